//! Parquet files.

use crate::files::gzip;
use crate::kinds::{Kinds, options};
use ::parquet::basic::{Compression, Type};
use ::parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use ::parquet::file::properties::{EnabledStatistics, WriterProperties};
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use anyhow::Result;
use data::documents::{self, Reading, Sink};
use data::text;
use rng::Mt19937;
use std::fs;
use std::io::Write;
use std::sync::Arc;
use system::progress::Progress;

/// Returns a file with one row group. Values other than those of `text` do not matter.
pub fn file(schema: &str, texts: &[Option<&[u8]>], compression: Compression) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder().set_compression(compression).set_dictionary_enabled(false);
    let properties = Arc::new(properties.set_statistics_enabled(EnabledStatistics::None).build());
    let mut file = SerializedFileWriter::new(Vec::new(), schema.clone(), properties).unwrap();
    let n = texts.len();
    let mut group = file.next_row_group().unwrap();
    let columns = file_columns(&schema);
    for (name, kind, repeated) in columns {
        let mut column = group.next_column().unwrap().unwrap();
        let levels: Vec<i16> =
            texts.iter().map(|text| i16::from(!repeated && (name != "text" || text.is_some()))).collect();
        let starts = repeated.then(|| vec![0; n]);
        let count = if repeated { 0 } else { n };
        match kind {
            Type::BYTE_ARRAY => {
                let texts = texts.iter().flatten().map(|text| ByteArray::from(text.to_vec()));
                let values: Vec<ByteArray> =
                    if name == "text" { texts.collect() } else { vec![ByteArray::from("other"); n] };
                let values = if repeated { &[] } else { &values[..] };
                column.typed::<ByteArrayType>().write_batch(values, Some(&levels), starts.as_deref()).unwrap();
            }
            Type::DOUBLE => {
                column.typed::<DoubleType>().write_batch(&vec![0.5; count], Some(&levels), None).unwrap();
            }
            _ => {
                column.typed::<Int64Type>().write_batch(&vec![7; count], Some(&levels), None).unwrap();
            }
        }
        column.close().unwrap();
    }
    group.close().unwrap();
    file.into_inner().unwrap()
}

/// Returns name, type and repetition of each column.
fn file_columns(schema: &Arc<::parquet::schema::types::Type>) -> Vec<(String, Type, bool)> {
    let schema = ::parquet::schema::types::SchemaDescriptor::new(schema.clone());
    let columns = schema.columns().iter();
    columns.map(|c| (c.path().string(), c.physical_type(), c.max_rep_level() > 0)).collect()
}

pub const SCHEMA: &str = "message m { OPTIONAL INT64 id; OPTIONAL BYTE_ARRAY text (UTF8); OPTIONAL DOUBLE score; REPEATED \
                          BYTE_ARRAY words (UTF8); }";

fn good(compression: Compression) -> Vec<u8> {
    let texts = ["one and two, ".repeat(20), "three ".repeat(9), "four".into()];
    let texts: Vec<Option<&[u8]>> = texts.iter().map(|text| Some(text.as_bytes())).collect();
    file(SCHEMA, &texts, compression)
}

/// Replaces bytes at a position.
fn with(bytes: &[u8], at: usize, new: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + new.len()].copy_from_slice(new);
    bytes
}

pub fn run(kinds: &mut Kinds) {
    damaged(kinds);
    columns(kinds);
    codecs(kinds);
    flipped(kinds);
}

