#!/usr/bin/env python3
"""Makes the reference files in tests/data with PyTorch: small GPT-2 models in llm.c's formats.

    ATEN_CPU_CAPABILITY=default python3 scripts/pytorch_reference.py NAME FOLDER [DEVICE]
    ATEN_CPU_CAPABILITY=default python3 scripts/pytorch_reference.py --normal

The first command writes, for NAME = tiny (or another of the SHAPES below):
    tiny.bin              model, fp32 (version 3)
    tiny_debug_state.bin  inputs, targets, logits, loss and the gradient of every parameter
    tiny_losses.json      losses and gradient norms of ten AdamW steps on that batch, for several settings
    tiny_losses.txt       the losses with the settings of examples/train_gpt2, which are those of llm.c's test_gpt2
Values are computed in double precision on DEVICE (cpu, or cuda for large models) and stored in single precision. The second
command prints CRC-32s of normally distributed tensors.
Without ATEN_CPU_CAPABILITY=default, PyTorch draws normal values with vector instructions, which round differently.
"""

import json
import math
import struct
import sys
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F

# (L, NH, C, V, Vp, maxT, B, T), and the factor applied to the normally distributed weights
SHAPES = {
    "tiny": ((2, 3, 48, 97, 128, 20, 2, 16), 4),
    # Head size 64, which the GPU kernels support; no padding rows.
    "wide": ((1, 1, 64, 61, 61, 9, 2, 9), 4),
    "d12": ((12, 12, 768, 50257, 50304, 1024, 4, 64), 1),
}

ORDER = [
    "wte", "wpe", "ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb",
    "ln2w", "ln2b", "fcw", "fcb", "fcprojw", "fcprojb", "lnfw", "lnfb",
]  # fmt: skip
DECAYED = {"wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"}
STEPS = 10
SETTINGS = [
    {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip": 1.0},
    {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0},
]
# Decays all parameters and does not clip.
TEST_GPT2 = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "clip": math.inf}


def make_parameters(generator):
    """Returns initial parameters that exercise every term: in small models the normally distributed weights are larger by a
    power of two, so that attention is far from uniform; biases and LayerNorm weights differ from their initial constants."""

    def normal(*shape, std):
        return torch.empty(shape).normal_(0, std, generator=generator)

    p = {"wte": torch.zeros(VP, C), "wpe": None}
    p["wte"][:V] = normal(V, C, std=0.02)
    p["wpe"] = normal(MAX_T, C, std=0.02)
    residual = 0.02 / math.sqrt(2 * L)
    layers = {"qkvw": (3 * C, C, 0.02), "attprojw": (C, C, residual), "fcw": (4 * C, C, 0.02), "fcprojw": (C, 4 * C, residual)}
    drawn = [{name: normal(rows, cols, std=std) for name, (rows, cols, std) in layers.items()} for _ in range(L)]
    for name in layers:
        p[name] = torch.stack([layer[name] for layer in drawn])
    for name in p:
        p[name] = p[name] * SCALE
    biases = {"ln1b": C, "qkvb": 3 * C, "attprojb": C, "ln2b": C, "fcb": 4 * C, "fcprojb": C}
    for name, width in biases.items():
        p[name] = normal(L, width, std=0.1)
    p["ln1w"] = 1 + normal(L, C, std=0.1)
    p["ln2w"] = 1 + normal(L, C, std=0.1)
    p["lnfw"] = 1 + normal(C, std=0.1)
    p["lnfb"] = normal(C, std=0.1)
    return {name: p[name] for name in ORDER}


