//! Checks of the sizes in the headers of a parquet file, before the crate reads them. The crate reserves memory for any size that a
//! damaged header states, and calls itself for each level of the schema. Both can end the process.
//!
//! The headers are structs in Thrift's compact protocol
//! (<https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md>). The checks read them as the crate does: a
//! field that the crate knows has the type that it expects, and any other field the type that precedes it.

use ::parquet::errors::{ParquetError, Result as ParquetResult};
use ::parquet::file::reader::{ChunkReader, Length};
use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;

/// Types of fields.
const BINARY: u8 = 8;
const LIST: u8 = 9;
const STRUCT: u8 = 12;
/// Maximum number of levels of nested values; Parquet's structs have fewer than ten.
const MAX_DEPTH: usize = 32;

/// Maximum number of levels of a schema.
const MAX_LEVELS: usize = 256;
/// The end of a file: the length of the footer, and `PAR1`.
const TAIL_BYTES: u64 = 8;
/// The field of `FileMetaData` with the schema: the elements of a tree, each before its children.
const SCHEMA: i16 = 2;
/// The field of `SchemaElement` with the number of children.
const CHILDREN: i16 = 5;

/// Maximum size of a page's header. It contains the least and greatest value of the page, which are long in files of old writers.
/// Arrow's reader for C++ has the same limit.
const MAX_HEADER_BYTES: u64 = 16 << 20;
/// Maximum compression ratio: zstd stores a block of 128 KiB equal bytes in 4 bytes (RFC 8878, section 3.1.1.2).
const MAX_RATIO: u64 = 32768;
/// Number of integers at the beginning of the fields 5 to 8 of a `PageHeader`, which are the headers of a page of data, of an index and
/// of a dictionary, and of a page of data of version 2.
const INTEGERS: [i16; 4] = [4, 0, 2, 6];
/// Size of the length of a string in a dictionary.
const LENGTH_BYTES: u64 = 4;

/// Reads values.
pub struct Reader<R>(pub R);

impl<R: Read> Reader<R> {
    fn byte(&mut self) -> Result<u8> {
        let mut byte = [0];
        self.0.read_exact(&mut byte)?;
        Ok(byte[0])
    }

    /// Skips bytes.
    pub fn skip_bytes(&mut self, size: u64) -> Result<()> {
        let found = io::copy(&mut self.0.by_ref().take(size), &mut io::sink())?;
        ensure!(found == size, "header: expected a value of {size} bytes, found {found}");
        Ok(())
    }

    /// Reads groups of 7 bits, the lowest first.
    pub fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..70).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        bail!("header: expected a number of at most 10 bytes, found more")
    }

    fn int(&mut self) -> Result<i32> {
        let value = self.varint()?;
        Ok(i32::try_from((value >> 1) as i64 ^ -((value & 1) as i64))?)
    }

    /// Reads the number of elements of a list and their type. A list of booleans is an error: only the index of a column has one, and
    /// the crate takes no byte for them, so it counts to any number.
    fn list(&mut self) -> Result<(u64, u8)> {
        let head = self.byte()?;
        let size = if head >> 4 == 15 { self.varint()? } else { (head >> 4).into() };
        let kind = head & 15;
        ensure!(kind > 2 || size == 0, "header: expected no list of booleans, found one");
        Ok((size, kind))
    }

    /// Calls `field` with the number and type of each field of a struct. It must read the field's value.
    fn fields(&mut self, mut field: impl FnMut(&mut Self, i16, u8) -> Result<()>) -> Result<()> {
        let mut number = 0_i16;
        loop {
            let head = self.byte()?;
            let kind = head & 15;
            if kind == 0 {
                return Ok(());
            }
            number = match head >> 4 {
                0 => self.int()?.try_into()?,
                difference => number.checked_add(difference.into()).context("header: expected fewer fields")?,
            };
            field(self, number, kind)?;
        }
    }

    fn skip(&mut self, kind: u8) -> Result<()> {
        self.skip_nested(kind, MAX_DEPTH)
    }

    fn skip_nested(&mut self, kind: u8, depth: usize) -> Result<()> {
        let depth = depth.checked_sub(1).context("header: expected fewer levels")?;
        match kind {
            // A boolean, which is in its type.
            1 | 2 => Ok(()),
            3 => self.skip_bytes(1),
            4..=6 => self.varint().map(drop),
            7 => self.skip_bytes(8),
            BINARY => {
                let size = self.varint()?;
                self.skip_bytes(size)
            }
            LIST => {
                let (size, kind) = self.list()?;
                (0..size).try_for_each(|_| self.skip_nested(kind, depth))
            }
            STRUCT => self.fields(|reader, _, kind| reader.skip_nested(kind, depth)),
            _ => bail!("header: expected a value, found type {kind}"),
        }
    }

    /// Reads a schema. Returns the number of children of each element.
    fn children(&mut self) -> Result<Vec<usize>> {
        let (size, kind) = self.list()?;
        ensure!(kind == STRUCT, "schema: expected a list of elements, found one of type {kind}");
        let mut all = Vec::new();
        for _ in 0..size {
            let mut children = 0;
            self.fields(|reader, number, kind| match number {
                1..=3 | 5..=9 => {
                    let value = reader.int()?;
                    if number == CHILDREN {
                        children = value.try_into()?;
                    }
                    Ok(())
                }
                4 => reader.skip(BINARY),
                10 => reader.skip(STRUCT),
                _ => reader.skip(kind),
            })?;
            all.push(children);
        }
        Ok(all)
    }
}

