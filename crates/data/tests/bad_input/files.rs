//! Text files, compressed files, and paths.

use crate::kinds::{Kinds, format, options};
use data::documents::{self, Format, Reading};
use data::text::{self, TextOptions};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Compresses as the program zstd does, with a checksum.
fn zst(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Returns text in UTF-16 with a byte order mark.
pub fn utf16(text: &str) -> Vec<u8> {
    [0xfeff].into_iter().chain(text.encode_utf16()).flat_map(u16::to_le_bytes).collect()
}

pub fn run(kinds: &mut Kinds) {
    encodings(kinds);
    compressed(kinds);
    paths(kinds);
    special_files(kinds);
    settings(kinds);
}

fn encodings(kinds: &mut Kinds) {
    let skips = |kinds: &mut Kinds, kind: &str, name: &str, bytes: &[u8], part: &str| {
        let path = kinds.file(name, bytes);
        kinds.skips(kind, path, &["expected at least one document with text, found none", part, name]);
    };
    skips(kinds, "binary file", "binary.txt", b"text\0text", "binary files (with a NUL byte): 1");
    skips(kinds, "UTF-16, little endian", "windows.txt", &utf16("text"), "UTF-16 files (convert them to UTF-8): 1");
    let big: Vec<u8> = [0xfeff].into_iter().chain("中文".encode_utf16()).flat_map(u16::to_be_bytes).collect();
    skips(kinds, "UTF-16, big endian, without NUL bytes", "big.txt", &big, "UTF-16 files");
    skips(kinds, "empty file", "nothing.txt", b"", "empty files: 1");
    let summary = kinds.reports("invalid UTF-8", "invalid.txt", b"a \xff\xfe b \xe4\xb8", Reading::default());
    let path = kinds.path("input/invalid.txt");
    assert_eq!((summary.input.invalid_utf8, summary.invalid_utf8), (3, vec![(path, 3)]));
}

fn compressed(kinds: &mut Kinds) {
    let text = "some text, ".repeat(10_000);
    let gz = gzip(text.as_bytes());
    let compressed = zst(text.as_bytes());
    let cut = |bytes: &[u8]| bytes[..bytes.len() / 2].to_vec();
    let flipped = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 0xff;
        bytes
    };
    let parts = ["cannot decompress", "expected complete compressed data", "download or compress it again"];
    for (kind, name, bytes) in [
        ("truncated gz", "a.txt.gz", cut(&gz)),
        ("gz without bytes", "a.txt.gz", Vec::new()),
        ("zst without bytes", "a.txt.zst", Vec::new()),
        ("truncated zst", "a.txt.zst", cut(&compressed)),
        ("gz without its last byte", "a.txt.gz", gz[..gz.len() - 1].to_vec()),
        ("zst without its last byte", "a.txt.zst", compressed[..compressed.len() - 1].to_vec()),
        ("text named .gz", "a.txt.gz", b"plain text".to_vec()),
        ("text named .zst", "a.txt.zst", b"plain text".to_vec()),
        ("zst named .gz", "a.txt.gz", compressed.clone()),
        ("gz named .zst", "a.txt.zst", gz.clone()),
        ("gz with a wrong checksum", "a.txt.gz", flipped(&gz, gz.len() - 6)),
        ("gz with damaged data", "a.txt.gz", flipped(&gz, gz.len() / 2)),
        ("zst with damaged data", "a.txt.zst", flipped(&compressed, compressed.len() / 2)),
        ("gz with trailing garbage", "a.txt.gz", [&gz[..], b"garbage"].concat()),
        ("zst with trailing garbage", "a.txt.zst", [&compressed[..], b"garbage"].concat()),
    ] {
        kinds.rejects(kind, name, &bytes, &parts);
    }
    for (kind, name, bytes) in [("gz of nothing", "nothing.gz", gzip(b"")), ("zst of nothing", "nothing.zst", zst(b""))]
    {
        let path = kinds.file(name, &bytes);
        kinds.skips(kind, path, &["empty files: 1", name]);
    }
    let path = kinds.file("binary.gz", &gzip(b"a\0b"));
    kinds.skips("gz of a binary file", path, &["binary files", "binary.gz"]);
}

