//! Tables of measurements: each row is printed when it is complete, and `--json` saves them all.

use crate::commands::json as json_file;
use crate::output::{self, Kind, Mark};
use crate::terminal;
use anyhow::ensure;
use engine::{Engine, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The file for the measurements.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Json {
    /// Also write the measurements to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const MEASUREMENTS: Kind =
    Kind { name: "measurements of bench", mark: Mark::Keys(&["bench", "version", "machine", "rows"]) };

impl Json {
    /// Fails if the file cannot be written.
    pub fn check(&self) -> Result<()> {
        self.json.as_deref().map_or(Ok(()), |path| output::check(path, MEASUREMENTS))
    }

    /// Returns the path of the file.
    pub fn path(&self) -> Option<&Path> {
        self.json.as_deref()
    }
}

/// A column. The heading contains the unit.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Key in JSON.
    pub key: &'static str,
    pub heading: &'static str,
    pub width: usize,
    pub format: Format,
}

/// Format of the printed cells of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Left-aligned text.
    Text,
    /// Right-aligned numbers with this many decimals.
    Number(usize),
}

impl Column {
    pub const fn text(key: &'static str, heading: &'static str, width: usize) -> Self {
        Self { key, heading, width, format: Format::Text }
    }

    pub const fn number(key: &'static str, heading: &'static str, width: usize, decimals: usize) -> Self {
        Self { key, heading, width, format: Format::Number(decimals) }
    }
}

/// A cell of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Text(String),
    Number(f64),
    Empty,
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<f64> for Cell {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl From<usize> for Cell {
    fn from(number: usize) -> Self {
        Self::Number(number as f64)
    }
}

impl<T: Into<Self>> From<Option<T>> for Cell {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Empty, Into::into)
    }
}

/// A table that is printed and saved.
pub struct Table {
    json: Json,
    columns: &'static [Column],
    /// Values of the whole table: the machine, ceilings, sums.
    about: Map<String, Value>,
    rows: Vec<Value>,
}

impl Table {
    /// Creates a table that records the program version, the machine and the precision.
    pub fn new(bench: &str, columns: &'static [Column], engine: &dyn Engine, json: &Json) -> Self {
        Self::of(bench, columns, &engine.describe(), engine.dtype().name(), json)
    }

    /// Creates a table like [`new`](Self::new), of measurements without an engine.
    pub fn of(bench: &str, columns: &'static [Column], machine: &str, precision: &str, json: &Json) -> Self {
        let mut table = Self { json: json.clone(), columns, about: Map::new(), rows: Vec::new() };
        table.note("bench", bench);
        table.note("version", env!("CARGO_PKG_VERSION"));
        table.note("machine", machine);
        table.note("precision", precision);
        table
    }

    /// Records a value of the whole table, in JSON only.
    pub fn note(&mut self, key: &str, value: impl Serialize) {
        self.about.insert(key.to_owned(), json!(value));
    }

    /// Prints the headings.
    pub fn print_heading(&self) -> Result<()> {
        let headings = self.columns.iter().map(|column| Cell::from(column.heading)).collect::<Vec<_>>();
        self.print(&headings)
    }

    /// Prints and records a row with one cell for each column.
    pub fn row(&mut self, cells: &[Cell]) -> Result<()> {
        self.record(cells);
        self.print(cells)
    }

    fn record(&mut self, cells: &[Cell]) {
        debug_assert_eq!(cells.len(), self.columns.len());
        let values = self.columns.iter().zip(cells).filter_map(|(column, cell)| {
            let value = match cell {
                Cell::Text(text) => json!(text),
                Cell::Number(number) => json!(number),
                Cell::Empty => return None,
            };
            Some((column.key.to_owned(), value))
        });
        self.rows.push(Value::Object(values.collect()));
    }

    fn print(&self, cells: &[Cell]) -> Result<()> {
        terminal::line(&line(self.columns, cells))
    }

    /// Writes the JSON file if `--json` was given, and fails if the table has no row.
    pub fn finish_rows(self) -> Result<()> {
        ensure!(
            !self.rows.is_empty(),
            "expected at least one measurement, found none; choose other operations or shapes"
        );
        self.finish()
    }

