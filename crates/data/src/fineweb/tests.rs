use super::*;
use crate::Tokens;
use crate::dataset::Dataset;
use parquet::basic::{Compression, Type, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::fs::{self, File};
use std::sync::Arc;
use tempfile::TempDir;

/// FineWeb's columns.
const SCHEMA: &str = "message schema {
    OPTIONAL BYTE_ARRAY text (UTF8); OPTIONAL BYTE_ARRAY id (UTF8); OPTIONAL BYTE_ARRAY dump (UTF8);
    OPTIONAL BYTE_ARRAY url (UTF8); OPTIONAL BYTE_ARRAY file_path (UTF8); OPTIONAL BYTE_ARRAY language (UTF8);
    OPTIONAL DOUBLE language_score; OPTIONAL INT64 token_count;
}";

/// Writes a file in FineWeb's format. `rows` are the values of the column `text`, in groups.
fn write_parquet(path: &Path, compression: Compression, groups: &[&[Option<&[u8]>]]) {
    write_schema(path, SCHEMA, compression, groups);
}

fn write_schema(path: &Path, schema: &str, compression: Compression, groups: &[&[Option<&[u8]>]]) {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut file = SerializedFileWriter::new(File::create(path).unwrap(), schema.clone(), properties).unwrap();
    for rows in groups {
        let mut group = file.next_row_group().unwrap();
        let defined = vec![1; rows.len()];
        for field in schema.get_fields() {
            let mut column = group.next_column().unwrap().unwrap();
            match (field.name(), field.get_physical_type()) {
                ("text", Type::BYTE_ARRAY) => {
                    let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
                    let values: Vec<ByteArray> =
                        rows.iter().flatten().map(|&row| ByteArray::from(row.to_vec())).collect();
                    column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
                }
                (_, Type::BYTE_ARRAY) => {
                    let values = vec![ByteArray::from("other"); rows.len()];
                    column.typed::<ByteArrayType>().write_batch(&values, Some(&defined), None).unwrap();
                }
                (_, Type::DOUBLE) => {
                    column.typed::<DoubleType>().write_batch(&vec![0.5; rows.len()], Some(&defined), None).unwrap();
                }
                _ => {
                    column.typed::<Int64Type>().write_batch(&vec![3; rows.len()], Some(&defined), None).unwrap();
                }
            }
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    file.close().unwrap();
}

fn options(shard_tokens: usize) -> FinewebOptions {
    FinewebOptions {
        names: ShardNames::EDU_FINEWEB,
        shard_tokens,
        tokenizer: Tokenizer::gpt2(),
        program: "test".into(),
    }
}

fn run(from: &Path, out: &Path, options: &FinewebOptions) -> Result<Summary> {
    write(&files(from)?, out, options)
}

fn shards(out: &Path) -> Vec<(String, Vec<u32>)> {
    let files = Tokens::open_all(&out.join("*.bin").to_string_lossy()).unwrap();
    let mut shards: Vec<_> = files
        .iter()
        .map(|file| {
            let mut ids = vec![0; file.len()];
            file.read(0, &mut ids).unwrap();
            (Path::new(file.name()).file_name().unwrap().to_str().unwrap().to_owned(), ids)
        })
        .collect();
    // Shard 0 is the validation split.
    shards.sort_by_key(|(name, _)| name[name.len() - 10..].to_owned());
    shards
}

/// The shards of llm.c's script: a document is copied as a whole if it leaves at least one token free; otherwise its first
/// tokens fill the shard, and the others begin the next one.
fn llmc_shards(documents: &[Vec<u32>], size: usize) -> Vec<Vec<u32>> {
    let mut written = Vec::new();
    let mut buffer = vec![0; size];
    let mut count = 0;
    for document in documents {
        if count + document.len() < size {
            buffer[count..count + document.len()].copy_from_slice(document);
            count += document.len();
        } else {
            let fits = size - count;
            buffer[count..].copy_from_slice(&document[..fits]);
            written.push(buffer.clone());
            count = document.len() - fits;
            buffer[..count].copy_from_slice(&document[fits..]);
        }
    }
    if count > 0 {
        written.push(buffer[..count].to_vec());
    }
    written
}

#[test]
fn parquet_files_become_llm_cs_shards() {
    let dir = tempfile::tempdir().unwrap();
    let texts: Vec<String> = (0..900)
        .map(|i| format!("Page {i}.\n{}<|endoftext|> é\u{a0}", " All the world's a stage,".repeat(i % 9)))
        .collect();
    let all: Vec<Option<&[u8]>> = texts.iter().map(|text| Some(text.as_bytes())).collect();
    let from = dir.path().join("10BT");
    fs::create_dir(&from).unwrap();
    // The order of the names is not the order in which the files are created.
    write_parquet(&from.join("001_00000.parquet"), Compression::ZSTD(ZstdLevel::default()), &[&all[800..]]);
    write_parquet(&from.join("000_00000.parquet"), Compression::SNAPPY, &[&all[..500], &all[500..800]]);
    fs::write(from.join("README.md"), "not data").unwrap();

    let documents: Vec<Vec<u32>> =
        texts.iter().map(|text| [vec![50256], Tokenizer::gpt2().encode(text).unwrap()].concat()).collect();
    let total: usize = documents.iter().map(Vec::len).sum();
    let out = dir.path().join("out");
    // The last size divides the number of tokens.
    for size in [100, 1000, 4097, total.div_ceil(2)] {
        let summary = run(&from, &out, &options(size)).unwrap();
        let expected = llmc_shards(&documents, size);
        let found = shards(&out);
        assert_eq!(found.len(), expected.len(), "size {size}");
        for (i, ((name, ids), expected)) in found.iter().zip(&expected).enumerate() {
            let split = if i == 0 { "val" } else { "train" };
            assert_eq!(*name, format!("edu_fineweb_{split}_{i:06}.bin"));
            assert!(ids == expected, "{name}, size {size}");
        }
        let dataset = Dataset::read(&out).unwrap().unwrap();
        assert_eq!((dataset.name.as_str(), dataset.input.files, dataset.input.documents), ("edu_fineweb", 2, 900));
        assert_eq!((dataset.val.shards, dataset.val.tokens), (1, size));
        assert_eq!((dataset.train.shards, dataset.train.tokens), (found.len() - 1, total - size));
        assert_eq!((dataset.train, dataset.val, dataset.input), (summary.train, summary.val, summary.input));
    }
}

#[test]
fn one_and_three_threads_write_the_same_files() {
    let dir = tempfile::tempdir().unwrap();
    let texts: Vec<String> = (0..300).map(|i| "some text of the web ".repeat(i * 20)).collect();
    let all: Vec<Option<&[u8]>> = texts.iter().map(|text| Some(text.as_bytes())).collect();
    let file = dir.path().join("a.parquet");
    write_parquet(&file, Compression::UNCOMPRESSED, &[&all]);
    let [one, three] = [1, 3].map(|threads| {
        let out = dir.path().join(threads.to_string());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&file, &out, &options(100_000)).unwrap());
        shards(&out)
    });
    assert!(one == three);
    assert!(one.len() > 5);
}

