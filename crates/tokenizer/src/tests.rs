use super::*;
use proptest::prelude::*;
use std::fs;
use std::path::PathBuf;

fn gpt2(text: &str) -> Vec<u32> {
    Tokenizer::gpt2().encode(text).unwrap()
}

/// Writes a tokenizer.json with GPT-2's split pattern, all bytes, one merge and two special tokens.
pub(crate) fn small_json() -> (tempfile::TempDir, PathBuf) {
    let mut vocab: Vec<String> = (0..=255).map(|byte| byte_level::character(byte).to_string()).collect();
    vocab.push("Ġh".into());
    let escaped = |token: &String| token.replace('\\', "\\\\").replace('"', "\\\"");
    let entry = |(id, token): (usize, &String)| format!("\"{}\": {id}", escaped(token));
    let vocab: Vec<String> = vocab.iter().enumerate().map(entry).collect();
    let special = |id, text| {
        format!(
            r#"{{"id": {id}, "content": "{text}", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}}"#
        )
    };
    let text = format!(
        r#"{{"version": "1.0", "truncation": {{"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}},
        "padding": null, "added_tokens": [{}, {}], "normalizer": null,
        "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}},
        "post_processor": null, "decoder": {{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}},
        "model": {{"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": {{{}}}, "merges": ["Ġ h"]}}}}"#,
        special(257, "<|endoftext|>"),
        special(258, "<|pad|>"),
        vocab.join(", ")
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tokenizer.json");
    fs::write(&path, text).unwrap();
    (directory, path)
}

#[test]
fn ids_match_gpt2() {
    assert_eq!(gpt2("Hello, world!"), [15496, 11, 995, 0]);
    assert_eq!(gpt2("First Citizen:\nBefore we proceed"), [5962, 22307, 25, 198, 8421, 356, 5120]);
    assert_eq!(Tokenizer::gpt2().text(&[50256, 15496]), "<|endoftext|>Hello");
    assert_eq!(Tokenizer::gpt2().text(&[60000]), "");
    assert_eq!(Tokenizer::bytes().encode("né").unwrap(), [110, 0xc3, 0xa9]);
    assert_eq!(Tokenizer::bytes().text(&[0xc3, 256]), "\u{fffd}");
}

#[test]
fn the_hash_of_gpt2_is_that_of_its_vocabulary() {
    let tokenizer = Tokenizer::gpt2();
    assert_eq!(GPT2_FINGERPRINT, fingerprint(&tokenizer.0.encoding, tokenizer.special()));
}

#[test]
fn special_tokens_are_recognized_on_request() {
    let text = "a<|endoftext|><|endoftext|>b";
    let with = Tokenizer::gpt2().encode_with_special(text).unwrap();
    assert_eq!(with, [64, 50256, 50256, 65]);
    let plain = gpt2(text);
    assert!(!plain.contains(&50256));
    assert_eq!(Tokenizer::gpt2().text(&plain), text);
    assert_eq!(Tokenizer::bytes().encode_with_special("<|endoftext|>").unwrap().len(), 13);
}

#[test]
fn gpt2_has_the_tokens_of_tiktoken() {
    let reference = tiktoken_rs::r50k_base_singleton();
    let tokens = gpt2_tokens();
    assert_eq!(tokens.len(), GPT2_VOCAB - 1);
    for (id, token) in (0..).zip(tokens) {
        assert_eq!(reference.decode_bytes(&[id]).unwrap(), *token, "{id}");
    }
}

#[test]
fn long_runs_match_tiktoken() {
    let reference = tiktoken_rs::r50k_base_singleton();
    for unit in [" ", "\n", "a", "é", "7", "!", "\u{3000}", "ab", "=-"] {
        let text = format!("before {} after", unit.repeat(700));
        assert_eq!(gpt2(&text), reference.encode_ordinary(&text), "{unit:?}");
    }
    // Linear time: the reference takes minutes for a run of this length.
    assert_eq!(Tokenizer::gpt2().text(&gpt2(&"a".repeat(1 << 20))).len(), 1 << 20);
}

