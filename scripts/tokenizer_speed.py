#!/usr/bin/env python3
"""Compares the GPT-2 encoding of llm-rs with tiktoken and Hugging Face tokenizers, on one core.

usage: tokenizer_speed.py PROGRAM RANKS FILE...

Needs the packages tiktoken and tokenizers from PyPI, and RANKS: tiktoken's r50k_base.tiktoken, which is part of the crate
tiktoken-rs (~/.cargo/registry/src/*/tiktoken-rs-*/assets). The programs alternate; the table shows the median of five rounds.
"""

import base64
import os
import re
import statistics
import subprocess
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
ROUNDS = 5


def byte_characters():
    """Returns the character of each byte in GPT-2's vocabulary files."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def merge_of(token, ranks):
    """Returns the two tokens that merge to this one."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], len(ranks)) for i in range(len(parts) - 1)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def peers(path):
    """Returns a function for each peer that maps a text to its number of tokens."""
    import tiktoken
    from tokenizers import ByteLevelBPETokenizer

    with open(path, encoding="ascii") as file:
        ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in file}
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    special = {"<|endoftext|>": 50256}
    tik = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    characters = byte_characters()
    name = lambda token: "".join(characters[byte] for byte in token)
    merges = [tuple(map(name, merge_of(token, ranks))) for token in ranks if len(token) > 1]
    hugging_face = ByteLevelBPETokenizer({name(token): rank for token, rank in ranks.items()} | special, merges)
    return {
        "tiktoken": lambda text: len(tik.encode(text, allowed_special="all")),
        "Hugging Face": lambda text: len(hugging_face.encode(text).ids),
    }


def main():
    program, ranks, files = sys.argv[1], sys.argv[2], sys.argv[3:]
    texts = [open(file, encoding="utf-8", newline="").read() for file in files]
    size = sum(len(text.encode()) for text in texts)
    others = peers(ranks)
    seconds, tokens = {}, {}
    for _ in range(ROUNDS):
        printed = subprocess.run([program, "bench", "tokenizer", *files], check=True, capture_output=True, text=True).stdout
        found = re.search(r"(\d+) tokens, ([\d.]+) s", printed)
        tokens["llm-rs"] = int(found[1])
        seconds.setdefault("llm-rs", []).append(float(found[2]))
        for name, encode in others.items():
            start = time.perf_counter()
            tokens[name] = sum(encode(text) for text in texts)
            seconds.setdefault(name, []).append(time.perf_counter() - start)
    print(f"{size} bytes in {len(files)} files, one core, median of {ROUNDS} rounds")
    for name, times in seconds.items():
        print(f"{name:14}{size / statistics.median(times) / 1e6:8.1f} MB/s {tokens[name]:12} tokens")


main()
