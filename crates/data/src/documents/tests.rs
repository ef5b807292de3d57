use super::*;
use ::parquet::basic::{BrotliLevel, Compression, Encoding, GzipLevel, ZstdLevel};
use ::parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use ::parquet::file::properties::{WriterProperties, WriterVersion};
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use ::parquet::schema::types::ColumnPath;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

/// Collects documents.
#[derive(Default)]
struct Collector {
    documents: Vec<String>,
    current: String,
}

impl Sink for Collector {
    fn text(&mut self, text: &str) -> Result<()> {
        self.current.push_str(text);
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.documents.push(std::mem::take(&mut self.current));
        Ok(())
    }
}

fn read_with(path: &Path, reading: &Reading) -> Result<(Vec<String>, FileReport)> {
    let mut sink = Collector::default();
    let report = read(path, reading, &Progress::default(), &mut sink)?;
    assert!(sink.current.is_empty(), "every document ends");
    Ok((sink.documents, report))
}

/// A directory with one file.
struct Input {
    _dir: TempDir,
    path: PathBuf,
}

fn input(name: &str, bytes: &[u8]) -> Input {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, bytes).unwrap();
    Input { _dir: dir, path }
}

fn documents(name: &str, bytes: &[u8]) -> Vec<String> {
    read_with(&input(name, bytes).path, &Reading::default()).unwrap().0
}

fn field(name: &str) -> Reading {
    Reading { field: name.into(), ..Reading::default() }
}

/// Expects an error that names the file and contains all `parts`.
fn fails(name: &str, bytes: &[u8], reading: &Reading, parts: &[&str]) {
    let message = format!("{:#}", read_with(&input(name, bytes).path, reading).map(|_| ()).unwrap_err());
    for part in parts.iter().chain([&name]) {
        assert!(message.contains(part), "{part} is not in: {message}");
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn named_and_matched_version_control_directories_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(".git")).unwrap();
    fs::write(dir.path().join(".git/HEAD"), "ref").unwrap();
    let message = format!("{:#}", find(&[dir.path().join(".git")], &[], None).unwrap_err());
    assert!(message.contains("found none") && message.contains("version control directories"), "{message}");
    fs::write(dir.path().join("a.txt"), "text").unwrap();
    let found = find(&[dir.path().join("*")], &[], None).unwrap();
    assert_eq!(found.files, [dir.path().join("a.txt")]);
    assert_eq!(found.skipped.count(Reason::VersionControl), 1);
}

#[test]
fn formats_follow_the_names() {
    for (name, format) in [
        ("a.txt", Format::Text),
        ("a", Format::Text),
        ("a.json", Format::Text),
        ("a.gz", Format::Text),
        ("a.jsonl.gz", Format::Jsonl),
        ("a.NDJSON.zst", Format::Jsonl),
        ("A.CSV.GZ", Format::Csv),
        ("a.csv", Format::Csv),
        ("a.parquet", Format::Parquet),
    ] {
        assert_eq!(Format::of_name(Path::new(name)), format, "{name}");
    }
}

#[test]
fn a_text_file_is_one_document_or_split_at_separators() {
    let text = "one<|end|>two\n<|end|>\r\nthree<|end|>\n\nfour<|en";
    assert_eq!(documents("a.txt", text.as_bytes()), [text]);
    let split = Reading { separator: Some("<|end|>".into()), ..Reading::default() };
    let split = |text: &str| read_with(&input("a.txt", text.as_bytes()).path, &split).unwrap().0;
    assert_eq!(split(text), ["one", "two\n", "three", "\nfour<|en"]);
    assert_eq!(split("one<|end|>"), ["one", ""]);
    assert_eq!(split("<|end|>\r"), ["", "\r"]);
}