fn error(from: &Path) -> String {
    let out = tempfile::tempdir().unwrap();
    fs::write(out.path().join("edu_fineweb_val_000000.bin"), "old").unwrap();
    let message = format!("{:#}", run(from, out.path(), &options(4)).unwrap_err());
    let kept: Vec<_> = fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(kept, ["edu_fineweb_val_000000.bin"], "{message}");
    assert_eq!(fs::read(out.path().join("edu_fineweb_val_000000.bin")).unwrap(), b"old");
    message
}

fn file_with(dir: &TempDir, schema: &str, rows: &[Option<&[u8]>]) -> PathBuf {
    let path = dir.path().join("bad.parquet");
    write_schema(&path, schema, Compression::SNAPPY, &[rows]);
    path
}

#[test]
fn bad_input_is_an_error_that_keeps_the_old_shards() {
    let dir = tempfile::tempdir().unwrap();
    let good = [Some("one two three four five six".as_bytes())];
    let message = error(&file_with(&dir, SCHEMA, &[good[0], good[0], None, good[0]]));
    assert!(message.contains("bad.parquet: expected UTF-8 text in each row, found 1 null values"), "{message}");
    let message = error(&file_with(&dir, SCHEMA, &[None, None]));
    assert!(message.contains("bad.parquet") && message.contains("found 2 null values"), "{message}");
    let message = error(&file_with(&dir, SCHEMA, &[good[0], Some(&[b'a', 0xff, b'b'])]));
    assert!(message.contains("bad.parquet") && message.contains("1 invalid UTF-8 sequences"), "{message}");
    let message = error(&file_with(&dir, "message schema { OPTIONAL BYTE_ARRAY id; OPTIONAL INT64 n; }", &good));
    assert!(message.contains("expected a column \"text\", found id, n"), "{message}");
    let message = error(&file_with(&dir, "message schema { OPTIONAL INT64 text; }", &good));
    assert!(message.contains("column \"text\": expected strings, found INT64"), "{message}");
    let message = error(&file_with(&dir, SCHEMA, &[Some("hi".as_bytes())]));
    assert!(message.contains("found 2; use more text or a smaller --shard-tokens"), "{message}");
    let message = error(&file_with(&dir, SCHEMA, &[]));
    assert!(message.contains("bad.parquet: expected parquet files with documents, found no rows"), "{message}");
    let message = error(&file_with(&dir, SCHEMA, &[Some(b"")]));
    assert!(message.contains("expected at least one document with text, found none in 1 file"), "{message}");
    let message = error(&dir.path().join("none.parquet"));
    assert!(message.contains("--from") && message.contains("none.parquet"), "{message}");
    let empty = tempfile::tempdir().unwrap();
    assert!(error(empty.path()).contains("expected files that end in .parquet, found none"));
    let text = dir.path().join("text.parquet");
    fs::write(&text, "This is a text file, not a parquet file.").unwrap();
    let message = error(&text);
    assert!(message.contains("text.parquet") && message.contains("expected a complete parquet file"), "{message}");
    let complete = fs::read(file_with(&dir, SCHEMA, &good)).unwrap();
    fs::write(&text, &complete[..complete.len() / 2]).unwrap();
    assert!(error(&text).contains("text.parquet"));
    let none = options(0);
    assert!(write(&[], dir.path(), &none).unwrap_err().to_string().contains("--shard-tokens 0"));
}

/// The last file is checked before the first one is read.
#[test]
fn damaged_files_are_found_first() {
    let dir = tempfile::tempdir().unwrap();
    write_parquet(&dir.path().join("000.parquet"), Compression::SNAPPY, &[&[None]]);
    fs::write(dir.path().join("001.parquet"), "PAR1").unwrap();
    assert!(error(dir.path()).contains("001.parquet: expected a complete parquet file"));
}

/// Rows without text are documents, as in llm.c.
#[test]
fn empty_text_becomes_a_document_token() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_with(&dir, SCHEMA, &[Some(b""), Some(b"a"), Some(b"")]);
    let out = dir.path().join("out");
    let summary = run(&file, &out, &options(2)).unwrap();
    let ids: Vec<u32> = shards(&out).into_iter().flat_map(|(_, ids)| ids).collect();
    assert_eq!(ids, [50256, 50256, 64, 50256]);
    assert_eq!((summary.input.documents, summary.input.empty_documents), (1, 2));
}
