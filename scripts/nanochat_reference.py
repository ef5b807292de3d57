#!/usr/bin/env python3
"""Makes the reference in tests/data/nanochat: a small random model of nanochat, and what nanochat's own modules compute from it.

    python3 scripts/nanochat_reference.py NANOCHAT FOLDER

NANOCHAT is a checkout of https://github.com/karpathy/nanochat at 92d63d4. FOLDER contains model_000000.pt and meta_000000.json (the
parameters in fp32, as nanochat saves a checkpoint) and reference.safetensors: inputs and targets (B, T), logits (B, T, V), the gradient of
every parameter under its name, the losses of ten steps of nanochat's optimizer on that batch, and for each step the factor of the
learning rates, Muon's momentum and Muon's weight decay; and final.NAME, the parameters after these steps. Values are computed in double
precision on the CPU, with the epsilon of norms that nanochat has in fp32, and stored in single precision. small/ has the checkpoint of a
smaller model in bf16.
Needs torch, safetensors and filelock.
"""

import dataclasses
import json
import math
import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"
import torch
from safetensors.torch import save_file

B, T, V, STEPS = 2, 140, 97, 10
CONFIG = dict(sequence_len=T, vocab_size=V, n_layer=4, n_head=2, n_kv_head=1, n_embd=48, window_pattern="SSSL")
# For tests of damaged files.
SMALL = dict(sequence_len=8, vocab_size=5, n_layer=2, n_head=2, n_kv_head=1, n_embd=24, window_pattern="SL")
WARMUP, WARMDOWN, FINAL = 3, 0.4, 0.05
LEARNING_RATES = dict(unembedding_lr=0.004, embedding_lr=0.1, matrix_lr=0.02, weight_decay=0.2, scalar_lr=0.1)


def in_double_precision(nanochat):
    """Imports nanochat's modules, and lets them compute in double precision."""
    sys.path.insert(0, str(nanochat))
    import nanochat.gpt as gpt
    import nanochat.optim as optim

    gpt.COMPUTE_DTYPE = optim.COMPUTE_DTYPE = torch.float64
    epsilon = torch.finfo(torch.float32).eps
    gpt.norm = lambda x: torch.nn.functional.rms_norm(x, (x.size(-1),), eps=epsilon)
    # The optimizer casts to fp32 where it sums squares.
    torch.Tensor.float = torch.Tensor.double
    return gpt


def make_model(gpt):
    """Returns a model whose parameters exercise every term."""
    model = gpt.GPT(gpt.GPTConfig(**CONFIG)).double()
    model.init_weights()
    torch.manual_seed(1234)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(0, 0.5)
            elif parameter.dim() == 2:
                parameter.normal_(0, 0.4 if "value_embeds" in name or "wte" in name else 0.1)
            else:
                parameter.copy_(parameter + 0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def save(model, folder):
    """Saves a model as save_checkpoint of nanochat's checkpoint_manager.py does, which needs tiktoken and other packages."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {name: p.detach().contiguous().clone() for name, p in model.named_parameters()}
    torch.save({name: p.to(torch.float32) if p.dtype == torch.float64 else p for name, p in parameters.items()}, folder / "model_000000.pt")
    meta = {"step": 0, "model_config": dataclasses.asdict(model.config)}
    (folder / "meta_000000.json").write_text(json.dumps(meta, indent=2) + "\n")


def schedule(step):
    """Returns the factor of the learning rates, Muon's momentum and the factor of its weight decay, as in nanochat's base_train.py."""
    warmdown = round(WARMDOWN * STEPS)
    if step < WARMUP:
        rate = (step + 1) / WARMUP
    elif step <= STEPS - warmdown:
        rate = 1.0
    else:
        progress = (STEPS - step) / warmdown
        rate = progress + (1 - progress) * FINAL
    return rate, 0.85 + step / 400 * (0.97 - 0.85), 0.5 * (1 + math.cos(math.pi * step / STEPS))


def main():
    nanochat, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    gpt = in_double_precision(nanochat)
    model = make_model(gpt)
    stored = lambda tensor: tensor.detach().to(torch.float32).contiguous().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(stored(parameter))
    save(model, folder)
    small = gpt.GPT(gpt.GPTConfig(**SMALL), pad_vocab_size_to=1)
    small.init_weights()
    save(small.bfloat16(), folder / "small")
    tokens = torch.randint(0, V, (B, T + 1), generator=torch.Generator().manual_seed(5))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    tensors = {"inputs": inputs.int(), "targets": targets.int(), "logits": stored(model(inputs))}
    optimizer = model.setup_optimizer(**LEARNING_RATES)
    losses, schedules = [], []
    for step in range(STEPS):
        loss = model(inputs, targets)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            tensors |= {name: stored(p.grad) for name, p in model.named_parameters()}
        rate, momentum, decay = schedule(step)
        schedules.append([rate, momentum, decay * LEARNING_RATES["weight_decay"]])
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate
            if group["kind"] == "muon":
                group["momentum"], group["weight_decay"] = momentum, schedules[-1][2]
        optimizer.step()
        model.zero_grad(set_to_none=True)
    tensors |= {"losses": torch.tensor(losses), "schedules": torch.tensor(schedules)}
    tensors |= {"final." + name: stored(p) for name, p in model.named_parameters()}
    save_file(tensors, folder / "reference.safetensors")
    print("losses", losses)


main()