#[test]
fn characters_and_separators_across_blocks_stay_whole() {
    let split = Reading { separator: Some("é|é".into()), ..Reading::default() };
    for shift in 0..8 {
        let first = format!("{}{}", "x".repeat(shift), "中é".repeat(60_000));
        let text = format!("{first}é|é\nlast 😀");
        let file = input("a.txt", text.as_bytes());
        let (found, report) = read_with(&file.path, &split).unwrap();
        assert_eq!(report.invalid_utf8, 0);
        assert!(found == [first.as_str(), "last 😀"], "{shift}");
    }
}

#[test]
fn invalid_utf8_is_replaced_and_counted_as_in_the_standard_library() {
    let mut bytes = "ä".repeat(200_000).into_bytes();
    bytes.extend(b"\xff\xe4\xb8 \xf0\x9f\x98");
    let (found, report) = read_with(&input("a.txt", &bytes).path, &Reading::default()).unwrap();
    assert!(found == [String::from_utf8_lossy(&bytes)]);
    assert_eq!(report.invalid_utf8, 3);
    let (found, report) = read_with(&input("a.jsonl", b"{\"text\": \"a\xffb\"}").path, &Reading::default()).unwrap();
    assert_eq!((found[0].as_str(), report.invalid_utf8), ("a\u{fffd}b", 1));
    let (found, report) = read_with(&input("a.csv", b"text\n\xff\xff\n").path, &Reading::default()).unwrap();
    assert_eq!((found[0].as_str(), report.invalid_utf8), ("\u{fffd}\u{fffd}", 2));
}

#[test]
fn binary_and_empty_files_are_skipped() {
    let skipped = |name: &str, bytes: &[u8]| {
        let (found, report) = read_with(&input(name, bytes).path, &Reading::default()).unwrap();
        assert!(found.is_empty());
        report.skipped
    };
    assert_eq!(skipped("a.txt", b"text\0"), Some(Reason::Binary));
    assert_eq!(skipped("a.txt.gz", &gzip(b"text\0")), Some(Reason::Binary));
    for name in ["a.txt", "a.jsonl", "a.csv", "a.parquet"] {
        assert_eq!(skipped(name, b""), Some(Reason::Empty), "{name}");
    }
    assert_eq!(skipped("a.txt.gz", &gzip(b"")), Some(Reason::Empty));
    // The first read returns less than what the decision needs, as from a pipe.
    assert_eq!(skipped("a.txt.gz", &[gzip(b"text"), gzip(b"\0")].concat()), Some(Reason::Binary));
    assert_eq!(skipped("a.txt.gz", &[gzip(b"\xff"), gzip(b"\xfea\0")].concat()), Some(Reason::Utf16));
    assert_eq!(skipped("a.txt.gz", &[gzip(b""), gzip(b"\0")].concat()), Some(Reason::Binary));
}

#[test]
fn compressed_files_are_decompressed_and_damaged_ones_rejected() {
    let text = "some text, ".repeat(10_000);
    let zst = zstd::encode_all(text.as_bytes(), 1).unwrap();
    let gz = gzip(text.as_bytes());
    assert_eq!(documents("a.txt.gz", &gz), [text.as_str()]);
    assert_eq!(documents("a.txt.zst", &zst), [text.as_str()]);
    // Both formats allow concatenated files.
    assert_eq!(documents("a.gz", &[&gz[..], &gz].concat()), [text.repeat(2)]);
    assert_eq!(documents("a.zst", &[&zst[..], &zst].concat()), [text.repeat(2)]);
    assert_eq!(documents("A.TXT.GZ", &gz), [text.as_str()]);
    assert_eq!(documents("A.TXT.ZST", &zst), [text.as_str()]);
    assert_eq!(documents("a.jsonl.gz", &gzip(b"{\"text\": \"x\"}\n")), ["x"]);
    let parts = ["cannot decompress", "download or compress it again"];
    for (name, bytes) in [("a.txt.gz", &gz), ("a.txt.zst", &zst)] {
        fails(name, &bytes[..bytes.len() / 2], &Reading::default(), &parts);
        fails(name, &bytes[..bytes.len() - 1], &Reading::default(), &parts);
        fails(name, b"plain text", &Reading::default(), &parts);
    }
}