    /// Writes the JSON file if `--json` was given.
    pub fn finish(self) -> Result<()> {
        let Some(path) = &self.json.json else { return Ok(()) };
        let mut all = self.about;
        all.insert("rows".to_owned(), Value::Array(self.rows));
        json_file::write(path, &all)
    }
}

fn line(columns: &[Column], cells: &[Cell]) -> String {
    let cells = columns.iter().zip(cells).map(|(&Column { width, format, .. }, cell)| match (cell, format) {
        (Cell::Number(number), Format::Number(decimals)) => format!("{number:>width$.decimals$}"),
        (Cell::Number(number), Format::Text) => format!("{number:<width$}"),
        (Cell::Text(text), Format::Text) => format!("{text:<width$}"),
        (Cell::Text(text), Format::Number(_)) => format!("{text:>width$}"),
        (Cell::Empty, Format::Text) => " ".repeat(width),
        (Cell::Empty, Format::Number(_)) => format!("{:>width$}", "-"),
    });
    cells.collect::<Vec<_>>().join(" ").trim_end().to_owned()
}

/// Median, minimum and maximum of measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    /// Computes the spread.
    ///
    /// # Panics
    /// If `samples` is empty.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let (middle, n) = (samples.len() / 2, samples.len());
        let median = if n.is_multiple_of(2) { samples[middle - 1].midpoint(samples[middle]) } else { samples[middle] };
        Self { median, least: samples[0], most: samples[n - 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::cpu::Cpu;

    const COLUMNS: &[Column] = &[
        Column::text("name", "operation", 10),
        Column::number("us", "us", 8, 1),
        Column::number("gbs", "GB/s", 6, 0),
        Column::text("note", "", 4),
    ];

    #[test]
    fn numbers_are_right_aligned_and_text_is_left_aligned() {
        let row = |cells: &[Cell]| line(COLUMNS, cells);
        assert_eq!(row(&["operation".into(), "us".into(), "GB/s".into(), "".into()]), "operation        us   GB/s");
        assert_eq!(row(&["sum".into(), 12.345.into(), 3999.6.into(), "x".into()]), "sum            12.3   4000 x");
        assert_eq!(row(&["sum".into(), Cell::Empty, None::<f64>.into(), Cell::Empty]), "sum               -      -");
    }

    #[test]
    fn json_holds_every_printed_row_in_full_precision() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.json");
        let mut table = Table::new("kernels", COLUMNS, &Cpu::new(), &Json { json: Some(path.clone()) });
        table.note("copy", 4.25);
        table.row(&["a".into(), 12.345.into(), Cell::Empty, "n".into()]).unwrap();
        table.row(&["b".into(), 1.0.into(), 7usize.into(), Cell::Empty]).unwrap();
        table.finish().unwrap();
        let json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(
            (&json["bench"], &json["precision"], &json["copy"]),
            (&json!("kernels"), &json!("f32"), &json!(4.25))
        );
        assert_eq!(
            json["rows"],
            json!([{"name": "a", "us": 12.345, "note": "n"}, {"name": "b", "us": 1.0, "gbs": 7.0}])
        );
        assert!(json["machine"].as_str().unwrap().starts_with("CPU"));
        let empty = Table::new("x", COLUMNS, &Cpu::new(), &Json { json: None }).finish_rows().unwrap_err().to_string();
        assert!(empty.starts_with("expected at least one measurement, found none"), "{empty}");
        let nowhere = Json { json: Some(dir.path().join("no/out.json")) };
        let mut table = Table::new("x", COLUMNS, &Cpu::new(), &nowhere);
        table.row(&["a".into(), Cell::Empty, Cell::Empty, Cell::Empty]).unwrap();
        let text = table.finish().unwrap_err().to_string();
        assert!(text.contains("cannot write") && text.contains("no/out.json"), "{text}");
    }

    #[test]
    fn spread_sorts_the_samples() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, least: 1.0, most: 3.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]), Spread { median: 2.5, least: 1.0, most: 4.0 });
    }
}
