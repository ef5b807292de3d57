//! Token files, as `data check` and `train` open them.

use crate::kinds::Kinds;
use data::check;
use data::header::HEADER_BYTES;
use data::tokens::{self, Tokens, Width};
use std::fs;

pub fn run(kinds: &mut Kinds) {
    let path = kinds.path("good.bin");
    tokens::write(&path, &[50256u16, 1, 2, 3], Width::U16).unwrap();
    let good = fs::read(&path).unwrap();
    let word = |at: usize, value: i32| {
        let mut bytes = good.clone();
        bytes[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    for (kind, bytes, parts) in [
        ("empty", Vec::new(), &["expected a header of 1024 bytes, found 0 bytes"][..]),
        ("text", b"some text".to_vec(), &["expected a header of 1024 bytes, found 9 bytes"]),
        ("truncated header", good[..1000].to_vec(), &["expected a header of 1024 bytes, found 1000 bytes"]),
        ("other magic number", word(0, 20_240_326), &["expected magic 20240520 or 20240801, found 20240326"]),
        ("other byte order", word(0, 20_240_520_i32.swap_bytes()), &["expected magic 20240520 or 20240801, found"]),
        ("other version", word(1, 2), &["expected token file version 1, found 2"]),
        ("version of the other width", word(1, 7), &["expected token file version 1, found 7"]),
        ("no tokens", word(2, 0), &["expected a token count above 0 in the header, found 0"]),
        ("negative count", word(2, -5), &["expected a token count above 0 in the header, found -5"]),
        (
            "count above the size",
            word(2, i32::MAX),
            &["is truncated: expected", "for the 2147483647 tokens", "found 1032"],
        ),
        ("count below the size", word(2, 3), &["is too long: expected 1030 bytes for the 3 tokens", "found 1032"]),
        ("truncated", good[..good.len() - 1].to_vec(), &["is truncated: expected 1032 bytes for the 4 tokens"]),
        ("trailing bytes", [&good[..], &[0]].concat(), &["is too long: expected 1032 bytes for the 4 tokens"]),
        ("header only", good[..HEADER_BYTES].to_vec(), &["is truncated: expected 1032 bytes"]),
    ] {
        let path = kinds.file("bad.bin", &bytes);
        kinds.fails(kind, &[parts, &["bad.bin"]].concat(), |_| Tokens::open(&path));
    }
    let missing = kinds.path("none.bin");
    kinds.fails("missing file", &["none.bin", "No such file"], |_| Tokens::open(&missing));
    kinds.fails("directory", &["out", "directory"], |kinds| Tokens::open(&kinds.out()));
    let pattern = kinds.path("none_*.bin").display().to_string();
    kinds.fails("pattern without a match", &["none_*.bin", "expected token files (.bin)"], |_| tokens::find(&pattern));
    kinds.fails("invalid pattern", &["'[': not a glob pattern"], |_| tokens::find("["));
    for (kind, width) in [("id outside the vocabulary", Width::U16), ("wide id outside the vocabulary", Width::U32)] {
        let path = kinds.path("outside.bin");
        tokens::write(&path, &[50256u32, 1, 50257, 2], width).unwrap();
        let parts = ["outside.bin: token 50257 at position 2: expected ids below 50257", "tokenize the text"];
        kinds.fails(kind, &parts, |_| check::vocabulary(&[Tokens::open(&path)?], 50257));
        let report = check::shard(&Tokens::open(&path).unwrap(), 50257, 50256).unwrap();
        assert_eq!((report.invalid, report.first_invalid), (1, vec![(2, 50257)]));
    }
    // `data check` reports files without documents.
    kinds.add("no document token");
    let path = kinds.path("marks.bin");
    tokens::write(&path, &[1u16, 2, 3], Width::U16).unwrap();
    let report = check::shard(&Tokens::open(&path).unwrap(), 50257, 50256).unwrap();
    assert_eq!((report.documents, report.starts_with_document, report.longest), (0, false, 3));
    let path = kinds.path("shrinks.bin");
    tokens::write(&path, &[1u16; 100], Width::U16).unwrap();
    let shard = Tokens::open(&path).unwrap();
    fs::write(&path, &good).unwrap();
    let parts = ["shrinks.bin", "the file changed after it was opened: expected 1224 bytes, unmodified, found 1032"];
    kinds.fails("file that shrinks after it was opened", &parts, |_| check::vocabulary(&[shard], 50257));
}
