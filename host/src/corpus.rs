//! The corpus that comes with the program: its own sources and documents, gathered by the build.

use data::Tokens;
use data::tokenizer::Tokenizer;

static TEXT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/corpus.txt"));

/// Lines are dealt out in blocks of about this many bytes, every tenth of them to validation: it sees all kinds of text.
const BLOCK: usize = 8 << 10;
const VALIDATION_EVERY: usize = 10;

/// Training and validation tokens.
pub fn tokens(tokenizer: Tokenizer) -> (Tokens, Tokens) {
    let (train, val) = split(&String::from_utf8_lossy(TEXT));
    let encode = |name, text: &str| Tokens::in_memory(name, tokenizer.encode(text));
    (encode("the built-in corpus", &train), encode("the built-in corpus' validation part", &val))
}

fn split(text: &str) -> (String, String) {
    let (mut train, mut val) = (String::new(), String::new());
    let mut read = 0;
    for line in text.split_inclusive('\n') {
        let block = read / BLOCK;
        let to = if block % VALIDATION_EVERY == VALIDATION_EVERY - 1 { &mut val } else { &mut train };
        to.push_str(line);
        read += line.len();
    }
    (train, val)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_the_lines_is_kept_for_validation() {
        let (train, val) = tokens(Tokenizer::Bytes);
        let share = val.len() as f64 / (train.len() + val.len()) as f64;
        assert!((0.05..0.12).contains(&share), "{share}");
        assert!(train.len() > 50_000, "{} bytes", train.len());
        let (train, val) = split(&"a line\n".repeat(20_000));
        assert_eq!(train.len() + val.len(), 140_000);
        assert!(train.ends_with("a line\n") && val.starts_with("a line\n"));
    }
}
