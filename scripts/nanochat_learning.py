#!/usr/bin/env python3
"""Trains nanochat's model with nanochat's own code on the batches of an llm-rs run, and compares the losses of both programs.

    nanochat_learning.py init --nanochat DIR --depth 6 --out DIR
    nanochat_learning.py train --nanochat DIR --checkpoint DIR/model_000000.pt --tokens train.bin --steps 500 --batch 16 --out losses.txt
    nanochat_learning.py compare main.jsonl losses.txt

DIR after --nanochat is a checkout of https://github.com/karpathy/nanochat at 92d63d4.

`init` writes a fresh model in nanochat's checkpoint format: model_000000.pt and meta_000000.json. `train` starts from this model. It uses
nanochat's model, optimizer and formulas (`scripts/base_train.py`), and reads the token file in order. It first prints the `llm-rs train`
command of the same run. `compare` prints the losses of both runs at every hundredth step.

Token files have a header of 256 32-bit integers and 16-bit tokens, as in llm.c. A step reads B*T tokens after those of the step before,
and one more token for the last target. `llm-rs train --shuffle 0` reads the same batches.

Needs torch and filelock.
"""

import argparse
import importlib
import json
import math
import os
import shlex
import sys
import time
import types
from array import array
from dataclasses import asdict
from pathlib import Path

# Defaults of nanochat's scripts/base_train.py.
ASPECT_RATIO, HEAD_DIM = 64, 128
EMBEDDING_LR, UNEMBEDDING_LR, MATRIX_LR, SCALAR_LR, WEIGHT_DECAY = 0.3, 0.008, 0.02, 0.5, 0.28
WARMUP_STEPS, WARMDOWN_RATIO, FINAL_LR_FRAC = 40, 0.65, 0.05
TOKENS_PER_PARAMETER = 12
REFERENCE_DEPTH, REFERENCE_BATCH = 12, 2**19
# Constants of its momentum schedule.
FIRST_MOMENTUM, PEAK_MOMENTUM, FINAL_MOMENTUM, MOMENTUM_STEPS = 0.85, 0.97, 0.90, 400

TOKEN_MAGIC, HEADER_BYTES = 20240520, 1024


def import_nanochat(folder):
    """Returns nanochat's modules `gpt`, `common` and `checkpoint_manager`, and torch."""
    if not (Path(folder) / "nanochat" / "gpt.py").is_file():
        sys.exit(f"error: --nanochat {folder}: expected a checkout of nanochat, found no nanochat/gpt.py; clone it at 92d63d4")
    sys.path.insert(0, str(folder))
    # The checkpoint manager imports the tokenizer, which has dependencies that this script does not need.
    tokenizer = types.ModuleType("nanochat.tokenizer")
    tokenizer.get_tokenizer = None
    sys.modules["nanochat.tokenizer"] = tokenizer
    names = ["nanochat.gpt", "nanochat.common", "nanochat.checkpoint_manager"]
    return [importlib.import_module(name) for name in names] + [importlib.import_module("torch")]


