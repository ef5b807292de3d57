//! The tinyshakespeare data set, with the same tokens and split as llm.c's.

use crate::dataset::{Input, Replacement, Replaces, ShardNames};
use crate::download::Remote;
use crate::text::{self, Encoder, Layout, Summary, Validation};
use anyhow::{Context, Result};
use std::path::Path;
use tokenizer::Tokenizer;

const URL: &str = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt";
const SHA256: &str = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed";
const VALIDATION_TOKENS: usize = 32_768;

/// The names of the files.
pub const NAMES: ShardNames = ShardNames::TINY_SHAKESPEARE;

/// Returns the address of the text.
pub fn remote() -> Remote {
    Remote::with_sha256(URL, SHA256)
}

/// Tokenizes the text in a file, and writes `tiny_shakespeare_val.bin`, `tiny_shakespeare_train.bin` and `dataset.json` into
/// `out`.
///
/// Each section is a document, which includes the blank line at its end.
pub fn write(text: &Path, out: &Path, tokenizer: &Tokenizer, program: &str) -> Result<Summary> {
    let text = bounded_file::read_to_string(text, bounded_file::TEXT)
        .with_context(|| format!("cannot read {}", text.display()))?;
    let replacement = Replacement::begin(out, Replaces::Same(NAMES))?;
    let validation = Validation::FirstTokens(VALIDATION_TOKENS);
    let layout = Layout { names: NAMES, shard_tokens: usize::MAX, validation };
    text::write_shards(replacement, &Encoder::of_llmc(tokenizer), layout, program, |sink| {
        let mut rest = text.as_str();
        while let Some(end) = rest.find("\n\n") {
            let (section, after) = rest.split_at(end + 2);
            sink.text(section)?;
            sink.end()?;
            rest = after;
        }
        sink.text(rest)?;
        sink.end()?;
        Ok(Summary { input: Input { files: 1, ..Input::default() }, ..Summary::default() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokens;
    use crate::dataset::Dataset;
    use std::fs;

    fn read(path: &Path) -> Vec<u32> {
        let file = Tokens::open(path).unwrap();
        let mut ids = vec![0; file.len()];
        file.read(0, &mut ids).unwrap();
        ids
    }

    #[test]
    fn sections_are_documents_that_include_their_blank_line() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("text.txt");
        let speech = "All:\nResolved. resolved.<|endoftext|>\n\n";
        let ids = [vec![50256], Tokenizer::gpt2().encode(speech).unwrap()].concat();
        // The text ends with empty sections, and begins with one.
        let repeats = VALIDATION_TOKENS / ids.len() + 1;
        fs::write(&file, format!("\n\n{}\n\n", speech.repeat(repeats))).unwrap();
        let blank = [vec![50256], Tokenizer::gpt2().encode("\n\n").unwrap()].concat();
        let expected = [&blank[..], &ids.repeat(repeats), &blank, &[50256]].concat();
        let out = dir.path().join("out");
        let summary = write(&file, &out, &Tokenizer::gpt2(), "test").unwrap();
        let [train, val] = ["train", "val"].map(|split| read(&out.join(NAMES.file(split, 0))));
        assert_eq!((train.len(), val.len()), (expected.len() - VALIDATION_TOKENS, VALIDATION_TOKENS));
        assert!([val, train].concat() == expected);
        let dataset = Dataset::read(&out).unwrap().unwrap();
        assert_eq!((dataset.name.as_str(), dataset.program.as_str()), ("tiny_shakespeare", "test"));
        assert_eq!((dataset.val.shards, dataset.val.tokens), (1, VALIDATION_TOKENS));
        assert_eq!((&dataset.train, &dataset.input), (&summary.train, &summary.input));
        assert_eq!((dataset.input.files, dataset.input.documents, dataset.input.empty_documents), (1, repeats + 2, 1));
    }

    #[test]
    fn short_text_is_an_error_that_keeps_the_old_data_set() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text.txt");
        fs::write(&text, "too short").unwrap();
        let out = dir.path().join("out");
        fs::create_dir(&out).unwrap();
        fs::write(out.join("tiny_shakespeare_val.bin"), "old").unwrap();
        let message = format!("{:#}", write(&text, &out, &Tokenizer::gpt2(), "test").unwrap_err());
        assert!(message.contains("expected more than 32768 tokens") && message.contains("found 3"), "{message}");
        assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
        assert_eq!(fs::read(out.join("tiny_shakespeare_val.bin")).unwrap(), b"old");
        fs::write(&text, b"not \xff UTF-8").unwrap();
        let message = format!("{:#}", write(&text, &out, &Tokenizer::gpt2(), "test").unwrap_err());
        assert!(message.contains("text.txt") && message.contains("UTF-8"), "{message}");
    }

    /// Uses the full text if `LLM_RS_TINYSHAKESPEARE` names it; otherwise the test does nothing.
    #[test]
    fn split_matches_llm_c() {
        let Some(text) = std::env::var_os("LLM_RS_TINYSHAKESPEARE") else { return };
        let dir = tempfile::tempdir().unwrap();
        let summary = write(Path::new(&text), dir.path(), &Tokenizer::gpt2(), "test").unwrap();
        assert_eq!((summary.val.tokens, summary.train.tokens), (32_768, 305_260));
        let size = |split| fs::metadata(dir.path().join(NAMES.file(split, 0))).unwrap().len();
        assert_eq!((size("val"), size("train")), (66_560, 611_544));
    }
}
