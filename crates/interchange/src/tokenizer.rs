//! Tokenizer files for other programs, and the vocabulary that GGUF contains.
//!
//! Byte-level vocabularies are text files: each byte of a token is one printable character. GPT-2's vocabulary and its merges
//! follow from the ranks that the `tokenizer` crate has built in.

use crate::config::ModelConfig;
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;
use tokenizer::byte_level::character;
use tokenizer::{BYTE_VOCAB, GPT2_VOCAB, Pattern, Tokenizer, byte_level_bpe, merges_of_ranks, split_pattern, stored};

/// Names of tokenizer files in Hugging Face directories.
pub const FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
];

/// A byte-level BPE vocabulary.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// How text is split before its bytes are merged.
    pub pattern: Pattern,
    /// Whether the BOS token precedes any text.
    pub adds_bos: bool,
    /// All tokens by id, in the alphabet of [`character`]. Special tokens are plain text.
    pub tokens: Vec<String>,
    /// Pairs of tokens in the order in which they are merged.
    pub merges: Vec<(String, String)>,
    /// Ids of special tokens.
    pub special: Vec<u32>,
    /// Ids of added tokens that are not special. Any text may contain them.
    pub added: Vec<u32>,
    /// Ids without a token, which pad the vocabulary.
    pub unused: Vec<u32>,
    /// The token that precedes each document.
    pub bos: Option<u32>,
    /// The token that ends each document.
    pub eos: Option<u32>,
}

impl Vocabulary {
    /// Returns the vocabulary of the built-in tokenizer of this size.
    pub fn built_in(size: usize) -> Option<Self> {
        match size {
            GPT2_VOCAB => Some(Self::gpt2()),
            BYTE_VOCAB => Some(Self::bytes()),
            _ => None,
        }
    }

    fn gpt2() -> Self {
        Self::of_ranks(&Tokenizer::gpt2(), Pattern::Gpt2, false)
    }

    /// Returns the vocabulary of a tokenizer that merges the pair of lowest rank. Its ids are the ranks, followed by those of special
    /// tokens.
    fn of_ranks(tokenizer: &Tokenizer, pattern: Pattern, adds_bos: bool) -> Self {
        let special: Vec<u32> = tokenizer.special().iter().map(|token| token.id).collect();
        let ranked = special.iter().min().map_or(tokenizer.vocab(), |&id| id as usize);
        let plain: Vec<Vec<u8>> = (0..ranked as u32).map(|id| tokenizer.decode(&[id])).collect();
        let text = |bytes: &[u8]| bytes.iter().map(|&byte| character(byte)).collect::<String>();
        let merges = merges_of_ranks(&plain).map(|[left, right]| (text(left), text(right))).collect();
        let names = tokenizer.special().iter().map(|token| token.text.clone());
        let [bos, eos] = bos_eos(tokenizer);
        Self {
            pattern,
            adds_bos,
            tokens: plain.iter().map(|token| text(token)).chain(names).collect(),
            merges,
            special,
            added: Vec::new(),
            unused: Vec::new(),
            bos,
            eos,
        }
    }

    /// Returns the vocabulary of bytes. It has no special token: a newline precedes each document, and nothing ends one.
    fn bytes() -> Self {
        let tokens = (0..=u8::MAX).map(|byte| character(byte).to_string()).collect();
        let bos = Some(Tokenizer::bytes().document());
        Self {
            pattern: Pattern::Gpt2,
            adds_bos: false,
            tokens,
            merges: Vec::new(),
            special: Vec::new(),
            added: Vec::new(),
            unused: Vec::new(),
            bos,
            eos: None,
        }
    }