#[test]
fn tokenizer_json_encodes_like_its_vocabulary() {
    let (directory, path) = small_json();
    let tokenizer = Tokenizer::open(&path).unwrap();
    assert_eq!(tokenizer, Tokenizer::open(directory.path()).unwrap());
    assert_eq!((tokenizer.vocab(), tokenizer.document()), (259, 257));
    let id = |c: char| u32::from(c as u8);
    assert_eq!(tokenizer.encode(" hé").unwrap(), [256, 0xc3, 0xa9]);
    assert_eq!(tokenizer.encode("<|pad|>").unwrap(), "<|pad|>".chars().map(id).collect::<Vec<_>>());
    assert_eq!(tokenizer.encode_with_special("a<|pad|>").unwrap(), [id('a'), 258]);
    assert_eq!(tokenizer.decode(&[0xc3, 1000]), [0xc3], "half of a character");
    assert_eq!(tokenizer.text(&[256, 0xc3, 0xa9, 257]), " hé<|endoftext|>");
}

#[test]
fn identities_differ_with_the_vocabulary() {
    let (directory, path) = small_json();
    let tokenizer = Tokenizer::open(&path).unwrap();
    let other = directory.path().join("other.json");
    fs::write(&other, fs::read_to_string(&path).unwrap().replace("\"<|pad|>\"", "\"<|end|>\"")).unwrap();
    assert_ne!(tokenizer, Tokenizer::open(&other).unwrap());
    assert_ne!(Tokenizer::gpt2(), Tokenizer::bytes());
    assert_eq!(Tokenizer::gpt2().identity().vocab, GPT2_VOCAB);
    let [gpt2, named] = [Tokenizer::gpt2(), Tokenizer::named("gpt2").unwrap()].map(|t| t.identity());
    assert!(gpt2.has_vocabulary_of(&Identity { name: "a copy".into(), ..named.clone() }));
    assert!(!gpt2.has_vocabulary_of(&Identity { fingerprint: "0".into(), ..named.clone() }));
    assert!(!gpt2.has_vocabulary_of(&Identity { vocab: 50256, ..named }));
    assert_eq!(gpt2.to_string(), format!("gpt2 (50257 tokens, hash {})", gpt2.fingerprint));
    assert_eq!(Tokenizer::named("gpt2").unwrap(), Tokenizer::of_vocab(GPT2_VOCAB).unwrap());
}

#[test]
fn tokens_that_begin_documents_in_other_models_are_known() {
    let (directory, path) = small_json();
    let text = fs::read_to_string(&path).unwrap();
    let with = |token: &str| {
        let other = directory.path().join("other.json");
        fs::write(&other, text.replace("<|endoftext|>", token)).unwrap();
        Tokenizer::open(&other)
    };
    for token in ["<|bos|>", "<bos>", "[CLS]", "<｜begin▁of▁sentence｜>", "[SEP]"] {
        assert_eq!(with(token).unwrap().document(), 257, "{token}");
    }
    let error = with("<other>").unwrap_err().to_string();
    assert!(error.contains("found <other>, <|pad|>; add one to added_tokens"), "{error}");
}

/// Exports of models of bytes have such a file.
#[test]
fn a_file_with_the_vocabulary_of_bytes_needs_no_special_token() {
    let (directory, path) = small_json();
    let text = fs::read_to_string(&path).unwrap();
    let start = text.find("\"added_tokens\": [").unwrap();
    let end = start + text[start..].find("], \"normalizer\"").unwrap();
    let text = format!("{}\"added_tokens\": [{}", &text[..start], &text[end..]);
    let text = text.replace(", \"Ġh\": 256", "").replace("[\"Ġ h\"]", "[]");
    let bytes = directory.path().join("bytes.json");
    fs::write(&bytes, &text).unwrap();
    let tokenizer = Tokenizer::open(&bytes).unwrap();
    assert_eq!(tokenizer, Tokenizer::bytes());
    assert_eq!(tokenizer.document(), u32::from(b'\n'));
    assert_eq!(tokenizer.encode("né h").unwrap(), Tokenizer::bytes().encode("né h").unwrap());
    assert_eq!(tokenizer.file().unwrap(), &File { name: "tokenizer.json", bytes: text.into_bytes() });
    assert_eq!(Tokenizer::bytes().file(), None);
}

