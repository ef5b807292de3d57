//! The alphabet in which GPT-2's vocabulary files write bytes as printable characters
//! ([encoder.py](https://github.com/openai/gpt-2/blob/master/src/encoder.py), `bytes_to_unicode`).

/// Returns whether a byte stands for itself.
fn printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// Returns all bytes in the order of their characters, which is that of GPT-2's ids: printable ones first.
pub fn alphabet() -> impl Iterator<Item = u8> {
    let (first, others): (Vec<u8>, Vec<u8>) = (0..=255).partition(|&byte| printable(byte));
    first.into_iter().chain(others)
}

/// Returns the character of a byte: itself if it is printable, else one of the characters from U+0100 on.
pub fn character(byte: u8) -> char {
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !printable(other)).count() as u32;
    char::from_u32(0x100 + before).expect("68 characters follow U+0100")
}

/// Returns the bytes of a token in this alphabet, or `None` if it has other characters.
pub fn bytes(token: &str) -> Option<Vec<u8>> {
    let byte = |c: char| match c as u32 {
        0x100..=0x143 => (0..=255).find(|&byte| character(byte) == c),
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u8::try_from(c as u32).ok(),
        _ => None,
    };
    token.chars().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_is_a_bijection_with_the_known_characters() {
        for byte in 0..=255 {
            assert_eq!(bytes(&character(byte).to_string()), Some(vec![byte]), "{byte}");
        }
        let bytes_of_all_kinds = [b'!', b'~', b' ', b'\n', 0, 0x7f, 0xa0, 0xad, 0xff];
        assert_eq!(bytes_of_all_kinds.map(character), ['!', '~', 'Ġ', 'Ċ', 'Ā', 'ġ', 'ł', 'Ń', 'ÿ']);
        assert_eq!(bytes("Ġhi"), Some(b" hi".to_vec()));
        assert_eq!(bytes("中"), None);
    }
}
