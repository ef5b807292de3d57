//! The tinyshakespeare data set, with the same tokens and split as llm.c's.

use super::tokens::{self, Width};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;

const URL: &str = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt";
const VALIDATION_TOKENS: usize = 32_768;

/// The token files of the data set.
#[derive(Debug)]
pub struct Written {
    /// Path and number of tokens of the training split.
    pub train: (PathBuf, usize),
    /// Path and number of tokens of the validation split.
    pub val: (PathBuf, usize),
}

/// Writes `tiny_shakespeare_train.bin` and `tiny_shakespeare_val.bin` into `out`. Without `from`, downloads the text.
pub fn write(from: Option<&Path>, out: &Path) -> Result<Written> {
    let text = match from {
        Some(path) => fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?,
        None => download().with_context(|| {
            format!("cannot download {URL}; without a network connection, pass the text with --from FILE")
        })?,
    };
    let ids = encode(&text)?;
    ensure!(
        ids.len() > VALIDATION_TOKENS,
        "tinyshakespeare: expected more than {VALIDATION_TOKENS} tokens (the validation split), found {}; \
         check the text file",
        ids.len()
    );
    let (val, train) = ids.split_at(VALIDATION_TOKENS);
    atomic_file::create_directory(out)?;
    let write = |split: &str, ids: &[u32]| {
        let path = out.join(format!("tiny_shakespeare_{split}.bin"));
        tokens::write(&path, ids, Width::U16).map(|()| (path, ids.len()))
    };
    Ok(Written { val: write("val", val)?, train: write("train", train)? })
}

/// Returns the tokens of the text. Each section is a document, which includes the blank line at its end.
fn encode(text: &str) -> Result<Vec<u32>> {
    let tokenizer = Tokenizer::gpt2();
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

fn download() -> Result<String> {
    Ok(ureq::get(URL).call()?.body_mut().read_to_string()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_documents_that_include_their_blank_line() {
        let eot = 50256;
        let encode_plain = |text| Tokenizer::gpt2().encode(text).unwrap();
        let encode = |text| encode(text).unwrap();
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
        let message = format!("{:#}", write(Some(&text), &dir.path().join("out")).unwrap_err());
        assert!(message.contains("found 3"), "{message}");
        assert!(!dir.path().join("out").exists());
    }

    /// Uses the full text if `LLM_RS_TINYSHAKESPEARE` names it; otherwise the test does nothing.
    #[test]
    fn split_matches_llm_c() {
        let Some(text) = std::env::var_os("LLM_RS_TINYSHAKESPEARE") else { return };
        let dir = tempfile::tempdir().unwrap();
        let written = write(Some(Path::new(&text)), dir.path()).unwrap();
        assert_eq!((written.val.1, written.train.1), (32_768, 305_260));
        let size = |path: &Path| fs::metadata(path).unwrap().len();
        assert_eq!((size(&written.val.0), size(&written.train.0)), (66_560, 611_544));
    }
}