#[test]
fn json_lines_have_nested_fields_and_escapes() {
    let lines = b"{\"id\": 1, \"text\": \"a \\u00e9\\n\"}\r\n\n  \n{\"text\": \"b\", \"more\": [1, {\"text\": 2}]}\n{\"text\": null}";
    assert_eq!(documents("a.jsonl", lines), ["a é\n", "b", ""]);
    assert_eq!(documents("a.jsonl", b"\xef\xbb\xbf{\"text\": \"a\"}"), ["a"]);
    let nested = input("a.jsonl", b"{\"a\": {\"b\": {\"c\": \"x\"}}}\n{\"a.b.c\": \"y\"}\n{\"a\": {\"b.c\": \"z\"}}");
    assert_eq!(read_with(&nested.path, &field("a.b.c")).unwrap().0, ["x", "y", "z"]);
}

#[test]
fn a_field_of_null_is_a_document_without_text() {
    let lines =
        input("a.jsonl", b"{\"a\": {\"b\": \"x\"}}\n{\"a\": null}\n{\"a\": {\"b\": null}}\n{\"a\":{\"b\":\"y\"}}");
    assert_eq!(read_with(&lines.path, &field("a.b")).unwrap().0, ["x", "", "", "y"]);
}

#[test]
fn a_byte_order_mark_is_no_text() {
    assert_eq!(documents("a.txt", b"\xef\xbb\xbfone"), ["one"]);
    assert_eq!(documents("a.txt", b"\xef\xbb\xbf"), [""]);
    assert_eq!(documents("a.txt.gz", &gzip(b"\xef\xbb\xbfone")), ["one"]);
    // Elsewhere it is a character.
    assert_eq!(documents("a.txt", "one\u{feff}two".as_bytes()), ["one\u{feff}two"]);
}

/// `zstd --long=31` writes such frames.
#[test]
fn a_large_window_of_zstd_is_an_error_that_says_how_to_decompress_it() {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(28).unwrap();
    encoder.write_all(b"{\"text\": \"a\"}\n").unwrap();
    encoder.flush().unwrap();
    let frame = encoder.finish().unwrap();
    let parts = ["expected a window of at most 128 MiB", "zstd -d --long=31"];
    fails("a.jsonl.zst", &frame, &field("text"), &parts);
    // A frame with a large window may follow other frames.
    let lines = "{\"text\": \"a\"}\n".repeat(1 << 12);
    let first = zstd::encode_all(lines.as_bytes(), 1).unwrap();
    fails("a.jsonl.zst", &[first, frame.clone()].concat(), &field("text"), &parts);
    let rows = "text\n".to_owned() + &"a\n".repeat(1 << 14);
    fails("a.csv.zst", &[zstd::encode_all(rows.as_bytes(), 1).unwrap(), frame].concat(), &field("text"), &parts);
}

#[test]
fn errors_in_json_lines_name_the_line_and_the_field() {
    let good = "{\"text\": \"a\", \"id\": 7}\n";
    let line = |bad: &str, reading: &Reading, parts: &[&str]| {
        fails("a.jsonl", format!("{good}{bad}").as_bytes(), reading, &[parts, &["line 2"]].concat());
    };
    let text = field("text");
    line("{\"body\": \"x\", \"id\": 1}", &text, &["expected a field \"text\", found body, id", "--field"]);
    line("{}", &text, &["found none"]);
    line("{\"text\": 7}", &text, &["expected a string, found a number"]);
    line("{\"text\": [\"x\"]}", &text, &["expected a string, found an array"]);
    line("{\"text\": \"x\"", &text, &["expected a JSON object, found EOF", "column 12"]);
    line("{\"text\": \"x\"} extra", &text, &["found trailing characters"]);
    line("[1, 2]", &text, &["expected a JSON object, found an array", "--format"]);
    line("plain text", &text, &["expected a JSON object, found"]);
    line("\"x\"", &text, &["found a string"]);
    line("{\"text\": \"a\tb\"}", &text, &["control character"]);
    line("{\"text\": \"\\ud800\"}", &text, &["line 2"]);
    let id = "{\"a\": {\"b\": 1}}\n";
    fails("a.jsonl", id.as_bytes(), &field("a.c"), &["line 1", "expected a field \"c\", found b"]);
    fails("a.jsonl", id.as_bytes(), &field("a.b.c"), &["line 1", "found a number"]);
    fails("a.jsonl.gz", &gzip(b"{\"text\": 1}"), &text, &["line 1"]);
}

