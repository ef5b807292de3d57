use super::*;
use crate::Encoding;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::HashMap;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, PreTokenizerWrapper};

const END: &str = "<|endoftext|>";

fn settings(vocab: usize, min_frequency: u64) -> Settings {
    Settings { vocab, special: vec![END.to_owned()], min_frequency }
}

fn count(texts: &[&str], splitter: &Splitter) -> Pieces {
    let (pieces, mut table) = (Pieces::default(), Table::default());
    for text in texts {
        splitter.split(text, |piece| table.add(piece.as_bytes(), 1)).unwrap();
        pieces.add(&mut table);
    }
    pieces
}

fn trained(texts: &[&str], pattern: &str, settings: &Settings) -> Trained {
    let splitter = Splitter::new(pattern).unwrap();
    train(count(texts, &splitter), &splitter, settings, &mut || ()).unwrap()
}

/// Merges as byte strings.
type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

fn pairs(trained: &Trained) -> Pairs {
    let Merges { tokens, pairs, .. } = &trained.merges;
    let bytes = |id: u32| tokens[id as usize].to_vec();
    pairs.iter().map(|&(left, right)| (bytes(left), bytes(right))).collect()
}

/// Counts all pairs again before each merge.
fn reference(texts: &[&str], pattern: &str, vocab: usize, min_frequency: u64) -> Vec<(u32, u32)> {
    let mut tokens: Vec<Vec<u8>> = byte_level::alphabet().map(|byte| vec![byte]).collect();
    let id = |tokens: &[Vec<u8>], bytes: &[u8]| tokens.iter().position(|token| token == bytes).map(|id| id as u32);
    let mut words: Vec<Vec<u32>> = Vec::new();
    for text in texts {
        let put = |piece: &str| words.push(piece.bytes().map(|byte| id(&tokens, &[byte]).unwrap()).collect());
        Splitter::new(pattern).unwrap().split(text, put).unwrap();
    }
    let mut merges = Vec::new();
    while tokens.len() < vocab {
        let mut counts: HashMap<(u32, u32), u64> = HashMap::new();
        words
            .iter()
            .flat_map(|word| word.windows(2))
            .for_each(|pair| *counts.entry((pair[0], pair[1])).or_default() += 1);
        let best = counts.into_iter().max_by_key(|&(pair, count)| (count, std::cmp::Reverse(pair)));
        let Some((pair, _)) = best.filter(|(_, count)| *count >= min_frequency) else { break };
        let bytes = [&*tokens[pair.0 as usize], &*tokens[pair.1 as usize]].concat();
        let merged = id(&tokens, &bytes).unwrap_or(tokens.len() as u32);
        if merged as usize == tokens.len() {
            tokens.push(bytes);
        }
        merges.push(pair);
        for word in &mut words {
            let mut at = 0;
            while at + 1 < word.len() {
                if (word[at], word[at + 1]) == pair {
                    word.splice(at..at + 2, [merged]);
                }
                at += 1;
            }
        }
    }
    merges
}

/// Trains with the `tokenizers` crate. Returns the tokens of the merges.
fn hugging_face(texts: &[&str], regex: &str, vocab: usize, min_frequency: u64) -> Pairs {
    let trainer = BpeTrainer::builder()
        .vocab_size(vocab)
        .min_frequency(min_frequency)
        .special_tokens(vec![AddedToken::from(END, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    let pre_tokenizer = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]});
    tokenizer.with_pre_tokenizer(Some(serde_json::from_value::<PreTokenizerWrapper>(pre_tokenizer).unwrap()));
    tokenizer.train(&mut TrainerWrapper::from(trainer), texts.iter().copied()).unwrap();
    let file = serde_json::to_value(&tokenizer).unwrap();
    let merges = file["model"]["merges"].as_array().unwrap();
    let bytes = |token: &Value| byte_level::bytes(token.as_str().unwrap()).unwrap();
    merges.iter().map(|merge| (bytes(&merge[0]), bytes(&merge[1]))).collect()
}

const LONG_TEXTS: [&str; 4] = [
    include_str!("../../../../README.md"),
    include_str!("../../../../docs/testing.md"),
    include_str!("tests.rs"),
    "Ärger über Öl, it's 1999, I'LL\r\n\r\n  go 中文字中文字 😀😀😀 aaaaaaaaaaaaaaaaaaaaaa",
];

