//! Splits text into the pieces that byte-pair encoding merges separately.
//!
//! Each function is a hand-written matcher of one regular expression, which is several times faster than a regex engine:
//!
//! * GPT-2: `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
//!   ([encoder.py](https://github.com/openai/gpt-2/blob/master/src/encoder.py))
//! * Llama 3: `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
//!   ([tokenizer.py](https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py))
//! * Qwen 2 and later: Llama 3's with `\p{N}` instead of `\p{N}{1,3}`
//!   ([tokenization_qwen2.py](https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen2/tokenization_qwen2.py))
//! * nanochat: Llama 3's with `\p{N}{1,2}` instead of `\p{N}{1,3}`
//!   ([tokenizer.py](https://github.com/karpathy/nanochat/blob/master/nanochat/tokenizer.py))
//!
//! GPT-4's pattern, also known as cl100k, is another spelling of Llama 3's. It writes `'(?i:[sdmt]|ll|ve|re)` for the contractions,
//! `?+` and `++` where nothing could be given back, and `\s*[\r\n]`, which ends after the last line break as `\s*[\r\n]+` does
//! ([openai_public.py](https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py)). nanochat's pattern has this
//! spelling.
//!
//! Each pattern matches every character, so the pieces add up to the text.

use crate::classes::{Class, class};

/// A split pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// GPT-2, also known as r50k.
    Gpt2,
    /// Llama 3 and GPT-4.
    Llama3,
    /// Qwen 2 and later.
    Qwen2,
    /// nanochat.
    Nanochat,
}

/// GPT-2's regular expression.
pub const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The parts of Llama 3's and of GPT-4's regular expression before and after the numbers.
const AROUND_NUMBERS: [(&str, &str); 2] = [
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|", r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
];

impl Pattern {
    /// Returns the pattern of a regular expression in a `tokenizer.json`.
    pub fn of_regex(regex: &str) -> Option<Self> {
        if regex == GPT2 {
            return Some(Self::Gpt2);
        }
        let numbers = |(before, after)| regex.strip_prefix(before)?.strip_suffix(after);
        match AROUND_NUMBERS.into_iter().find_map(numbers)? {
            r"\p{N}{1,3}" => Some(Self::Llama3),
            r"\p{N}{1,2}" => Some(Self::Nanochat),
            r"\p{N}" => Some(Self::Qwen2),
            _ => None,
        }
    }

    /// Passes the pieces of a text to `put`, in order.
    pub fn split<'a>(self, text: &'a str, put: impl FnMut(&'a str)) {
        // One loop for each pattern, so that its matcher is inlined.
        match self {
            Self::Gpt2 => split_by(text, gpt2_piece, put),
            Self::Llama3 => split_by(text, |text| llama3_piece(text, 3), put),
            Self::Qwen2 => split_by(text, |text| llama3_piece(text, 1), put),
            Self::Nanochat => split_by(text, |text| llama3_piece(text, 2), put),
        }
    }

    /// Reports whether a piece always ends between these adjacent characters, and the pieces before it do not depend on the
    /// text after it.
    pub fn divides_between(self, before: char, after: char) -> bool {
        let starts_space = class(before) != Class::Space && class(after) == Class::Space;
        match self {
            Self::Gpt2 => starts_space,
            // Line breaks may belong to the punctuation or the whitespace before them.
            Self::Llama3 | Self::Qwen2 | Self::Nanochat => {
                let line_break = |c| matches!(c, '\r' | '\n');
                let ends_line = line_break(before) && class(after) != Class::Space;
                ends_line || (starts_space && !line_break(after))
            }
        }
    }
}

/// Splits a text. `first_piece` returns the length of the first piece of a text that is not empty, in bytes.
#[inline]
fn split_by<'a>(mut text: &'a str, first_piece: impl Fn(&str) -> usize, mut put: impl FnMut(&'a str)) {
    while !text.is_empty() {
        let (piece, rest) = text.split_at(first_piece(text));
        put(piece);
        text = rest;
    }
}

/// Returns the first character and its class, or `None` at the end.
#[inline]
fn first(text: &str) -> Option<(char, Class)> {
    // The table lookup of ASCII characters needs no decoding.
    text.chars().next().map(|c| (c, class(c)))
}

/// Returns the length of the longest prefix with characters that satisfy `accept`.
#[inline]
fn run(text: &str, mut accept: impl FnMut(char, Class) -> bool) -> usize {
    text.char_indices().find(|&(_, c)| !accept(c, class(c))).map_or(text.len(), |(at, _)| at)
}

#[inline]
fn run_of(text: &str, wanted: Class) -> usize {
    run(text, |_, found| found == wanted)
}

/// Returns the length of an English contraction at the start of `text`, such as `'ll`, or 0. `fold` ignores case.
fn contraction(text: &str, fold: bool) -> usize {
    let Some(rest) = text.strip_prefix('\'') else { return 0 };
    let lower = |c: char| match c {
        // The long s folds to s in Unicode.
        'ſ' if fold => 's',
        c if fold => c.to_ascii_lowercase(),
        c => c,
    };
    let mut chars = rest.chars();
    let (Some(one), two) = (chars.next(), chars.next()) else { return 0 };
    match (lower(one), two.map(lower)) {
        ('s' | 't' | 'm' | 'd', _) => 1 + one.len_utf8(),
        ('r' | 'v', Some('e')) | ('l', Some('l')) => 3,
        _ => 0,
    }
}

