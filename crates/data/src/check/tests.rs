use super::*;
use crate::tokens;
use std::fs;
use std::path::Path;

#[test]
fn report_counts_documents_and_invalid_ids() {
    let ids = vec![9, 1, 2, 9, 3, 4, 5, 6, 9, 1];
    let report = shard(&Tokens::in_memory("tokens", ids.clone()), 10, 9).unwrap();
    let expected = Report {
        documents: 3,
        starts_with_document: true,
        longest: 5,
        largest: 9,
        invalid: 0,
        first_invalid: Vec::new(),
    };
    assert_eq!(report, expected);
    let report = shard(&Tokens::in_memory("tokens", ids), 5, 5).unwrap();
    assert_eq!((report.documents, report.starts_with_document, report.longest), (1, false, 6));
    assert_eq!((report.invalid, report.largest), (5, 9));
    assert_eq!(report.first_invalid, [(0, 9), (3, 9), (6, 5), (7, 6), (8, 9)]);
    let report = shard(&Tokens::in_memory("tokens", vec![1; 7]), 2, 0).unwrap();
    assert_eq!((report.documents, report.starts_with_document, report.longest), (0, false, 7));
}

/// Documents that cross the chunks of several threads, compared with a plain loop.
#[test]
fn documents_may_cross_chunks() {
    let len = 3 * CHUNK + 17;
    let marks = [5, CHUNK - 1, CHUNK, 3 * CHUNK + 1];
    let mut ids = vec![1; len];
    for at in marks {
        ids[at] = 7;
    }
    ids[2 * CHUNK] = 100;
    let report = shard(&Tokens::in_memory("tokens", ids), 100, 7).unwrap();
    assert_eq!((report.documents, report.longest), (4, 2 * CHUNK + 1));
    assert_eq!(report.first_invalid, [(2 * CHUNK, 100)]);
}

fn file(directory: &Path, name: &str, ids: &[u32], width: Width) -> Tokens {
    let path = directory.join(name);
    tokens::write(&path, ids, width).unwrap();
    Tokens::open(&path).unwrap()
}

#[test]
fn first_invalid_id_is_found_in_files_of_both_widths() {
    let dir = tempfile::tempdir().unwrap();
    for width in [Width::U16, Width::U32] {
        let mut ids = vec![999; 2 * CHUNK + 3];
        let good = file(dir.path(), "a.bin", &ids, width);
        vocabulary(std::slice::from_ref(&good), 1000).unwrap();
        ids[CHUNK + 2] = 1000;
        ids[2 * CHUNK + 1] = 2000;
        let bad = file(dir.path(), "b.bin", &ids, width);
        let message = vocabulary(&[good, bad.clone(), bad], 1000).unwrap_err().to_string();
        let expected = format!("b.bin: token 1000 at position {}: expected ids below 1000", CHUNK + 2);
        assert!(message.contains(&expected), "{message}");
    }
    // Every 16-bit id belongs to a larger vocabulary.
    vocabulary(&[file(dir.path(), "c.bin", &[65535], Width::U16)], 65536).unwrap();
    let wide = file(dir.path(), "d.bin", &[65535, 70000], Width::U32);
    assert!(vocabulary(&[wide], 65536).unwrap_err().to_string().contains("token 70000 at position 1"));
}

#[test]
fn large_data_sets_are_sampled_with_both_ends_of_each_shard() {
    let tokens = |at: usize| {
        let mut ids = vec![1; 10 * CHUNK];
        ids[at] = 5;
        Tokens::in_memory(format!("invalid at {at}"), ids)
    };
    let found = |at, most| vocabulary_of_up_to(&[tokens(at)], 5, most).is_err();
    for at in [0, 5 * CHUNK, 10 * CHUNK - 1] {
        assert!(found(at, 2 * CHUNK), "{at}");
    }
    assert!(!found(4 * CHUNK, 2 * CHUNK));
    assert!(found(4 * CHUNK, 10 * CHUNK));
}

#[test]
fn a_file_that_shrinks_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let shard = file(dir.path(), "a.bin", &[1; 100], Width::U16);
    fs::OpenOptions::new().write(true).open(dir.path().join("a.bin")).unwrap().set_len(1100).unwrap();
    let message = format!("{:#}", vocabulary(&[shard], 5).unwrap_err());
    assert!(message.contains("a.bin") && message.contains("found 1100 bytes"), "{message}");
}