#[test]
fn merges_equal_those_of_hugging_face() {
    for pattern in ["gpt2", "gpt4", "llama3", "qwen2", r"\w+|\s", r"\w+\W*"] {
        for (vocab, min_frequency) in [(1000, 1), (5000, 3)] {
            let trained = trained(&LONG_TEXTS, pattern, &settings(vocab, min_frequency));
            let expected = hugging_face(&LONG_TEXTS, Splitter::new(pattern).unwrap().regex(), vocab, min_frequency);
            let found = pairs(&trained);
            let equal = found.iter().zip(&expected).take_while(|(found, expected)| found == expected).count();
            assert_eq!((equal, found.len()), (expected.len(), expected.len()), "{pattern} {vocab}");
            assert!(trained.merges() > 700 && trained.vocab() == 257 + trained.merges(), "{pattern}");
        }
    }
}

#[test]
fn the_file_encodes_like_hugging_face() {
    for pattern in ["gpt4", r"'(?i:[sdmt]|ll|ve|re)|\w+|\s"] {
        let trained = trained(&LONG_TEXTS, pattern, &settings(900, 2));
        let json = trained.json().unwrap();
        let mut reference: tokenizers::Tokenizer = json.parse().unwrap();
        let tokenizer = crate::open_json("tokenizer.json", &json).unwrap();
        assert_eq!(matches!(tokenizer.0.encoding, Encoding::ByteLevel(_)), pattern == "gpt4");
        assert_eq!((tokenizer.vocab(), tokenizer.document()), (900, 899));
        let mut tokens = 0;
        for text in LONG_TEXTS.into_iter().chain(["", "\u{0}\u{301} <|endoftext|>é\u{a0}"]) {
            let ids = tokenizer.encode_with_special(text).unwrap();
            assert_eq!(ids, reference.encode(text, false).unwrap().get_ids());
            assert_eq!(tokenizer.text(&ids), text);
            reference.set_encode_special_tokens(true);
            let plain = tokenizer.encode(text).unwrap();
            assert_eq!(plain, reference.encode(text, false).unwrap().get_ids());
            reference.set_encode_special_tokens(false);
            tokens += if LONG_TEXTS.contains(&text) { plain.len() as u64 } else { 0 };
        }
        assert_eq!(trained.encoded(), tokens);
    }
}

#[test]
fn ranks_are_the_ids_of_the_tokens() {
    let trained = trained(&LONG_TEXTS, "llama3", &settings(700, 2));
    let json = crate::open_json("tokenizer.json", &trained.json().unwrap()).unwrap();
    let (bpe, _) = crate::tiktoken_file::parse(RANKS, &trained.ranks()).unwrap();
    assert_eq!(bpe.tokens(), &trained.merges.tokens[..]);
    for text in LONG_TEXTS {
        let mut ids = Vec::new();
        bpe.encode(text, &mut ids);
        assert_eq!(json.encode(text).unwrap(), ids);
    }
}

#[test]
fn ties_are_broken_by_the_order_of_the_ids() {
    // In GPT-2's alphabet, printable characters precede the space.
    let trained = trained(&["b a", "d c", "ab", "ba"], r"(?s).+", &settings(258, 1));
    assert_eq!(pairs(&trained), [(b"a".to_vec(), b"b".to_vec())]);
}

#[test]
fn a_text_with_too_few_pairs_fills_a_part_of_the_vocabulary() {
    let trained = trained(&["abab"], "gpt2", &settings(1000, 2));
    assert_eq!((pairs(&trained), trained.vocab(), trained.encoded()), (vec![(vec![b'a'], vec![b'b'])], 258, 2));
    let none = self::trained(&[". . ."], "gpt2", &settings(257, 1));
    assert_eq!((none.merges(), none.vocab(), none.encoded()), (0, 257, 5));
}

