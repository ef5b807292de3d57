//! The book builds without warnings and dead links.

use std::path::Path;

#[test]
fn the_book_builds_without_warnings_and_dead_links() {
    let out = tempfile::tempdir().unwrap();
    book::build(out.path(), Some("https://example.org/blob/main")).unwrap();
    assert!(out.path().join("index.html").is_file());
}

#[test]
fn links_between_the_markdown_files_of_the_repository_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    book::check_markdown(&root).unwrap();
}
