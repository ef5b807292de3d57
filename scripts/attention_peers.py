#!/usr/bin/env python3
"""Times causal attention in PyTorch, forward and backward, with cuDNN and FlashAttention-2.

    scripts/attention_peers.py [--shape B,NH,T,HS]... [--backend cudnn|flash]...

Compare with `llm-rs bench attention` on the same machine. Prints the median and range of TFLOP/s. FLOPs above the diagonal are
not counted: 2 B NH T T HS forward, 2.5 times that backward. Q, K and V are views of one packed tensor (B,T,3,NH,HS), as in llm.rs.
"""

import argparse
import sys

DEFAULT = [[64, 12, 1024, 64], [16, 12, 4096, 64], [16, 16, 4096, 128]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", type=shape, metavar="B,NH,T,HS")
    parser.add_argument("--backend", action="append", choices=["cudnn", "flash"])
    parser.add_argument("--launches", type=int, default=20)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("PyTorch: not installed; run `pip install torch`")
    if not torch.cuda.is_available():
        sys.exit("GPU: PyTorch finds none; check the driver and that PyTorch was built with CUDA")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(f"{'B NH T HS':<18} {'backend':<8} {'forward TFLOP/s':>24} {'backward TFLOP/s':>24}")
    for dimensions in options.shape or DEFAULT:
        for backend in options.backend or ["cudnn", "flash"]:
            forward, backward = times(torch, dimensions, backend, options.launches)
            b, nh, t, hs = dimensions
            flops = 2 * b * nh * t * t * hs
            name = " ".join(map(str, dimensions))
            print(f"{name:<18} {backend:<8} {rates(flops, forward):>24} {rates(2.5 * flops, backward):>24}", flush=True)


def shape(text):
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 4 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"shape: expected B,NH,T,HS such as 64,12,1024,64, found {text!r}")
    return numbers


def times(torch, dimensions, backend, launches):
    """Returns the times of every forward and every backward pass, in milliseconds."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    b, nh, t, hs = dimensions
    options = {"device": "cuda", "dtype": torch.bfloat16}
    packed = torch.randn(b, t, 3, nh, hs, **options)
    q, k, v = (view.detach().requires_grad_() for view in packed.permute(2, 0, 3, 1, 4))
    dout = torch.randn(b, t, nh, hs, **options).transpose(1, 2)
    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]
    with sdpa_kernel(kernels):
        attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = attend()
        backward = measure(torch, lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), launches)
        with torch.no_grad():
            forward = measure(torch, attend, launches)
    return forward, backward


def measure(torch, run, launches):
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(launches)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)


def rates(flops, milliseconds):
    rate = lambda time: flops / time / 1e9
    middle = milliseconds[len(milliseconds) // 2]
    return f"{rate(middle):.0f} ({rate(milliseconds[-1]):.0f} to {rate(milliseconds[0]):.0f})"


if __name__ == "__main__":
    main()
