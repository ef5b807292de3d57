//! The header shared by llm.c's data files: 256 little-endian i32 words, of which the first two are a magic number and
//! a version.

use anyhow::{Context, Result, bail, ensure};
use std::io::{self, Read};

/// Size of a header in bytes.
pub const HEADER_BYTES: usize = 1024;

/// A file format that starts with a header.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// Name of the format in error messages, such as `token file`.
    pub name: &'static str,
    /// First word of the header.
    pub magic: i32,
    /// Second word of the header.
    pub version: i32,
}

/// A header with a valid magic number and version.
#[derive(Clone, Debug)]
pub struct Header([u8; HEADER_BYTES]);

/// Reads a header and returns the index of its format in `formats`, which have the same name. `file` names the file in error
/// messages.
pub fn read_one_of(formats: &[Format], file: &str, from: &mut impl Read) -> Result<(usize, Header)> {
    let name = formats[0].name;
    let mut header = Header([0; HEADER_BYTES]);
    let found = read_available(from, &mut header.0).with_context(|| format!("cannot read {file}"))?;
    ensure!(
        found == HEADER_BYTES,
        "{file}: not a valid {name}: expected a header of {HEADER_BYTES} bytes, found {found} bytes"
    );
    let [magic, version] = [0, 1].map(|i| header.word(i));
    let Some(which) = formats.iter().position(|format| format.magic == magic) else {
        let expected: Vec<String> = formats.iter().map(|format| format.magic.to_string()).collect();
        bail!("{file}: not a valid {name}: expected magic {}, found {magic}", expected.join(" or "));
    };
    let expected = formats[which].version;
    ensure!(version == expected, "{file}: expected {name} version {expected}, found {version}");
    Ok((which, header))
}

impl Format {
    /// Reads a header and checks its magic number and version. `file` names the file in error messages.
    pub fn read_header(&self, file: &str, from: &mut impl Read) -> Result<Header> {
        read_one_of(&[*self], file, from).map(|(_, header)| header)
    }

    /// Returns the bytes of a header. `words` follow the magic number and the version; the remaining words are zero.
    pub fn header_bytes(&self, words: &[i32]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let words = [self.magic, self.version].into_iter().chain(words.iter().copied());
        for (slot, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *slot = word.to_le_bytes();
        }
        bytes
    }
}

impl Header {
    /// Returns word `i`, which must be below 256.
    pub fn word(&self, i: usize) -> i32 {
        i32::from_le_bytes(self.0.as_chunks().0[i])
    }
}

/// Reads until `buffer` is full or the input ends. Returns the number of bytes read.
pub(crate) fn read_available(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match from.read(&mut buffer[len..]) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}