#[test]
fn unusable_files_are_errors_that_name_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let error = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        fs::write(&path, bytes).unwrap();
        let message = format!("{:#}", Tokenizer::open(&path).unwrap_err());
        assert!(message.contains(name), "{message}");
        message
    };
    assert!(error("a.json", b"{}").contains("not a valid tokenizer.json"));
    let message = error("bom.json", "\u{feff}{\"added_tokens\": []}".as_bytes());
    assert!(message.contains("bom.json: not a valid tokenizer.json: expected value"), "{message}");
    assert!(error("b.model", &[0xff, 0xfe, 0]).contains("SentencePiece"));
    assert!(error("c.model", b"hello").contains("expected a base64 token"));
    let (_keep, path) = small_json();
    let text = fs::read_to_string(path).unwrap().replace("<|endoftext|>", "<|stop|>");
    assert!(error("d.json", text.as_bytes()).contains("special token that precedes documents"));
    let empty = tempfile::tempdir().unwrap();
    assert!(Tokenizer::open(empty.path()).unwrap_err().to_string().contains("found none"));
    assert!(format!("{:#}", Tokenizer::named("/nowhere/t.json").unwrap_err()).contains("/nowhere/t.json"));
    assert!(Tokenizer::of_vocab(300).unwrap_err().to_string().contains("has 300 tokens"));
}

/// Trains a byte-level BPE with the `tokenizers` crate. Its special token has id 0, so the ids are not the ranks.
fn trained(pre_tokenizer: serde_json::Value, change: impl FnOnce(&mut serde_json::Value)) -> String {
    use tokenizers::AddedToken;
    use tokenizers::models::TrainerWrapper;
    use tokenizers::models::bpe::{BPE, BpeTrainer};
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    let trainer = BpeTrainer::builder()
        .vocab_size(700)
        .special_tokens(vec![AddedToken::from("<|endoftext|>", true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    let pre_tokenizer: tokenizers::PreTokenizerWrapper = serde_json::from_value(pre_tokenizer).unwrap();
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer)).with_decoder(Some(ByteLevel::default()));
    let text = include_str!("../../../README.md").lines().chain(["Ärger über Öl, it's 1999, I'LL\r\n\r\n  go"]);
    tokenizer.train(&mut TrainerWrapper::from(trainer), text).unwrap();
    let mut file = serde_json::to_value(&tokenizer).unwrap();
    change(&mut file);
    file.to_string()
}

fn split_with(regex: &str) -> serde_json::Value {
    serde_json::json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]})
}

/// Returns files that [`ByteLevel`] encodes, with the steps of GPT-2, Llama 3 and Qwen 3.
fn byte_level_files() -> Vec<String> {
    let byte_level =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let nfc = |file: &mut serde_json::Value| {
        file["normalizer"] = serde_json::json!({"type": "NFC"});
        // An added token that is not special.
        let mut added = file["added_tokens"][0].clone();
        (added["id"], added["content"], added["special"]) = (700.into(), "<think>".into(), false.into());
        file["added_tokens"].as_array_mut().unwrap().push(added);
    };
    vec![
        trained(byte_level, |_| ()),
        trained(split_with(LLAMA3), |file| file["model"]["ignore_merges"] = true.into()),
        trained(split_with(QWEN2), nfc),
        // A token that no merge leads to, and merges in another order than the ids.
        trained(split_with(LLAMA3), |file| {
            let merges = file["model"]["merges"].as_array_mut().unwrap();
            merges.remove(20);
            merges.swap(3, 90);
        }),
    ]
}

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT4: &str = concat!(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|",
    r"\s*[\r\n]|\s+(?!\S)|\s+"
);
const NANOCHAT: &str = concat!(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|",
    r"\s*[\r\n]|\s+(?!\S)|\s+"
);

const TEXTS: &str = "(?s).{0,60}|([a-zA-Zſé中0-9½.!'\u{301}\u{345} \n\t\r\u{a0}]{0,6}|<think>){0,20}";

/// Pairs of a file's encoding with that of the `tokenizers` crate.
static PAIRS: LazyLock<Vec<(Tokenizer, tokenizers::Tokenizer)>> = LazyLock::new(|| {
    let pair = |text: String| {
        let mut reference: tokenizers::Tokenizer = text.parse().unwrap();
        reference.set_encode_special_tokens(true);
        (open_json("tokenizer.json", &text).unwrap(), reference)
    };
    byte_level_files().into_iter().map(pair).collect()
});