    /// Reads the vocabulary from the `tokenizer.json` of a Hugging Face directory. Only byte-level BPE is supported.
    pub fn read(directory: &Path, config: &ModelConfig) -> Result<Self> {
        let path = directory.join(FILES[0]);
        let text =
            bounded_file::read(&path, bounded_file::TEXT).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text, config.descriptor.vocab, config.bos_eos()).with_context(|| path.display().to_string())
    }

    /// Returns the vocabulary of a tokenizer for a model with `size` ids. Of files, only byte-level BPE in a `tokenizer.json` and
    /// Llama 3's `tokenizer.model` are supported.
    pub fn of(tokenizer: &Tokenizer, size: usize) -> Result<Self> {
        let mut vocabulary = match tokenizer.file() {
            Some(file) if file.name == stored::JSON => {
                Self::parse(&file.bytes, size, bos_eos(tokenizer)).with_context(|| tokenizer.name().to_owned())?
            }
            // Llama 3 begins each text with a special token.
            Some(_) => Self::of_ranks(tokenizer, Pattern::Llama3, true),
            None => Self::built_in(tokenizer.vocab()).context("only GPT-2's tokenizer and bytes are built in")?,
        };
        let unused = vocabulary.tokens.len()..size;
        vocabulary.unused.extend(unused.clone().map(|id| id as u32));
        vocabulary.tokens.extend(unused.map(padding));
        Ok(vocabulary)
    }

    /// Parses a `tokenizer.json` for a model with `size` ids. `bos_eos` are the tokens before and after a document.
    fn parse(text: &[u8], size: usize, bos_eos: [Option<u32>; 2]) -> Result<Self> {
        let file: Value = serde_json::from_slice(text).context("not valid JSON")?;
        let [bos, eos] = bos_eos;
        let (model, splitter, normalizer) = (&file["model"], &file["pre_tokenizer"], &file["normalizer"]);
        // Old versions of tokenizers do not write the type of the model.
        let is_bpe = model["type"] == "BPE" || (model.is_object() && model["type"].is_null());
        let is_gpt2 =
            splitter["type"] == "ByteLevel" && splitter["add_prefix_space"] != true && splitter["use_regex"] != false;
        let pattern = if is_gpt2 { Some(Pattern::Gpt2) } else { split_pattern(splitter) };
        // llama.cpp does not normalize text. Its conversion of Qwen ignores this step, too.
        let is_normalized =
            |pattern| normalizer.is_null() || (pattern == Pattern::Qwen2 && normalizer["type"] == "NFC");
        let pattern = pattern.filter(|&pattern| is_bpe && is_normalized(pattern)).with_context(|| {
            format!(
                "expected the byte-level BPE tokenizer of GPT-2, Llama 3 or Qwen 2, found model {}, pre-tokenizer {splitter} and \
                 normalizer {normalizer}; gguf export supports no other",
                model["type"]
            )
        })?;
        let mut tokens = vec![None; size];
        let mut add = |token: &str, id: &Value| -> Result<u32> {
            let slot = id.as_u64().filter(|&id| id < size as u64);
            let slot = slot.with_context(|| format!("token {token}: expected an id below {size}, found {id}"))?;
            let other = tokens[slot as usize].replace(token.to_owned());
            ensure!(
                other.as_deref().is_none_or(|other| other == token),
                "token {token}: expected an id of its own, found {id} of token {}",
                other.unwrap_or_default()
            );
            Ok(slot as u32)
        };
        let vocab = model["vocab"].as_object().context("model.vocab: expected an object")?;
        vocab.iter().try_for_each(|(token, id)| add(token, id).map(drop))?;
        let (mut special, mut added) = (Vec::new(), Vec::new());
        for token in file["added_tokens"].as_array().unwrap_or(&Vec::new()) {
            let id = add(token["content"].as_str().context("added_tokens: expected content")?, &token["id"])?;
            if token["special"] == true { &mut special } else { &mut added }.push(id);
        }
        let merges = model["merges"].as_array().context("model.merges: expected an array")?;
        let merges = merges.iter().map(parse_merge).collect::<Result<_>>()?;
        let unused = (0..size).filter(|&id| tokens[id].is_none()).map(|id| id as u32).collect();
        let named = |(id, token): (usize, Option<String>)| token.unwrap_or_else(|| padding(id));
        let tokens = tokens.into_iter().enumerate().map(named).collect();
        let adds_bos = bos.is_some() && adds_bos(&file["post_processor"]);
        Ok(Self { pattern, adds_bos, tokens, merges, special, added, unused, bos, eos })
    }

    /// Returns the names and contents of all tokenizer files of a Hugging Face directory, for texts of up to `max_tokens` tokens.
    pub fn files(&self, max_tokens: usize) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let merges: String =
            ["#version: 0.2".to_owned()].into_iter().chain(self.merge_lines()).map(|line| line + "\n").collect();
        Ok(vec![
            ("tokenizer.json", pretty(&self.tokenizer())?),
            ("tokenizer_config.json", pretty(&self.tokenizer_config(max_tokens))?),
            ("vocab.json", serde_json::to_vec(&Ids(&self.tokens))?),
            ("merges.txt", merges.into_bytes()),
            ("special_tokens_map.json", pretty(&self.special_tokens())?),
        ])
    }

    fn added_tokens(&self) -> Vec<(u32, Value)> {
        let added = |&id: &u32| {
            let flags = json!({
                "content": self.tokens[id as usize],
                "lstrip": false, "normalized": false, "rstrip": false, "single_word": false, "special": true,
            });
            (id, flags)
        };
        self.special.iter().map(added).collect()
    }

    /// Returns the contents of `tokenizer.json`.
    fn tokenizer(&self) -> Value {
        let added = self.added_tokens().into_iter().map(|(id, mut token)| {
            token["id"] = id.into();
            token
        });
        let plain = self.tokens.iter().enumerate();
        let vocab = plain.map(|(id, token)| (token.clone(), id.into())).collect();
        byte_level_bpe(&vocab, &self.merge_lines(), &added.collect::<Vec<_>>(), false)
    }

    /// Returns each merge as text with a space between its two tokens.
    pub fn merge_lines(&self) -> Vec<String> {
        self.merges.iter().map(|(left, right)| format!("{left} {right}")).collect()
    }

    fn tokenizer_config(&self, max_tokens: usize) -> Value {
        let added: serde_json::Map<String, Value> =
            self.added_tokens().into_iter().map(|(id, token)| (id.to_string(), token)).collect();
        let mut config = json!({
            "add_prefix_space": false,
            "added_tokens_decoder": added,
            // Decoding must not change the spaces of the text.
            "clean_up_tokenization_spaces": false,
            "errors": "replace",
            "model_max_length": max_tokens,
            // The class for GPT-2 always has <|endoftext|>.
            "tokenizer_class": if self.special.is_empty() { "PreTrainedTokenizerFast" } else { "GPT2Tokenizer" },
        });
        if let (Some(all), Value::Object(special)) = (config.as_object_mut(), self.special_tokens()) {
            all.extend(special);
        }
        config
    }

    fn special_tokens(&self) -> Value {
        match self.special[..] {
            [] => json!({}),
            [id, ..] => {
                let token = &self.tokens[id as usize];
                json!({"bos_token": token, "eos_token": token, "unk_token": token})
            }
        }
    }
}

