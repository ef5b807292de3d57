//! A check of pages with delta encodings. The crate reserves memory for the number of lengths that such a page states, before it reads
//! them.

use super::headers::Reader;
use ::parquet::basic::Encoding;
use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::errors::{ParquetError, Result as ParquetResult};
use anyhow::{Context, Result, ensure};

/// Maximum number of lengths per byte. DuckDB stores 2048 equal lengths in 9 bytes.
const MAX_RATIO: u64 = 1024;

/// The pages of a column. Pages with delta encodings of strings are checked.
pub struct CheckedPages {
    /// The pages.
    pub pages: Box<dyn PageReader>,
    /// Number of lists of levels with which a page of version 1 begins: repetition levels, and definition levels.
    pub levels: usize,
}

impl Iterator for CheckedPages {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        let page = self.pages.get_next_page()?;
        let checked = page.as_ref().map(|page| check(page, self.levels)).transpose();
        checked.map_err(|error| ParquetError::General(format!("{error:#}")))?;
        Ok(page)
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        self.pages.skip_next_page()
    }
}

fn check(page: &Page, levels: usize) -> Result<()> {
    let lists = match page.encoding() {
        // The lengths of the strings.
        Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
        // The lengths of prefixes, then those of suffixes.
        Encoding::DELTA_BYTE_ARRAY => 2,
        _ => return Ok(()),
    };
    let mut reader = Reader(&page.buffer()[..]);
    match page {
        Page::DataPage { def_level_encoding, rep_level_encoding, .. } => {
            for encoding in [def_level_encoding, rep_level_encoding].into_iter().take(levels) {
                ensure!(*encoding == Encoding::RLE, "page: expected levels with encoding RLE, found {encoding}");
                let (size, _) = reader.0.split_first_chunk().context("page: expected levels, found its end")?;
                reader.skip_bytes(size_of::<u32>() as u64 + u64::from(u32::from_le_bytes(*size)))?;
            }
        }
        Page::DataPageV2 { def_levels_byte_len, rep_levels_byte_len, .. } => {
            reader.skip_bytes(u64::from(*def_levels_byte_len) + u64::from(*rep_levels_byte_len))?;
        }
        Page::DictionaryPage { .. } => {}
    }
    (0..lists).try_for_each(|_| skip_lengths(&mut reader))
}

/// Skips numbers with the encoding `DELTA_BINARY_PACKED`
/// (<https://parquet.apache.org/docs/file-format/data-pages/encodings/#delta-encoding-delta_binary_packed--5>). Checks that the bytes
/// suffice for them.
fn skip_lengths(reader: &mut Reader<&[u8]>) -> Result<()> {
    let bytes = reader.0.len();
    let most = bytes as u64 * MAX_RATIO;
    let [block, miniblocks, count, _first] = [reader.varint()?, reader.varint()?, reader.varint()?, reader.varint()?];
    ensure!(count <= most, "page: expected at most {most} lengths in {bytes} bytes, found {count}");
    let size = block.checked_div(miniblocks).context("page: expected parts of blocks, found none")?;
    let mut left = count.saturating_sub(1);
    while left > 0 {
        let _least_delta = reader.varint()?;
        let widths = reader.0.split_off(..miniblocks as usize).context("page: expected widths, found its end")?;
        for &width in widths {
            // The widths that follow have no bytes.
            if left > 0 {
                reader.skip_bytes(size.saturating_mul(width.into()) / 8)?;
            }
            left = left.saturating_sub(size);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a page of version 2 without levels.
    fn page(encoding: Encoding, bytes: &[u8]) -> Page {
        let buf = bytes.to_vec().into();
        Page::DataPageV2 {
            buf,
            num_values: 5,
            encoding,
            num_nulls: 0,
            num_rows: 5,
            def_levels_byte_len: 0,
            rep_levels_byte_len: 0,
            is_compressed: false,
            statistics: None,
        }
    }

    /// 5 numbers in a block of 128 with 4 parts, the first of which has 4 bits per number.
    const FIVE: &[u8] = &[128, 1, 4, 5, 0, 0, 4, 9, 9, 9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1];
    /// 2^40 numbers.
    const MANY: &[u8] = &[128, 1, 4, 128, 128, 128, 128, 128, 32, 0, 0, 0, 0, 0, 0];

    #[test]
    fn numbers_of_lengths_are_bounded_by_the_size_of_the_page() {
        for (encoding, parts) in [
            (Encoding::DELTA_LENGTH_BYTE_ARRAY, &[FIVE, b"text"][..]),
            (Encoding::DELTA_BYTE_ARRAY, &[FIVE, FIVE, b"text"]),
            (Encoding::DELTA_BYTE_ARRAY, &[&[128, 1, 4, 0, 0], &[128, 1, 4, 1, 0]]),
            (Encoding::PLAIN, &[MANY]),
        ] {
            check(&page(encoding, &parts.concat()), 1).unwrap();
        }
        for (encoding, parts) in [
            (Encoding::DELTA_LENGTH_BYTE_ARRAY, &[MANY][..]),
            (Encoding::DELTA_BYTE_ARRAY, &[MANY]),
            (Encoding::DELTA_BYTE_ARRAY, &[FIVE, MANY]),
        ] {
            let error = check(&page(encoding, &parts.concat()), 1).unwrap_err().to_string();
            assert!(error.contains("lengths in 15 bytes, found 1099511627776"), "{error}");
        }
        for bytes in [&FIVE[..FIVE.len() - 1], &FIVE[..8], &FIVE[..2], &[128, 1, 0, 5, 0]] {
            assert!(check(&page(Encoding::DELTA_LENGTH_BYTE_ARRAY, bytes), 1).is_err(), "{bytes:?}");
        }
    }
}