#[test]
fn byte_level_files_do_not_need_the_tokenizers_crate() {
    for (tokenizer, reference) in PAIRS.iter() {
        assert!(matches!(tokenizer.0.encoding, Encoding::ByteLevel(_)));
        let text = include_str!("../../../docs/testing.md");
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(ids, reference.encode(text, false).unwrap().get_ids());
        assert_eq!((tokenizer.text(&ids), tokenizer.document()), (text.to_owned(), 0));
        let slow = Encoding::HuggingFace(Box::new(HuggingFace::new(reference.clone())));
        assert_eq!(format!("{:016x}", fingerprint(&slow, tokenizer.special())), tokenizer.identity().fingerprint);
    }
    let (qwen, _) = &PAIRS[2];
    assert_eq!(qwen.encode("<think>").unwrap(), [700]);
    assert_eq!(qwen.decode(&[700, 0]), b"<think><|endoftext|>");
    assert!(!qwen.divides_between('t', 'h') && qwen.special_token_contains('t', 'h'));
}

/// Special tokens may take the spaces around them, or be found only as whole words. With the scheme `first` of Metaspace, text after a
/// special token does not begin with the sign of a word.
#[test]
fn special_tokens_are_found_by_the_rules_of_the_file() {
    let flags = |flag: &str| {
        let mut token = serde_json::json!({"id": 700, "content": "<mask>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true});
        token[flag] = true.into();
        let mut file: serde_json::Value = serde_json::from_str(&byte_level_files()[0]).unwrap();
        file["added_tokens"].as_array_mut().unwrap().push(token);
        file
    };
    let mut normalized = flags("normalized");
    normalized["normalizer"] = serde_json::json!({"type": "NFC"});
    let mut files = vec![flags("lstrip"), flags("rstrip"), flags("single_word"), normalized];
    for scheme in ["first", "always", "never"] {
        let metaspace =
            serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
        let special = serde_json::json!({"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true});
        let vocab = serde_json::json!({"<s>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "<": 5, "s": 6, ">": 7});
        files.push(
            serde_json::json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [special],
            "normalizer": null, "pre_tokenizer": metaspace, "post_processor": null, "decoder": metaspace,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": ["▁ a"]}}),
        );
    }
    let texts = ["a<mask>b", "a  <mask>  b <mask>", "<mask>a<mask>\n", "a<s>a a<s> ab<s><s>", "<s>a", "a", ""];
    for file in files {
        let file = file.to_string();
        let mut reference: tokenizers::Tokenizer = file.parse().unwrap();
        let tokenizer = open_json("tokenizer.json", &file).unwrap();
        for text in texts {
            reference.set_encode_special_tokens(false);
            let expected = reference.encode(text, false).unwrap();
            assert_eq!(tokenizer.encode_with_special(text).unwrap(), expected.get_ids(), "{text:?} {file}");
            reference.set_encode_special_tokens(true);
            let expected = reference.encode(text, false).unwrap();
            assert_eq!(tokenizer.encode(text).unwrap(), expected.get_ids(), "{text:?} {file}");
        }
    }
}

#[test]
fn files_with_other_steps_need_the_tokenizers_crate() {
    let json = |text| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let changes: [(&str, serde_json::Value); 8] = [
        ("/normalizer", json(r#"{"type": "NFKC"}"#)),
        ("/decoder", json("null")),
        ("/pre_tokenizer/add_prefix_space", true.into()),
        ("/pre_tokenizer", json(r#"{"type": "Whitespace"}"#)),
        ("/model/byte_fallback", true.into()),
        ("/model/end_of_word_suffix", "</w>".into()),
        (
            "/added_tokens/0",
            json(
                r#"{"id": 0, "content": "<m>", "single_word": true, "lstrip": false, "rstrip": false, "normalized": false, "special": false}"#,
            ),
        ),
        ("/model/merges", json(r#"["missing tokens"]"#)),
    ];
    let text = &byte_level_files()[0];
    assert!(ByteLevel::of_json(text).is_some());
    // Old versions of the library do not write the type of the model.
    let mut old = json(text);
    old["model"].as_object_mut().unwrap().remove("type").unwrap();
    assert!(ByteLevel::of_json(&old.to_string()).is_some());
    // Encoding ignores dropout.
    let mut dropout = json(text);
    dropout["model"]["dropout"] = 0.5.into();
    assert!(ByteLevel::of_json(&dropout.to_string()).is_some());
    for (key, value) in changes {
        let mut file = json(text);
        *file.pointer_mut(key).unwrap() = value;
        assert!(ByteLevel::of_json(&file.to_string()).is_none(), "{key}");
    }
    // A vocabulary without all bytes.
    let mut file = json(text);
    file["model"]["vocab"].as_object_mut().unwrap().remove("!");
    assert!(ByteLevel::of_json(&file.to_string()).is_none());
}

proptest! {
    #[test]
    fn ids_match_tiktoken(text in "(?s)\\PC*|.{0,200}|([a-zA-Zé中0-9½.!'\u{345} \n\t\r\u{a0}]{0,6}){0,40}") {
        let tokenizer = Tokenizer::gpt2();
        let ids = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(&ids, &tiktoken_rs::r50k_base_singleton().encode_ordinary(&text));
        prop_assert_eq!(tokenizer.text(&ids), text);
    }

    #[test]
    fn byte_level_ids_match_the_tokenizers_crate(text in TEXTS) {
        for (tokenizer, reference) in PAIRS.iter() {
            let expected = reference.encode(text.as_str(), false).unwrap();
            prop_assert_eq!(&tokenizer.encode(&text).unwrap(), expected.get_ids());
        }
    }

    #[test]
    fn pieces_match_a_regex(text in TEXTS) {
        for regex in [split::GPT2, LLAMA3, QWEN2, GPT4, NANOCHAT] {
            let expected = fancy_regex::Regex::new(regex).unwrap();
            let expected: Vec<&str> = expected.find_iter(&text).map(|found| found.unwrap().as_str()).collect();
            let mut pieces = Vec::new();
            Pattern::of_regex(regex).unwrap().split(&text, |piece| pieces.push(piece));
            prop_assert_eq!(pieces, expected, "{}", regex);
        }
    }
}

#[test]
fn ranges_of_tokens_cover_the_text() {
    let (_directory, path) = small_json();
    let json = fs::read_to_string(&path).unwrap();
    let nfc = json.replace(r#""normalizer": null"#, r#""normalizer": {"type": "NFC"}"#);
    // An encoding of the `tokenizers` crate.
    let slow = json.replace(r#""lstrip": false"#, r#""lstrip": true"#);
    let tokenizers = [
        Tokenizer::gpt2(),
        Tokenizer::bytes(),
        Tokenizer::from_json("a", &json).unwrap(),
        Tokenizer::from_json("b", &nfc).unwrap(),
        Tokenizer::from_json("c", &slow).unwrap(),
    ];
    assert_eq!(tokenizers.each_ref().map(Tokenizer::breaks_special), [true, true, true, true, false]);
    for text in ["", "Hello  né <|endoftext|><|pad|> h\n", "e\u{301}a e\u{301}", "<|endoftext|>"] {
        for tokenizer in &tokenizers {
            let tokens = tokenizer.encode_with_ranges(text, &[]).unwrap();
            let ids: Vec<u32> = tokens.iter().map(|(id, _)| *id).collect();
            assert_eq!(ids, tokenizer.encode_with_special(text).unwrap(), "{tokenizer}: {text}");
            let mut end = 0;
            for (id, range) in tokens {
                // Tokens of a normalized character stand for the same bytes.
                assert!(range.start <= end && range.end >= end, "{tokenizer}: {text}: {id} {range:?}");
                end = range.end;
            }
            assert_eq!(end, text.len(), "{tokenizer}: {text}");
        }
    }
    // The accent is composed with the letter before it.
    let ranges: Vec<_> = tokenizers[3].encode_with_ranges("ae\u{301}b", &[]).unwrap();
    assert_eq!(ranges.iter().map(|(_, range)| range.clone()).collect::<Vec<_>>(), [0..1, 1..4, 1..4, 4..5]);
}

#[test]
fn broken_special_tokens_are_text() {
    let tokenizer = Tokenizer::gpt2();
    let text = "a<|endoftext|>b<|endoftext|>";
    let ids = |broken: &[usize]| -> Vec<u32> {
        tokenizer.encode_with_ranges(text, broken).unwrap().into_iter().map(|(id, _)| id).collect()
    };
    let end = vec![50256];
    assert_eq!(ids(&[2]), [gpt2("a<|endoftext|>b"), end.clone()].concat());
    // The first position is before the second token.
    assert_eq!(ids(&[1, 16]), [gpt2("a"), end, gpt2("b<|endoftext|>")].concat());
    let mut found = Vec::new();
    tokenizer.find_special(text, |range| found.push(range));
    assert_eq!(found, [1..14, 15..28]);
    let (_directory, path) = small_json();
    let slow = fs::read_to_string(path).unwrap().replace(r#""lstrip": false"#, r#""lstrip": true"#);
    assert!(Tokenizer::from_json("c", &slow).unwrap().encode_with_ranges(text, &[2]).is_err());
}
