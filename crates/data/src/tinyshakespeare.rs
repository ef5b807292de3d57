//! The tinyshakespeare data set, with the same tokens and split as llm.c's.

use crate::download::Remote;
use crate::shard_set::{ShardSet, Written};
use crate::tokens::Width;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use tokenizer::Tokenizer;

const URL: &str = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt";
const SHA256: &str = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed";
const VALIDATION_TOKENS: usize = 32_768;
const NAMES: [&str; 2] = ["tiny_shakespeare_val.bin", "tiny_shakespeare_train.bin"];

/// Returns the address of the text.
pub fn remote() -> Remote {
    Remote::with_sha256(URL, SHA256)
}

/// Tokenizes the text in a file, and writes `tiny_shakespeare_val.bin` and `tiny_shakespeare_train.bin` into `out`.
pub fn write(text: &Path, out: &Path, tokenizer: &Tokenizer) -> Result<[Written; 2]> {
    let text = fs::read_to_string(text).with_context(|| format!("cannot read {}", text.display()))?;
    let ids = encode(&text, tokenizer)?;
    ensure!(
        ids.len() > VALIDATION_TOKENS,
        "tinyshakespeare: expected more than {VALIDATION_TOKENS} tokens (the validation split), found {}; \
         check the text file",
        ids.len()
    );
    let (val, train) = ids.split_at(VALIDATION_TOKENS);
    let mut set = ShardSet::create(out, Width::of_vocab(tokenizer.vocab()))?;
    for (name, ids) in NAMES.into_iter().zip([val, train]) {
        let mut shard = set.shard(name)?;
        shard.extend(ids)?;
        set.finish(shard)?;
    }
    let written = set.commit(&NAMES)?;
    Ok(written.try_into().expect("two files were written"))
}

/// Returns the tokens of the text. Each section is a document, which includes the blank line at its end.
fn encode(text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    let mut rest = text;
    let mut document = |text: &str| {
        ids.push(tokenizer.document());
        ids.extend(tokenizer.encode(text)?);
        Ok::<_, anyhow::Error>(())
    };
    while let Some(end) = rest.find("\n\n") {
        let (section, after) = rest.split_at(end + 2);
        document(section)?;
        rest = after;
    }
    document(rest)?;
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_documents_that_include_their_blank_line() {
        let eot = 50256;
        let encode_plain = |text| Tokenizer::gpt2().encode(text).unwrap();
        let encode = |text| encode(text, &Tokenizer::gpt2()).unwrap();
        let hi = encode_plain("Hi\n\n");
        assert_eq!(encode("Hi\n\nHi\n\nHi"), [&[eot][..], &hi, &[eot], &hi, &[eot], &hi[..1]].concat());
        assert_eq!(encode("Hi\n\n"), [&[eot][..], &hi, &[eot]].concat());
        assert_eq!(
            encode("\n\n\n\n"),
            [&[eot][..], &encode_plain("\n\n"), &[eot], &encode_plain("\n\n"), &[eot]].concat()
        );
    }

    #[test]
    fn short_text_is_rejected_before_writing() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text.txt");
        fs::write(&text, "too short").unwrap();
        let message = format!("{:#}", write(&text, &dir.path().join("out"), &Tokenizer::gpt2()).unwrap_err());
        assert!(message.contains("found 3"), "{message}");
        assert!(!dir.path().join("out").exists());
    }

    /// Uses the full text if `LLM_RS_TINYSHAKESPEARE` names it; otherwise the test does nothing.
    #[test]
    fn split_matches_llm_c() {
        let Some(text) = std::env::var_os("LLM_RS_TINYSHAKESPEARE") else { return };
        let dir = tempfile::tempdir().unwrap();
        let [val, train] = write(Path::new(&text), dir.path(), &Tokenizer::gpt2()).unwrap();
        assert_eq!((val.tokens, train.tokens), (32_768, 305_260));
        let size = |path: &Path| fs::metadata(path).unwrap().len();
        assert_eq!((size(&val.path), size(&train.path)), (66_560, 611_544));
    }
}