/// Returns the name of an id without a token, which pads the vocabulary.
fn padding(id: usize) -> String {
    format!("[PAD{id}]")
}

/// Returns the tokens before (BOS) and after (EOS) a document. A model predicts the token of the next document after the end of one. A
/// newline, which precedes documents of bytes, ends nothing.
pub fn bos_eos(tokenizer: &Tokenizer) -> [Option<u32>; 2] {
    let document = tokenizer.document();
    let is_special = tokenizer.special().iter().any(|token| token.id == document);
    [Some(document), is_special.then_some(document)]
}

/// Returns the names and contents of the tokenizer files of a Hugging Face directory: a tokenizer's own file with what
/// transformers needs besides it, or the files of a built-in tokenizer. Texts have up to `max_tokens` tokens.
pub fn files(tokenizer: &Tokenizer, max_tokens: usize) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let Some(file) = tokenizer.file() else { return Vocabulary::of(tokenizer, 0)?.files(max_tokens) };
    let document = tokenizer.document();
    let special = tokenizer.special().iter().find(|token| token.id == document).map(|token| &token.text);
    let config = json!({
        "bos_token": special,
        "clean_up_tokenization_spaces": false,
        "eos_token": special,
        "model_max_length": max_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    Ok(vec![(file.name, file.bytes.clone()), ("tokenizer_config.json", pretty(&config)?)])
}

/// Returns the tokenizer with these texts as special tokens. Missing ones get the ids after all others; no other id changes. A built-in
/// tokenizer becomes a `tokenizer.json`. `name` is the path of the result, for its identity.
pub fn with_special(tokenizer: &Tokenizer, texts: &[&str], name: &str) -> Result<Tokenizer> {
    let is_special = |text: &&&str| tokenizer.special().iter().any(|token| token.text == **text);
    let missing: Vec<&str> = texts.iter().filter(|text| !is_special(text)).copied().collect();
    let mut file: Value = match tokenizer.file() {
        Some(_) if missing.is_empty() => return Ok(tokenizer.clone()),
        Some(file) if file.name == stored::JSON => serde_json::from_slice(&file.bytes)?,
        Some(_) => bail!(
            "{tokenizer}: expected a tokenizer.json, to which special tokens can be added, found another file; use the tokenizer.json of \
             the model"
        ),
        None => Vocabulary::of(tokenizer, 0)?.tokenizer(),
    };
    let mut next = tokenizer.vocab();
    for text in missing {
        ensure!(!text.is_empty(), "special token: expected text, found none");
        let in_vocabulary = file["model"]["vocab"].get(text).and_then(Value::as_u64);
        let added =
            file["added_tokens"].as_array_mut().with_context(|| format!("{tokenizer}: expected added_tokens"))?;
        if let Some(token) = added.iter_mut().find(|token| token["content"] == text) {
            token["special"] = true.into();
            continue;
        }
        let id = in_vocabulary.unwrap_or(next as u64);
        added.push(json!({
            "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        }));
        next += usize::from(in_vocabulary.is_none());
    }
    Tokenizer::from_json(name, std::str::from_utf8(&pretty(&file)?)?)
}

/// Returns the `tokenizer_config.json` of a tokenizer whose texts begin and end with these tokens. It is `old`, the one of the tokenizer
/// that was extended, or a new one if that is null. `is_extended` states whether special tokens were added.
pub fn config_of(old: &Value, tokenizer: &Tokenizer, eos: Option<&str>, is_extended: bool) -> Value {
    let document = tokenizer.special().iter().find(|token| token.id == tokenizer.document()).map(|token| &token.text);
    let mut config = if old.is_object() {
        old.clone()
    } else {
        json!({ "bos_token": document, "eos_token": document, "clean_up_tokenization_spaces": false, "tokenizer_class": FAST })
    };
    if is_extended {
        // Other classes have vocabularies of their own.
        config["tokenizer_class"] = FAST.into();
        config.as_object_mut().map(|config| config.remove("added_tokens_decoder"));
    }
    if let Some(eos) = eos {
        config["eos_token"] = eos.into();
    }
    // The template is a file of its own.
    config.as_object_mut().map(|config| config.remove("chat_template"));
    config
}

/// The class of transformers for any `tokenizer.json`.
const FAST: &str = "PreTrainedTokenizerFast";

/// Reports whether the `post_processor` of a `tokenizer.json` puts a special token before a text.
fn adds_bos(post_processor: &Value) -> bool {
    let one = [post_processor.clone()];
    let steps = post_processor["processors"].as_array().map_or(&one[..], Vec::as_slice);
    let begins = |step: &Value| step["type"] == "TemplateProcessing" && step["single"][0]["SpecialToken"].is_object();
    steps.iter().any(begins)
}

/// A merge is a pair of tokens, or text in which a space separates them.
fn parse_merge(value: &Value) -> Result<(String, String)> {
    let pair = match value {
        Value::String(text) => text.split_once(' '),
        Value::Array(pair) => match &pair[..] {
            [Value::String(left), Value::String(right)] => Some((&left[..], &right[..])),
            _ => None,
        },
        _ => None,
    };
    match pair {
        Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
        None => bail!("model.merges: expected a pair of tokens, found {value}"),
    }
}

/// Serializes tokens as an object from token to id, in the order of the ids.
struct Ids<'a>(&'a [String]);

impl Serialize for Ids<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().enumerate().map(|(id, token)| (token, id)))
    }
}

