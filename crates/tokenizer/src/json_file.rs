//! Byte-level byte-pair encodings in Hugging Face's `tokenizer.json`.
//!
//! GPT-2, Llama 3, Qwen and models trained with the `tokenizers` library have such files. [`Bpe`] encodes them many times faster
//! than the `tokenizers` crate, with the same ids. That crate encodes all other files.

use crate::Special;
use crate::bpe::{Bpe, Pair};
use crate::byte_level;
use crate::matcher::{Matcher, Part};
use crate::split::Pattern;
use anyhow::Result;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use unicode_normalization::{UnicodeNormalization, is_nfc};

/// A byte-level byte-pair encoding with the steps before it.
#[derive(Debug)]
pub struct ByteLevel {
    pub bpe: Bpe,
    /// Tokens that are not special, but are recognized in any text.
    pub added: Matcher,
    /// Whether text is normalized to the composed form (NFC).
    nfc: bool,
}

impl ByteLevel {
    /// Creates an encoding without other steps.
    pub fn new(bpe: Bpe) -> Result<Self> {
        Ok(Self { bpe, added: Matcher::new(Vec::new())?, nfc: false })
    }

    /// Reads a `tokenizer.json`. Returns `None` if the file has steps that this type does not have.
    pub fn of_json(text: &str) -> Option<Self> {
        let file: File = serde_json::from_str(text).ok()?;
        let nfc = match &file.normalizer {
            Value::Null => false,
            Value::Object(normalizer) if normalizer.get("type")? == "NFC" => true,
            _ => return None,
        };
        if file.decoder.get("type")? != "ByteLevel" || !file.model.is_plain() {
            return None;
        }
        let pattern = pattern(&file.pre_tokenizer)?;
        // Text around such a token would belong to it, or its text would be normalized.
        let depends_on_text =
            |token: &Added| token.single_word || token.lstrip || token.rstrip || (nfc && token.normalized);
        if file.added_tokens.iter().any(depends_on_text) {
            return None;
        }
        let (special, added): (Vec<Added>, _) = file.added_tokens.into_iter().partition(|token| token.special);
        let is_added = |id: u32| special.iter().chain(&added).any(|token| token.id == id);
        let bpe = file.model.bpe(pattern, is_added)?;
        let added = added.into_iter().map(|token| Special { text: token.content, id: token.id }).collect();
        Some(Self { bpe, added: Matcher::new(added).ok()?, nfc })
    }

    /// Appends the ids of a text without special tokens to `out`.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<()> {
        self.added.split(text, |part| {
            match part {
                Part::Token(id) => out.push(id),
                Part::Text(text) if self.nfc && !is_nfc(text) => self.bpe.encode(&text.nfc().collect::<String>(), out),
                Part::Text(text) => self.bpe.encode(text, out),
            }
            Ok(())
        })
    }

    /// Returns the positions of a text that normalization changes; `None` if it leaves the text as it is.
    pub fn normalized(&self, text: &str) -> Option<Normalized> {
        if !self.nfc || is_nfc(text) {
            return None;
        }
        // No character is composed with an ASCII character after it.
        let starts = text.char_indices().filter(|(at, c)| *at > 0 && c.is_ascii()).map(|(at, _)| at);
        let mut cuts = vec![[0, 0]];
        for end in starts.chain([text.len()]) {
            let [start, normalized] = cuts[cuts.len() - 1];
            let length: usize = text[start..end].nfc().map(char::len_utf8).sum();
            cuts.push([end, normalized + length]);
        }
        Some(Normalized { cuts })
    }

    /// Returns the bytes of a token; none if the id is unused.
    pub fn bytes(&self, id: u32) -> Option<&[u8]> {
        let token = self.bpe.tokens().get(id as usize).map(|token| &**token);
        token.filter(|token| !token.is_empty()).or_else(|| self.added.bytes(id))
    }
}

/// Positions in a text before and after normalization.
#[derive(Debug)]
pub struct Normalized {
    /// Positions before and after it, in increasing order. Each part between two of them is normalized by itself.
    cuts: Vec<[usize; 2]>,
}

impl Normalized {
    /// Returns the length of the normalized text.
    pub fn len(&self) -> usize {
        self.cuts[self.cuts.len() - 1][1]
    }

    /// Returns the position before normalization of a position after it. Inside a part whose length has changed, it is the start of the
    /// part, or its end.
    pub fn origin(&self, at: usize, is_end: bool) -> usize {
        let last = self.cuts.partition_point(|cut| cut[1] <= at) - 1;
        let [start, normalized] = self.cuts[last];
        let Some([end, normalized_end]) = self.cuts.get(last + 1) else { return start };
        match at - normalized {
            0 => start,
            inside if end - start == normalized_end - normalized => start + inside,
            _ if is_end => *end,
            _ => start,
        }
    }
}