/// Checks the schema of a file of `size` bytes. Leaves files without a footer to the crate.
pub fn check_schema(file: &File, size: u64) -> Result<()> {
    let mut tail = [0; TAIL_BYTES as usize];
    let Some(end) = size.checked_sub(TAIL_BYTES) else { return Ok(()) };
    file.read_exact_at(&mut tail, end)?;
    let [a, b, c, d, magic @ ..] = tail;
    let Some(start) = end.checked_sub(u32::from_le_bytes([a, b, c, d]).into()).filter(|_| &magic == b"PAR1") else {
        return Ok(());
    };
    let mut footer = vec![0; (end - start) as usize];
    file.read_exact_at(&mut footer, start)?;
    Reader(&footer[..]).fields(|reader, number, kind| match number {
        SCHEMA => check_tree(&reader.children()?),
        _ => reader.skip(kind),
    })
}

/// Checks that the elements suffice for the children that they claim, and the number of levels.
fn check_tree(children: &[usize]) -> Result<()> {
    let (found, most) = (children.iter().sum::<usize>(), children.len().saturating_sub(1));
    ensure!(found <= most, "schema: expected at most {most} children in {} elements, found {found}", children.len());
    // The number of children to come of each open element.
    let mut open = Vec::new();
    for &n in children {
        open.push(n);
        ensure!(open.len() <= MAX_LEVELS, "schema: expected at most {MAX_LEVELS} levels, found more");
        while open.pop_if(|left| *left == 0).is_some() {
            if let Some(parent) = open.last_mut() {
                *parent -= 1;
            }
        }
    }
    Ok(())
}

/// A parquet file with checked headers of pages. A [`SerializedPageReader`](::parquet::file::serialized_reader::SerializedPageReader)
/// reads only these with [`get_read`](ChunkReader::get_read).
pub struct CheckedFile(pub File);

impl Length for CheckedFile {
    fn len(&self) -> u64 {
        Length::len(&self.0)
    }
}

impl ChunkReader for CheckedFile {
    type T = BufReader<File>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        let header = self.0.get_read(start)?.take(MAX_HEADER_BYTES);
        check_page(header).map_err(|error| ParquetError::General(format!("{error:#}")))?;
        self.0.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        // The crate reserves memory for all of them.
        if start.saturating_add(length as u64) > self.len() {
            return Err(ParquetError::EOF(format!("page: expected {length} bytes, found the end of the file")));
        }
        self.0.get_bytes(start, length)
    }
}