/// Returns JSON text that ends with a newline.
pub fn pretty(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::architecture::GPT2;
    use model::Descriptor;
    use std::fs;
    use xxhash_rust::xxh3::xxh3_64;

    fn file<'a>(files: &'a [(&str, Vec<u8>)], name: &str) -> &'a [u8] {
        &files.iter().find(|(found, _)| *found == name).unwrap().1
    }

    #[test]
    fn gpt2s_merges_are_those_of_openai() {
        let vocabulary = Vocabulary::built_in(50257).unwrap();
        assert_eq!((vocabulary.tokens.len(), vocabulary.merges.len()), (50257, 50000));
        let pair = |i: usize| (&vocabulary.merges[i].0[..], &vocabulary.merges[i].1[..]);
        assert_eq!([pair(0), pair(1), pair(2)], [("Ġ", "t"), ("Ġ", "a"), ("h", "e")]);
        assert_eq!(pair(49_999), ("Ġg", "azed"));
        assert_eq!((&vocabulary.tokens[0][..], &vocabulary.tokens[50256][..]), ("!", "<|endoftext|>"));
        // Each merge creates the token of the same rank.
        for (i, (left, right)) in vocabulary.merges.iter().enumerate() {
            assert_eq!(format!("{left}{right}"), vocabulary.tokens[256 + i]);
        }
        let files = vocabulary.files(1024).unwrap();
        // scripts/check_hf_export compares the file with the SHA-256 sum of OpenAI's vocab.bpe.
        assert_eq!(xxh3_64(file(&files, "merges.txt")), MERGES_XXH3);
        assert!(file(&files, "vocab.json").starts_with(br##"{"!":0,"\"":1,"#":2,"##));
    }

    #[test]
    fn tokenizer_files_are_read_back() {
        for (size, special) in [(50257, vec![50256]), (256, vec![])] {
            let vocabulary = Vocabulary::built_in(size).unwrap();
            let directory = tempfile::tempdir().unwrap();
            for (name, bytes) in vocabulary.files(64).unwrap() {
                assert!(FILES.contains(&name));
                fs::write(directory.path().join(name), bytes).unwrap();
            }
            let descriptor = Descriptor::gpt2(1, 1, 8, 64, size).unwrap();
            let config = ModelConfig::new(&GPT2, descriptor, [vocabulary.bos, vocabulary.eos]);
            let read = Vocabulary::read(directory.path(), &config).unwrap();
            assert_eq!((&read.tokens, &read.merges), (&vocabulary.tokens, &vocabulary.merges));
            assert_eq!((read.special, read.bos, read.eos), (special, vocabulary.bos, vocabulary.eos));
            let text = fs::read(directory.path().join("tokenizer_config.json")).unwrap();
            let config: Value = serde_json::from_slice(&text).unwrap();
            assert_eq!(config["model_max_length"], 64);
            assert_eq!(config["tokenizer_class"] == "GPT2Tokenizer", size == 50257);
            assert_eq!(config["eos_token"], if size == 50257 { json!("<|endoftext|>") } else { Value::Null });
            // A run that starts from the directory has the tokenizer of data that was encoded with the built-in one.
            let built_in = Tokenizer::of_vocab(size).unwrap();
            assert_eq!(stored::in_directory(directory.path()).unwrap(), Some(built_in.clone()));
            if size == GPT2_VOCAB {
                // The two files of old directories are the same tokenizer.
                fs::remove_file(directory.path().join(FILES[0])).unwrap();
                let of_two_files = stored::in_directory(directory.path()).unwrap().unwrap();
                assert_eq!(of_two_files, built_in);
                let text = "I'll go<|endoftext|>, 42 times: né!\n\n";
                assert_eq!(
                    of_two_files.encode_with_special(text).unwrap(),
                    built_in.encode_with_special(text).unwrap()
                );
            }
            let padded = Vocabulary::of(&built_in, size + 2).unwrap();
            assert_eq!((padded.tokens.len(), &padded.tokens[size + 1]), (size + 2, &format!("[PAD{}]", size + 1)));
            assert_eq!(padded.tokens[..size], vocabulary.tokens);
        }
        assert!(Vocabulary::built_in(300).is_none());
    }

    #[test]
    fn special_tokens_are_appended() {
        let texts = ["<|im_start|>", "<|im_end|>"];
        let text = "a<|im_start|>user\nné 42<|endoftext|>";
        for (tokenizer, document) in [(Tokenizer::gpt2(), 50256), (Tokenizer::bytes(), 10)] {
            let vocab = tokenizer.vocab();
            let extended = with_special(&tokenizer, &texts, "out/tokenizer.json").unwrap();
            assert_eq!((extended.vocab(), extended.document()), (vocab + 2, document));
            assert!(extended.extends(&tokenizer) && extended.extends(&extended) && !tokenizer.extends(&extended));
            assert!(
                !extended.extends(&Tokenizer::of_vocab(if vocab == 256 { GPT2_VOCAB } else { BYTE_VOCAB }).unwrap())
            );
            assert_eq!((extended.name(), extended.file().unwrap().name), ("out/tokenizer.json", "tokenizer.json"));
            let ids = extended.encode_with_special(text).unwrap();
            let old = |text| tokenizer.encode_with_special(text).unwrap();
            assert_eq!(ids, [old("a"), vec![vocab as u32], old("user\nné 42<|endoftext|>")].concat());
            // The tokens are there already.
            assert_eq!(with_special(&extended, &texts, "other").unwrap().name(), "out/tokenizer.json");
            let more = with_special(&extended, &["<|im_end|>", "<|end|>"], "more").unwrap();
            assert_eq!(
                (more.vocab(), more.encode_with_special("<|end|>").unwrap()),
                (vocab + 3, vec![vocab as u32 + 2])
            );
        }
        // The ids of tokens that are in the vocabulary stay.
        let named = with_special(&Tokenizer::gpt2(), &["a"], "a").unwrap();
        assert_eq!((named.vocab(), named.encode_with_special("a").unwrap()), (50257, vec![64]));
        assert_eq!(named.special().len(), 2);
        let same = with_special(&Tokenizer::gpt2(), &[], "gpt2").unwrap();
        assert!(same == Tokenizer::gpt2() && same.file().is_some());
    }

    #[test]
    fn configurations_state_the_end_token() {
        let extended = with_special(&Tokenizer::gpt2(), &["<|im_end|>"], "a").unwrap();
        let new = config_of(&Value::Null, &extended, Some("<|im_end|>"), true);
        assert_eq!((&new["bos_token"], &new["eos_token"]), (&json!("<|endoftext|>"), &json!("<|im_end|>")));
        assert_eq!(new["tokenizer_class"], FAST);
        let old = json!({"tokenizer_class": "Qwen2Tokenizer", "chat_template": "a", "pad_token": "b", "added_tokens_decoder": {}});
        assert_eq!(
            config_of(&old, &extended, None, false),
            json!({"tokenizer_class": "Qwen2Tokenizer", "pad_token": "b", "added_tokens_decoder": {}})
        );
        assert_eq!(config_of(&old, &extended, None, true), json!({"tokenizer_class": FAST, "pad_token": "b"}));
    }

    type Change = fn(&mut Value);

    #[test]
    fn other_tokenizers_are_read_or_rejected() {
        let tokenizer = |change: &dyn Fn(&mut Value)| {
            let mut file = json!({
                "pre_tokenizer": {"type": "ByteLevel"},
                "added_tokens": [{"id": 4, "content": "<s>", "special": true}, {"id": 3, "content": "x", "special": false}],
                "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b", ["ab", "ab"]]},
            });
            change(&mut file);
            Vocabulary::parse(file.to_string().as_bytes(), 6, [Some(4), None])
        };
        let read = tokenizer(&|_| ()).unwrap();
        assert_eq!(read.tokens, ["a", "b", "ab", "x", "<s>", "[PAD5]"]);
        assert_eq!(read.merges, [("a".into(), "b".into()), ("ab".into(), "ab".into())]);
        assert_eq!((read.special, read.added, read.bos, read.eos), (vec![4], vec![3], Some(4), None));
        let old = tokenizer(&|f| drop(f["model"].as_object_mut().unwrap().remove("type"))).unwrap();
        assert_eq!(old.tokens, read.tokens);
        let changes: [(Change, &str); 13] = [
            (
                |f| f["model"]["type"] = "WordPiece".into(),
                r#"expected the byte-level BPE tokenizer of GPT-2, Llama 3 or Qwen 2, found model "WordPiece", pre"#,
            ),
            (|f| f["pre_tokenizer"]["add_prefix_space"] = true.into(), r#"pre-tokenizer {"add_prefix_space":true,"#),
            (|f| f["pre_tokenizer"]["use_regex"] = false.into(), r#""use_regex":false} and normalizer null"#),
            (|f| f["normalizer"] = json!({"type": "NFC"}), r#"and normalizer {"type":"NFC"}; gguf export supports"#),
            (|f| f["model"] = Value::Null, "found model null, "),
            (|f| f["model"]["vocab"]["ab"] = 1.into(), "token b: expected an id of its own, found 1 of token ab"),
            (
                |f| f["pre_tokenizer"] = Value::Null,
                "pre-tokenizer null and normalizer null; gguf export supports no other",
            ),
            (|f| f["model"]["vocab"]["ab"] = 6.into(), "token ab: expected an id below 6, found 6"),
            (|f| f["added_tokens"][0]["id"] = (-1).into(), "token <s>: expected an id below 6, found -1"),
            (|f| f["added_tokens"][0]["content"] = 1.into(), "added_tokens: expected content"),
            (|f| f["model"]["vocab"] = json!([]), "model.vocab: expected an object"),
            (|f| f["model"]["merges"] = Value::Null, "model.merges: expected an array"),
            (|f| f["model"]["merges"][0] = "ab".into(), r#"model.merges: expected a pair of tokens, found "ab""#),
        ];
        for (change, expected) in changes {
            let message = format!("{:#}", tokenizer(&change).unwrap_err());
            assert!(message.contains(expected), "{expected}: {message}");
        }
        let directory = tempfile::tempdir().unwrap();
        let config = ModelConfig::new(&GPT2, Descriptor::gpt2(1, 1, 8, 64, 6).unwrap(), [None; 2]);
        let message = format!("{:#}", Vocabulary::read(directory.path(), &config).unwrap_err());
        assert!(message.contains("cannot read ") && message.contains("tokenizer.json"), "{message}");
    }

    const MERGES_XXH3: u64 = 16258279301553006112;
}
