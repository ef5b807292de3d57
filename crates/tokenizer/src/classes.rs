//! Unicode classes of the split patterns: letters (`\p{L}`), numbers (`\p{N}`) and whitespace (`\s`).

use regex_syntax::hir::{Class as HirClass, HirKind};
use std::sync::LazyLock;

/// The class of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Class {
    /// None of the others, for example punctuation.
    Other,
    /// `\p{L}`
    Letter,
    /// `\p{N}`
    Number,
    /// `\s`
    Space,
}

/// Returns the class of a character.
#[inline]
pub fn class(c: char) -> Class {
    TABLE[c as usize]
}

/// The class of each code point, from the Unicode tables of regex-syntax.
static TABLE: LazyLock<Box<[Class]>> = LazyLock::new(|| {
    let mut table = vec![Class::Other; char::MAX as usize + 1].into_boxed_slice();
    for (pattern, class) in [(r"\p{L}", Class::Letter), (r"\p{N}", Class::Number), (r"\s", Class::Space)] {
        let hir = regex_syntax::parse(pattern).expect("a constant pattern");
        let HirKind::Class(HirClass::Unicode(ranges)) = hir.kind() else { unreachable!("{pattern} is a class") };
        for range in ranges.ranges() {
            table[range.start() as usize..=range.end() as usize].fill(class);
        }
    }
    table
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_the_unicode_general_categories() {
        let cases = [
            ('a', Class::Letter),
            ('é', Class::Letter),
            ('中', Class::Letter),
            ('7', Class::Number),
            // A letter number (Nl), which is alphabetic but not in \p{L}.
            ('Ⅷ', Class::Number),
            ('½', Class::Number),
            (' ', Class::Space),
            ('\u{a0}', Class::Space),
            ('\u{3000}', Class::Space),
            ('!', Class::Other),
            // A combining mark (Mn), which is alphabetic but not in \p{L}.
            ('\u{345}', Class::Other),
            ('😀', Class::Other),
        ];
        for (c, expected) in cases {
            assert_eq!(class(c), expected, "{c:?}");
        }
    }
}
