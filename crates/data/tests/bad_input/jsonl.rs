//! JSON lines.

use crate::files::{gzip, utf16};
use crate::kinds::Kinds;

const GOOD: &str = "{\"text\": \"a good line\", \"id\": 7}\n";

pub fn run(kinds: &mut Kinds) {
    let fix = "--field";
    let deep = [&b"{\"text\": "[..], &vec![b'['; 300_000], b"}"].concat();
    for (kind, bad, parts) in [
        ("no JSON", &b"plain text"[..], &["expected a JSON object, found", "repair or remove the line"][..]),
        ("Python's quotation marks", b"{'text': 'a'}", &["expected a JSON object, found key must be a string"]),
        ("array", b"[{\"text\": \"a\"}]", &["expected a JSON object, found an array", "--format"]),
        ("string", b"\"text\"", &["expected a JSON object, found a string"]),
        ("missing field", b"{\"body\": \"a\", \"id\": 1}", &["expected a field \"text\", found body, id", fix]),
        ("no field", b"{}", &["expected a field \"text\", found none", fix]),
        ("number in the field", b"{\"text\": 7}", &["expected a string, found a number", fix]),
        ("boolean in the field", b"{\"text\": true}", &["expected a string, found a boolean", fix]),
        ("array in the field", b"{\"text\": [\"a\"]}", &["expected a string, found an array", fix]),
        ("object in the field", b"{\"text\": {\"a\": \"b\"}}", &["expected a string, found an object", fix]),
        ("deeply nested value", &deep, &["expected a JSON object, found"]),
        (
            "duplicate field",
            b"{\"text\": \"a\", \"text\": \"b\"}",
            &["expected one field \"text\", found several", "remove all but one"],
        ),
        ("invalid escape", b"{\"text\": \"\\x\"}", &["invalid escape", "repair or remove the line"]),
        (
            "lone surrogate",
            b"{\"text\": \"\\ud800\"}",
            &["field \"text\": expected a valid string, found", "hex escape", "repair"],
        ),
        ("lone surrogate in a name", b"{\"\\udc00\": 1, \"text\": \"a\"}", &["expected a JSON object, found"]),
        ("unterminated string", b"{\"text\": \"a", &["expected a JSON object, found EOF while parsing a string"]),
        ("unterminated object", b"{\"text\": \"a\"", &["found EOF while parsing an object at column 12"]),
        ("object on two lines", b"{\n\"text\": \"a\"}", &["found EOF while parsing an object"]),
        ("NUL byte", b"{\"text\": \"a\0\"}", &["control character"]),
        ("tab in a string", b"{\"text\": \"a\tb\"}", &["control character"]),
        ("two objects on a line", b"{\"text\": \"a\"} {\"text\": \"b\"}", &["found trailing characters at column 15"]),
        ("trailing garbage", b"{\"text\": \"a\"},", &["found trailing characters at column 14"]),
        ("byte order mark in the middle", b"\xef\xbb\xbf\xef\xbb\xbf{}", &["expected a JSON object, found"]),
        ("invalid UTF-8 outside of strings", b"{\xff\"text\": \"a\"}", &["found key must be a string"]),
    ] {
        let parts = [parts, &["line 2"]].concat();
        kinds.rejects(kind, "a.jsonl", &[GOOD.as_bytes(), bad].concat(), &parts);
    }
    kinds.rejects(
        "byte order mark alone on a line",
        "a.jsonl",
        b"\xef\xbb\xbf\n\xef\xbb\xbf{}",
        &["line 2", "found none"],
    );
    kinds.rejects("UTF-16", "a.jsonl", &utf16(GOOD), &["expected UTF-8, found a byte order mark of UTF-16", "iconv"]);
    kinds.rejects("error in a compressed file", "a.jsonl.gz", &gzip(b"{\"text\": 1}"), &["line 1", "found a number"]);
    kinds.rejects("truncated compressed file", "a.jsonl.gz", &gzip(GOOD.as_bytes())[..30], &["cannot decompress"]);
    let nested = b"{\"a\": {\"b\": 1}}";
    let missing = ["line 1", "expected a field \"c\", found b", fix];
    kinds.rejects_field("missing nested field", "a.jsonl", nested, "a.c", &missing);
    kinds.rejects_field(
        "field of a number",
        "a.jsonl",
        nested,
        "a.b.c",
        &["line 1", "expected a JSON object, found a number"],
    );
    let twice = b"{\"a\": {\"b\": \"x\"}, \"a\": {\"b\": \"y\"}}";
    kinds.rejects_field(
        "duplicate outer field",
        "a.jsonl",
        twice,
        "a.b",
        &["line 1", "one field \"a\", found several"],
    );
    let none = ["expected at least one document with text, found none in 1 file"];
    for (kind, bytes) in
        [("only blank lines", &b"\n \n\r\n"[..]), ("only null", b"{\"text\": null}\n{\"text\": \"\"}\n")]
    {
        let path = kinds.file("b.jsonl", bytes);
        kinds.skips(kind, path, &none);
    }
}