fn paths(kinds: &mut Kinds) {
    let missing = |kinds: &mut Kinds, kind: &str, path: PathBuf, parts: &[&str]| {
        kinds.fails(kind, parts, |kinds| kinds.tokenize(&[path], &options()));
    };
    let path = kinds.path("none.txt");
    missing(kinds, "missing file", path, &["none.txt", "No such file"]);
    let path = kinds.path("*.none");
    missing(kinds, "pattern without a match", path, &["*.none", "no file matches", "check the pattern"]);
    let path = kinds.path("[a");
    missing(kinds, "invalid pattern", path, &["[a", "not a glob pattern"]);
    let path = kinds.path("dangling.txt");
    symlink("nowhere", &path).unwrap();
    missing(kinds, "dangling symbolic link", path, &["dangling.txt", "No such file"]);
    let path = kinds.path("loop.txt");
    symlink("loop.txt", &path).unwrap();
    missing(kinds, "symbolic link to itself", path, &["loop.txt", "symbolic links"]);
    let path = kinds.file("secret.txt", b"text");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    // The root user may read it.
    if fs::File::open(&path).is_err() {
        missing(kinds, "file without permission", path, &["secret.txt", "Permission denied"]);
    }
    kinds.fails("standard input twice", &["expected standard input once, found it twice"], |kinds| {
        kinds.tokenize(&["-".into(), "-".into()], &options())
    });
    let path = kinds.file("of code/a.rs", b"text").parent().unwrap().to_owned();
    kinds.fails(
        "no file with the extension",
        &["of code", "expected input files with extension .md, found none", "a.rs"],
        |kinds| documents::find(&[path], &["md".into()], Some(&kinds.out())),
    );
}

/// Directories with nothing to read.
fn special_files(kinds: &mut Kinds) {
    let directory = |kinds: &Kinds, name: &str| {
        let path = kinds.path(name);
        fs::create_dir_all(&path).unwrap();
        path
    };
    let path = directory(kinds, "of nothing");
    kinds.skips("empty directory", path, &["of nothing: expected input files, found none"]);
    let path = kinds.file("of git/.git/config", b"text").parent().unwrap().parent().unwrap().to_owned();
    kinds.skips("directory with only .git", path, &["found none", "version control directories: 1", "of git/.git"]);
    let path = directory(kinds, "of links");
    symlink(kinds.path("good.txt"), path.join("link.txt")).unwrap();
    symlink(&path, path.join("cycle")).unwrap();
    kinds.skips("directory with only symbolic links", path, &["found none", "symbolic links: 2", "link.txt"]);
    let path = directory(kinds, "of pipes");
    if Command::new("mkfifo").arg(path.join("fifo")).status().is_ok_and(|status| status.success()) {
        let fifo = path.join("fifo");
        kinds.skips("directory with only a pipe", path, &["found none", "devices, pipes and sockets: 1", "fifo"]);
        let parquet = TextOptions { reading: format(Format::Parquet), ..options() };
        let parts = ["fifo: expected a parquet file, found a pipe or device", "store it in a file"];
        kinds.fails("parquet in a pipe", &parts, |kinds| {
            let found = documents::find(&[fifo], &[], None)?;
            text::write(&found, &kinds.out(), &parquet)
        });
    }
    let out = kinds.out();
    kinds.skips("the output directory as input", out, &["found none", "files of the output directory"]);
}

fn settings(kinds: &mut Kinds) {
    kinds.fails("data set without --overwrite", &["train_000000.bin already exists", "--overwrite"], |kinds| {
        kinds.tokenize(&[], &TextOptions { overwrite: false, ..options() })
    });
    let separator = |text: &str| Reading { separator: Some(text.into()), ..Reading::default() };
    let parts = ["--separator: expected at least one character, found none"];
    kinds.fails("empty separator", &parts, |kinds| {
        kinds.tokenize(&[], &TextOptions { reading: separator(""), ..options() })
    });
    let summary = kinds.reports("separator that never occurs", "a.txt", b"one two", separator("<|end|>"));
    assert_eq!((summary.without_separator, summary.input.documents), (1, 1));
    let path = kinds.file("separators.txt", b"<|end|>\n<|end|>");
    kinds.fails("only separators", &["expected at least one document with text, found none in 1 file"], |kinds| {
        let found = documents::find(&[path], &[], None)?;
        let options = TextOptions { reading: separator("<|end|>"), ..options() };
        text::write(&found, &kinds.out(), &options)
    });
    let file = kinds.file("occupied", b"a file");
    kinds.fails("output directory that is a file", &["occupied"], |kinds| {
        let found = documents::find(&[kinds.path("good.txt")], &[], None)?;
        text::write(&found, &file, &options())
    });
    assert_eq!(fs::read(kinds.path("occupied")).unwrap(), b"a file");
}
