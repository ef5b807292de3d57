use super::*;
use crate::tests::small_json;
use std::fs;

fn error(search: Search) -> String {
    format!("{:#}", search.find().unwrap_err())
}

#[test]
fn the_order_is_flag_model_data_and_vocabulary_size() {
    let (directory, path) = small_json();
    let (small, bytes, gpt2) = (Tokenizer::open(&path).unwrap(), Tokenizer::bytes(), Tokenizer::gpt2());
    let empty = tempfile::tempdir().unwrap();
    let found = |search: Search| {
        let Found { tokenizer, is_stated, note } = search.find().unwrap();
        assert_eq!(note, None);
        (tokenizer, is_stated)
    };
    let of_small = (directory.path(), &small.identity());
    let all = Search { named: Some(&small), model: Some(directory.path()), data: Some(of_small), vocab: 50257 };
    assert_eq!(found(all), (Some(small.clone()), true));
    let named = Search { named: Some(&bytes), model: Some(directory.path()), data: None, vocab: 50257 };
    assert_eq!(found(named), (Some(bytes.clone()), true));
    assert_eq!(found(Search { named: None, ..named }), (Some(small.clone()), true));
    let of_data = Search { model: Some(empty.path()), data: Some(of_small), vocab: 50257, ..Search::default() };
    assert_eq!(found(of_data), (Some(small), true));
    let by_size = |vocab| found(Search { model: Some(empty.path()), vocab, ..Search::default() });
    assert_eq!(by_size(50257), (Some(gpt2), false));
    assert_eq!(by_size(256), (Some(bytes), false));
    assert_eq!(by_size(300), (None, false));
    assert_eq!(found(Search { vocab: 256, ..Search::default() }), (Some(Tokenizer::bytes()), false));
}

#[test]
fn different_and_large_tokenizers_are_errors_that_name_both() {
    let (directory, path) = small_json();
    let (small, gpt2) = (Tokenizer::open(&path).unwrap().identity(), Tokenizer::gpt2());
    let named = Search { named: Some(&gpt2), vocab: 300, ..Search::default() };
    let expected =
        "--tokenizer: expected a tokenizer with at most 300 ids, the vocabulary of the model, found gpt2 (50257 tokens";
    assert!(error(named).starts_with(expected), "{}", error(named));
    let model = Search { model: Some(directory.path()), vocab: 258, ..Search::default() };
    let message = error(model);
    assert!(message.contains(&format!("the model in {}", directory.path().display())), "{message}");
    assert!(message.contains("at most 258 ids") && message.contains(&small.to_string()), "{message}");
    // Both have fewer ids than the model.
    let data = Path::new("shards");
    let different = Search { data: Some((data, &gpt2.identity())), vocab: 60000, ..model };
    let message = error(different);
    let expected = format!("shards: expected tokens of {small}, the tokenizer of the model in ");
    assert!(message.starts_with(&expected) && message.contains("found tokens of gpt2 (50257 tokens"), "{message}");
    let reverse = Search { named: Some(&gpt2), data: Some((data, &small)), vocab: 60000, ..Search::default() };
    let message = error(reverse);
    let expected = format!("shards: expected tokens of {}, the tokenizer of --tokenizer", gpt2.identity());
    assert!(message.starts_with(&expected) && message.contains(&format!("found tokens of {small}")), "{message}");
    // The same ids with another text.
    let other = Identity { fingerprint: "0".repeat(16), ..gpt2.identity() };
    let same_size = Search { named: Some(&gpt2), data: Some((data, &other)), vocab: 50257, ..Search::default() };
    assert!(error(same_size).contains("0000000000000000"));
}

#[test]
fn a_tokenizer_that_cannot_be_opened_is_not_replaced_by_the_built_in_one() {
    let directory = tempfile::tempdir().unwrap();
    let unknown = |search: Search, part: &str| {
        let Found { tokenizer, is_stated, note } = search.find().unwrap();
        assert_eq!((tokenizer, is_stated), (None, false));
        let note = note.unwrap();
        assert!(note.starts_with("the tokenizer is unknown: ") && note.contains(part), "{note}");
    };
    let lost = Identity { name: "lost.json".into(), vocab: 50257, fingerprint: "0".into() };
    let data = Search { data: Some((directory.path(), &lost)), vocab: 50257, ..Search::default() };
    unknown(data, "expected the tokenizer lost.json (50257 tokens, hash 0)");
    fs::write(directory.path().join(JSON), "{}").unwrap();
    let model = Search { model: Some(directory.path()), vocab: 50257, ..Search::default() };
    unknown(model, "not a valid tokenizer.json");
    // The data may still name it.
    let gpt2 = Tokenizer::gpt2().identity();
    let found = Search { data: Some((directory.path(), &gpt2)), ..model }.find().unwrap();
    assert_eq!((found.tokenizer, found.is_stated), (Some(Tokenizer::gpt2()), true));
}

#[test]
fn written_tokenizers_are_found_again() {
    let (_keep, path) = small_json();
    let small = Tokenizer::open(&path).unwrap();
    for tokenizer in [Tokenizer::gpt2(), Tokenizer::bytes(), small.clone()] {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(in_directory(directory.path()).unwrap(), None);
        write(&tokenizer, directory.path()).unwrap();
        assert_eq!(in_directory(directory.path()).unwrap(), Some(tokenizer.clone()));
        let copy = fs::read(directory.path().join(JSON)).ok();
        assert_eq!(copy, tokenizer.file().map(|file| file.bytes.clone()));
    }
    // The identity decides, not the file of an earlier run.
    let directory = tempfile::tempdir().unwrap();
    write(&small, directory.path()).unwrap();
    write(&Tokenizer::gpt2(), directory.path()).unwrap();
    assert_eq!(in_directory(directory.path()).unwrap(), Some(Tokenizer::gpt2()));
}

#[test]
fn a_missing_or_different_file_is_an_error_that_names_both() {
    let (source, path) = small_json();
    let small = Tokenizer::open(&path).unwrap();
    let directory = tempfile::tempdir().unwrap();
    write(&small, directory.path()).unwrap();
    let other = fs::read_to_string(&path).unwrap().replace("<|pad|>", "<|end|>");
    fs::write(directory.path().join(JSON), &other).unwrap();
    // The original still exists.
    assert_eq!(in_directory(directory.path()).unwrap(), Some(small.clone()));
    fs::write(&path, other).unwrap();
    let error = || format!("{:#}", in_directory(directory.path()).unwrap_err());
    let name = directory.path().display().to_string();
    let expected = format!("{name}: expected the tokenizer {} as tokenizer.json or", small.identity());
    let found = Tokenizer::open(&path).unwrap().identity().fingerprint;
    let message = error();
    assert!(message.starts_with(&expected) && message.contains(&found), "{message}");
    drop(source);
    fs::write(directory.path().join(JSON), "{}").unwrap();
    assert!(error().contains("not a valid tokenizer.json"));
    fs::remove_file(directory.path().join(JSON)).unwrap();
    assert!(error().ends_with("tokenizer.model, found none; copy the file there"));
    fs::write(directory.path().join(IDENTITY), "{}").unwrap();
    assert!(error().contains("tokenizer_identity.json: expected name, vocab and fingerprint of a tokenizer"));
}
