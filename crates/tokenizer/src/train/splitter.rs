//! Splits the training text with any regular expression.

use crate::split::{self, Pattern};
use anyhow::{Context, Result, anyhow, ensure};
use tokenizers::tokenizer::pattern::Pattern as _;
use tokenizers::utils::SysRegex;

/// Names of regular expressions for `--pattern`.
const NAMES: [(&str, &str); 4] = [
    ("gpt2", split::GPT2),
    (
        "gpt4",
        concat!(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|",
            r"\s*[\r\n]|\s+(?!\S)|\s+"
        ),
    ),
    (
        "llama3",
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
            r"\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
    (
        "qwen2",
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
            r"\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
];

/// Texts that show whether a regular expression matches the empty string.
const PROBES: [&str; 4] = ["", "Ab 1", "\n\t x,y!", "é中 \u{301}½"];

/// A regular expression that splits text into pieces. Text that it does not match becomes pieces too, as with the behavior `Isolated` of
/// Hugging Face's `Split`.
#[derive(Debug)]
pub struct Splitter {
    regex: String,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Pattern(Pattern),
    Regex(SysRegex),
}

impl Splitter {
    /// Creates a splitter from `gpt2`, `gpt4`, `llama3`, `qwen2` or a regular expression.
    pub fn new(pattern: &str) -> Result<Self> {
        let regex = NAMES.into_iter().find(|(name, _)| *name == pattern).map_or(pattern, |(_, regex)| regex);
        let kind = match Pattern::of_regex(regex) {
            Some(pattern) => Kind::Pattern(pattern),
            None => Kind::Regex(SysRegex::new(regex).map_err(|error| {
                anyhow!(
                    "--pattern: expected gpt2, gpt4, llama3, qwen2 or a regular expression, found {pattern:?}: {error}; \
                     correct the expression"
                )
            })?),
        };
        let splitter = Self { regex: regex.to_owned(), kind };
        PROBES.into_iter().try_for_each(|text| splitter.split(text, |_| ()))?;
        Ok(splitter)
    }

    /// Returns the regular expression.
    pub fn regex(&self) -> &str {
        &self.regex
    }

    /// Passes the pieces of a text to `put`, in order. Fails if the regular expression matches the empty string.
    pub fn split<'a>(&self, text: &'a str, mut put: impl FnMut(&'a str)) -> Result<()> {
        let regex = match &self.kind {
            Kind::Pattern(pattern) => {
                pattern.split(text, put);
                return Ok(());
            }
            Kind::Regex(regex) => regex,
        };
        let empty = || {
            format!(
                "--pattern: expected a regular expression that matches at least one character, found an empty match of {:?}; \
                 use + in place of *, and no look-around alone",
                self.regex
            )
        };
        ensure!(!text.is_empty() || regex.find_iter(text).next().is_none(), empty());
        if text.is_empty() {
            return Ok(());
        }
        let found = regex.find_matches(text).map_err(|error| anyhow!(error)).context("--pattern")?;
        for ((begin, end), _) in found {
            ensure!(begin < end, empty());
            put(&text[begin..end]);
        }
        Ok(())
    }

    /// Reports whether a text may be cut between these adjacent characters without a change of its pieces. Nothing is known about other
    /// regular expressions.
    pub fn divides_between(&self, before: char, after: char) -> bool {
        match &self.kind {
            Kind::Pattern(pattern) => pattern.divides_between(before, after),
            Kind::Regex(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces<'a>(pattern: &str, text: &'a str) -> Vec<&'a str> {
        let mut pieces = Vec::new();
        Splitter::new(pattern).unwrap().split(text, |piece| pieces.push(piece)).unwrap();
        pieces
    }

    #[test]
    fn named_patterns_have_matchers() {
        for (name, regex) in NAMES {
            let splitter = Splitter::new(name).unwrap();
            assert!(matches!(splitter.kind, Kind::Pattern(_)), "{name}");
            assert_eq!(splitter.regex(), regex);
            assert!(splitter.divides_between('a', ' '));
        }
        let splitter = Splitter::new(r"\w+").unwrap();
        assert!(matches!(splitter.kind, Kind::Regex(_)) && !splitter.divides_between('a', ' '));
    }

    #[test]
    fn text_between_matches_is_a_piece() {
        assert_eq!(pieces(r"\w+", "a, b1!"), ["a", ", ", "b1", "!"]);
        assert_eq!(pieces(r"\d", "abc"), ["abc"]);
        assert_eq!(pieces(r" ?\p{L}+(?!\w)", "ab cd1 e"), ["ab", " cd1", " e"]);
        assert_eq!(pieces(r"\w+", ""), [""; 0]);
    }

    #[test]
    fn unusable_expressions_are_errors() {
        let error = |pattern: &str| format!("{:#}", Splitter::new(pattern).unwrap_err());
        assert!(
            error("(a").contains("--pattern: expected gpt2, gpt4, llama3, qwen2 or a regular expression, found \"(a\"")
        );
        for pattern in ["", r"\w*", "(?=A)", r"\b", "a|", r"(?<=\n)"] {
            assert!(error(pattern).contains("found an empty match"), "{pattern}: {}", error(pattern));
        }
        // Found while the text is split.
        assert!(Splitter::new("(?=Q)").unwrap().split("xQ", |_| ()).is_err());
    }

    proptest! {
        #[test]
        fn matchers_and_regular_expressions_have_the_same_pieces(text in r"(?s).{0,40}|[aL's1½. \n\r]{0,40}") {
            for (name, regex) in NAMES {
                let slow = Splitter { regex: regex.to_owned(), kind: Kind::Regex(SysRegex::new(regex).unwrap()) };
                let mut expected = Vec::new();
                slow.split(&text, |piece| expected.push(piece)).unwrap();
                prop_assert_eq!(pieces(name, &text), expected, "{}", name);
            }
        }
    }
}