#[test]
fn csv_rows_may_contain_quotes_and_line_breaks() {
    let rows = "id,text\n1,\"two\nlines, \"\"quoted\"\"\"\r\n2,plain\n3,\n";
    assert_eq!(documents("a.csv", rows.as_bytes()), ["two\nlines, \"quoted\"", "plain", ""]);
    assert_eq!(documents("a.csv", b"\xef\xbb\xbftext,id\na,1\n"), ["a"]);
    assert_eq!(documents("a.csv", b"\xef\xbb\xbf\"id,\"\"x\"\"\",text\n1,a\n"), ["a"]);
    assert_eq!(documents("a.csv", b"text,id\n\"a\" ,1\nb\"c,2\n"), ["a ", "b\"c"]);
}

proptest! {
    /// No quotation marks are reported as missing in the files of a CSV writer.
    #[test]
    fn csv_of_a_writer_is_read_back(rows in proptest::collection::vec("[a\"\n\r, é]{0,9}", 1..9), crlf in proptest::bool::ANY) {
        let terminator = if crlf { ::csv::Terminator::CRLF } else { ::csv::Terminator::Any(b'\n') };
        let mut writer = ::csv::WriterBuilder::new().terminator(terminator).from_writer(Vec::new());
        writer.write_record(["id", "text"]).unwrap();
        for row in &rows {
            writer.write_record([row, row]).unwrap();
        }
        prop_assert_eq!(documents("a.csv", &writer.into_inner().unwrap()), rows);
    }
}

#[test]
fn errors_in_csv_name_the_row_and_the_column() {
    fails(
        "a.csv",
        b"id,body\n1,x\n",
        &field("text"),
        &["row 1", "expected a column \"text\", found id, body", "--field"],
    );
    let short = b"id,text\n1,x\n2\n";
    fails("a.csv", short, &field("text"), &["row 3, line 3", "expected 2 columns", "found 1"]);
    let endless = [b"text\n\"".to_vec(), vec![b'x'; MAX_RECORD_BYTES + (1 << 20)]].concat();
    fails("a.csv", &endless, &field("text"), &["missing quotation mark"]);
}

#[test]
fn errors_list_a_part_of_many_or_long_names() {
    let many = (0..1000).map(|i| format!("column{i}")).collect::<Vec<_>>();
    let header = [&many.join(",")[..], ",", &"é".repeat(100_000), "\n"].concat();
    fails("a.csv", header.as_bytes(), &field("text"), &["found column0, column1,", "column19, and 981 more;"]);
    let long = format!("{{\"{}\": 1}}", "é".repeat(100_000));
    fails("a.jsonl", long.as_bytes(), &field("text"), &[&format!("found {}…;", "é".repeat(LISTED_CHARACTERS))]);
    fails("a.csv", b"\n\n", &field("text"), &["found none;"]);
}

#[test]
fn an_endless_json_line_is_an_error_instead_of_filling_the_memory() {
    let endless = vec![b'x'; MAX_RECORD_BYTES + 1];
    fails("a.jsonl", &endless, &field("text"), &["line 1", "at most 134217728 bytes", "found more"]);
}

/// Writes a file with the columns id, text (optional), meta.title and words (a list), in groups of rows.
fn parquet_file(path: &Path, groups: &[&[Option<&str>]], compression: Compression) {
    parquet_file_with(path, groups, WriterProperties::builder().set_compression(compression).build());
}