/// Returns the piece of a whitespace run: all of it at the end of the text, else all but its last character, which
/// belongs to the next piece. A single character is a piece of its own.
fn whitespace(text: &str) -> usize {
    let end = run_of(text, Class::Space);
    if end == text.len() {
        return end;
    }
    let last = text[..end].char_indices().next_back().map_or(0, |(at, _)| at);
    if last == 0 { end } else { last }
}

fn gpt2_piece(text: &str) -> usize {
    let contraction = contraction(text, false);
    if contraction > 0 {
        return contraction;
    }
    let Some((c, kind)) = first(text) else { return 0 };
    let (prefix, kind) = match first(&text[c.len_utf8()..]) {
        Some((_, next)) if c == ' ' && next != Class::Space => (1, next),
        _ => (0, kind),
    };
    match kind {
        Class::Space => whitespace(text),
        kind => prefix + run_of(&text[prefix..], kind),
    }
}

/// Numbers have at most `digits` characters.
fn llama3_piece(text: &str, digits: i32) -> usize {
    let contraction = contraction(text, true);
    if contraction > 0 {
        return contraction;
    }
    let Some((c, kind)) = first(text) else { return 0 };
    let (after, next) = (&text[c.len_utf8()..], first(&text[c.len_utf8()..]).map(|(_, next)| next));
    if kind == Class::Letter {
        return run_of(text, Class::Letter);
    }
    if kind != Class::Number && !matches!(c, '\r' | '\n') && next == Some(Class::Letter) {
        return c.len_utf8() + run_of(after, Class::Letter);
    }
    if kind == Class::Number {
        let mut left = digits;
        return run(text, |_, kind| {
            left -= 1;
            kind == Class::Number && left >= 0
        });
    }
    let prefix = usize::from(c == ' ' && next == Some(Class::Other));
    if kind == Class::Other || prefix == 1 {
        let end = prefix + run_of(&text[prefix..], Class::Other);
        return end + run(&text[end..], |c, _| matches!(c, '\r' | '\n'));
    }
    let spaces = run_of(text, Class::Space);
    match text[..spaces].rfind(['\r', '\n']) {
        Some(last) => last + 1,
        None => whitespace(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(pattern: Pattern, text: &str) -> Vec<&str> {
        let mut pieces = Vec::new();
        pattern.split(text, |piece| pieces.push(piece));
        pieces
    }

    #[test]
    fn gpt2_pieces() {
        let pieces = |text| pieces(Pattern::Gpt2, text);
        assert_eq!(pieces("I'll go, 42 times!"), ["I", "'ll", " go", ",", " 42", " times", "!"]);
        assert_eq!(pieces("a  b\n\n c \n"), ["a", " ", " b", "\n\n", " c", " \n"]);
        assert_eq!(pieces("don'T 's"), ["don", "'", "T", " '", "s"]);
        assert_eq!(pieces("\u{a0}\u{a0}x"), ["\u{a0}", "\u{a0}", "x"]);
    }

    #[test]
    fn llama3_pieces() {
        let pieces = |text| pieces(Pattern::Llama3, text);
        assert_eq!(pieces("I'LL go, 12345 times!\n\n"), ["I", "'LL", " go", ",", " ", "123", "45", " times", "!\n\n"]);
        assert_eq!(pieces("\t\tx  (y"), ["\t", "\tx", " ", " (", "y"].map(|s| s));
        assert_eq!(pieces(" \n\n  z"), [" \n\n", " ", " z"]);
        assert_eq!(pieces("'ſ"), ["'ſ"]);
        assert_eq!(pieces("a\r\nb"), ["a", "\r\n", "b"]);
    }

    #[test]
    fn qwen2_pieces_have_one_digit() {
        assert_eq!(pieces(Pattern::Qwen2, "in 2026: x"), ["in", " ", "2", "0", "2", "6", ":", " x"]);
    }

    #[test]
    fn other_regular_expressions_are_unknown() {
        assert_eq!(Pattern::of_regex(r"\s+|\S+"), None);
        for (before, after) in AROUND_NUMBERS {
            let pattern = |digits: &str| Pattern::of_regex(&format!("{before}{digits}{after}"));
            let expected = [Some(Pattern::Llama3), Some(Pattern::Nanochat), Some(Pattern::Qwen2), None];
            assert_eq!([r"\p{N}{1,3}", r"\p{N}{1,2}", r"\p{N}", r"\p{N}+"].map(pattern), expected);
        }
        let mixed = format!(r"{}\p{{N}}{}", AROUND_NUMBERS[0].0, AROUND_NUMBERS[1].1);
        assert_eq!(Pattern::of_regex(&mixed), None);
    }

    proptest! {
        #[test]
        fn pieces_are_those_of_the_parts_where_the_pattern_divides(text in "([a'sR1é.中]{0,3}[ \n\t\r\u{a0}]{0,3}){0,8}") {
            for pattern in [Pattern::Gpt2, Pattern::Llama3, Pattern::Qwen2, Pattern::Nanochat] {
                let whole = pieces(pattern, &text);
                for (at, after) in text.char_indices().skip(1) {
                    let before = text[..at].chars().next_back().unwrap();
                    if pattern.divides_between(before, after) {
                        let parts = [pieces(pattern, &text[..at]), pieces(pattern, &text[at..])].concat();
                        prop_assert_eq!(&parts, &whole, "{:?} at {}", pattern, at);
                    }
                }
            }
        }
    }
}
