//! The listings in the chapters are those of the sources, and the book builds without warnings and dead links.

#[test]
fn the_listings_of_the_chapters_are_those_of_their_sources() {
    book::check_listings().unwrap();
}

#[test]
fn the_book_builds_without_warnings_and_dead_links() {
    let out = tempfile::tempdir().unwrap();
    book::build(out.path(), Some("https://example.org/blob/main")).unwrap();
    assert!(out.path().join("index.html").is_file());
}

#[test]
fn links_in_the_markdown_files_of_the_repository_work() {
    book::check_markdown(&book::repository_root().unwrap()).unwrap();
}