fn damaged(kinds: &mut Kinds) {
    let good = good(Compression::SNAPPY);
    let n = good.len();
    let complete = ["expected a complete parquet file", "download it again"];
    let metadata = u32::from_le_bytes(good[n - 8..n - 4].try_into().unwrap()) as usize;
    for (kind, bytes) in [
        ("text named .parquet", b"plain text, not parquet".to_vec()),
        ("3 bytes", good[..3].to_vec()),
        ("only the magic number", good[..4].to_vec()),
        ("truncated in the pages", good[..40].to_vec()),
        ("truncated in the middle", good[..n / 2].to_vec()),
        ("without the footer", good[..n - metadata - 8].to_vec()),
        ("without the last byte", good[..n - 1].to_vec()),
        ("without the magic number at the end", good[..n - 4].to_vec()),
        ("wrong magic number", with(&good, n - 4, b"PAR2")),
        ("encrypted footer", with(&good, n - 4, b"PARE")),
        ("footer of 0 bytes", with(&good, n - 8, &[0; 4])),
        ("footer that is too short", with(&good, n - 8, &(metadata as u32 / 2).to_le_bytes())),
        ("footer longer than the file", with(&good, n - 8, &(n as u32).to_le_bytes())),
        ("footer of a negative size", with(&good, n - 8, &[0xff; 4])),
        ("footer of zeros", with(&good, n - 8 - metadata, &vec![0; metadata])),
        ("trailing bytes", [&good[..], b"garbage."].concat()),
    ] {
        kinds.rejects(kind, "a.parquet", &bytes, &complete);
    }
    let reader = opened(&good).unwrap();
    let page = reader.metadata().row_group(0).column(1).byte_range();
    let (start, len) = (page.0 as usize, page.1 as usize);
    let pages = ["download it again"];
    kinds.rejects("page header of zeros", "a.parquet", &with(&good, start, &[0; 8]), &pages);
    kinds.rejects("page header of ones", "a.parquet", &with(&good, start, &[0xff; 8]), &pages);
    kinds.rejects("page of zeros", "a.parquet", &with(&good, start, &vec![0; len]), &pages);
    kinds.rejects("page data of ones", "a.parquet", &with(&good, start + len - 40, &[0xff; 40]), &pages);
    let parts = ["expected a complete parquet file, found inconsistent data", "download it again"];
    kinds.rejects("file for which the parquet crate panics", "a.parquet", &catch_a_panic(), &parts);
    let path = kinds.file("none.parquet", b"");
    kinds.skips("empty file", path, &["empty files: 1", "none.parquet"]);
    let path = kinds.file("rows.parquet", &file(SCHEMA, &[], Compression::SNAPPY));
    kinds.skips("no rows", path, &["expected at least one document with text, found none in 1 file"]);
    let path = kinds.file("nulls.parquet", &file(SCHEMA, &[None, None], Compression::SNAPPY));
    kinds.skips("only null", path, &["expected at least one document with text, found none in 1 file"]);
}

fn columns(kinds: &mut Kinds) {
    let good = good(Compression::UNCOMPRESSED);
    let mut rejects = |kind: &str, field: &str, parts: &[&str]| {
        kinds.rejects_field(kind, "a.parquet", &good, field, &[parts, &["--field"]].concat());
    };
    rejects("missing column", "body", &["expected a column \"body\", found id, text, score, words"]);
    rejects("integers", "id", &["column \"id\": expected strings, found INT64"]);
    rejects("floats", "score", &["column \"score\": expected strings, found DOUBLE"]);
    rejects("lists", "words", &["column \"words\": expected strings, found lists"]);
    let twice = "message m { OPTIONAL BYTE_ARRAY text (UTF8); OPTIONAL BYTE_ARRAY text (UTF8); }";
    let twice = file(twice, &[Some(b"a")], Compression::UNCOMPRESSED);
    kinds.rejects("duplicate column", "a.parquet", &twice, &["expected one column \"text\", found 2", "rename"]);
    let nested = "message m { OPTIONAL GROUP text { OPTIONAL BYTE_ARRAY body (UTF8); } }";
    let nested = file(nested, &[Some(b"a")], Compression::UNCOMPRESSED);
    kinds.rejects("struct", "a.parquet", &nested, &["expected a column \"text\", found text.body", "--field"]);
    let compressed = ["expected a parquet file, found a compressed one", "pass an uncompressed file"];
    kinds.rejects("parquet in gz", "a.parquet.gz", &gzip(&good), &compressed);
}

/// Opens a file with the parquet crate.
fn opened(bytes: &[u8]) -> Option<SerializedFileReader<fs::File>> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    SerializedFileReader::new(file).ok()
}