def forward(p, x):
    norm = lambda h, w, b: F.layer_norm(h, (C,), w, b, 1e-5)
    heads = lambda a: a.view(*x.shape, NH, C // NH).transpose(1, 2)
    steps = x.shape[1]
    future = torch.ones(steps, steps, dtype=torch.bool, device=x.device).triu(1)
    h = p["wte"][x] + p["wpe"][:steps]
    for l in range(L):
        w = lambda name: p[name][l]
        q, k, v = map(heads, F.linear(norm(h, w("ln1w"), w("ln1b")), w("qkvw"), w("qkvb")).split(C, dim=-1))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(C // NH)).masked_fill(future, -math.inf)
        attention = (scores.softmax(-1) @ v).transpose(1, 2).reshape(*x.shape, C)
        h = h + F.linear(attention, w("attprojw"), w("attprojb"))
        wide = F.gelu(F.linear(norm(h, w("ln2w"), w("ln2b")), w("fcw"), w("fcb")), approximate="tanh")
        h = h + F.linear(wide, w("fcprojw"), w("fcprojb"))
    return F.linear(norm(h, p["lnfw"], p["lnfb"]), p["wte"][:V])


def loss_of(logits, y):
    return F.cross_entropy(logits.reshape(-1, V), y.reshape(-1))


def train(parameters, x, y, settings, decayed=DECAYED):
    p = {name: value.double().to(x.device, copy=True).requires_grad_() for name, value in parameters.items()}
    groups = [
        {"params": [p[n] for n in ORDER if n in decayed], "weight_decay": settings["weight_decay"]},
        {"params": [p[n] for n in ORDER if n not in decayed], "weight_decay": 0.0},
    ]
    betas = (settings["beta1"], settings["beta2"])
    optimizer = torch.optim.AdamW(groups, lr=settings["learning_rate"], betas=betas, eps=settings["eps"])
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(forward(p, x), y)
        loss.backward()
        norm = torch.sqrt(sum((p[n].grad ** 2).sum() for n in ORDER))
        # torch.nn.utils.clip_grad_norm_ adds 1e-6 to the norm; llm.c does not.
        for value in p.values():
            value.grad *= min(1.0, settings["clip"] / norm.item())
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return {**settings, "losses": losses, "norms": norms}


def header(*values):
    return struct.pack("<256i", *values, *[0] * (256 - len(values)))


def single(tensor):
    return tensor.detach().cpu().to(torch.float32).contiguous().numpy().astype("<f4").tobytes()


def write_reference(name, folder, device):
    generator = torch.Generator().manual_seed(42)
    parameters = make_parameters(generator)
    tokens = torch.randint(0, V, (B * T + 1,), generator=generator)
    x, y = tokens[:-1].view(B, T), tokens[1:].view(B, T)
    body = b"".join(single(parameters[name]) for name in ORDER)
    (folder / f"{name}.bin").write_bytes(header(20240326, 3, MAX_T, V, L, NH, C, VP) + body)

    x, y = x.to(device), y.to(device)
    p = {name: value.double().to(device).requires_grad_() for name, value in parameters.items()}
    logits = forward(p, x)
    loss = loss_of(logits, y)
    loss.backward()
    ints = lambda t: t.cpu().numpy().astype("<i4").tobytes()
    state = [header(20240327, 2, B, T), ints(x), ints(y), single(logits), single(loss)]
    state += [single(p[name].grad) for name in ORDER]
    (folder / f"{name}_debug_state.bin").write_bytes(b"".join(state))

    runs = [train(parameters, x, y, settings) for settings in SETTINGS]
    (folder / f"{name}_losses.json").write_text(json.dumps(runs, indent=1) + "\n")
    losses = train(parameters, x, y, TEST_GPT2, set(ORDER))["losses"]
    (folder / f"{name}_losses.txt").write_text("".join(f"{loss:.9f}\n" for loss in losses))


def print_normal():
    sizes = [(16, 1.0), (37, 0.02), (5, 1.0), (4096 * 24, 0.02), (50257 * 16 + 3, 0.02 / math.sqrt(24)), (50257 * 768, 0.02)]
    for n, std in sizes:
        values = torch.empty(n).normal_(0, std, generator=torch.Generator().manual_seed(42))
        print(f"{n:>9} values with standard deviation {std:.6f}: {zlib.crc32(single(values)):08x}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--normal"]:
        print_normal()
    elif len(sys.argv) in (3, 4) and sys.argv[1] in SHAPES:
        (L, NH, C, V, VP, MAX_T, B, T), SCALE = SHAPES[sys.argv[1]]
        write_reference(sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or ["cpu"])[0])
    else:
        sys.exit(__doc__)
