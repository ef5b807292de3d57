//! JSON lines.

use crate::files::{gzip, utf16};
use crate::kinds::Kinds;

const GOOD: &str = "{\"text\": \"a good line\", \"id\": 7}\n";

pub fn run(kinds: &mut Kinds) {
    let line = |kinds: &mut Kinds, kind: &str, bad: &[u8], parts: &[&str]| {
        kinds.rejects(kind, "a.jsonl", &[GOOD.as_bytes(), bad].concat(), &[parts, &["line 2"]].concat());
    };
    let fix = "--field";
    line(kinds, "no JSON", b"plain text", &["expected a JSON object, found", "repair or remove the line"]);
    line(kinds, "Python's quotation marks", b"{'text': 'a'}", &["expected a JSON object, found key must be a string"]);
    line(kinds, "array", b"[{\"text\": \"a\"}]", &["expected a JSON object, found an array", "--format"]);
    line(kinds, "string", b"\"text\"", &["expected a JSON object, found a string"]);
    line(kinds, "missing field", b"{\"body\": \"a\", \"id\": 1}", &["expected a field \"text\", found body, id", fix]);
    line(kinds, "no field", b"{}", &["expected a field \"text\", found no field", fix]);
    line(kinds, "number in the field", b"{\"text\": 7}", &["expected a string, found a number", fix]);
    line(kinds, "boolean in the field", b"{\"text\": true}", &["expected a string, found a boolean", fix]);
    line(kinds, "array in the field", b"{\"text\": [\"a\"]}", &["expected a string, found an array", fix]);
    line(kinds, "object in the field", b"{\"text\": {\"a\": \"b\"}}", &["expected a string, found an object", fix]);
    let deep = [&b"{\"text\": "[..], &vec![b'['; 300_000], b"}"].concat();
    line(kinds, "deeply nested value", &deep, &["expected a JSON object, found"]);
    let twice = b"{\"text\": \"a\", \"text\": \"b\"}";
    line(kinds, "duplicate field", twice, &["expected one field \"text\", found several", "remove all but one"]);
    line(kinds, "invalid escape", b"{\"text\": \"\\x\"}", &["invalid escape", "repair or remove the line"]);
    let surrogate = b"{\"text\": \"\\ud800\"}";
    line(
        kinds,
        "lone surrogate",
        surrogate,
        &["field \"text\": expected a valid string, found", "hex escape", "repair"],
    );
    line(
        kinds,
        "unterminated string",
        b"{\"text\": \"a",
        &["expected a JSON object, found EOF while parsing a string"],
    );
    line(kinds, "unterminated object", b"{\"text\": \"a\"", &["found EOF while parsing an object at column 12"]);
    line(kinds, "object on two lines", b"{\n\"text\": \"a\"}", &["found EOF while parsing an object"]);
    line(kinds, "NUL byte", b"{\"text\": \"a\0\"}", &["control character"]);
    line(kinds, "tab in a string", b"{\"text\": \"a\tb\"}", &["control character"]);
    line(
        kinds,
        "two objects on a line",
        b"{\"text\": \"a\"} {\"text\": \"b\"}",
        &["found trailing characters at column 15"],
    );
    line(kinds, "trailing garbage", b"{\"text\": \"a\"},", &["found trailing characters at column 14"]);
    line(kinds, "byte order mark in the middle", b"\xef\xbb\xbf\xef\xbb\xbf{}", &["expected a JSON object, found"]);
    line(kinds, "invalid UTF-8 outside of strings", b"{\xff\"text\": \"a\"}", &["found key must be a string"]);
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
