#!/usr/bin/env python3
"""Times training steps of Qwen3-MoE in transformers, compiled, with PyTorch's grouped GEMM.

    scripts/experts_step_peers.py [--layers L] [--seq T] [--tokens N] [--batches B,B,...]

Compare with `llm-rs bench step -e qwen3:30b-a3b --layers L` on the same machine. The shape is that of Qwen3-30B-A3B with fewer layers, and
parameters, gradients and AdamW's moments are bf16. A step has N tokens in micro-batches of B sequences. Prints the median time of a step
for each B, or why it failed.
"""

import argparse
import statistics
import sys
import time


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--batches", default="4,2")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    try:
        import torch
        import transformers
    except ImportError as error:
        sys.exit(f"{error.name}: not installed; run `pip install torch transformers`")
    if not torch.cuda.is_available():
        sys.exit("GPU: PyTorch finds none; check the driver and that PyTorch was built with CUDA")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, transformers {transformers.__version__}")
    for batch in map(int, options.batches.split(",")):
        try:
            measure(torch, transformers, options, batch)
        except (RuntimeError, ValueError) as error:
            print(f"B = {batch}: {str(error).splitlines()[0][:300]}", flush=True)
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def measure(torch, transformers, options, batch):
    config = transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=options.layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        max_position_embeddings=options.seq, tie_word_embeddings=False, decoder_sparse_step=1, use_cache=False,
        output_router_logits=False, rope_theta=1e6,
    )
    config._experts_implementation = "grouped_mm"
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    compiled = torch.compile(model)
    micro_batches = options.tokens // (batch * options.seq)
    tokens = torch.randint(0, config.vocab_size, (micro_batches, batch, options.seq), device="cuda")
    times = []
    for _ in range(3 + options.steps):
        torch.cuda.synchronize()
        start = time.time()
        loss = 0.0
        for part in tokens:
            out = compiled(input_ids=part, labels=part)
            (out.loss / micro_batches).backward()
            loss += out.loss.detach() / micro_batches
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.time() - start)
    median = statistics.median(times[3:])
    print(
        f"B = {batch}: {median * 1e3:.0f} ms, {options.tokens / median:.0f} tokens/s, "
        f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, loss {loss:.3f}, gradient norm {norm:.3f}, first step {times[0]:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
