//! A library of an earlier version.

mod stand_in;

#[test]
fn a_library_that_is_too_old_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = stand_in::build(dir.path(), &["--cfg", "old"]);
    let text = nccl_rs::load_from(&path).unwrap_err().to_string();
    let start = format!("{} is NCCL 2.17.6, expected 2.18.0 or later: `pip install", path.display());
    assert!(text.starts_with(&start), "{text}");
    // The first outcome is kept.
    assert_eq!(nccl_rs::find().unwrap_err().to_string(), text);
}
