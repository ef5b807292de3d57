//! Comma-separated values.

use crate::files::{gzip, utf16};
use crate::kinds::Kinds;

pub fn run(kinds: &mut Kinds) {
    let mut rejects = |kind: &str, bytes: &[u8], parts: &[&str]| kinds.rejects(kind, "a.csv", bytes, parts);
    let column = "expected a column \"text\", found";
    rejects("missing column", b"id,body\n1,a\n", &["row 1", column, "id, body", "--field"]);
    rejects("no header", b"1,a\n2,b\n", &["row 1", column, "1, a"]);
    rejects("tabs instead of commas", b"id\ttext\n1\ta\n", &["row 1", column]);
    rejects("blank lines only", b"\n\n", &["row 1", column]);
    rejects(
        "duplicate column",
        b"text,id,text\na,1,b\n",
        &["row 1", "expected one column \"text\", found 2", "rename"],
    );
    rejects("short row", b"id,text\n1,a\n2\n", &["row 3, line 3", "expected 2 columns", "found 1", "quotation marks"]);
    rejects("long row", b"id,text\n1,a\n2,b,c\n", &["row 3, line 3", "expected 2 columns", "found 3"]);
    let open = ["line 3: expected a quotation mark that ends the field, found the end of the file; add it"];
    rejects("unterminated quotation mark", b"id,text\n1,a\n2,\"b\n3,c\n", &open);
    rejects(
        "unterminated after an escaped one",
        b"id,text\n1,\"a\"\"\n\"\n2,\"b\"\"",
        &["line 4: expected a quotation mark"],
    );
    rejects(
        "missing quotation mark before a quoted field",
        b"id,text\n1,\"a\n2,b\n3,\"c\"\n",
        &["a.csv, line 4: expected a comma or the end of the row after the quoted field from line 2", "twice"],
    );
    rejects("quotation marks that are not doubled", b"text\n\"a \"b\" c\"\n", &["line 2: expected a comma"]);
    rejects("NUL byte", b"text\na\0\n", &["expected comma-separated values, found a NUL byte", "--format"]);
    rejects("UTF-16", &utf16("text\na\n"), &["expected UTF-8, found a byte order mark of UTF-16", "iconv"]);
    rejects("parquet named .csv", b"PAR1\x15\x04\0\0", &["found a NUL byte"]);
    let open = gzip(b"text\n\"a\n");
    kinds.rejects("unterminated in a compressed file", "a.csv.gz", &open, &["a.csv.gz, line 2: expected a quotation"]);
    let path = kinds.file("header.csv", b"id,text\n");
    kinds.skips("header only", path, &["expected at least one document with text, found none in 1 file"]);
    let path = kinds.file("none.csv", b"");
    kinds.skips("empty file", path, &["empty files: 1", "none.csv"]);
}
