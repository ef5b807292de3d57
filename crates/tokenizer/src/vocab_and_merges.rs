//! `vocab.json` and `merges.txt` of a Hugging Face directory: the files of transformers' `GPT2Tokenizer`.

use crate::json_file;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Name of the file with the ids of all tokens.
pub const VOCAB: &str = "vocab.json";

/// Name of the file with one merge per line, beside [`VOCAB`].
pub const MERGES: &str = "merges.txt";

/// The keys of `tokenizer_config.json` and `special_tokens_map.json` that matter for encoding.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    tokenizer_class: Option<String>,
    add_prefix_space: Option<bool>,
    added_tokens_decoder: BTreeMap<u32, Map<String, Value>>,
    bos_token: Option<Named>,
    eos_token: Option<Named>,
    unk_token: Option<Named>,
    pad_token: Option<Named>,
    sep_token: Option<Named>,
    cls_token: Option<Named>,
    mask_token: Option<Named>,
    additional_special_tokens: Option<Vec<Named>>,
}

/// A special token: its text, or an object with its text and matching rules.
#[derive(Deserialize)]
#[serde(untagged)]
enum Named {
    Text(String),
    Object(Added),
}

/// A special token with its matching rules: whether it absorbs spaces on its left and right, and whether it must be a whole word.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Added {
    content: String,
    lstrip: bool,
    rstrip: bool,
    single_word: bool,
}

/// The key of `config.json` that names the architecture.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Model {
    model_type: Option<String>,
}

impl Config {
    /// Returns the special tokens.
    fn special(self) -> impl Iterator<Item = Added> {
        let begin = [self.bos_token, self.eos_token, self.unk_token, self.pad_token];
        let one = begin.into_iter().chain([self.sep_token, self.cls_token, self.mask_token]).flatten();
        one.chain(self.additional_special_tokens.into_iter().flatten()).map(|token| match token {
            Named::Text(content) => Added { content, ..Added::default() },
            Named::Object(token) => token,
        })
    }
}

/// Returns the contents of the `tokenizer.json` that encodes like the `vocab.json` at `path` and the files beside it.
pub fn to_json(path: &Path) -> Result<String> {
    let beside = |name: &str| path.with_file_name(name);
    let mut config: Config = read_if_exists(&beside("tokenizer_config.json"))?;
    let model: Model = read_if_exists(&beside("config.json"))?;
    let (key, class) = match (config.tokenizer_class.take(), model.model_type) {
        (Some(class), _) => ("tokenizer_class", class),
        (None, Some(kind)) => ("model_type", kind),
        (None, None) => ("tokenizer_class", "GPT2Tokenizer".to_owned()),
    };
    ensure!(
        ["GPT2Tokenizer", "GPT2TokenizerFast", "gpt2"].contains(&&*class),
        "{}: {key}: expected GPT-2, found {class}; llm-rs reads {VOCAB} and {MERGES} of no other tokenizer: save its \
         tokenizer.json with transformers",
        path.display()
    );
    let vocab: BTreeMap<String, u32> = read(path)?;
    let merges = read_merges(&beside(MERGES), &vocab)?;
    let names: Config = read_if_exists(&beside("special_tokens_map.json"))?;
    let added: BTreeMap<String, u32> = read_if_exists(&beside("added_tokens.json"))?;
    let (add_prefix_space, decoder) =
        (config.add_prefix_space == Some(true), std::mem::take(&mut config.added_tokens_decoder));
    // The default of transformers for each of these tokens that is not named.
    let named = |config: &Config| [&config.bos_token, &config.eos_token, &config.unk_token].map(Option::is_some);
    let all_are_named = named(&config).into_iter().zip(named(&names)).all(|(a, b)| a || b);
    let default = (!all_are_named).then(|| Added { content: "<|endoftext|>".to_owned(), ..Added::default() });
    let special: Vec<Added> = config.special().chain(names.special()).chain(default).collect();
    // A later entry with the same id replaces an earlier one.
    let mut tokens = BTreeMap::new();
    let of_vocab = special.iter().filter_map(|token| Some((&token.content, vocab.get(&token.content)?)));
    for (text, &id) in of_vocab.chain(&added) {
        // Several keys may name the same token, and only one of them may state its rules.
        let named = || special.iter().filter(|token| token.content == *text);
        let is_special = named().next().is_some();
        let rule = |rule: fn(&Added) -> bool| named().any(rule);
        tokens.insert(
            id,
            json!({"id": id, "content": text, "single_word": rule(|token| token.single_word),
                "lstrip": rule(|token| token.lstrip), "rstrip": rule(|token| token.rstrip),
                "normalized": !is_special, "special": is_special}),
        );
    }
    for (id, mut token) in decoder {
        token.insert("id".to_owned(), id.into());
        tokens.insert(id, token.into());
    }
    let vocab = vocab.into_iter().map(|(token, id)| (token, id.into())).collect();
    let tokens: Vec<Value> = tokens.into_values().collect();
    Ok(json_file::byte_level_bpe(&vocab, &merges, &tokens, add_prefix_space).to_string())
}