fn parquet_file_with(path: &Path, groups: &[&[Option<&str>]], properties: WriterProperties) {
    let schema = "message m { required int64 id; optional binary text (UTF8); required group meta { required binary title \
                  (UTF8); } repeated binary words (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap();
    for rows in groups {
        let n = rows.len();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&vec![7; n], None, None).unwrap();
        column.close().unwrap();
        let texts: Vec<ByteArray> = rows.iter().flatten().map(|text| ByteArray::from(*text)).collect();
        let levels: Vec<i16> = rows.iter().map(|text| i16::from(text.is_some())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&levels), None).unwrap();
        column.close().unwrap();
        let titles: Vec<ByteArray> = (0..n).map(|i| ByteArray::from(format!("title {i}").as_str())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&titles, None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&[], Some(&vec![0; n]), Some(&vec![0; n])).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

#[test]
fn parquet_columns_are_read_with_every_compression() {
    let many: Vec<String> = (0..1000).map(|i| format!("document {i}, é")).collect();
    let many: Vec<Option<&str>> = many.iter().map(|text| Some(text.as_str())).collect();
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(GzipLevel::default()),
        Compression::ZSTD(ZstdLevel::default()),
        Compression::LZ4,
        Compression::LZ4_RAW,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        parquet_file(&path, &[&[Some("one"), None, Some("")], &many], compression);
        let (found, report) = read_with(&path, &field("text")).unwrap();
        assert_eq!(report, FileReport { null: 1, ..FileReport::default() });
        assert_eq!((found.len(), &found[..4]), (1003, &["one", "", "", "document 0, é"].map(String::from)[..]));
        assert_eq!(found[1002], "document 999, é");
        assert_eq!(read_with(&path, &field("meta.title")).unwrap().0[4], "title 1");
    }
}

#[test]
fn parquet_columns_are_read_with_every_encoding() {
    let many: Vec<String> = (0..1000).map(|i| "é".repeat(i * i % 97)).collect();
    let all: Vec<Option<&str>> = many.iter().map(|text| Some(text.as_str())).collect();
    for encoding in [Encoding::PLAIN, Encoding::DELTA_LENGTH_BYTE_ARRAY, Encoding::DELTA_BYTE_ARRAY] {
        for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.parquet");
            let properties = WriterProperties::builder().set_dictionary_enabled(false).set_writer_version(version);
            let properties = ["text", "meta.title"].into_iter().fold(properties, |properties, name| {
                let column = ColumnPath::new(name.split('.').map(String::from).collect());
                properties.set_column_encoding(column, encoding)
            });
            parquet_file_with(&path, &[&[None, Some("")], &all], properties.build());
            assert_eq!(read_with(&path, &field("text")).unwrap().0[2..], many);
            assert_eq!(read_with(&path, &field("meta.title")).unwrap().0[1001], "title 999");
        }
    }
}

#[test]
fn errors_in_parquet_name_the_file_and_the_column() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    parquet_file(&path, &[&[Some("one"), Some("two")]], Compression::SNAPPY);
    let bytes = fs::read(&path).unwrap();
    let text = field("text");
    fails("a.parquet", &bytes, &field("body"), &["expected a column \"body\", found id, text, meta.title, words"]);
    fails("a.parquet", &bytes, &field("id"), &["expected strings, found INT64", "--field"]);
    fails("a.parquet", &bytes, &field("words"), &["expected strings, found lists"]);
    for (unsupported, name) in
        [(Compression::LZO, "found LZO"), (Compression::BROTLI(BrotliLevel::default()), "found BROTLI;")]
    {
        let message = parquet::check_compression(&path, "text", unsupported).unwrap_err().to_string();
        assert!(message.contains("a.parquet") && message.contains(name) && message.contains("zstd"), "{message}");
    }
    fails("a.parquet", &bytes[..bytes.len() - 9], &text, &["expected a complete parquet file", "download it again"]);
    fails("a.parquet", &bytes[..3], &text, &["expected a complete parquet file"]);
    fails("a.parquet", b"plain text, not parquet", &text, &["expected a complete parquet file"]);
    fails("a.parquet.gz", &gzip(&bytes), &text, &["found a compressed one", "uncompressed file"]);
    let forced = Reading { format: Some(Format::Parquet), ..Reading::default() };
    let message = read_with(Path::new(STDIN), &forced).unwrap_err().to_string();
    assert!(message.contains("standard input"), "{message}");
}

