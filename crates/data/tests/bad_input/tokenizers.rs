//! Tokenizer files, as `--tokenizer` opens them.

use crate::kinds::Kinds;
use std::fmt::Write;
use tokenizer::Tokenizer;

/// A tokenizer.json with the given vocabulary, merges and added tokens.
fn json(vocab: &str, merges: &str, added: &[(u32, &str)]) -> String {
    let added: Vec<String> = added
        .iter()
        .map(|(id, text)| {
            format!(
                r#"{{"id": {id}, "content": "{text}", "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true}}"#
            )
        })
        .collect();
    format!(
        r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [{}], "normalizer": null,
        "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}},
        "post_processor": null, "decoder": {{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
        "use_regex": true}}, "model": {{"type": "BPE", "dropout": null, "unk_token": null,
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
        "vocab": {vocab}, "merges": {merges}}}}}"#,
        added.join(", ")
    )
}

/// A tiktoken file with a token for each byte.
fn ranks() -> String {
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |i: usize| char::from(digits[i]);
    (0..256).fold(String::new(), |mut lines, byte| {
        writeln!(lines, "{}{}== {byte}", digit(byte >> 2), digit((byte & 3) << 4)).unwrap();
        lines
    })
}

pub fn run(kinds: &mut Kinds) {
    let vocab = r#"{"a": 0, "b": 1, "ab": 2}"#;
    let end = (3, "<|endoftext|>");
    let open = |kinds: &Kinds, text: &str| Tokenizer::open(&kinds.file("tokenizer.json", text.as_bytes()));
    assert_eq!(open(kinds, &json(vocab, r#"["a b"]"#, &[end])).unwrap().encode("ab").unwrap(), [2]);
    let good = json(vocab, "[]", &[end]);
    let invalid = "not a valid tokenizer.json";
    for (kind, text, parts) in [
        ("JSON that ends early", good[..good.len() / 2].to_owned(), &[invalid][..]),
        (
            "decoder that is no JSON",
            good.replace("\"add_prefix_space\": true", "\"add_prefix_space\": drue"),
            &[invalid],
        ),
        ("empty object", "{}".into(), &[invalid]),
        ("no model", r#"{"version": "1.0", "added_tokens": [], "model": null}"#.into(), &[invalid]),
        ("unknown model", good.replace("\"BPE\"", "\"Markov\""), &[invalid]),
        ("unknown version", good.replace("\"1.0\"", "\"9.0\""), &[invalid]),
        ("unknown pre-tokenizer", good.replace("\"ByteLevel\"", "\"Bytes\""), &[invalid]),
        ("id that is text", json(r#"{"a": "x"}"#, "[]", &[end]), &[invalid]),
        ("negative id", json(r#"{"a": -1}"#, "[]", &[end]), &[invalid]),
        ("merge of a missing token", json(vocab, r#"["a c"]"#, &[end]), &[invalid, "`c` out of vocabulary"]),
        ("merge with one part", json(vocab, r#"["a"]"#, &[end]), &[invalid]),
        ("no document token", json(vocab, "[]", &[]), &["expected a special token that precedes documents, one of"]),
        ("two tokens with one id", json(r#"{"a": 0, "b": 0}"#, "[]", &[(2, "<s>")]), &["one token with id 0, found"]),
        (
            "added token with the id of another token",
            json(vocab, "[]", &[(2, "<|endoftext|>")]),
            &["added token \"<|endoftext|>\": expected id 3", "found 2"],
        ),
        (
            "added token after a gap",
            json(vocab, "[]", &[(100, "<|endoftext|>")]),
            &["added token \"<|endoftext|>\": expected id 3", "found 100"],
        ),
        (
            "vocabulary with holes",
            json(r#"{"a": 0, "b": 7}"#, "[]", &[(8, "<|endoftext|>")]),
            &["added token \"<|endoftext|>\": expected id 2", "found 8"],
        ),
        (
            "two added tokens with one id",
            json(vocab, "[]", &[end, (3, "<|pad|>")]),
            &["added token \"<|pad|>\": expected id 4", "found 3"],
        ),
    ] {
        kinds.fails(kind, &[parts, &["tokenizer.json"]].concat(), |kinds| open(kinds, &text));
    }
    tiktoken(kinds);
    let sentencepiece = kinds.file("spiece.model", &[0x0a, 0x0e, 0xff, 0xfe, 0]);
    let parts =
        ["spiece.model", "found binary data; SentencePiece models are not supported", "tokenizer.json of the model"];
    kinds.fails("SentencePiece model", &parts, |_| Tokenizer::open(&sentencepiece));
    let missing = kinds.path("none.json");
    let parts = ["none.json", "expected gpt2, bytes, a tokenizer.json or Llama 3's tokenizer.model", "No such file"];
    kinds.fails("missing tokenizer", &parts, |_| Tokenizer::named(missing.to_str().unwrap()));
    let parts = [
        "out: expected tokenizer.json, tokenizer.model, tokenizer.pkl, or vocab.json with merges.txt in this directory, found none",
    ];
    kinds.fails("directory without a tokenizer", &parts, |kinds| Tokenizer::open(&kinds.out()));
}

fn tiktoken(kinds: &mut Kinds) {
    let good = ranks();
    for (kind, text, part) in [
        ("empty tiktoken file", String::new(), "expected a token for every byte, found none for byte 0"),
        ("line without rank", good.replace("BA== 4", "BA=="), ":5: expected a base64 token, a space and a rank"),
        ("no base64", good.replace("BA== 4", "?A== 4"), ":5: expected base64, found \"?A==\""),
        ("base64 without padding", good.replace("BA== 4", "BA 4"), ":5: expected base64, found \"BA\""),
        ("rank that is no number", good.replace("BA== 4", "BA== four"), ":5: expected a rank, found \"four\""),
        ("duplicate rank", good.replace("BA== 4", "BA== 3"), ":5: expected rank 4, the number of the tokens before it"),
        (
            "missing rank",
            good.replace("BA== 4\n", ""),
            ":5: expected rank 4, the number of the tokens before it, found 5",
        ),
        ("duplicate token", format!("{good}AA== 256\n"), "expected distinct tokens, found [0] twice"),
        ("missing byte", good.replace("/w== 255\n", ""), "expected a token for every byte, found none for byte 255"),
        ("Windows line ends", good.replace('\n', " \r\n"), ":1: expected a rank"),
    ] {
        let path = kinds.file("ranks.model", text.as_bytes());
        kinds.fails(kind, &["ranks.model", part], |_| Tokenizer::open(&path));
    }
    assert_eq!(Tokenizer::open(&kinds.file("ranks.model", good.as_bytes())).unwrap().vocab(), 512);
}
