//! Pages of a column, checked before they are decompressed and decoded.
//!
//! The crate reserves memory for the sizes that a page's header states, and a damaged header may state any size.

use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::errors::{ParquetError, Result};
use ::parquet::file::reader::{ChunkReader, Length};
use bytes::Bytes;
use std::fs::File;
use std::io::{BufReader, Chain, Cursor, Read};

/// Most bytes that a compressed byte stands for: zstd stores a block of 128 KiB equal bytes in 4 bytes (RFC 8878, section 3.1.1.2).
const MOST_RATIO: u64 = 32768;
/// The fields of a page's header that [`check_sizes`] reads take at most this many bytes.
const SIZES_BYTES: u64 = 18;

/// A parquet file with checked sizes of pages. A [`SerializedPageReader`](::parquet::file::serialized_reader::SerializedPageReader)
/// reads only headers of pages with [`get_read`](ChunkReader::get_read).
pub struct CheckedFile(pub File);

impl Length for CheckedFile {
    fn len(&self) -> u64 {
        Length::len(&self.0)
    }
}

impl ChunkReader for CheckedFile {
    type T = Chain<Cursor<Vec<u8>>, BufReader<File>>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        let mut reader = self.0.get_read(start)?;
        let mut header = Vec::new();
        reader.by_ref().take(SIZES_BYTES).read_to_end(&mut header)?;
        check_sizes(&header)?;
        Ok(Cursor::new(header).chain(reader))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        self.0.get_bytes(start, length)
    }
}

/// Checks the sizes in the header of a page: a struct in Thrift's compact protocol, with 32-bit integers in fields 1 (type), 2 (size
/// after decompression) and 3 (size in the file).
fn check_sizes(mut header: &[u8]) -> Result<()> {
    let mut fields = [0; 3];
    for field in &mut fields {
        // A 32-bit integer (5) in the field after the last one (1).
        let value = header.split_off_first().filter(|first| **first == 0x15).and_then(|_| varint(&mut header));
        *field = value.ok_or_else(|| ParquetError::General("page: expected a header, found other bytes".to_owned()))?;
    }
    let [_, size, compressed] = fields;
    let most = compressed.saturating_add(1).saturating_mul(MOST_RATIO);
    if size > most {
        return Err(ParquetError::General(format!(
            "page: expected at most {most} bytes, which {compressed} compressed bytes can contain, found {size}"
        )));
    }
    Ok(())
}

/// Reads a 32-bit integer: groups of 7 bits, the lowest first, of a number whose lowest bit is the sign.
fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..35).step_by(7) {
        let byte = u64::from(*bytes.split_off_first()?);
        value |= (byte & 0x7f) << shift;
        if byte < 0x80 {
            // The crate refuses negative sizes.
            return Some(value >> 1);
        }
    }
    None
}

/// Bytes of the length of a string in a dictionary.
const LENGTH_BYTES: usize = 4;

/// Pages of a column of strings. A dictionary with more values than fit into its page is an error. Without this check, the crate
/// reserves memory for all values that a damaged header claims.
pub struct CheckedPages<P>(pub P);

fn check(page: &Page) -> Result<()> {
    let Page::DictionaryPage { buf, num_values, .. } = page else { return Ok(()) };
    let most = buf.len() / LENGTH_BYTES;
    if *num_values as usize > most {
        let message = format!("dictionary: expected at most {most} values in {} bytes, found {num_values}", buf.len());
        return Err(ParquetError::General(message));
    }
    Ok(())
}

impl<P: PageReader> Iterator for CheckedPages<P> {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl<P: PageReader> PageReader for CheckedPages<P> {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let page = self.0.get_next_page()?;
        page.as_ref().map(check).transpose()?;
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.0.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.0.skip_next_page()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a page's header with two sizes.
    fn header(size: u32, compressed: u32) -> Vec<u8> {
        let mut bytes = vec![0x15, 0x04];
        for value in [size, compressed] {
            bytes.push(0x15);
            let mut rest = u64::from(value) << 1;
            while rest >= 0x80 {
                bytes.push(rest as u8 | 0x80);
                rest >>= 7;
            }
            bytes.push(rest as u8);
        }
        bytes.extend([0x4c, 0x15, 0x04]);
        bytes
    }

    #[test]
    fn sizes_are_bounded_by_the_largest_ratio() {
        for (size, compressed) in [(0, 0), (29, 38), (1 << 20, 40), (i32::MAX as u32, 1 << 16), (32768 * 5, 4)] {
            check_sizes(&header(size, compressed)).unwrap_or_else(|error| panic!("{size}, {compressed}: {error}"));
        }
        for (size, compressed) in [(1 << 20, 20), (i32::MAX as u32, 36), (32768 * 5 + 1, 4)] {
            let error = check_sizes(&header(size, compressed)).unwrap_err().to_string();
            let expected = format!("which {compressed} compressed bytes can contain, found {size}");
            assert!(error.contains(&expected), "{error}");
        }
    }

    #[test]
    fn other_bytes_are_not_a_header() {
        let long = [0x15, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00];
        for bytes in [&[] as &[u8], &[0x15], &header(5, 5)[..5], &[0x25, 0x04, 0x15, 0x04, 0x15, 0x04], &long] {
            let error = check_sizes(bytes).unwrap_err().to_string();
            assert!(error.contains("expected a header"), "{bytes:?}: {error}");
        }
    }
}
