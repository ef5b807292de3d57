#!/usr/bin/env python3
"""Converts HellaSwag's JSON lines to llm.c's evaluation file, independently of the program, as a reference for its tests.

    pip install regex
    hellaswag_reference.py SET.jsonl r50k_base.tiktoken OUT.bin

r50k_base.tiktoken is GPT-2's vocabulary; tiktoken and tiktoken-rs ship it. tests/data/hellaswag.bin was made by this script.
"""

import base64
import json
import struct
import sys

import regex

source, vocabulary, out = sys.argv[1:]
ranks = {}
for line in open(vocabulary, "rb"):
    token, rank = line.split()
    ranks[base64.b64decode(token)] = int(rank)
words = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def encode_word(word):
    parts = [bytes([b]) for b in word]
    while len(parts) > 1:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], 1 << 30))
        if parts[best] + parts[best + 1] not in ranks:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return [ranks[p] for p in parts]


def encode(text):
    return [i for word in words.findall(text) for i in encode_word(word.encode())]


examples = []
for index, line in enumerate(open(source, encoding="utf-8")):
    item = json.loads(line)
    stream = [0xFFFF, 0, index, item["label"], len(item["endings"])]
    for part in [item["ctx"]] + [" " + ending for ending in item["endings"]]:
        tokens = encode(part)
        stream += [len(tokens)] + tokens
    stream[1] = 2 * len(stream)
    examples.append(stream)

header = [20240522, 1, len(examples), max(s[1] for s in examples)] + [0] * 252
with open(out, "wb") as f:
    f.write(struct.pack("<256i", *header))
    for s in examples:
        f.write(struct.pack(f"<{len(s)}H", *s))