/// The parts of a file that matter for encoding.
#[derive(Deserialize)]
struct File {
    added_tokens: Vec<Added>,
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "keys of the file")]
struct Added {
    id: u32,
    content: String,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    /// Absent in files of old versions of `tokenizers`, such as OpenAI's GPT-2.
    #[serde(rename = "type")]
    kind: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: HashMap<String, u32>,
    merges: Vec<MergedPair>,
}

/// Versions of `tokenizers` before 0.20 write text with a space between the tokens.
#[derive(Deserialize)]
#[serde(untagged)]
enum MergedPair {
    Text(String),
    Pair(String, String),
}

impl MergedPair {
    fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Self::Text(text) => text.split_once(' '),
            Self::Pair(left, right) => Some((left, right)),
        }
    }
}

impl Model {
    fn is_plain(&self) -> bool {
        let is_absent = |text: &Option<String>| text.as_deref().unwrap_or_default().is_empty();
        self.kind.as_deref().is_none_or(|kind| kind == "BPE")
            && is_absent(&self.continuing_subword_prefix)
            && is_absent(&self.end_of_word_suffix)
            && !self.byte_fallback
    }

    /// Returns the encoding. `is_added` reports whether an id belongs to an added token, which is no result of merges.
    fn bpe(&self, pattern: Pattern, is_added: impl Fn(u32) -> bool) -> Option<Bpe> {
        let pair = |merge: &MergedPair| {
            let (left, right) = merge.parts()?;
            let id = |token: &str| self.vocab.get(token).copied();
            Some(Pair { parts: (id(left)?, id(right)?), merged: id(&format!("{left}{right}"))? })
        };
        let merges: Vec<Pair> = self.merges.iter().map(pair).collect::<Option<_>>()?;
        let used = self.vocab.iter().filter(|(_, id)| !is_added(**id));
        let len = used.clone().map(|(_, id)| *id as usize + 1).max()?;
        // Ids may have gaps, but a file with few tokens and a huge id is damaged.
        if len > 2 * self.vocab.len() + (1 << 16) {
            return None;
        }
        let mut tokens = vec![Box::default(); len];
        for (token, id) in used {
            tokens[*id as usize] = byte_level::bytes(token)?.into_boxed_slice();
        }
        Bpe::with_merges(pattern, tokens, &merges, self.ignore_merges).ok()
    }
}

/// Returns a `tokenizer.json` with GPT-2's split pattern. Each merge is text with a space between its two tokens, for versions of
/// `tokenizers` before 0.20. `added` has the form of the key `added_tokens`.
pub fn byte_level_bpe(vocab: &Map<String, Value>, merges: &[String], added: &[Value], add_prefix_space: bool) -> Value {
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": merges,
        },
    })
}

/// Returns the text of a `tokenizer.json` with a regular expression as its split pattern. `special_tokens` have their ids.
pub fn with_pattern(
    vocab: &Map<String, Value>,
    merges: &[String],
    special_tokens: &[(&str, usize)],
    regex: &str,
) -> Result<String> {
    let special = |&(text, id): &(&str, usize)| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    };
    let special: Vec<Value> = special_tokens.iter().map(special).collect();
    let mut file = byte_level_bpe(vocab, merges, &special, false);
    file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]});
    Ok(serde_json::to_string_pretty(&file)? + "\n")
}

/// Returns the split pattern of the `pre_tokenizer` of a `tokenizer.json`.
pub fn pattern(pre_tokenizer: &Value) -> Option<Pattern> {
    let is_byte_level = |value: &Value, use_regex: bool| {
        let found = value.get("use_regex").and_then(Value::as_bool).unwrap_or(true);
        value["type"] == "ByteLevel" && value["add_prefix_space"] == false && found == use_regex
    };
    if is_byte_level(pre_tokenizer, true) {
        return Some(Pattern::Gpt2);
    }
    let steps = (pre_tokenizer["type"] == "Sequence").then(|| pre_tokenizer["pretokenizers"].as_array())??;
    let [split, byte_level] = &steps[..] else { return None };
    let isolates = split["type"] == "Split" && split["behavior"] == "Isolated" && split["invert"] == false;
    if !isolates || !is_byte_level(byte_level, false) {
        return None;
    }
    Pattern::of_regex(split["pattern"]["Regex"].as_str()?)
}
