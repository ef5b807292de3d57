#!/usr/bin/env python3
"""Converts HellaSwag's JSON lines or MMLU's CSV files to llm.c's evaluation file, independently of the program, as a
reference for its tests.

    pip install regex
    multiple_choice_reference.py r50k_base.tiktoken OUT.bin SET.jsonl
    multiple_choice_reference.py r50k_base.tiktoken OUT.bin SUBJECT_test.csv...

r50k_base.tiktoken is GPT-2's vocabulary; tiktoken and tiktoken-rs ship it. tests/data/hellaswag.bin and tests/data/mmlu.bin
were made by this script. An MMLU question is rendered as in llm.c's dev/data/mmlu.py.
"""

import base64
import csv
import json
import struct
import sys

import regex

vocabulary, out, *sources = sys.argv[1:]
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


def hellaswag(path):
    for line in open(path, encoding="utf-8"):
        item = json.loads(line)
        yield item["ctx"], item["endings"], item["label"]


def mmlu(path):
    for question, *choices, answer in csv.reader(open(path, encoding="utf-8", newline="")):
        yield f"Question: {question}\n\nAnswer:", choices, "ABCD".index(answer)


examples = []
for source in sources:
    for context, endings, label in (mmlu if source.endswith(".csv") else hellaswag)(source):
        stream = [0xFFFF, 0, len(examples), label, len(endings)]
        for part in [context] + [" " + ending for ending in endings]:
            tokens = encode(part)
            stream += [len(tokens)] + tokens
        stream[1] = 2 * len(stream)
        examples.append(stream)

header = [20240522, 1, len(examples), max(s[1] for s in examples)] + [0] * 252
with open(out, "wb") as f:
    f.write(struct.pack("<256i", *header))
    for s in examples:
        f.write(struct.pack(f"<{len(s)}H", *s))
