#!/usr/bin/env python3
"""Trains a byte-level BPE with Hugging Face's tokenizers or with rustbpe, for a comparison with `llm-rs tokenizer train`.

    pip install tokenizers rustbpe
    scripts/tokenizer_train_speed.py hf|rustbpe TEXT VOCAB OUT

Prints the time of the training, without reading the file, and writes the tokenizer.json (hf) or the ranks (rustbpe).
"""

import base64
import resource
import sys
import time

PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
DOCUMENT = 1 << 16


def documents(text):
    """Cuts the text after line breaks that end a match of the pattern."""
    begin = 0
    while begin < len(text):
        end = min(begin + DOCUMENT, len(text))
        while end < len(text) and not (text[end - 1] == "\n" and text[end].isalpha()):
            end += 1
        yield text[begin:end]
        begin = end


def hugging_face(text, vocab, out):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(text), trainer=trainer)
    return lambda: tokenizer.save(out)


def rustbpe(text, vocab, out):
    import rustbpe

    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(documents(text), vocab - 1, pattern=PATTERN)

    def save():
        with open(out, "w") as file:
            for token, rank in tokenizer.get_mergeable_ranks():
                file.write(f"{base64.b64encode(bytes(token)).decode()} {rank}\n")

    return save


def main():
    name, path, vocab, out = sys.argv[1:]
    with open(path, encoding="utf8", newline="") as file:
        text = file.read()
    start = time.time()
    save = {"hf": hugging_face, "rustbpe": rustbpe}[name](text, int(vocab), out)
    seconds = time.time() - start
    save()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = usage.ru_utime + usage.ru_stime
    print(f"{name}: {seconds:.1f} s, user+sys {cpu:.1f} s, max rss {usage.ru_maxrss // 1024} MiB")


if __name__ == "__main__":
    main()
