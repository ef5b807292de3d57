#!/usr/bin/env python3
"""Times training steps of nanochat's own code, to compare them with `llm-rs bench step`.

    nanochat_speed.py --nanochat DIR --depth 24 --batch 16 --accumulate 4 --precision fp8

DIR is a checkout of https://github.com/karpathy/nanochat at 92d63d4. A step is that of nanochat's scripts/base_train.py: its compiled
model, its FP8 layers, its optimizer with its formulas, and the same random tokens in every step. Without FlashAttention 3, which needs the
package `kernels` and a network, full attention (--window-pattern L) is faster than windows.

Needs one GPU, torch and filelock.
"""

import argparse
import statistics
import time

from nanochat_learning import Formulas, config_of, import_nanochat, meta_model

# The number of steps determines only schedules.
SCHEDULED_STEPS = 10_000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", required=True, metavar="DIR")
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a micro-batch")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--window-pattern", default="L")
    parser.add_argument("--precision", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after three others")
    args = parser.parse_args()

    gpt, _, _, torch = import_nanochat(args.nanochat)
    torch.manual_seed(42)
    torch.set_float32_matmul_precision("high")
    model = meta_model(gpt, torch, config_of(gpt, args.depth, args.vocab, args.seq, args.window_pattern))
    model.to_empty(device="cuda")
    model.init_weights()
    if args.precision == "fp8":
        from nanochat.fp8 import Float8LinearConfig, convert_to_float8_training

        def is_large(module, _):
            sizes = [module.in_features, module.out_features] if isinstance(module, torch.nn.Linear) else [0]
            return min(sizes) >= 128 and all(size % 16 == 0 for size in sizes)

        config = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model, config=config, module_filter_fn=is_large)
    compiled = torch.compile(model, dynamic=False)
    batch = args.batch * args.seq
    formulas = Formulas(gpt, torch, model, batch * args.accumulate, SCHEDULED_STEPS)
    tokens = torch.randint(args.vocab, (args.accumulate, args.batch, args.seq + 1), device="cuda")

    def step(index):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for micro_batch in tokens:
            loss = compiled(micro_batch[:, :-1].contiguous(), micro_batch[:, 1:].contiguous())
            (loss / args.accumulate).backward()
        formulas.set(index)
        formulas.optimizer.step()
        compiled.zero_grad(set_to_none=True)
        loss = loss.item()
        torch.cuda.synchronize()
        return time.perf_counter() - start, loss

    steps = [step(index) for index in range(3 + args.steps)]
    times = [seconds for seconds, _ in steps[3:]]
    rate = batch * args.accumulate / statistics.median(times)
    shape = f"d{args.depth} {args.precision} {args.window_pattern} {args.batch}x{args.seq}x{args.accumulate}"
    attention = "FlashAttention 3" if uses_flash_attention() else "SDPA"
    print(
        f"nanochat {shape}, {attention}: {rate:,.0f} tokens/s, step {statistics.median(times) * 1e3:.1f} ms "
        f"({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}), loss {steps[0][1]:.3f} to {steps[-1][1]:.3f}, "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    )


def uses_flash_attention():
    """Returns whether nanochat found FlashAttention 3."""
    from nanochat.flash_attention import USE_FA3

    return USE_FA3


if __name__ == "__main__":
    main()
