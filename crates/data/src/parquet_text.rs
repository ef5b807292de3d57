//! Columns of text in parquet files.

use anyhow::{Context, Result, anyhow, bail, ensure};
use parquet::basic::Type;
use parquet::column::reader::ColumnReader;
use parquet::file::reader::{FileReader, SerializedFileReader};
use std::fs::File;
use std::path::Path;

/// Rows that are decoded together.
const ROWS: usize = 256;

/// A column of strings in a parquet file.
pub struct TextColumn {
    name: String,
    column: usize,
    column_name: String,
    is_optional: bool,
    rows: usize,
    reader: SerializedFileReader<File>,
}

impl TextColumn {
    /// Opens a file, and checks that it has a column `column` of strings.
    pub fn open(path: &Path, column: &str) -> Result<Self> {
        let name = path.display().to_string();
        let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
        let reader = decode(&name, || SerializedFileReader::new(file).context("not a parquet file"))?;
        let schema = reader.metadata().file_metadata().schema_descr();
        let names: Vec<String> = schema.columns().iter().map(|c| c.path().string()).collect();
        let Some(index) = names.iter().position(|name| name == column) else {
            bail!("{name}: expected a column '{column}', found {}", names.join(", "));
        };
        let description = schema.column(index);
        ensure!(
            description.physical_type() == Type::BYTE_ARRAY && description.max_rep_level() == 0,
            "{name}: column '{column}': expected strings, found {}{}",
            if description.max_rep_level() > 0 { "lists of " } else { "" },
            description.physical_type()
        );
        let is_optional = description.max_def_level() > 0;
        let rows = reader.metadata().file_metadata().num_rows();
        let rows = usize::try_from(rows).map_err(|_| anyhow!("{name}: expected a number of rows, found {rows}"))?;
        Ok(Self { name, column: index, column_name: column.to_owned(), is_optional, rows, reader })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Passes each value to `each`, in order.
    pub fn read(&self, each: &mut dyn FnMut(String) -> Result<()>) -> Result<()> {
        let mut row = 0;
        for group in 0..self.reader.num_row_groups() {
            let mut column = decode(&self.name, || {
                let group = self.reader.get_row_group(group)?;
                Ok(group.get_column_reader(self.column)?)
            })?;
            loop {
                let values = self.values(&mut column, row)?;
                if values.is_empty() {
                    break;
                }
                row += values.len();
                values.into_iter().try_for_each(&mut *each)?;
            }
        }
        ensure!(row == self.rows, "{}: expected {} rows, found {row}; the file is damaged", self.name, self.rows);
        Ok(())
    }

    /// Returns the next values. `first` is the row of the first one.
    fn values(&self, column: &mut ColumnReader, first: usize) -> Result<Vec<String>> {
        let ColumnReader::ByteArrayColumnReader(column) = column else { unreachable!("the type was checked") };
        let (mut values, mut levels) = (Vec::new(), Vec::new());
        let rows = decode(&self.name, || {
            let levels = self.is_optional.then_some(&mut levels);
            let (rows, ..) = column.read_records(ROWS, levels, None, &mut values)?;
            Ok(rows)
        })?;
        let place = |row| format!("{}, row {row}, column '{}'", self.name, self.column_name);
        let defined = levels.iter().max().copied().unwrap_or(0);
        if rows != values.len() {
            let missing = levels.iter().position(|&level| level != defined || values.is_empty()).unwrap_or(0);
            bail!("{}: expected a string, found null", place(first + missing));
        }
        let text = |(i, value): (usize, parquet::data_type::ByteArray)| {
            String::from_utf8(value.data().to_vec())
                .map_err(|error| anyhow!("{}: expected UTF-8: {}", place(first + i), error.utf8_error()))
        };
        values.into_iter().enumerate().map(text).collect()
    }
}

/// Calls the parquet crate, which panics on some damaged files.
fn decode<T>(name: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
    match quiet_panic::catch(call) {
        Some(result) => result.with_context(|| format!("{name}: the file is damaged or not a parquet file")),
        None => bail!("{name}: the file is damaged: its contents cannot be decoded"),
    }
}
