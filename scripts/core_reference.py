#!/usr/bin/env python3
"""Answers the questions of an evaluation bundle with a GPT-2 in float64, from the definition of DCLM's CORE, independently of the
program, as a reference for its tests. Also compares the answers with those of nanochat and lm-evaluation-harness.

    pip install numpy pyyaml regex
    core_reference.py tests/data/core/model tests/data/core/bundle tests/data/core/answers.jsonl

    pip install torch transformers jinja2 lm-eval
    core_reference.py tests/data/core/model tests/data/core/bundle tests/data/core/answers.jsonl \\
        --nanochat nanochat/nanochat/core_eval.py --lm-eval

MODEL is a Hugging Face directory of a GPT-2 with a byte-level tokenizer.json. A line of the output has the task, the line of the question
in its file, the chosen answer (null: the text does not match), whether it is correct, and the mean loss of each answer (null: no token is
scored), or the fraction of tokens that are the most likely ones. --nanochat runs the functions of that file, and --lm-eval the harness's
log-likelihoods of the same tokens, both on the CPU in float32. They must choose the same answer to every question; otherwise the
script fails and writes nothing.
"""

import argparse
import csv
import json
import math
import random
from pathlib import Path

import numpy as np
import regex
import yaml

# -------------------------------------------------------------------------------------------------- tokenizer

WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_letters():
    """The letter that stands for each byte in a byte-level tokenizer.json."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return letters


class Tokenizer:
    def __init__(self, path):
        model = json.loads(path.read_text(encoding="utf-8"))
        self.special = [token["id"] for token in model["added_tokens"]]
        model = model["model"]
        self.ids = model["vocab"]
        merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(merges)}
        self.letters = byte_letters()

    def word(self, text):
        parts = [self.letters[byte] for byte in text.encode("utf-8")]
        while len(parts) > 1:
            ranks = [self.ranks.get(pair, math.inf) for pair in zip(parts, parts[1:])]
            best = min(range(len(ranks)), key=ranks.__getitem__)
            if ranks[best] == math.inf:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return [self.ids[part] for part in parts]

    def encode(self, text):
        return [self.special[0]] + [id for word in WORDS.findall(text) for id in self.word(word)]


# -------------------------------------------------------------------------------------------------- model


class Gpt2:
    def __init__(self, directory):
        config = json.loads((directory / "config.json").read_text())
        self.heads, self.layers, self.context = config["n_head"], config["n_layer"], config["n_positions"]
        data = (directory / "model.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        self.tensors = {}
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            assert entry["dtype"] == "F32", f"{name}: expected F32, found {entry['dtype']}"
            first, last = entry["data_offsets"]
            values = np.frombuffer(data[8 + size + first : 8 + size + last], "<f4").reshape(entry["shape"])
            self.tensors[name.removeprefix("transformer.")] = values.astype(np.float64)

    def norm(self, x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * self.tensors[name + ".weight"] + self.tensors[name + ".bias"]

    def linear(self, x, name):
        return x @ self.tensors[name + ".weight"] + self.tensors[name + ".bias"]

    def log_probabilities(self, ids):
        """Returns the log-probabilities (tokens, vocabulary) of the token after each token."""
        t = len(ids)
        x = self.tensors["wte.weight"][ids] + self.tensors["wpe.weight"][:t]
        hidden = np.triu(np.full((t, t), -np.inf), 1)
        for layer in range(self.layers):
            block = f"h.{layer}."
            qkv = self.linear(self.norm(x, block + "ln_1"), block + "attn.c_attn")
            heads = qkv.reshape(t, 3, self.heads, -1).transpose(1, 2, 0, 3)
            query, key, value = heads
            scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1]) + hidden
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            x = x + self.linear((weights @ value).transpose(1, 0, 2).reshape(t, -1), block + "attn.c_proj")
            h = self.linear(self.norm(x, block + "ln_2"), block + "mlp.c_fc")
            h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            x = x + self.linear(h, block + "mlp.c_proj")
        logits = self.norm(x, "ln_f") @ self.tensors["wte.weight"].T
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


# -------------------------------------------------------------------------------------------------- questions


def tasks(bundle):
    """Yields each task with its questions, shuffled, each with its line."""
    for task in yaml.safe_load((bundle / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]:
        lines = (bundle / "eval_data" / task["dataset_uri"]).read_text(encoding="utf-8").split("\n")
        questions = [(i + 1, json.loads(line)) for i, line in enumerate(lines) if line.strip()]
        random.Random(1337).shuffle(questions)
        yield task, questions


def baselines(bundle):
    with open(bundle / "eval_meta_data.csv", encoding="utf-8", newline="") as file:
        return {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}


def rows(task, questions, index, tokenizer, context):
    """Returns the rows of tokens of a question, and where the scored tokens of each begin."""
    kind, delimiter = task["icl_task_type"], task.get("continuation_delimiter", " ")
    others = [i for i in range(len(questions)) if i != index]
    drawn = random.Random(1234 + index).sample(others, task["num_fewshot"][0])

    def parts(question):
        """All combinations of question and answer, and the index of the right one."""
        if kind == "multiple_choice":
            return [(question["query"], choice) for choice in question["choices"]], question["gold"]
        if kind == "schema":
            return [(option, question["continuation"]) for option in question["context_options"]], question["gold"]
        return [(question["context"].strip(), question["continuation"])], 0

    before = ""
    for i in drawn:
        pairs, gold = parts(questions[i][1])
        before += delimiter.join(pairs[gold]) + "\n\n"
    pairs, gold = parts(questions[index][1])
    ids = [tokenizer.encode(before + delimiter.join(pair)) for pair in pairs]
    if kind == "multiple_choice":
        starts = [prefix(ids)] * len(ids)
    elif kind == "schema":
        suffix = prefix([row[::-1] for row in ids])
        starts = [len(row) - suffix for row in ids]
    else:
        starts = [prefix([tokenizer.encode((before + pairs[0][0] + delimiter).strip()), ids[0]])]
    cropped = []
    for row, start in zip(ids, starts):
        excess = max(0, len(row) - context)
        assert start == 0 or start > excess, f"{task['label']}: a question is longer than the context"
        cropped.append((row[excess:], start - excess if start > 0 else len(row) - excess))
    return cropped, gold


def prefix(rows):
    count = 0
    while all(count < len(row) for row in rows) and len({row[count] for row in rows}) == 1:
        count += 1
    return count


def answer(task, rows, gold, model):
    """Returns the chosen row, whether it is right, and the scores."""
    scores = []
    for ids, start in rows:
        predicted = model.log_probabilities(ids)[start - 1 : -1]
        wanted = ids[start:]
        if task["icl_task_type"] == "language_modeling":
            scores.append(float(np.mean(predicted.argmax(-1) == wanted)))
        else:
            losses = [-row[id] for row, id in zip(predicted, wanted)]
            scores.append(sum(losses) / len(losses) if losses else math.nan)
    if task["icl_task_type"] == "language_modeling":
        return (0 if scores[0] == 1 else None), scores[0] == 1, scores
    choice = 0
    for i, score in enumerate(scores):
        if score < scores[choice] and rows[i] != rows[choice]:
            choice = i
    return choice, choice == gold, scores


def numpy_answers(args):
    tokenizer, model = Tokenizer(args.model / "tokenizer.json"), Gpt2(args.model)
    chance, centered = baselines(args.bundle), {}
    for task, questions in tasks(args.bundle):
        right = 0
        for index, (line, _) in enumerate(questions):
            of_question, gold = rows(task, questions, index, tokenizer, model.context)
            choice, correct, scores = answer(task, of_question, gold, model)
            right += correct
            scores = [None if math.isnan(score) else round(score, 6) for score in scores]
            yield {"task": task["label"], "line": line, "choice": choice, "correct": correct, "scores": scores}
        guess = chance[task["label"]]
        centered[task["label"]] = (right / len(questions) - guess) / (1 - guess)
    yield {"core": round(sum(centered.values()) / len(centered), 6)}


# -------------------------------------------------------------------------------------------------- other programs


def torch_model(directory):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return torch, model


def fast_tokenizer(directory):
    from tokenizers import Tokenizer as Fast

    tokenizer = Fast.from_file(str(directory / "tokenizer.json"))
    # Special tokens in a question are text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def nanochat_answers(args):
    """The answers of nanochat's evaluate_example. It tells only whether an answer is right, so each answer is declared right once."""
    import importlib.util

    torch, model = torch_model(args.model)
    spec = importlib.util.spec_from_file_location("core_eval", args.nanochat)
    core_eval = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core_eval)
    fast = fast_tokenizer(args.model)
    document = Tokenizer(args.model / "tokenizer.json").special[0]

    class WrappedModel:
        max_seq_len = model.config.n_positions

        def __call__(self, ids):
            return model(input_ids=ids).logits

    class WrappedTokenizer:
        def get_bos_token_id(self):
            return document

        def __call__(self, texts, prepend):
            return [[prepend] + fast.encode(text, add_special_tokens=False).ids for text in texts]

    for task, questions in tasks(args.bundle):
        meta = {
            "task_type": task["icl_task_type"],
            "num_fewshot": task["num_fewshot"][0],
            "continuation_delimiter": task.get("continuation_delimiter", " "),
        }
        data = [question for _, question in questions]
        for index, (line, question) in enumerate(questions):
            options = question.get("choices") or question.get("context_options") or [question.get("continuation")]
            choice = None
            for gold in range(len(options)):
                changed = data[:index] + [{**question, "gold": gold}] + data[index + 1 :]
                if core_eval.evaluate_example(index, WrappedModel(), WrappedTokenizer(), changed, "cpu", meta):
                    choice = gold
            yield task["label"], line, choice


