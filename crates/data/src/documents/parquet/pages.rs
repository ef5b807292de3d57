//! Pages of a column, checked before they are decompressed and decoded.
//!
//! The crate reserves memory for the sizes that a page's header states, and a damaged header may state any size.

use super::thrift::Type::{Bool, I32, Struct};
use super::thrift::{Reader, Type};
use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::errors::{ParquetError, Result};
use ::parquet::file::reader::{ChunkReader, Length};
use bytes::Bytes;
use std::fs::File;
use std::io::{BufReader, Chain, Cursor, Read};

/// Most bytes that a compressed byte stands for: zstd stores a block of 128 KiB equal bytes in 4 bytes (RFC 8878, section 3.1.1.2).
const MAX_RATIO: u64 = 32768;
/// Most bytes of a page's header. It contains the least and greatest value of the page, which are long in files of old writers. Arrow's
/// reader for C++ has the same limit.
const HEADER_BYTES: u64 = 16 << 20;
/// Types of the fields of a `PageHeader`: its first four, and the headers of a page of data, of an index and of a dictionary, and of a
/// page of data of version 2.
const HEADER: [Type; 8] = [
    I32,
    I32,
    I32,
    I32,
    Struct(&[I32, I32, I32, I32, Struct(&[])]),
    Struct(&[]),
    Struct(&[I32, I32, Bool]),
    Struct(&[I32, I32, I32, I32, I32, I32, Bool, Struct(&[])]),
];
/// Fields with the size after decompression, and in the file.
const SIZES: [i16; 2] = [2, 3];

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
        // The header does not state its own size.
        for limit in (8..).map(|power| u64::pow(2, power)).take_while(|&limit| limit <= HEADER_BYTES) {
            let missing = limit - header.len() as u64;
            let read = reader.by_ref().take(missing).read_to_end(&mut header)?;
            if let Some(sizes) = sizes(&header) {
                check_sizes(sizes)?;
                return Ok(Cursor::new(header).chain(reader));
            }
            if (read as u64) < missing {
                break;
            }
        }
        Err(ParquetError::General("page: expected a header, found other bytes".to_owned()))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        self.0.get_bytes(start, length)
    }
}

/// Reads the header of a page. Returns the size of the page after decompression and in the file.
///
/// All of the header is read, because the crate does not notice the end of the file within some values, and counts to any size of a
/// list.
fn sizes(header: &[u8]) -> Option<[u64; 2]> {
    let mut found = [None; 2];
    Reader(header).fields(|reader, number, kind| {
        let value = Reader(reader.0).int::<i32>();
        reader.skip_field(&HEADER, number, kind)?;
        if let Some(i) = SIZES.iter().position(|&size| size == number) {
            found[i] = Some(u64::try_from(value?).ok()?);
        }
        Some(())
    })?;
    let [size, compressed] = found;
    Some([size?, compressed?])
}

/// Checks that the compressed bytes of a page suffice for its size.
fn check_sizes([size, compressed]: [u64; 2]) -> Result<()> {
    let most = compressed.saturating_add(1).saturating_mul(MAX_RATIO);
    if size > most {
        return Err(ParquetError::General(format!(
            "page: expected at most {most} bytes, which {compressed} compressed bytes can contain, found {size}"
        )));
    }
    Ok(())
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
    use std::io::Write;

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
        // A dictionary with two values.
        bytes.extend([0x4c, 0x15, 0x04, 0x15, 0x00, 0x00, 0x00]);
        bytes
    }

    #[test]
    fn sizes_are_bounded_by_the_largest_ratio() {
        for (size, compressed) in [(0, 0), (29, 38), (1 << 20, 40), (i32::MAX as u32, 1 << 16), (32768 * 5, 4)] {
            check_sizes(sizes(&header(size, compressed)).unwrap())
                .unwrap_or_else(|error| panic!("{size}, {compressed}: {error}"));
        }
        for (size, compressed) in [(1 << 20, 20), (i32::MAX as u32, 36), (32768 * 5 + 1, 4)] {
            let error = check_sizes(sizes(&header(size, compressed)).unwrap()).unwrap_err().to_string();
            let expected = format!("which {compressed} compressed bytes can contain, found {size}");
            assert!(error.contains(&expected), "{error}");
        }
    }

    #[test]
    fn other_bytes_are_not_a_header() {
        let valid = header(5, 5);
        let long = [0x15, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00];
        let no_size = [0x15, 0x04, 0x25, 0x04, 0x00];
        // 2^32 + 5 in the file.
        let wide = [&valid[..5], &[0x8a, 0x80, 0x80, 0x80, 0x20], &valid[6..]].concat();
        // An integer in place of the header of a dictionary.
        let other_type = [&valid[..6], &[0x45, 0x00, 0x00]].concat();
        for bytes in [&[] as &[u8], &[0x15], &valid[..valid.len() - 1], &long, &no_size, &wide, &other_type] {
            assert!(sizes(bytes).is_none(), "{bytes:?}");
        }
    }

    #[test]
    fn a_header_of_any_length_is_read() {
        for length in [0_usize, 300, 70_000] {
            // Field 9, which the crate does not know: bytes.
            let mut bytes = header(5, 5);
            bytes.pop();
            bytes.extend([0x28, (length & 0x7f) as u8 | 0x80, (length >> 7 & 0x7f) as u8 | 0x80, (length >> 14) as u8]);
            bytes.extend(vec![7; length]);
            bytes.push(0);
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            let mut read = Vec::new();
            CheckedFile(file.try_clone().unwrap()).get_read(0).unwrap().read_to_end(&mut read).unwrap();
            assert_eq!(read, bytes);
            file.set_len(bytes.len() as u64 - 1).unwrap();
            let error = CheckedFile(file).get_read(0).map(drop).unwrap_err().to_string();
            assert!(error.contains("expected a header"), "{error}");
        }
    }

    /// The crate takes no byte for a boolean in a list, and accepts the end of the file in place of a number.
    #[test]
    fn lists_that_do_not_end_are_not_a_header() {
        let lists = [&[0x11][..], &[0xf3, 0xff, 0x7f], &[0xf7, 0xff, 0xff, 0x7f], &[0x17, 1, 2]];
        for list in lists {
            let mut bytes = header(5, 5);
            bytes.pop();
            bytes.push(0x29);
            bytes.extend(list);
            bytes.push(0);
            assert!(sizes(&bytes).is_none(), "{bytes:?}");
        }
        for empty in [0x00, 0x01, 0x07] {
            let mut bytes = header(5, 5);
            bytes.pop();
            bytes.extend([0x29, empty, 0]);
            assert_eq!(sizes(&bytes), Some([5, 5]));
        }
    }
}
