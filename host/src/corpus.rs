//! The built-in corpus: the project's own sources and documents, which the build script concatenates.

use anyhow::Result;
use data::Tokens;
use tokenizer::Tokenizer;

static TEXT: &str = include_str!(concat!(env!("OUT_DIR"), "/corpus.txt"));

/// Approximate size in bytes of the blocks of lines that are assigned to a split.
const BLOCK_BYTES: usize = 8 << 10;
/// Every tenth block belongs to the validation split, so that it contains all kinds of text.
const VALIDATION_EVERY: usize = 10;

/// Returns the training and the validation tokens.
pub fn tokens(tokenizer: &Tokenizer) -> Result<(Tokens, Tokens)> {
    let (train, val) = split(TEXT);
    let encode = |name, text: &str| Ok::<_, anyhow::Error>(Tokens::in_memory(name, tokenizer.encode(text)?));
    Ok((encode("the built-in corpus", &train)?, encode("the built-in corpus' validation part", &val)?))
}

/// Splits text into training and validation text.
fn split(text: &str) -> (String, String) {
    let (mut train, mut val) = (String::new(), String::new());
    let mut start = 0;
    while start < text.len() {
        let block = start / BLOCK_BYTES;
        // A block ends with the line that contains its last byte.
        let last = (block + 1) * BLOCK_BYTES - 1;
        let rest = text.as_bytes().get(last..).unwrap_or_default();
        let end = rest.iter().position(|&byte| byte == b'\n').map_or(text.len(), |i| last + i + 1);
        let split = if block % VALIDATION_EVERY == VALIDATION_EVERY - 1 { &mut val } else { &mut train };
        split.push_str(&text[start..end]);
        start = end;
    }
    (train, val)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validation_split_has_a_tenth_of_the_lines() {
        let (train, val) = tokens(&Tokenizer::bytes()).unwrap();
        let fraction = val.len() as f64 / (train.len() + val.len()) as f64;
        assert!((0.05..0.12).contains(&fraction), "{fraction}");
        assert!(train.len() > 50_000, "{} bytes", train.len());
        let (train, val) = split(&"a line\n".repeat(20_000));
        assert_eq!(train.len() + val.len(), 140_000);
        assert!(train.ends_with("a line\n") && val.starts_with("a line\n"));
    }

    #[test]
    fn a_line_belongs_to_the_block_in_which_it_starts() {
        let lengths = [1, 5_000, 3_191, 3_192, 8_191, 8_192, 50_000, 100_000, 70];
        let text = (0..60).map(|i| "x".repeat(lengths[i % lengths.len()] - 1) + "\n").collect::<String>() + "end";
        let (mut train, mut val, mut position) = (String::new(), String::new(), 0);
        for line in text.split_inclusive('\n') {
            let validation = position / BLOCK_BYTES % VALIDATION_EVERY == VALIDATION_EVERY - 1;
            if validation { &mut val } else { &mut train }.push_str(line);
            position += line.len();
        }
        assert!(!val.is_empty());
        assert_eq!(split(&text), (train, val));
    }
}
