#!/usr/bin/env python3
"""Times cuDNN's causal attention through PyTorch, at the sizes of `kernels run`: B = 8, NH = 12, T = 1024, HS = 64, bf16.

    examples/kernels/cudnn.py FILE

Writes JSON for `kernels run --cudnn FILE`: the median of five rounds of at least 20 launches, in microseconds.
"""

import json
import statistics
import sys

SHAPE = (8, 12, 1024, 64)
ROUNDS = 5
LAUNCHES = 20


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        sys.exit("error: PyTorch: expected it, found none; run `pip install torch`")
    if not torch.cuda.is_available():
        sys.exit("error: GPU: expected one that PyTorch can use, found none; check the driver")
    b, nh, t, hs = SHAPE
    options = {"device": "cuda", "dtype": torch.bfloat16}
    packed = torch.randn(b, t, 3, nh, hs, **options)
    q, k, v = (view.detach().requires_grad_() for view in packed.permute(2, 0, 3, 1, 4))
    dout = torch.randn(b, t, nh, hs, **options).transpose(1, 2)
    attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        forward = median(torch, attend)
        out = attend()
        backward = median(torch, lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    times = {"machine": torch.cuda.get_device_name(), "shape": SHAPE, "attention_us": forward, "attention_backward_us": backward}
    with open(sys.argv[1], "w") as file:
        json.dump(times, file, indent=1)
    print(times)


def median(torch, launch):
    """Returns the median time of a launch in microseconds."""
    times = []
    for _ in range(ROUNDS):
        for _ in range(3):
            launch()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(LAUNCHES):
            launch()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / LAUNCHES)
    return statistics.median(times)


if __name__ == "__main__":
    main()