/// Otherwise the file would have two tokens with the same text.
#[test]
fn no_merge_has_the_text_of_a_special_token() {
    let special = vec![END.to_owned(), "Ġthe".to_owned(), "<|endoftext|><|endoftext|>".to_owned()];
    let settings = Settings { vocab: 400, special, min_frequency: 1 };
    let trained = trained(&["the <|endoftext|> the the", "<|endoftext|>"], r"(?s)\s?\S+", &settings);
    let tokenizer = crate::open_json("tokenizer.json", &trained.json().unwrap()).unwrap();
    let texts: Vec<_> = trained.merges.tokens.iter().map(|token| String::from_utf8_lossy(token)).collect();
    assert!(
        texts.iter().any(|text| text == " <|endoftext|>") && !texts.iter().any(|text| text == END || text == " the")
    );
    assert!(tokenizer.encode("<|endoftext|>").unwrap().len() > 1);
    // The longest of the special tokens is found.
    let first = trained.merges.tokens.len() as u32;
    assert_eq!(tokenizer.encode_with_special("<|endoftext|><|endoftext|><|endoftext|>").unwrap(), [first + 2, first]);
    assert_eq!(tokenizer.document(), first);
}

#[test]
fn unusable_settings_are_errors() {
    let error = |vocab: usize, special: &[&str]| {
        let special = special.iter().map(|&token| token.to_owned()).collect();
        Settings { vocab, special, min_frequency: 2 }.check().unwrap_err().to_string()
    };
    assert!(
        error(257, &[END, "<|pad|>"])
            .contains("--vocab-size 257: expected at least 258, for 256 bytes and 2 special tokens")
    );
    assert!(error(300, &[END, ""]).contains("found an empty token"));
    assert!(error(300, &[END, "<a>", END]).contains("--special <|endoftext|>: expected distinct tokens"));
    assert!(error(300, &[END, "x"]).contains("--special x: expected at least two characters"));
    assert!(error(300, &["<x>"]).contains("one of <|endoftext|>, <|begin_of_text|>"));
    assert!(error(300, &[]).contains("found none; add one"));
    settings(257, 0).check().unwrap();
}

#[test]
fn files_are_replaced_only_on_request() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("a/b");
    check_output(&out, false).unwrap();
    check_output(&out, false).unwrap();
    let trained = trained(&["abab"], "gpt2", &settings(1000, 2));
    trained.write(&out).unwrap();
    assert_eq!(crate::Tokenizer::open(&out).unwrap().vocab(), 258);
    let error = |out: &Path, overwrite| check_output(out, overwrite).unwrap_err().to_string();
    assert!(error(&out, false).contains("tokenizer.json: expected no such file, found one"));
    assert!(error(&out.join(RANKS), true).contains("expected a directory, found a file"));
    check_output(&out, true).unwrap();
    std::fs::remove_file(out.join(stored::JSON)).unwrap();
    assert!(error(&out, false).contains("tokenizer.tiktoken"));
    std::fs::create_dir(out.join(stored::JSON)).unwrap();
    assert!(error(&out, true).contains("choose another --out"));
}

#[test]
fn rare_pieces_are_removed_to_limit_the_memory() {
    let splitter = Splitter::new("gpt2").unwrap();
    let words: Vec<String> = (0..5000).map(|i| format!(" w{i:x}").replace(['0', '1', '2', '3'], "a")).collect();
    let text = words.concat();
    let mut pieces = count(&[&text, &" the".repeat(1000)], &splitter);
    let all = pieces.len();
    pieces.limit(usize::MAX);
    assert_eq!((pieces.len(), pieces.removed()), (all, 0));
    pieces.limit(20_000);
    assert!(pieces.len() < all && pieces.removed() > 0 && !pieces.is_empty());
    let kept = train(pieces, &splitter, &settings(300, 1), &mut || ()).unwrap();
    assert!(kept.merges.tokens.iter().any(|token| &**token == b" the"));
}

proptest! {
    #[test]
    fn merges_equal_the_definition(
        texts in proptest::collection::vec("[ab]{1,30}|[abc ]{0,20}|(?s).{0,10}", 1..6),
        vocab in 257..300usize,
        min_frequency in 1..4u64,
    ) {
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        for pattern in [r"(?s).+", "gpt2"] {
            let found = trained(&texts, pattern, &settings(vocab, min_frequency));
            prop_assert_eq!(&found.merges.pairs, &reference(&texts, pattern, vocab - 1, min_frequency));
        }
    }
}
