//! Whole rows of parquet files, with lists and structs.

use super::super::{FileReport, Reason, Record, list_names};
use super::deltas::CheckedPages;
use super::headers::CheckedFile;
use super::{check_compression, decode, open_file, size};
use crate::conversations::Json;
use ::parquet::bloom_filter::Sbbf;
use ::parquet::column::page::PageReader;
use ::parquet::errors::Result as ParquetResult;
use ::parquet::file::metadata::RowGroupMetaData;
use ::parquet::file::reader::{FileReader, RowGroupReader};
use ::parquet::file::serialized_reader::SerializedPageReader;
use ::parquet::record::reader::RowIter;
use ::parquet::record::{Field, Row};
use ::parquet::schema::types::{Type, TypePtr};
use anyhow::{Context, Result, ensure};
use serde_json::Number;
use std::path::Path;
use std::sync::Arc;
use system::progress::Progress;

/// Passes the columns `columns` of each row to `put`, as a JSON object. Columns that the file does not have are left out.
pub fn read(
    path: &Path,
    columns: &[&str],
    progress: &Progress,
    put: &mut dyn FnMut(Record) -> Result<()>,
) -> Result<FileReport> {
    let name = path.display();
    let size = size(path)?;
    if size == 0 {
        return Ok(FileReport { skipped: Some(Reason::Empty), ..FileReport::default() });
    }
    let reader = open_file(path)?;
    let file = Arc::new(CheckedFile(bounded_file::open(path).with_context(|| format!("cannot read {name}"))?));
    let metadata = reader.metadata();
    let projection = projection(path, metadata.file_metadata().schema(), columns)?;
    let groups = metadata.num_row_groups();
    let mut number = 0;
    for index in 0..groups {
        for column in metadata.row_group(index).columns() {
            if columns.contains(&&*column.column_path().parts()[0]) {
                check_compression(path, &column.column_path().string(), decode(path, || column.compression())?)?;
            }
        }
        let place =
            |number: usize| format!("cannot read row {number} of {name}: expected valid pages; download it again");
        let group = CheckedGroup { file: Arc::clone(&file), metadata: metadata.row_group(index) };
        let rows = decode(path, || RowIter::from_row_group(Some(projection.clone()), &group))?;
        let mut rows = rows.with_context(|| place(number + 1))?;
        let before = number;
        while let Some(row) = decode(path, || rows.next())? {
            number += 1;
            let json = serde_json::to_string(&object(&row.with_context(|| place(number))?))?;
            put(Record { place: format!("{name}, row {number}"), json })?;
        }
        let (expected, found) = (metadata.row_group(index).num_rows(), (number - before) as i64);
        ensure!(
            found == expected,
            "{name}, row group {index}: expected {expected} rows, found {found}; download the file again"
        );
        progress.add(size * (index as u64 + 1) / groups as u64 - size * index as u64 / groups as u64);
    }
    Ok(FileReport::default())
}

/// Returns the part of a schema with some columns. Fails if there are none.
fn projection(path: &Path, schema: &Type, columns: &[&str]) -> Result<Type> {
    let selected: Vec<TypePtr> =
        schema.get_fields().iter().filter(|field| columns.contains(&field.name())).cloned().collect();
    ensure!(
        !selected.is_empty(),
        "{}: expected one of the columns {}, found {}; rename the column with the conversations",
        path.display(),
        columns.join(", "),
        list_names(schema.get_fields().iter().map(|field| field.name()))
    );
    Ok(Type::group_type_builder(schema.name()).with_fields(selected).build()?)
}

/// A row group that checks its pages.
struct CheckedGroup<'a> {
    file: Arc<CheckedFile>,
    metadata: &'a RowGroupMetaData,
}

impl RowGroupReader for CheckedGroup<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.metadata
    }

    fn num_columns(&self) -> usize {
        self.metadata.num_columns()
    }

    fn get_column_page_reader(&self, i: usize) -> ParquetResult<Box<dyn PageReader>> {
        let (chunk, rows) = (self.metadata.column(i), self.metadata.num_rows() as usize);
        let column = chunk.column_descr();
        let levels = usize::from(column.max_rep_level() > 0) + usize::from(column.max_def_level() > 0);
        let pages = SerializedPageReader::new(Arc::clone(&self.file), chunk, rows, None)?;
        Ok(Box::new(CheckedPages { pages: Box::new(pages), levels }))
    }

    fn get_column_bloom_filter(&self, _: usize) -> Option<&Sbbf> {
        None
    }

    fn get_row_iter(&self, projection: Option<Type>) -> ParquetResult<RowIter<'_>> {
        RowIter::from_row_group(projection, self)
    }
}

fn object(row: &Row) -> Json {
    Json::Object(row.get_column_iter().map(|(name, field)| (name.clone(), json(field))).collect())
}

/// Returns a value as JSON. Dates, times and decimal numbers become text.
fn json(field: &Field) -> Json {
    let float = |number: f64| Number::from_f64(number).map_or(Json::Null, Json::Number);
    match field {
        Field::Null => Json::Null,
        Field::Bool(value) => Json::Bool(*value),
        Field::Byte(value) => Json::Number((*value).into()),
        Field::Short(value) => Json::Number((*value).into()),
        Field::Int(value) => Json::Number((*value).into()),
        Field::Long(value) => Json::Number((*value).into()),
        Field::UByte(value) => Json::Number((*value).into()),
        Field::UShort(value) => Json::Number((*value).into()),
        Field::UInt(value) => Json::Number((*value).into()),
        Field::ULong(value) => Json::Number((*value).into()),
        Field::Float(value) => float(f64::from(*value)),
        Field::Double(value) => float(*value),
        Field::Str(text) => Json::String(text.clone()),
        Field::Bytes(bytes) => Json::String(String::from_utf8_lossy(bytes.data()).into_owned()),
        Field::Group(row) => object(row),
        Field::ListInternal(list) => Json::Array(list.elements().iter().map(json).collect()),
        Field::MapInternal(map) => {
            let entry = |(key, value): &(Field, Field)| {
                let name = if let Field::Str(key) = key { key.clone() } else { key.to_string() };
                (name, json(value))
            };
            Json::Object(map.entries().iter().map(entry).collect())
        }
        other => Json::String(other.to_string()),
    }
}
