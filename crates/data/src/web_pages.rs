//! Tokenizes web pages in parquet files, for the named data sets that consist of them. The choice of the files and of the validation split
//! does not belong here.

use crate::dataset::{Input, Replacement, Replaces};
use crate::documents::{self, FileReport, Format, Reading};
use crate::text::{self, Encoder, Layout, Summary};
use anyhow::{Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use system::progress::{self, Unit};
use tokenizer::Tokenizer;

fn reading() -> Reading {
    Reading { format: Some(Format::Parquet), ..Reading::default() }
}

/// Returns the number of rows of each file. Fails if a file is not a complete parquet file with a column `text`, or if no file has rows.
///
/// A damaged file is found before hours of work.
pub fn count_rows(files: &[PathBuf]) -> Result<Vec<usize>> {
    let field = reading().field;
    let rows: Vec<usize> = files.iter().map(|file| documents::check_parquet(file, &field)).collect::<Result<_>>()?;
    if rows.iter().all(|&rows| rows == 0) {
        let names = files.iter().map(|file| file.display().to_string());
        bail!(
            "{}: expected parquet files with documents, found no rows; download the files again, or pass others with --from",
            documents::list_names(names)
        );
    }
    Ok(rows)
}

/// Tokenizes the column `text` of the files, in this order, and replaces the data set in `out`. Each row is a document, also an empty one.
pub fn write(files: &[PathBuf], out: &Path, layout: Layout, tokenizer: &Tokenizer, program: &str) -> Result<Summary> {
    let reading = reading();
    let bytes = files.iter().filter_map(|file| fs::metadata(file).ok()).map(|found| found.len()).sum();
    let progress = progress::start("tokenizing", Unit::Bytes, bytes);
    let replacement = Replacement::begin(out, Replaces::Same(layout.names))?;
    text::write_shards(replacement, &Encoder::of_llmc(tokenizer), layout, program, |sink| {
        for file in files {
            let FileReport { null, invalid_utf8, .. } = documents::read(file, &reading, &progress, sink)?;
            ensure!(
                null == 0 && invalid_utf8 == 0,
                "{}: expected UTF-8 text in each row, found {null} null values and {invalid_utf8} invalid UTF-8 sequences; \
                 download the file again",
                file.display()
            );
        }
        Ok(Summary { input: Input { files: files.len(), ..Input::default() }, ..Summary::default() })
    })
}
