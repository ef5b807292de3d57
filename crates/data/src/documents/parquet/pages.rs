//! Pages of a column, checked before they are decoded.

use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::errors::{ParquetError, Result};

/// Bytes of the length of a string in a dictionary.
const LENGTH_BYTES: usize = 4;

/// Pages of a column of strings. A dictionary with more values than fit into its page is an error. Without this check, the crate
/// reserves memory for all values that a damaged header claims.
pub struct CheckedPages(pub Box<dyn PageReader>);

fn check(page: &Page) -> Result<()> {
    let Page::DictionaryPage { buf, num_values, .. } = page else { return Ok(()) };
    let most = buf.len() / LENGTH_BYTES;
    if *num_values as usize > most {
        let message = format!("dictionary: expected at most {most} values in {} bytes, found {num_values}", buf.len());
        return Err(ParquetError::General(message));
    }
    Ok(())
}

impl Iterator for CheckedPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for CheckedPages {
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
