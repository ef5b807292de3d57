#!/usr/bin/env python3
"""Times the grouped GEMMs of a layer's experts in PyTorch, and dense GEMMs of the same total size.

    scripts/grouped_gemm_peers.py [--rows N] [--experts E] [--channels C] [--expert-channels F]

Compare with `llm-rs bench gemm --experts E --shape N,2F,C --shape N,C,F` on the same machine. Prints the median and range of TFLOP/s
of the output, of the gradient of the input, and of the gradient of the weight. The sizes of the groups rise linearly, so the largest
is about three times the smallest, as in `bench gemm`.
"""

import argparse
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=524288)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--channels", type=int, default=2048)
    parser.add_argument("--expert-channels", type=int, default=768)
    parser.add_argument("--launches", type=int, default=20)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("PyTorch: not installed; run `pip install torch`")
    if not torch.cuda.is_available():
        sys.exit("GPU: PyTorch finds none; check the driver and that PyTorch was built with CUDA")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    print(f"{'rows x OC x C':<22} {'':<8} {'output':>22} {'gradient of input':>22} {'gradient of weight':>22}  TFLOP/s")
    c, f = options.channels, options.expert_channels
    for oc, ic in [(2 * f, c), (c, f)]:
        for grouped in [True, False]:
            rates = measure(torch, options, oc, ic, grouped)
            name = f"{options.rows}x{oc}x{ic}"
            print(f"{name:<22} {'grouped' if grouped else 'dense':<8} " + " ".join(f"{rate:>22}" for rate in rates), flush=True)


def sizes(rows, experts):
    """Returns the rows of each group, multiples of 8 except for the last."""
    ends = [int(rows * (i / experts) * (0.5 + 0.5 * i / experts)) // 8 * 8 for i in range(experts)] + [rows]
    return [after - before for before, after in zip(ends, ends[1:])]


def measure(torch, options, oc, ic, grouped):
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    rows, experts = options.rows, options.experts if grouped else 1
    x, dy = torch.randn(rows, ic, **kind), torch.randn(rows, oc, **kind)
    weight = torch.randn(experts, oc, ic, **kind)
    if grouped:
        ends = torch.tensor(sizes(rows, experts), device="cuda").cumsum(0).to(torch.int32)
        work = [
            lambda: grouped_mm(x, weight.transpose(1, 2), offs=ends),
            lambda: grouped_mm(dy, weight, offs=ends),
            lambda: grouped_mm(dy.t(), x, offs=ends),
        ]
    else:
        work = [lambda: x @ weight[0].t(), lambda: dy @ weight[0], lambda: dy.t() @ x]
    return [rate(2 * rows * oc * ic, times(torch, run, options.launches)) for run in work]


def times(torch, run, launches):
    """Returns the milliseconds of each launch."""
    for _ in range(3):
        run()
    milliseconds = []
    for _ in range(launches):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return milliseconds


def rate(flops, milliseconds):
    ordered = sorted(flops / 1e9 / time for time in milliseconds)
    return f"{ordered[len(ordered) // 2]:.0f} ({ordered[0]:.0f} to {ordered[-1]:.0f})"


if __name__ == "__main__":
    main()
