//! Parquet files. Only the column with the text is read, page by page.

mod deltas;
mod headers;
mod rows;

pub use rows::read as read_rows;

use super::{FileReport, Sink, document, list_names};
use ::parquet::basic::{Compression, Type};
use ::parquet::column::reader::{ColumnReader, get_column_reader};
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::file::serialized_reader::SerializedPageReader;
use ::parquet::schema::types::{ColumnDescPtr, SchemaDescriptor};
use anyhow::{Context, Result, bail, ensure};
use deltas::CheckedPages;
use headers::CheckedFile;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use system::progress::Progress;

/// Rows that are decoded at a time.
const ROWS: usize = 256;

/// Passes the column `field` of each row to `sink` as a document.
pub fn read(path: &Path, field: &str, progress: &Progress, sink: &mut dyn Sink) -> Result<FileReport> {
    let name = path.display();
    let size = size(path)?;
    if size == 0 {
        return Ok(FileReport { skipped: Some(super::Reason::Empty), ..FileReport::default() });
    }
    let (reader, column) = open(path, field)?;
    let file = Arc::new(CheckedFile(bounded_file::open(path).with_context(|| format!("cannot read {name}"))?));
    let metadata = reader.metadata();
    let descriptor = metadata.file_metadata().schema_descr().column(column);
    let mut report = FileReport::default();
    let groups = metadata.num_row_groups();
    let mut rows = 0;
    for group in 0..groups {
        let place = || format!("cannot read rows from {} of {name}: expected valid pages; download it again", rows + 1);
        let chunk = metadata.row_group(group).column(column);
        let expected = metadata.row_group(group).num_rows();
        let pages = decode(path, || SerializedPageReader::new(Arc::clone(&file), chunk, expected as usize, None))?;
        let pages = CheckedPages {
            pages: Box::new(pages.with_context(place)?),
            levels: usize::from(descriptor.max_def_level() > 0),
        };
        let values = get_column_reader(descriptor.clone(), Box::new(pages));
        let ColumnReader::ByteArrayColumnReader(mut values) = values else {
            bail!("{name}: expected a column of strings in \"{field}\"");
        };
        let (mut batch, mut levels) = (Vec::new(), Vec::new());
        let mut read = 0;
        loop {
            batch.clear();
            levels.clear();
            let records = decode(path, || values.read_records(ROWS, Some(&mut levels), None, &mut batch))?;
            let (records, ..) = records.with_context(|| {
                format!("cannot read row {} of {name}: expected valid pages; download it again", rows + 1)
            })?;
            if records == 0 {
                break;
            }
            for value in &batch {
                report.invalid_utf8 += document(value.data(), sink)?;
            }
            report.null += records - batch.len();
            // A document without text has no place among the others: it is left out, or an error.
            for _ in batch.len()..records {
                sink.end()?;
            }
            rows += records;
            read += records as i64;
        }
        ensure!(
            read == expected,
            "{name}, row group {group}: expected {expected} rows, found {read}; download the file again"
        );
        progress.add(size * (group as u64 + 1) / groups as u64 - size * group as u64 / groups as u64);
    }
    Ok(report)
}

/// Checks that a file is a parquet file with a column `field` of strings. Returns the number of rows, which are not read.
pub fn check(path: &Path, field: &str) -> Result<usize> {
    size(path)?;
    let (reader, _) = open(path, field)?;
    let rows = reader.metadata().row_groups().iter().map(|group| usize::try_from(group.num_rows()));
    rows.sum::<Result<usize, _>>().with_context(|| {
        format!(
            "{}: expected at least 0 rows in each row group, found a negative number; download it again",
            path.display()
        )
    })
}

/// Returns the names of the columns of strings.
pub fn columns(path: &Path) -> Result<Vec<String>> {
    let reader = open_file(path)?;
    let schema = reader.metadata().file_metadata().schema_descr_ptr();
    let is_text = |column: &&ColumnDescPtr| column.physical_type() == Type::BYTE_ARRAY && column.max_rep_level() == 0;
    Ok(schema.columns().iter().filter(is_text).map(|column| column.path().string()).collect())
}

/// Returns the size of a file. Fails for a pipe, which would also block when it is opened.
fn size(path: &Path) -> Result<u64> {
    let found = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        found.is_file(),
        "{}: expected a parquet file, found a pipe or device; parquet is read at random positions: store it in a file",
        path.display()
    );
    Ok(found.len())
}

/// Opens a file. Returns it with the index of its column `field`. Fails if the column has an unsupported compression.
fn open(path: &Path, field: &str) -> Result<(SerializedFileReader<File>, usize)> {
    let reader = open_file(path)?;
    let metadata = reader.metadata();
    let column =
        find_column(metadata.file_metadata().schema_descr(), field).with_context(|| path.display().to_string())?;
    for group in metadata.row_groups() {
        check_compression(path, field, decode(path, || group.column(column).compression())?)?;
    }
    Ok((reader, column))
}

/// Opens a file and checks its schema.
fn open_file(path: &Path) -> Result<SerializedFileReader<File>> {
    let name = path.display();
    let file = bounded_file::open(path).with_context(|| format!("cannot read {name}"))?;
    let invalid =
        || format!("{name}: expected a complete parquet file, found another or a damaged one; download it again");
    headers::check_schema(&file, file.metadata()?.len()).with_context(invalid)?;
    decode(path, || SerializedFileReader::new(file))?.with_context(invalid)
}

/// Calls the parquet crate, which panics for some damaged files. Such a panic is an error of the file.
fn decode<T>(path: &Path, call: impl FnOnce() -> T) -> Result<T> {
    quiet_panic::catch(call).with_context(|| {
        format!("{}: expected a complete parquet file, found inconsistent data; download it again", path.display())
    })
}

/// Fails for a compression that is not compiled in.
pub(super) fn check_compression(path: &Path, field: &str, found: Compression) -> Result<()> {
    // The crate adds a level, which a file does not contain: `BROTLI(BrotliLevel(1))`.
    let name = found.to_string();
    let name = name.split('(').next().unwrap_or_default();
    ensure!(
        !matches!(found, Compression::LZO | Compression::BROTLI(_)),
        "{}: expected column \"{field}\" without compression or with snappy, gzip, zstd or lz4, found {name}; write the \
         file again with zstd, for example with pyarrow.parquet.write_table(table, file, compression=\"zstd\")",
        path.display()
    );
    Ok(())
}

/// Returns the index of a column of strings.
fn find_column(schema: &SchemaDescriptor, field: &str) -> Result<usize> {
    let columns = schema.columns();
    let mut found = columns.iter().enumerate().filter(|(_, column)| column.path().string() == field);
    let Some((index, column)) = found.next() else {
        let names = columns.iter().map(|column| column.path().string());
        bail!(
            "expected a column \"{field}\", found {}; name the column with the text with `data text --field`",
            list_names(names)
        );
    };
    let same = 1 + found.count();
    ensure!(same == 1, "expected one column \"{field}\", found {same}; rename or remove the others");
    ensure!(
        column.physical_type() == Type::BYTE_ARRAY && column.max_rep_level() == 0,
        "column \"{field}\": expected strings, found {}; name the column with the text with `data text --field`",
        if column.max_rep_level() > 0 { "lists".to_owned() } else { column.physical_type().to_string() }
    );
    Ok(index)
}