/// Returns the lines of a `merges.txt`, after checking that its tokens are in the vocabulary.
fn read_merges(path: &Path, vocab: &BTreeMap<String, u32>) -> Result<Vec<String>> {
    let text = bounded_file::read_to_string(path, bounded_file::TEXT)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.starts_with("#version"));
    let merge = |(i, line): (usize, &str)| {
        let (left, right) = line.split_once(' ').unwrap_or_default();
        let known = [left, right, &format!("{left}{right}")].iter().all(|token| vocab.contains_key(*token));
        let at = || format!("{}:{}", path.display(), i + 1);
        ensure!(known, "{}: expected two tokens that form a token of {VOCAB}, found {line:?}", at());
        Ok(line.to_owned())
    };
    lines.map(merge).collect()
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text =
        bounded_file::read(path, bounded_file::TEXT).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{}: not a valid tokenizer file", path.display()))
}

fn read_if_exists<T: DeserializeOwned + Default>(path: &Path) -> Result<T> {
    match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(T::default()),
        _ => read(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::small_json;
    use crate::{Identity, Tokenizer, stored};

    /// Writes the files of the tokenizer of [`small_json`], and returns it as well.
    fn files() -> (tempfile::TempDir, Tokenizer) {
        let (source, path) = small_json();
        let json: Value = read(&path).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        let mut vocab = json["model"]["vocab"].clone();
        vocab["<|endoftext|>"] = 257.into();
        write(VOCAB, &vocab.to_string());
        write(MERGES, "#version: 0.2\nĠ h\n");
        write("added_tokens.json", r#"{"<|pad|>": 258}"#);
        write("special_tokens_map.json", r#"{"pad_token": {"content": "<|pad|>"}, "eos_token": "<|endoftext|>"}"#);
        (directory, Tokenizer::open(source.path()).unwrap())
    }

    #[test]
    fn the_files_encode_like_a_tokenizer_json() {
        let (directory, expected) = files();
        let tokenizer = Tokenizer::open(directory.path()).unwrap();
        assert_eq!((&tokenizer, tokenizer.special()), (&expected, expected.special()));
        assert!(matches!(tokenizer.0.encoding, crate::Encoding::ByteLevel(_)));
        let text = "a hé<|pad|> <|endoftext|>h h";
        assert_eq!(tokenizer.encode(text).unwrap(), expected.encode(text).unwrap());
        assert_eq!(tokenizer.encode_with_special(text).unwrap(), expected.encode_with_special(text).unwrap());
        assert_eq!(stored::in_directory(directory.path()).unwrap(), Some(expected.clone()));
        // The copy in the directory of a run or a data set is a tokenizer.json.
        let run = tempfile::tempdir().unwrap();
        stored::write(&tokenizer, run.path()).unwrap();
        assert_eq!(stored::in_directory(run.path()).unwrap(), Some(expected.clone()));
        fs::remove_file(run.path().join(stored::JSON)).unwrap();
        // The original is found by its name.
        let identity: Identity = tokenizer.identity();
        assert_eq!(identity.name, directory.path().join(VOCAB).display().to_string());
        assert_eq!(stored::in_directory(run.path()).unwrap(), Some(expected));
    }

    #[test]
    fn all_kinds_of_special_tokens_are_read() {
        let (directory, _) = files();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        let special = || {
            let tokenizer = Tokenizer::open(directory.path()).unwrap();
            tokenizer.special().iter().map(|token| token.text.clone()).collect::<Vec<_>>()
        };
        write("added_tokens.json", r#"{"<mask>": 258, "</s>": 259, "<cls>": 260}"#);
        for map in [
            r#"{"mask_token": "<mask>", "sep_token": "</s>", "cls_token": "<cls>"}"#,
            r#"{"mask_token": {"content": "<mask>"}, "sep_token": "</s>", "cls_token": "<cls>", "bos_token": "</s>"}"#,
        ] {
            write("special_tokens_map.json", map);
            assert_eq!(special(), ["<|endoftext|>", "<mask>", "</s>", "<cls>"], "{map}");
        }
        write(
            "special_tokens_map.json",
            r#"{"mask_token": {"content": "<mask>", "lstrip": true}, "sep_token": "</s>"}"#,
        );
        let ids = Tokenizer::open(directory.path()).unwrap().encode_with_special("a <mask>b").unwrap();
        assert_eq!((ids.len(), ids[1]), (3, 258), "the token takes the space before it");
        // Other tokens begin and end documents, so this one is ordinary text.
        write("special_tokens_map.json", r#"{"bos_token": "</s>", "eos_token": "</s>"}"#);
        write("tokenizer_config.json", r#"{"unk_token": "</s>"}"#);
        assert_eq!(special(), ["</s>"]);
    }

    #[test]
    fn settings_of_transformers_are_used() {
        let (directory, expected) = files();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        fs::remove_file(directory.path().join("added_tokens.json")).unwrap();
        fs::remove_file(directory.path().join("special_tokens_map.json")).unwrap();
        write("config.json", r#"{"model_type": "gpt2"}"#);
        let open = || Tokenizer::open(directory.path());
        assert_eq!(open().unwrap().special().len(), 1);
        let pad = r#"{"258": {"content": "<|pad|>", "lstrip": false, "normalized": false, "rstrip": false,
            "single_word": false, "special": true}}"#;
        let config = format!(r#"{{"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {pad}}}"#);
        write("tokenizer_config.json", &config);
        assert_eq!(open().unwrap(), expected);
        write("tokenizer_config.json", r#"{"add_prefix_space": true, "pad_token": null}"#);
        assert_eq!(open().unwrap().encode("h").unwrap(), [256]);
        for (name, text, part) in [
            ("tokenizer_config.json", "[", "tokenizer_config.json: not a valid tokenizer file"),
            (
                "tokenizer_config.json",
                r#"{"tokenizer_class": "CLIPTokenizer"}"#,
                "vocab.json: tokenizer_class: expected GPT-2, found CLIPTokenizer",
            ),
            ("config.json", r#"{"model_type": "roberta"}"#, "vocab.json: model_type: expected GPT-2, found roberta"),
            (MERGES, "#version: 0.2\nĠ h\nh e\n", "merges.txt:3: expected two tokens that form a token of vocab.json"),
            (MERGES, "h", "merges.txt:1: expected two tokens"),
            (VOCAB, r#"{"a": "b"}"#, "vocab.json: not a valid tokenizer file"),
            ("added_tokens.json", r#"{"<|pad|>": 300}"#, "expected id 258, its place in the vocabulary, found 300"),
        ] {
            let (directory, _) = files();
            fs::write(directory.path().join(name), text).unwrap();
            let message = format!("{:#}", Tokenizer::open(directory.path()).unwrap_err());
            assert!(message.contains(part), "{part}: {message}");
        }
        // A vocabulary without merges is not a tokenizer.
        fs::remove_file(directory.path().join(MERGES)).unwrap();
        assert!(open().unwrap_err().to_string().contains("found none"));
    }
}
