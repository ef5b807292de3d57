#!/usr/bin/env python3
"""Prints the initial weights' CRC-32s and the data order that tests/parity.rs expects, computed with PyTorch alone.

    ATEN_CPU_CAPABILITY=default python3 scripts/parity_reference.py

Without ATEN_CPU_CAPABILITY=default, PyTorch draws normal values with vector instructions, which round differently.
"""

import math
import zlib

import torch

# L, C, maxT, V
MODELS = {"d12": (12, 768, 1024, 50257), "small": (2, 48, 20, 97)}
SHARDS = [200, 137, 90, 260, 33]


def initial_weights(layers, c, max_t, vocab):
    """Prints every randomly initialized tensor, layer by layer, with the CRC-32 of its values in fp32 and in bf16."""
    generator = torch.Generator().manual_seed(42)
    residual = 0.02 / math.sqrt(2 * layers)
    draws = [("Wte", 0, (vocab, c), 0.02), ("Wpe", 0, (max_t, c), 0.02)]
    for layer in range(layers):
        matrices = [("Qkvw", 3 * c, c, 0.02), ("Attprojw", c, c, residual), ("Fcw", 4 * c, c, 0.02), ("Fcprojw", c, 4 * c, residual)]
        draws += [(name, layer, (rows, cols), std) for name, rows, cols, std in matrices]
    for name, layer, shape, std in draws:
        values = torch.empty(shape).normal_(0, std, generator=generator)
        rounded = values.to(torch.bfloat16).view(torch.int16)
        crcs = ", ".join(f"0x{zlib.crc32(v.numpy().tobytes()):08x}" for v in (values, rounded))
        print(f"    ({name}, {layer}, {crcs}),")


def batches(b, t, ranks, rank, n):
    """Returns the first token of each of the first n batches, if token i of the concatenated shards is i."""
    generator = torch.Generator().manual_seed(42 + rank)

    def shuffle(order):
        for i in range(len(order) - 1, 0, -1):
            j = torch.randint(0, i + 1, (), generator=generator).item()
            order[i], order[j] = order[j], order[i]

    shards, first = list(range(len(SHARDS))), []
    while len(first) < n:
        shuffle(shards)
        for shard in shards:
            samples = list(range((SHARDS[shard] - 1) // (ranks * b * t)))
            shuffle(samples)
            first += [sum(SHARDS[:shard]) + (sample * ranks + rank) * b * t for sample in samples]
    return first[:n]


if __name__ == "__main__":
    for name, shape in MODELS.items():
        print(name)
        initial_weights(*shape)
    print("rank 0 of 1", batches(2, 8, 1, 0, 80))
    print("rank 1 of 2", batches(2, 8, 2, 1, 50))