#[test]
fn find_searches_directories_patterns_and_errors_name_missing_paths() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    fs::create_dir_all(root.join("b/.git")).unwrap();
    for name in ["z.rs", "b/a.rs", "b/c.md.gz", "b/.git/x.rs", "x.bin"] {
        fs::write(root.join(name), "text").unwrap();
    }
    let names = |found: &Found| -> Vec<String> {
        found.files.iter().map(|p| p.strip_prefix(root).unwrap_or(p).to_str().unwrap().to_owned()).collect()
    };
    let extensions = ["rs".to_owned(), "md".to_owned()];
    let found = find(&[root.to_owned()], &extensions, None).unwrap();
    assert_eq!(names(&found), ["b/a.rs", "b/c.md.gz", "z.rs"]);
    assert_eq!((found.skipped.count(Reason::Extension), found.skipped.count(Reason::VersionControl)), (1, 1));
    assert_eq!(found.bytes(), Some(12));
    let found = find(&[root.join("*.rs"), root.join("b/a.rs"), STDIN.into(), root.to_owned()], &[], None).unwrap();
    assert_eq!(names(&found), ["z.rs", "b/a.rs", "-", "b/c.md.gz", "x.bin"]);
    assert_eq!((found.skipped.count(Reason::Repeated), found.bytes()), (2, None));
    let error = |paths: &[PathBuf], extensions: &[String]| format!("{:#}", find(paths, extensions, None).unwrap_err());
    assert!(error(&["/nowhere".into()], &[]).contains("cannot read /nowhere"));
    let message = error(&[root.to_owned()], &["tex".to_owned()]);
    assert!(message.contains("found none with extension .tex") || message.contains(".tex"), "{message}");
    assert!(message.contains("skipped files with other extensions: 4"), "{message}");
    assert!(error(&[root.join("*.none")], &[]).contains("no file matches"));
    assert!(error(&[STDIN.into(), STDIN.into()], &[]).contains("found it twice"));
}

#[test]
fn find_reports_links_and_leaves_out_the_output_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (root, out) = (dir.path(), dir.path().join("out"));
    fs::create_dir(&out).unwrap();
    fs::write(out.join("train_000000.bin"), "old").unwrap();
    fs::write(root.join("a.txt"), "text").unwrap();
    std::os::unix::fs::symlink(root, root.join("cycle")).unwrap();
    std::os::unix::fs::symlink("missing", root.join("dangling")).unwrap();
    let found = find(&[root.to_owned()], &[], Some(&out)).unwrap();
    assert_eq!(found.files, [root.join("a.txt")]);
    assert_eq!((found.skipped.count(Reason::SymbolicLink), found.skipped.count(Reason::Output)), (2, 1));
    // The output may also be in the input directory itself.
    for name in ["dataset.json", "tokenizer.json", "train_000000.bin"] {
        fs::write(root.join(name), "{}").unwrap();
    }
    for input in [root.to_owned(), root.join("[adt]*.*")] {
        let found = find(&[input], &["json".to_owned(), "txt".to_owned()], Some(root)).unwrap();
        assert_eq!(found.files, [root.join("a.txt")]);
        assert_eq!(found.skipped.count(Reason::Output), 3);
    }
}

