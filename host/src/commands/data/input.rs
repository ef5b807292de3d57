//! Flags that say how documents are read.

use data::documents::{Format, Reading};

/// How files are read, and which files of a directory.
#[derive(Debug, clap::Args)]
pub struct ReadingFlags {
    /// Format of all files, instead of the one that each name implies
    #[arg(long, value_name = "text|jsonl|parquet|csv", value_parser = format)]
    format: Option<Format>,

    /// Field or column with the text; a.b is field b of field a
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,

    /// Text that ends a document in a text file, together with the line break after it. Without --separator, each file is one document
    #[arg(long, value_name = "TEXT")]
    pub separator: Option<String>,

    /// In directories, use only files with these extensions, such as rs,md
    #[arg(long, value_name = "EXT,EXT", value_delimiter = ',', value_parser = extension)]
    pub extensions: Vec<String>,
}

impl ReadingFlags {
    /// Returns how files are read.
    pub fn reading(&self) -> Reading {
        Reading { format: self.format, field: self.field.clone(), separator: self.separator.clone() }
    }

    /// Returns the flags as arguments, without those that have their default value.
    pub fn arguments(&self) -> Vec<String> {
        let format = self.format.map(|format| match format {
            Format::Text => "text",
            Format::Jsonl => "jsonl",
            Format::Parquet => "parquet",
            Format::Csv => "csv",
        });
        let field = (self.field != Reading::default().field).then(|| self.field.clone());
        let extensions = (!self.extensions.is_empty()).then(|| self.extensions.join(","));
        let flags = [
            ("--format", format.map(str::to_owned)),
            ("--field", field),
            ("--separator", self.separator.clone()),
            ("--extensions", extensions),
        ];
        flags.into_iter().filter_map(|(flag, value)| Some([flag.to_owned(), value?])).flatten().collect()
    }
}

fn format(text: &str) -> Result<Format, &'static str> {
    match text {
        "text" => Ok(Format::Text),
        "jsonl" => Ok(Format::Jsonl),
        "parquet" => Ok(Format::Parquet),
        "csv" => Ok(Format::Csv),
        _ => Err("expected text, jsonl, parquet or csv"),
    }
}

/// Accepts an extension with or without its dot.
pub fn extension(text: &str) -> Result<String, &'static str> {
    let name = text.strip_prefix('.').unwrap_or(text);
    if name.is_empty() { Err("expected extensions, such as rs,md") } else { Ok(name.to_owned()) }
}