def harness_answers(args):
    """The answers by lm-evaluation-harness's log-likelihoods of the scored tokens, divided by their number."""
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    _, model = torch_model(args.model)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(args.model / "tokenizer.json"), eos_token="<|endoftext|>")
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")
    own = Tokenizer(args.model / "tokenizer.json")
    for task, questions in tasks(args.bundle):
        for index, (line, _) in enumerate(questions):
            of_question, _ = rows(task, questions, index, own, model.config.n_positions)
            scores, greedy = [], False
            for ids, start in of_question:
                if start == len(ids):
                    scores.append(math.nan)
                    continue
                request = (("", str(len(scores))), ids[:start], ids[start:])
                [(likelihood, greedy)] = harness._loglikelihood_tokens([request], disable_tqdm=True)
                scores.append(-likelihood / (len(ids) - start))
            if task["icl_task_type"] == "language_modeling":
                yield task["label"], line, 0 if greedy else None
            else:
                yield task["label"], line, scores.index(min(scores))


def compare(name, expected, found):
    expected = [(line["task"], line["line"], line["choice"]) for line in expected if "task" in line]
    found = list(found)
    assert len(expected) == len(found), f"{name}: expected {len(expected)} answers, found {len(found)}"
    different = [f"{name} {b}, numpy {a}" for a, b in zip(expected, found) if a != b]
    assert not different, "\n".join(different)
    print(f"{name}: the same choice for all {len(found)} questions")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nanochat", metavar="CORE_EVAL.PY", help="also compare with nanochat's evaluator")
    parser.add_argument("--lm-eval", action="store_true", help="also compare with lm-evaluation-harness")
    args = parser.parse_args()
    answers = list(numpy_answers(args))
    if args.nanochat:
        compare("nanochat", answers, nanochat_answers(args))
    if args.lm_eval:
        compare("lm-evaluation-harness", answers, harness_answers(args))
    args.out.write_text("".join(json.dumps(answer) + "\n" for answer in answers))


if __name__ == "__main__":
    main()