def config_of(gpt, depth, vocab, seq, pattern):
    """Returns the configuration that base_train.py derives from a depth."""
    channels = -(-depth * ASPECT_RATIO // HEAD_DIM) * HEAD_DIM
    heads = channels // HEAD_DIM
    return gpt.GPTConfig(
        sequence_len=seq, vocab_size=vocab, n_layer=depth, n_head=heads, n_kv_head=heads, n_embd=channels, window_pattern=pattern
    )


def meta_model(gpt, torch, config):
    """Returns a model without data."""
    with torch.device("meta"):
        return gpt.GPT(config)


def init(args):
    """Writes a fresh model in nanochat's checkpoint format."""
    if args.dtype:
        os.environ["NANOCHAT_DTYPE"] = args.dtype
    gpt, common, checkpoint_manager, torch = import_nanochat(args.nanochat)
    torch.manual_seed(args.seed)
    config = config_of(gpt, args.depth, args.vocab, args.seq, args.window_pattern)
    model = meta_model(gpt, torch, config)
    model.to_empty(device="cpu")
    model.init_weights()
    if args.round:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    meta = {"step": 0, "val_bpb": None, "model_config": asdict(config), "user_config": {"depth": args.depth, "seed": args.seed}}
    checkpoint_manager.save_checkpoint(str(args.out), 0, model.state_dict(), None, meta)
    print(f"wrote {args.out}/model_000000.pt: d{args.depth}, {sum(p.numel() for p in model.parameters()):,} parameters")


def load_model(args, gpt, common, torch, device):
    """Returns the model of a checkpoint, as nanochat's `build_model` loads it."""
    checkpoint = Path(args.checkpoint)
    meta = checkpoint.parent / checkpoint.name.replace("model_", "meta_").replace(".pt", ".json")
    model = meta_model(gpt, torch, gpt.GPTConfig(**json.loads(meta.read_text())["model_config"]))
    model.to_empty(device=device)
    # This also computes the rotary embeddings, which are not in the checkpoint.
    model.init_weights()
    model.load_state_dict(torch.load(checkpoint, map_location=device), strict=True, assign=True)
    dtype = torch.float32 if args.fp32_embeddings else common.COMPUTE_DTYPE
    for embedding in [model.transformer.wte, *model.value_embeds.values()]:
        embedding.to(dtype=dtype)
    return model


class Formulas:
    """The hyperparameters of base_train.py for a model, a batch in tokens and a number of steps."""

    def __init__(self, gpt, torch, model, batch, steps):
        def scaling_parameters(model):
            counts = model.num_scaling_params()
            return counts["transformer_matrices"] + counts["lm_head"]

        config = model.config
        reference = config_of(gpt, REFERENCE_DEPTH, config.vocab_size, config.sequence_len, config.window_pattern)
        reference_tokens = TOKENS_PER_PARAMETER * scaling_parameters(meta_model(gpt, torch, reference))
        tokens = int(TOKENS_PER_PARAMETER * scaling_parameters(model))
        scale = (batch / REFERENCE_BATCH) ** 0.5
        self.steps = steps
        self.warmdown = round(WARMDOWN_RATIO * steps)
        self.weight_decay = WEIGHT_DECAY * math.sqrt(batch / REFERENCE_BATCH) * (reference_tokens / tokens)
        self.optimizer = model.setup_optimizer(
            unembedding_lr=UNEMBEDDING_LR * scale,
            embedding_lr=EMBEDDING_LR * scale,
            scalar_lr=SCALAR_LR * scale,
            matrix_lr=MATRIX_LR * scale,
            weight_decay=self.weight_decay,
        )

    def rate(self, step):
        """Returns the factor of the learning rates of a step, counted from 0."""
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        if step <= self.steps - self.warmdown:
            return 1.0
        progress = (self.steps - step) / self.warmdown
        return progress * 1.0 + (1 - progress) * FINAL_LR_FRAC

    def momentum(self, step):
        """Returns Muon's momentum in a step, counted from 0."""
        start = self.steps - self.warmdown
        if step < MOMENTUM_STEPS:
            fraction = step / MOMENTUM_STEPS
            return (1 - fraction) * FIRST_MOMENTUM + fraction * PEAK_MOMENTUM
        if step >= start:
            progress = (step - start) / self.warmdown
            return PEAK_MOMENTUM * (1 - progress) + FINAL_MOMENTUM * progress
        return PEAK_MOMENTUM

    def decay(self, step):
        """Returns the weight decay of Muon in a step, counted from 0."""
        return self.weight_decay * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def set(self, step):
        """Sets the hyperparameters of a step, counted from 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.rate(step)
            if group["kind"] == "muon":
                group["momentum"] = self.momentum(step)
                group["weight_decay"] = self.decay(step)


def command_of(args, formulas):
    """Returns the arguments of `llm-rs` that train the same model. All values come from nanochat's optimizer."""
    groups = formulas.optimizer.param_groups
    number = lambda value: f"{value:.9g}"
    # The order of `GPT.setup_optimizer`.
    names = ["head", "embeddings", "value-embeddings", "residual-scales", "embedding-scales", "smear"]
    muon = next(group for group in groups if group["kind"] == "muon")
    flags = {
        "model": args.checkpoint,
        "train": args.tokens,
        "val": args.val,
        "shuffle": 0,
        "batch": args.batch,
        "seq": args.seq,
        "total-batch": args.batch * args.seq * args.accumulate,
        "steps": args.steps,
        "optimizer": "muon",
        "schedule": "trapezoidal",
        "warmup": WARMUP_STEPS,
        "warmdown": WARMDOWN_RATIO,
        "final-fraction": FINAL_LR_FRAC,
        "clip": 0,
        "weight-decay": number(formulas.weight_decay),
        "weight-decay-schedule": "cosine",
        "muon-lr": number(muon["initial_lr"]),
        "muon-momentum": PEAK_MOMENTUM,
        "muon-momentum-warmup": MOMENTUM_STEPS,
        "muon-momentum-final": FINAL_MOMENTUM,
        "muon-coefficients": "polar-express",
        "muon-equilibrate": 1,
        "muon-renormalize": 1,
        "muon-variance": 1,
        "muon-cautious-decay": 1,
        "sample-every": 0,
        "checkpoint-every": 0,
        "val-every": args.steps if args.val else 0,
        "val-batches": -1 if args.val else None,
    }
    words = ["train"]
    for flag, value in flags.items():
        words += [f"--{flag}", str(value)] if value is not None else []
    for name, group in zip(names, groups):
        assert group["kind"] == "adamw"
        lr, (beta1, beta2), eps, decay = (group[key] for key in ("initial_lr", "betas", "eps", "weight_decay"))
        words += ["--group", f"{name}:lr={number(lr)},beta1={beta1},beta2={beta2},eps={eps},decay={decay}"]
    return words


def read_tokens(path, torch):
    """Returns the tokens of a file of llm.c."""
    data = Path(path).read_bytes()
    header = array("i", data[:HEADER_BYTES])
    if len(header) != 256 or header[0] != TOKEN_MAGIC or header[1] != 1 or len(data) != HEADER_BYTES + 2 * header[2]:
        sys.exit(f"error: {path}: expected a token file of version 1 (magic {TOKEN_MAGIC}) with 16-bit tokens, found another file")
    # torch has few operations for 16-bit unsigned integers, so tokens are converted to 64 bits.
    return torch.frombuffer(bytearray(data[HEADER_BYTES:]), dtype=torch.int16).long() & 0xFFFF


def validation_loss(model, tokens, args, torch):
    """Returns the mean loss of all whole batches of a token file."""
    batch = args.batch * args.seq
    total, batches = 0.0, (len(tokens) - 1) // batch
    with torch.no_grad():
        for index in range(batches):
            window = tokens[index * batch : (index + 1) * batch + 1]
            total += model(window[:-1].view(args.batch, -1), window[1:].view(args.batch, -1)).item()
    return total / batches


def train(args):
    """Trains from a checkpoint and writes the loss of each step."""
    if args.dtype:
        os.environ["NANOCHAT_DTYPE"] = args.dtype
    if args.compile == "none":
        # nanochat compiles its optimizer when it is imported.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    gpt, common, _, torch = import_nanochat(args.nanochat)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(42)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = load_model(args, gpt, common, torch, device)
    args.seq = args.seq or model.config.sequence_len
    batch = args.batch * args.seq
    formulas = Formulas(gpt, torch, model, batch * args.accumulate, args.steps)
    words = command_of(args, formulas)
    print("llm-rs " + shlex.join(words), flush=True)
    if args.command:
        args.command.write_text(shlex.join(words) + "\n")
    if args.command_only:
        return
    tokens = read_tokens(args.tokens, torch)
    needed = args.steps * args.accumulate * batch + 1
    if len(tokens) < needed:
        sys.exit(f"error: {args.tokens}: expected at least {needed} tokens, found {len(tokens)}; use fewer --steps or a smaller --batch")
    tokens = tokens[:needed].to(device)
    if tokens.max() >= model.config.vocab_size:
        sys.exit(f"error: {args.tokens}: expected tokens below {model.config.vocab_size}, found {tokens.max()}; use the model's tokenizer")
    optimizer = formulas.optimizer
    forward = torch.compile(model, dynamic=False) if args.compile == "all" else model
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    from nanochat.flash_attention import USE_FA3

    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{device_name}, torch {torch.__version__}, {common.COMPUTE_DTYPE}, {'FA3' if USE_FA3 else 'SDPA'}, compile {args.compile}, "
        f"embeddings {model.transformer.wte.weight.dtype}",
        flush=True,
    )
    losses, start, position = [], time.time(), 0
    with args.out.open("w") as out:
        out.write("# step loss; the step is counted from 1\n")
        for step in range(args.steps):
            total = 0.0
            for _ in range(args.accumulate):
                window = tokens[position : position + batch + 1]
                position += batch
                loss = forward(window[:-1].view(args.batch, -1), window[1:].view(args.batch, -1))
                total = total + loss.detach()
                (loss / args.accumulate).backward()
            formulas.set(step)
            optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(total / args.accumulate)
            # Reading a loss waits for the GPU, so losses are written in groups.
            if step == 0 or len(losses) == 20 or step + 1 == args.steps:
                values = torch.stack(losses).tolist()
                first, losses = step + 2 - len(values), []
                out.writelines(f"{first + i} {value:.6f}\n" for i, value in enumerate(values))
                out.flush()
                if step in (0, 20) or (step + 1) % args.log_every < 20 or step + 1 == args.steps:
                    print(f"step {step + 1}/{args.steps} loss {values[-1]:.6f} {time.time() - start:.1f} s", flush=True)
        synchronize()
        seconds = time.time() - start
        print(f"{args.steps} steps in {seconds:.1f} s, {args.steps * args.accumulate * batch / seconds:,.0f} tokens/s", flush=True)
        if args.val:
            value = validation_loss(forward, read_tokens(args.val, torch).to(device), args, torch)
            out.write(f"# validation {value:.6f}\n")
            print(f"validation loss {value:.6f}", flush=True)
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def read_losses(path):
    """Returns the losses of the steps, and the last validation loss, of main.jsonl or of a file of `train`."""
    losses, validation = {}, None
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            # llm-rs counts steps from 0 in main.jsonl.
            if record.get("loss") is not None:
                losses[record["step"] + 1] = record["loss"]
            validation = record.get("val_loss", validation)
        elif line.startswith("# validation"):
            validation = float(line.split()[-1])
        elif line and not line.startswith("#"):
            step, loss = line.split()[:2]
            losses[int(step)] = float(loss)
    return losses, validation


