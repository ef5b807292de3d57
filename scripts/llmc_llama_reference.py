#!/usr/bin/env python3
"""Makes the reference files of a small Llama in the formats of llm.c's branch llama3 with PyTorch.

    python3 scripts/llmc_llama_reference.py FOLDER

Writes
    llama.bin              model, fp32 (version 3); the head has the values of the embedding, but is trained separately
    llama_debug_state.bin  inputs, targets, logits, loss, the gradient of every tensor, and the losses and gradient norms of ten
                           AdamW steps on that batch
Values are computed in double precision and stored in single precision.
"""

import math
import struct
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

L, NH, KV, C, V, MAX_T, B, T = 2, 4, 2, 48, 97, 20, 2, 16
MULTIPLIER, MULTIPLE_OF, EPS, THETA = 0.5, 16, 1e-5, 500_000.0
HS = C // NH
HIDDEN = int(MULTIPLIER * int(8 * C / 3))
FF = (HIDDEN + MULTIPLE_OF - 1) // MULTIPLE_OF * MULTIPLE_OF
QKV = (NH + 2 * KV) * HS
STEPS = 10

# Tensors of the file with their shapes. Those that end in "b" are zeros in place of biases.
TENSORS = {
    "wte": (V, C), "lm_head": (V, C), "ln1w": (L, C), "ln1b": (L, C), "qkvw": (L, QKV, C), "qkvb": (L, QKV),
    "attprojw": (L, C, C), "attprojb": (L, C), "ln2w": (L, C), "ln2b": (L, C), "fcw": (L, 2 * FF, C), "fcb": (L, 2 * FF),
    "fcprojw": (L, C, FF), "fcprojb": (L, C), "lnfw": (C,), "lnfb": (C,),
}  # fmt: skip


def make_parameters():
    generator = torch.Generator().manual_seed(42)
    parameters = {}
    for name, shape in TENSORS.items():
        if name.endswith("b"):
            parameters[name] = torch.zeros(shape)
        else:
            mean, std = (1.0, 0.1) if name.startswith("ln") else (0.0, 0.08)
            parameters[name] = torch.empty(shape).normal_(mean, std, generator=generator)
    parameters["lm_head"] = parameters["wte"].clone()
    return parameters, generator


def frequencies():
    """Returns the angle per position of each pair, with Llama 3.1's scaling."""
    result = []
    for i in range(HS // 2):
        frequency = THETA ** (-2 * i / HS)
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192:
            frequency /= 8
        elif wavelength > 8192 / 4:
            smooth = (8192 / wavelength - 1) / 3
            frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        result.append(frequency)
    return torch.tensor(result, dtype=torch.float64)


def rotate(x):
    """Rotates the pairs of neighboring channels of (B, heads, T, HS)."""
    angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequencies())
    rotated = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(rotated).flatten(-2)


def forward(p, x):
    norm = lambda h, w: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * w
    heads = lambda a: a.view(B, T, -1, HS).transpose(1, 2)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    h = p["wte"][x]
    for l in range(L):
        q, k, v = map(heads, F.linear(norm(h, p["ln1w"][l]), p["qkvw"][l]).split([C, KV * HS, KV * HS], dim=-1))
        q, k = rotate(q), rotate(k)
        k, v = (a.repeat_interleave(NH // KV, dim=1) for a in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(HS)).masked_fill(future, -math.inf)
        h = h + F.linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C), p["attprojw"][l])
        up, gate = F.linear(norm(h, p["ln2w"][l]), p["fcw"][l]).split(FF, dim=-1)
        h = h + F.linear(up * F.silu(gate), p["fcprojw"][l])
    return F.linear(norm(h, p["lnfw"]), p["lm_head"])


def loss_of(logits, y):
    return F.cross_entropy(logits.reshape(-1, V), y.reshape(-1))


def train(p, x, y):
    used = [value for name, value in p.items() if not name.endswith("b")]
    optimizer = torch.optim.AdamW(used, lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(forward(p, x), y)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(used, 1.0).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms


def single(tensor):
    return tensor.detach().to(torch.float32).contiguous().numpy().astype("<f4").tobytes()


def main(folder):
    parameters, generator = make_parameters()
    tokens = torch.randint(0, V, (B * T + 1,), generator=generator)
    x, y = tokens[:-1].view(B, T), tokens[1:].view(B, T)
    pad = lambda values, kind: struct.pack(f"<256{kind}", *values, *[0] * (256 - len(values)))
    words = pad([20240803, 3, MAX_T, V, L, NH, KV, C, MULTIPLE_OF, 1, 3, 1], "i")
    floats = pad([MULTIPLIER, EPS, THETA], "f")
    body = b"".join(single(value) for value in parameters.values())
    (folder / "llama.bin").write_bytes(words + floats + body)

    p = {name: value.double().requires_grad_() for name, value in parameters.items()}
    logits = forward(p, x)
    loss = loss_of(logits, y)
    loss.backward()
    ints = lambda t: t.numpy().astype("<i4").tobytes()
    gradients = [torch.zeros_like(value) if value.grad is None else value.grad.clone() for value in p.values()]
    losses, norms = train(p, x, y)
    state = [pad([20240803, 3, B, T, STEPS], "i"), ints(x), ints(y), single(logits), single(loss)]
    state += [single(gradient) for gradient in gradients]
    state += [single(torch.tensor(losses)), single(torch.tensor(norms))]
    (folder / "llama_debug_state.bin").write_bytes(b"".join(state))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
