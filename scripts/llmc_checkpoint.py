#!/usr/bin/env python3
"""Writes checkpoints in llm.c's format without any code of this project. tests/data/llmc was made by this script.

    llmc_checkpoint.py DIRECTORY

It writes four runs of a model with L=2, NH=2, C=8, maxT=8, V=60: DIRECTORY/bf16 and DIRECTORY/fp32 with master weights,
DIRECTORY/bf16_without_masters, and DIRECTORY/two_ranks, which is DIRECTORY/bf16 on two GPUs with ZeRO-1. The loader of the
bf16 runs shuffles three shards of 41, 70 and 55 tokens (B=2, T=4, seed 42) and has read nine batches. Values are
`value(tensor, i)`, where i counts over all tensors in file order.
"""

import random
import struct
import sys
from pathlib import Path

LAYERS, HEADS, CHANNELS, MAX_T, VOCAB, PADDED = 2, 2, 8, 8, 60, 128
STEP = 9
SHARDS, SAMPLE_TOKENS = [41, 70, 55], 8
ROUNDING, ROUNDING_BEFORE_UPDATE = 0x0123456789ABCDEF, 0xFEDCBA9876543210
SEED_LEFT_UNSET = 0xDEADBEEFCAFEF00D
PARAMS, M, V, MASTERS = range(4)


def value(tensor, i):
    return ((i * 2654435761 + tensor * 97) % 2**32) / 2**32 - 0.5


def floats(tensor, truncate=False):
    c, l = CHANNELS, LAYERS
    n = PADDED * c + MAX_T * c + l * (12 * c * c + 13 * c) + 2 * c
    padding = range(VOCAB * c, PADDED * c)
    values = [0.0 if i in padding else value(tensor, i) for i in range(n)]
    if truncate:  # bf16 is the upper half of an f32
        return b"".join(struct.pack("<f", x)[2:] for x in values)
    return struct.pack(f"<{n}f", *values)


def shard_of(tensor, rank, ranks):
    """Returns one rank's shard: an equal part of each tensor of each layer."""
    c, l = CHANNELS, LAYERS
    layer = [c, c, 3 * c * c, 3 * c, c * c, c, c, c, 4 * c * c, 4 * c, 4 * c * c, c]
    sizes = [PADDED * c, MAX_T * c] + [n for n in layer for _ in range(l)] + [c, c]
    values, slices, offset = floats(tensor), [], 0
    for n in sizes:
        first = offset + rank * n // ranks
        slices.append(values[4 * first : 4 * (first + n // ranks)])
        offset += n
    return b"".join(slices)


def header(words):
    ints = [0] * 256
    for at, word in words.items():
        ints[at] = word
    return struct.pack("<256i", *ints)


class Mt19937:
    """Python's Mersenne Twister, seeded like std::mt19937 and llm.c."""

    def __init__(self, seed):
        words = [seed]
        for i in range(1, 624):
            words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + i) % 2**32)
        self.random = random.Random()
        self.random.setstate((3, tuple(words) + (624,), None))

    def shuffle(self, values):
        for i in range(len(values) - 1, 0, -1):
            j = self.random.getrandbits(32) % (i + 1)
            values[i], values[j] = values[j], values[i]

    def pack(self):
        *words, at = self.random.getstate()[1]
        left, constants = 625 - at, (0, 0x9908B0DF)
        return struct.pack("<QiI624I2I", SEED_LEFT_UNSET, left, at, *words, *constants)


class Loader:
    def __init__(self):
        self.rng = Mt19937(42)
        self.shards = list(range(len(SHARDS)))
        self.rng.shuffle(self.shards)
        self.shard = 0
        self.open()

    def open(self):
        self.sample = 0
        self.samples = list(range((SHARDS[self.shards[self.shard]] - 1) // SAMPLE_TOKENS))
        self.rng.shuffle(self.samples)

    def next(self):
        if self.sample >= len(self.samples):
            self.shard += 1
            self.open()
        self.sample += 1

    def pack(self):
        def order(values):
            return struct.pack(f"<Q{len(values)}i", len(values), *values)

        return order(self.shards) + order(self.samples) + self.rng.pack()


def write(directory, bf16, masters, shuffle, ranks=1):
    directory.mkdir(parents=True, exist_ok=True)
    model = header({0: 20240326, 1: 5 if bf16 else 3, 2: MAX_T, 3: VOCAB, 4: LAYERS, 5: HEADS, 6: CHANNELS, 7: PADDED})
    body = floats(PARAMS, truncate=bf16)
    (directory / f"model_{STEP:08}.bin").write_bytes(model + body)

    loader = Loader()
    for _ in range(9):
        loader.next()
    shard, sample = (loader.shard, loader.sample) if shuffle else (1, 3)
    halves = {}
    for at, wide in {20: ROUNDING, 22: ROUNDING_BEFORE_UPDATE, 30: shard, 32: sample}.items():
        halves[at], halves[at + 1] = struct.unpack("<2i", struct.pack("<Q", wide))
    for rank in range(ranks):
        flags = {0: 20240527, 1: 1, 2: ranks, 3: rank, 4: int(masters), 5: int(shuffle), 10: STEP}
        state = header(flags | halves) + shard_of(M, rank, ranks) + shard_of(V, rank, ranks)
        if masters:  # in fp32 the master weights are the weights
            state += shard_of(MASTERS if bf16 else PARAMS, rank, ranks)
        if shuffle:
            state += loader.pack()
        (directory / f"state_{STEP:08}_{rank:05}.bin").write_bytes(state)
    (directory / f"DONE_{STEP:08}").write_bytes(b"")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    write(out / "bf16", bf16=True, masters=True, shuffle=True)
    write(out / "bf16_without_masters", bf16=True, masters=False, shuffle=True)
    write(out / "fp32", bf16=False, masters=True, shuffle=False)
    write(out / "two_ranks", bf16=True, masters=True, shuffle=True, ranks=2)
