//! The error of a library that is too old.

mod mock;

#[test]
fn error_names_a_library_that_is_too_old() {
    let dir = tempfile::tempdir().unwrap();
    let path = mock::build(dir.path(), &["--cfg", "old"]);
    let text = nccl_rs::load_from(&path).unwrap_err().to_string();
    let start = format!("{}: expected NCCL 2.18.0 or later, found 2.17.6; `pip install", path.display());
    assert!(text.starts_with(&start), "{text}");
    // Later calls return the result of the first.
    assert_eq!(nccl_rs::find().unwrap_err().to_string(), text);
}