def compare(args):
    """Prints the losses of two runs at every hundredth step."""
    (ours, our_validation), (theirs, their_validation) = read_losses(args.ours), read_losses(args.theirs)
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        sys.exit(f"error: {args.ours}, {args.theirs}: expected steps that both files have, found none; use the files of two runs")
    mean = lambda losses, step: (lambda near: sum(near) / len(near))([losses[s] for s in steps if step - 5 <= s < step + 5])
    print("| step | llm-rs | nanochat | difference | llm-rs, 10 steps | nanochat, 10 steps | difference |")
    print("|---|---|---|---|---|---|---|")
    shown = [step for step in steps if step == 1 or step % args.every == 0]
    largest = 0.0
    for step in shown:
        a, b, c, d = ours[step], theirs[step], mean(ours, step), mean(theirs, step)
        largest = max(largest, abs(c - d))
        print(f"| {step} | {a:.4f} | {b:.4f} | {a - b:+.4f} | {c:.4f} | {d:.4f} | {c - d:+.4f} |")
    all_steps = [ours[step] - theirs[step] for step in steps]
    print(f"\nlargest difference of the means: {largest:.4f}")
    print(f"all {len(steps)} steps: mean difference {sum(all_steps) / len(steps):+.5f}, largest {max(map(abs, all_steps)):.4f}")
    if our_validation is not None and their_validation is not None:
        print(f"validation: {our_validation:.4f}, {their_validation:.4f}, difference {our_validation - their_validation:+.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("init", help="write a fresh model")
    p.set_defaults(run=init)
    p.add_argument("--nanochat", type=Path, required=True, help="checkout of nanochat")
    p.add_argument("--depth", type=int, required=True)
    p.add_argument("--seq", type=int, default=2048, help="tokens of a sequence, which determine the window of attention")
    p.add_argument("--vocab", type=int, default=32768)
    p.add_argument("--window-pattern", default="SSSL")
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--dtype", choices=["bfloat16", "float32"], help="nanochat's compute dtype, the dtype of the embeddings")
    p.add_argument("--round", action="store_true", help="round all parameters to bf16, so that f32 and bf16 weights start equal")
    p.add_argument("--out", type=Path, required=True)
    p = commands.add_parser("train", help="train with nanochat's code")
    p.set_defaults(run=train)
    p.add_argument("--nanochat", type=Path, required=True, help="checkout of nanochat")
    p.add_argument("--checkpoint", required=True, help="model_000000.pt")
    p.add_argument("--tokens", required=True, help="token file")
    p.add_argument("--val", help="token file of which the final loss is computed")
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--batch", type=int, required=True, help="sequences of a micro-batch")
    p.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    p.add_argument("--seq", type=int, help="tokens of a sequence (default: that of the checkpoint)")
    p.add_argument("--device", choices=["cpu", "cuda"])
    p.add_argument("--dtype", choices=["bfloat16", "float32"], help="nanochat's compute dtype (default: bfloat16 on a GPU)")
    p.add_argument("--fp32-embeddings", action="store_true", help="keep embeddings and their moments in f32 instead of the compute dtype")
    p.add_argument("--compile", nargs="?", const="all", default="none", choices=["none", "optimizer", "all"], help="use torch.compile")
    p.add_argument("--command", type=Path, help="file for the arguments of llm-rs")
    p.add_argument("--command-only", action="store_true", help="only print the command of llm-rs")
    p.add_argument("--log-every", type=int, default=100)
    p.add_argument("--out", type=Path, required=True, help="file for the losses")
    p = commands.add_parser("compare", help="compare the losses of two runs")
    p.set_defaults(run=compare)
    p.add_argument("ours", type=Path, help="main.jsonl of llm-rs")
    p.add_argument("theirs", type=Path, help="losses of nanochat")
    p.add_argument("--every", type=int, default=100)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