/// Unsupported codecs. There is no writer for LZO, so the test replaces the codec number in the file.
fn codecs(kinds: &mut Kinds) {
    let good = good(Compression::UNCOMPRESSED);
    let at = codec_position(&good);
    let bytes = with(&good, at, &[6]);
    assert!(has_codec(&bytes, "LZO"));
    let parts =
        ["expected column \"text\" without compression", "zstd or lz4, found LZO;", "write the file again with zstd"];
    kinds.rejects("codec LZO", "a.parquet", &bytes, &parts);
    let unknown = ["expected a complete parquet file", "download it again"];
    kinds.rejects("codec that does not exist", "a.parquet", &with(&good, at, &[0x40]), &unknown);
}

/// Reports whether the column `text` of a file has a codec.
fn has_codec(bytes: &[u8], name: &str) -> bool {
    opened(bytes).is_some_and(|reader| {
        let group = reader.metadata().row_group(0);
        group.columns().len() == 4 && group.column(1).compression().to_string().split('(').next() == Some(name)
    })
}

/// Returns the position of the codec of the column `text` in an uncompressed file.
fn codec_position(good: &[u8]) -> usize {
    let footer_bytes = u32::from_le_bytes(good[good.len() - 8..good.len() - 4].try_into().unwrap()) as usize;
    let mut footer = good.len() - 8 - footer_bytes..good.len() - 8;
    // Thrift stores the number n as 2n. 8 is brotli.
    footer.find(|&at| has_codec(&with(good, at, &[8]), "BROTLI")).expect("the codec is one byte")
}

/// Changes a byte at 200 positions. Some changes are only found by the text that results.
fn flipped(kinds: &mut Kinds) {
    kinds.add("byte changed at random");
    let mut random = Mt19937::new(1337);
    let mut rejected = 0;
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY] {
        let good = good(compression);
        for _ in 0..100 {
            let mut bytes = good.clone();
            let at = random.next_u32() as usize % bytes.len();
            bytes[at] ^= 1 << (random.next_u32() % 8);
            let path = kinds.file("flipped.parquet", &bytes);
            let found = documents::find(&[path], &[], None).unwrap();
            let out = tempfile::tempdir().unwrap();
            fs::write(out.path().join("train_000000.bin"), "old").unwrap();
            let Err(error) = text::write(&found, out.path(), &options()) else { continue };
            rejected += 1;
            let message = format!("{error:#}");
            assert!(message.contains("flipped.parquet") || message.contains("found none in 1 file"), "{message}");
            assert_eq!(fs::read_dir(out.path()).unwrap().count(), 1, "{message}");
            assert_eq!(fs::read(out.path().join("train_000000.bin")).unwrap(), b"old");
        }
    }
    assert!(rejected > 40, "{rejected}");
}

/// Reads damaged files until the parquet crate panics for one of them, which is an error. Returns that file.
pub fn catch_a_panic() -> Vec<u8> {
    let good = good(Compression::SNAPPY);
    let mut damaged = (0..good.len()).flat_map(|at| [!good[at], 55, 128].map(|byte| with(&good, at, &[byte])));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("damaged.parquet");
    let panics = |bytes: &Vec<u8>| {
        fs::write(&path, bytes).unwrap();
        let read = documents::read(&path, &Reading::default(), &Progress::default(), &mut Panics(None));
        read.is_err_and(|error| error.to_string().contains("inconsistent data"))
    };
    damaged.find(panics).expect("the parquet crate panics for some damaged files")
}

/// Panics when the first document arrives.
pub fn panic_while_reading(message: &'static str) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("good.parquet");
    fs::write(&path, good(Compression::SNAPPY)).unwrap();
    documents::read(&path, &Reading::default(), &Progress::default(), &mut Panics(Some(message))).unwrap();
}

/// Receives documents and panics with a message, if there is one.
struct Panics(Option<&'static str>);

impl Sink for Panics {
    fn text(&mut self, _: &str) -> Result<()> {
        if let Some(message) = self.0 {
            panic!("{message}");
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        Ok(())
    }
}