/// Reads a pipe, as in `data text <(zcat a.txt.gz)`.
#[test]
fn pipes_with_a_name_are_read() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let path = PathBuf::from(format!("/dev/fd/{}", reader.as_raw_fd()));
    let found = find(&[path.clone(), path.clone()], &[], Some(Path::new("/"))).unwrap();
    assert_eq!((&found.files, found.skipped.count(Reason::Repeated)), (&vec![path.clone()], 1));
    // The reader decides nothing before it has the first bytes.
    let slow = std::thread::spawn(move || {
        for part in [&b"\xff"[..], b"\xfe", b"text"] {
            writer.write_all(part).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    });
    let (_, report) = read_with(&path, &Reading::default()).unwrap();
    assert_eq!(report.skipped, Some(Reason::Utf16));
    slow.join().unwrap();
}

#[test]
fn damaged_parquet_files_are_errors_that_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    parquet_file(&path, &[&[Some("one"), Some("two")]], Compression::SNAPPY);
    let good = fs::read(&path).unwrap();
    let mut contradictory = 0;
    for at in 0..good.len() {
        for byte in [!good[at], 55, 128] {
            let mut bytes = good.clone();
            bytes[at] = byte;
            fs::write(&path, &bytes).unwrap();
            if let Err(error) = read_with(&path, &field("text")) {
                let message = format!("{error:#}");
                assert!(message.contains("a.parquet"), "{message}");
                contradictory += usize::from(message.contains("inconsistent data"));
            }
        }
    }
    assert!(contradictory > 0, "the parquet crate panics for some of these files");
}

/// Writes a file with a column of lists of structs, as Hugging Face's datasets store conversations: two rows, and a null.
fn conversations_file(path: &Path, properties: WriterProperties) {
    let schema = "message m { optional group messages (LIST) { repeated group list { optional group element { optional binary role (UTF8); \
                  optional binary content (UTF8); } } } required binary other (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let columns: [(&[&str], &[i16], &[i16]); 2] = [
        (&["user", "assistant", "user"], &[4, 4, 4, 0], &[0, 1, 0, 0]),
        // The content of the second message is null.
        (&["a", "né"], &[4, 3, 4, 0], &[0, 1, 0, 0]),
    ];
    for (values, definitions, repetitions) in columns {
        let values: Vec<ByteArray> = values.iter().map(|text| ByteArray::from(*text)).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, Some(definitions), Some(repetitions)).unwrap();
        column.close().unwrap();
    }
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&["x", "y", "z"].map(ByteArray::from), None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn rows_of_parquet_files_are_records_with_lists_and_structs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let read = |columns: &[&str]| -> Result<Vec<Record>> {
        let mut records = Vec::new();
        read_records(&path, None, columns, &Progress::default(), &mut |record| {
            records.push(record);
            Ok(())
        })?;
        Ok(records)
    };
    let expected = [
        r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":null}]}"#,
        r#"{"messages":[{"role":"user","content":"né"}]}"#,
        r#"{"messages":null}"#,
    ];
    for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
        for encoding in [Encoding::PLAIN, Encoding::DELTA_LENGTH_BYTE_ARRAY, Encoding::DELTA_BYTE_ARRAY] {
            let properties = WriterProperties::builder().set_writer_version(version).set_dictionary_enabled(false);
            conversations_file(&path, properties.set_encoding(encoding).build());
            let records = read(&["messages", "absent"]).unwrap();
            assert_eq!(records.iter().map(|record| record.json.as_str()).collect::<Vec<_>>(), expected, "{encoding}");
            assert_eq!(records[2].place, format!("{}, row 3", path.display()));
        }
    }
    assert_eq!(read(&["other"]).unwrap()[1].json, r#"{"other":"y"}"#);
    let error = read(&["prompt", "completion"]).unwrap_err().to_string();
    assert!(error.contains("expected one of the columns prompt, completion, found messages, other"), "{error}");
    // A damaged file is an error, and no panic.
    let bytes = fs::read(&path).unwrap();
    for at in (0..bytes.len()).step_by(3) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x41;
        fs::write(&path, &damaged).unwrap();
        let _ = read(&["messages"]);
    }
}