/// Reads the header of a page. Checks that the compressed bytes suffice for the size of the page, and the page for the values of a
/// dictionary, for all of which the crate reserves memory.
fn check_page(header: impl Read) -> Result<()> {
    let (mut integers, mut values) = ([0; 4], 0);
    Reader(header).fields(|reader, number, kind| match number {
        1..=4 => {
            integers[number as usize - 1] = reader.int()?;
            Ok(())
        }
        5..=8 => reader.fields(|reader, inner, kind| {
            if !(1..=INTEGERS[number as usize - 5]).contains(&inner) {
                return reader.skip(kind);
            }
            let value = reader.int()?;
            if (number, inner) == (7, 1) {
                values = value;
            }
            Ok(())
        }),
        _ => reader.skip(kind),
    })?;
    let [_, size, compressed, _] = integers;
    let (size, compressed, values) = (u64::try_from(size)?, u64::try_from(compressed)?, u64::try_from(values)?);
    let most = (compressed + 1) * MAX_RATIO;
    ensure!(
        size <= most,
        "page: expected at most {most} bytes, which {compressed} compressed bytes can contain, found {size}"
    );
    let most = size / LENGTH_BYTES;
    ensure!(values <= most, "dictionary: expected at most {most} values in {size} bytes, found {values}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Returns a page's header with two sizes.
    fn header(size: u32, compressed: u32) -> Vec<u8> {
        let mut bytes = vec![0x15, 0x04];
        for value in [size, compressed] {
            bytes.push(0x15);
            bytes.extend(varint(u64::from(value) << 1));
        }
        // A dictionary with one value.
        bytes.extend([0x4c, 0x15, 0x02, 0x15, 0x00, 0x00, 0x00]);
        bytes
    }

    fn varint(mut rest: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while rest >= 0x80 {
            bytes.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        bytes.push(rest as u8);
        bytes
    }

    /// Returns a page's header with another field at its end.
    fn with_field(field: &[u8]) -> Vec<u8> {
        let mut bytes = header(5, 5);
        bytes.pop();
        bytes.extend(field);
        bytes.push(0);
        bytes
    }

    fn error_of(header: &[u8]) -> String {
        format!("{:#}", check_page(header).expect_err("the header is not valid"))
    }

    #[test]
    fn sizes_are_bounded_by_the_largest_ratio() {
        for (size, compressed) in [(4, 4), (29, 38), (1 << 20, 40), (i32::MAX as u32, 1 << 16), (32768 * 5, 4)] {
            check_page(&header(size, compressed)[..]).unwrap_or_else(|error| panic!("{size}, {compressed}: {error}"));
        }
        for (size, compressed) in [(1 << 20, 20), (i32::MAX as u32, 36), (32768 * 5 + 1, 4)] {
            let error = error_of(&header(size, compressed));
            let expected = format!("which {compressed} compressed bytes can contain, found {size}");
            assert!(error.contains(&expected), "{error}");
        }
        // The crate takes the last size, whatever its type claims to be.
        for kind in [0x01, 0x05, 0x08] {
            let repeated = with_field(&[&[kind, 0x04], &varint(u64::from(u32::MAX - 1))[..]].concat());
            assert!(error_of(&repeated).contains("found 2147483647"), "{kind}");
        }
    }

    #[test]
    fn values_of_a_dictionary_are_bounded_by_its_size() {
        assert!(error_of(&header(3, 3)).contains("expected at most 0 values in 3 bytes, found 1"));
        let many = [&header(400, 400)[..8], &[0x4c, 0x15, 0xca, 0x01, 0, 0]].concat();
        assert!(error_of(&many).contains("expected at most 100 values in 400 bytes, found 101"), "{}", error_of(&many));
    }

    #[test]
    fn other_bytes_are_not_a_header() {
        let valid = header(5, 5);
        let long = [0x15, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00];
        // 2^32 + 5 in the file.
        let wide = [&valid[..5], &[0x8a, 0x80, 0x80, 0x80, 0x20], &valid[6..]].concat();
        for bytes in [&[] as &[u8], &[0x15], &valid[..valid.len() - 1], &long, &wide] {
            assert!(check_page(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_header_of_any_length_is_read() {
        for length in [0_usize, 300, 70_000] {
            // Field 9, which the crate does not know: bytes.
            let bytes = with_field(&[&[0x28], &varint(length as u64)[..], &vec![7; length]].concat());
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            let mut read = Vec::new();
            CheckedFile(file.try_clone().unwrap()).get_read(0).unwrap().read_to_end(&mut read).unwrap();
            assert_eq!(read, bytes);
            file.set_len(bytes.len() as u64 - 1).unwrap();
            assert!(CheckedFile(file).get_read(0).is_err());
        }
    }

    #[test]
    fn pages_after_the_end_of_the_file_are_errors() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 9]).unwrap();
        let file = CheckedFile(file);
        assert_eq!(file.get_bytes(4, 5).unwrap(), [7; 5][..]);
        assert!(file.get_bytes(4, 6).unwrap_err().to_string().contains("expected 6 bytes, found the end of the file"));
        assert!(file.get_bytes(u64::MAX, 1).is_err());
    }

    /// The crate takes no byte for a boolean in a list, and accepts the end of the file in place of a number.
    #[test]
    fn lists_that_do_not_end_are_errors() {
        for list in [&[0x11][..], &[0xf3, 0xff, 0x7f], &[0xf7, 0xff, 0xff, 0x7f], &[0x17, 1, 2]] {
            let bytes = with_field(&[&[0x29], list].concat());
            assert!(check_page(&bytes[..]).is_err(), "{bytes:?}");
        }
        for empty in [0x00, 0x01, 0x07] {
            check_page(&with_field(&[0x29, empty])[..]).unwrap();
        }
    }

    #[test]
    fn trees_of_any_form_are_valid() {
        let chain = [vec![1; MAX_LEVELS - 1], vec![0]].concat();
        for children in [&[][..], &[0], &[1, 0], &[3, 0, 2, 0, 0, 0], &[2, 1, 1, 0, 0], &chain] {
            check_tree(children).unwrap_or_else(|error| panic!("{children:?}: {error}"));
        }
    }

    #[test]
    fn children_that_do_not_exist_and_deep_trees_are_errors() {
        let chain = [vec![1; MAX_LEVELS], vec![0]].concat();
        for (children, message) in [
            (&[1][..], "at most 0 children in 1 elements, found 1"),
            (&[2, 1, 0], "at most 2 children in 3 elements, found 3"),
            (&[i32::MAX as usize, 0, 0], "at most 2 children in 3 elements"),
            (&chain, "at most 256 levels"),
        ] {
            let error = check_tree(children).unwrap_err().to_string();
            assert!(error.contains(message), "{children:?}: {error}");
        }
    }
}
