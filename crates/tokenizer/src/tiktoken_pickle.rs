//! nanochat's `tokenizer.pkl`: tiktoken's `Encoding` as a pickle.

use crate::byte_level::character;
use crate::{json_file, merges_of_ranks};
use anyhow::{Context, Result, ensure};
use pickle::{Pickle, Value};

/// The class of the value in the file.
const CLASS: &str = "tiktoken.core.Encoding";

/// Returns the `tokenizer.json` of the encoding.
pub fn to_json(bytes: &[u8]) -> Result<String> {
    let pickle = Pickle::read(bytes)?;
    let found = pickle.root().call().map(|(class, _)| class);
    ensure!(
        found == Some(CLASS),
        "expected a pickle of {CLASS}, which nanochat saves as tokenizer.pkl, found {}",
        found.unwrap_or("another value")
    );
    let state = pickle.root().state().context("expected the state of the encoding, found none")?;
    // tiktoken stores only the name of an encoding that it knows.
    if let Some(name) = state.text() {
        anyhow::bail!(
            "expected an encoding with its ranks, found only the name {name}; use the tokenizer.json of this encoding"
        );
    }
    let key = |key: &str| state.get(key).with_context(|| format!("expected the key {key}, found none"));
    let regex = key("pat_str")?.text().context("pat_str: expected text, found another value")?;
    let ranks = ids("mergeable_ranks", key("mergeable_ranks")?, Value::bytes)?;
    let special = ids("special_tokens", key("special_tokens")?, Value::text)?;
    let tokens: Vec<Vec<u8>> = ranks.iter().map(|(_, token)| token.to_vec()).collect();
    let next = ranks.iter().zip(0..).find(|((id, _), rank)| id != rank);
    if let Some(((id, _), rank)) = next {
        anyhow::bail!(
            "mergeable_ranks: expected each rank once and the ranks from 0 on, found {id} in place of {rank}"
        );
    }
    let text = |token: &[u8]| token.iter().map(|&byte| character(byte)).collect::<String>();
    let vocab = tokens.iter().zip(0..).map(|(token, id): (_, u32)| (text(token), id.into())).collect();
    let merges: Vec<String> =
        merges_of_ranks(&tokens).map(|[left, right]| format!("{} {}", text(left), text(right))).collect();
    let special: Vec<(&str, usize)> = special.into_iter().map(|(id, token)| (token, id)).collect();
    json_file::with_pattern(&vocab, &merges, &special, regex)
}

/// Returns the tokens of a dictionary from token to id, ordered by id.
fn ids<'a, T>(name: &str, dict: Value<'a>, token: impl Fn(Value<'a>) -> Option<T>) -> Result<Vec<(usize, T)>> {
    let entries = dict.entries().with_context(|| format!("{name}: expected a dictionary, found another value"))?;
    let entry = |[key, value]: [Value<'a>; 2]| Some((usize::try_from(value.int()?).ok()?, token(key)?));
    let ids: Option<Vec<_>> = entries.map(entry).collect();
    let mut ids = ids.with_context(|| format!("{name}: expected ids of tokens, found other entries"))?;
    ids.sort_by_key(|(id, _)| *id);
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use crate::Tokenizer;
    use std::path::Path;

    fn nanochat() -> Vec<u8> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/nanochat/tokenizer/tokenizer.pkl");
        std::fs::read(path).unwrap()
    }

    #[test]
    fn an_encoding_of_nanochat_has_the_ids_of_tiktoken() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("tokenizer.pkl"), nanochat()).unwrap();
        let tokenizer = Tokenizer::open(directory.path()).unwrap();
        let special: Vec<&str> = tokenizer.special().iter().map(|token| token.text.as_str()).collect();
        assert_eq!((tokenizer.vocab(), special.len(), special[0], tokenizer.document()), (320, 9, "<|bos|>", 311));
        // encode_ordinary of tiktoken, which saved the file.
        let ids = [
            72, 267, 108, 111, 44, 284, 271, 108, 100, 33, 32, 49, 50, 51, 52, 53, 300, 39, 115, 294, 97, 195, 175,
            118, 101, 32, 230, 151, 165, 230, 156, 172, 232, 170, 158, 279, 32, 32, 120,
        ];
        let text = "Hello, world! 12345 it's naïve 日本語\n\n  x";
        assert_eq!(tokenizer.encode(text).unwrap(), ids);
        assert_eq!(tokenizer.text(&ids), text);
        // What a run keeps is a tokenizer.json with the same vocabulary.
        let file = tokenizer.file().unwrap();
        let json = Tokenizer::from_json(file.name, std::str::from_utf8(&file.bytes).unwrap()).unwrap();
        assert!(json.identity().has_vocabulary_of(&tokenizer.identity()));
    }

    #[test]
    fn other_pickles_are_errors() {
        let changed = |from: &[u8], to: &[u8]| {
            let mut bytes = nanochat();
            let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
            bytes[at..at + from.len()].copy_from_slice(to);
            bytes
        };
        for (bytes, expected) in [
            (
                b"\x80\x04N.".to_vec(),
                "expected a pickle of tiktoken.core.Encoding, which nanochat saves as tokenizer.pkl, found another value",
            ),
            (changed(b"Encoding", b"Decoding"), "found tiktoken.core.Decoding"),
            (changed(b"pat_str", b"pat_xyz"), "expected the key pat_str, found none"),
            (changed(b"special_tokens", b"spatial_tokens"), "expected the key special_tokens, found none"),
            (
                changed(b"K\x20", b"K\x21"),
                "mergeable_ranks: expected each rank once and the ranks from 0 on, found 33 in place of 32",
            ),
            (nanochat()[..1000].to_vec(), "not a pickle that llm-rs reads: byte"),
        ] {
            let message = format!("{:#}", super::to_json(&bytes).unwrap_err());
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }
}
