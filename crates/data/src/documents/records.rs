//! Whole records of JSON lines and parquet files, as JSON.

use super::source::Source;
use super::{FileReport, Format, Reason, STDIN, check_random_access, jsonl, parquet};
use anyhow::{Result, bail};
use std::path::Path;
use system::progress::Progress;

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The file and the line or row, for messages.
    pub place: String,
    /// A JSON object, unless the file is damaged.
    pub json: String,
}

/// Passes the records of a file to `put`. Of a parquet file, only the columns `columns` are read. Standard input has JSON lines.
pub fn read(
    path: &Path,
    format: Option<Format>,
    columns: &[&str],
    progress: &Progress,
    put: &mut dyn FnMut(Record) -> Result<()>,
) -> Result<FileReport> {
    let is_standard_input = path == Path::new(STDIN);
    match format.unwrap_or_else(|| if is_standard_input { Format::Jsonl } else { Format::of_name(path) }) {
        Format::Parquet => {
            check_random_access(path)?;
            parquet::read_rows(path, columns, progress, put)
        }
        Format::Jsonl => {
            let mut source = Source::open(path, progress)?;
            if source.is_empty() {
                return Ok(FileReport { skipped: Some(Reason::Empty), ..FileReport::default() });
            }
            source.check_utf8()?;
            let name = source.name().to_owned();
            let invalid_utf8 = jsonl::read_lines(&mut source, &mut |number, line| {
                put(Record { place: jsonl::place(&name, number), json: line.to_owned() })
            })?;
            Ok(FileReport { invalid_utf8, ..FileReport::default() })
        }
        Format::Text | Format::Csv => bail!(
            "{}: expected JSON lines (.jsonl, .ndjson) or a parquet file, found another name; convert the file, for example a JSON array \
             with `jq -c '.[]' FILE.json > FILE.jsonl`, select files in directories with --extensions jsonl, or name the format with \
             --format",
            path.display()
        ),
    }
}
