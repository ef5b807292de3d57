use super::*;
use crate::Tokens;
use crate::documents::{Reason, find};
use std::fs;
use std::io::Write;
use tempfile::TempDir;

fn options(val_fraction: f64, shard_tokens: usize) -> TextOptions {
    TextOptions {
        tokenizer: Tokenizer::gpt2(),
        allow_special: false,
        reading: Reading::default(),
        val_fraction,
        shard_tokens,
        overwrite: false,
        program: "test".into(),
    }
}

fn run(paths: &[PathBuf], out: &Path, options: &TextOptions) -> Result<Summary> {
    write(&find(paths, &[], Some(out))?, out, options)
}

fn read_all(pattern: &Path) -> (usize, Vec<u32>) {
    let shards = Tokens::open_all(&pattern.to_string_lossy()).unwrap();
    let mut all = Vec::new();
    for shard in &shards {
        let start = all.len();
        all.resize(start + shard.len(), 0);
        shard.read(0, &mut all[start..]).unwrap();
    }
    (shards.len(), all)
}

fn train_tokens(out: &Path) -> Vec<u32> {
    read_all(&out.join("train_*.bin")).1
}

fn plain(text: &str) -> Vec<u32> {
    Tokenizer::gpt2().encode(text).unwrap()
}

fn documents(dir: &Path, n: usize) -> Vec<PathBuf> {
    let path = |i| dir.join(format!("{i:03}.txt"));
    for i in 0..n {
        fs::write(path(i), format!("Document number {i}.\nIt ends here.\n")).unwrap();
    }
    (0..n).map(path).collect()
}

/// Returns name and content of each file in a directory.
fn snapshot(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().unwrap().is_file())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect();
    files.sort();
    files
}

#[test]
fn documents_are_delimited_split_and_sharded() {
    let dir = tempfile::tempdir().unwrap();
    let files = documents(dir.path(), 40);
    let out = dir.path().join("out");
    let summary = run(&files, &out, &options(0.1, 100)).unwrap();
    let (train_shards, train) = read_all(&out.join("train_*.bin"));
    let (val_shards, val) = read_all(&out.join("val_*.bin"));
    let amounts = |split: &Split| (split.shards, split.hashes.len(), split.tokens);
    assert_eq!(amounts(&summary.train), (train_shards, train_shards, train.len()));
    assert_eq!(amounts(&summary.val), (val_shards, val_shards, val.len()));
    assert_eq!(train_shards, train.len().div_ceil(100));
    let decode =
        |ids: &[u32]| Tokenizer::gpt2().text(ids).split("<|endoftext|>").skip(1).map(String::from).collect::<Vec<_>>();
    let (train, val) = (decode(&train), decode(&val));
    assert_eq!((train.len(), val.len()), (36, 4));
    assert_eq!(val[0], "Document number 9.\nIt ends here.\n");
    assert_eq!(train[0], "Document number 0.\nIt ends here.\n");
    assert_eq!(train[9], "Document number 10.\nIt ends here.\n");
    assert_eq!(fs::read_dir(&out).unwrap().count(), train_shards + val_shards + 1);
}

#[test]
fn few_documents_are_split_at_their_ends() {
    let dir = tempfile::tempdir().unwrap();
    let files = documents(dir.path(), 3);
    let summary = run(&files[..1], &dir.path().join("one"), &options(0.25, 1000)).unwrap();
    assert_eq!((summary.train.tokens, summary.val.tokens), (9, 2));
    let (_, val) = read_all(&dir.path().join("one/val_*.bin"));
    assert_eq!(Tokenizer::gpt2().text(&val), ".\n");
    let summary = run(&files, &dir.path().join("three"), &options(0.25, 1000)).unwrap();
    assert_eq!((summary.train.tokens, summary.val.tokens), (27, 6));
    let (_, val) = read_all(&dir.path().join("three/val_*.bin"));
    assert_eq!(Tokenizer::gpt2().text(&val), ".\n".repeat(3));
}

#[test]
fn special_tokens_in_the_text_are_ordinary_text_unless_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let files = [("a.txt", "one<|endoftext|>two"), ("b.jsonl", "{\"text\": \"one<|endoftext|>two\"}\n")];
    let ordinary = [&[50256][..], &plain("one<|endoftext|>two")].concat();
    assert_eq!(ordinary.iter().filter(|&&id| id == 50256).count(), 1);
    let special = [&[50256][..], &plain("one"), &[50256], &plain("two")].concat();
    for (name, text) in files {
        let file = dir.path().join(name);
        fs::write(&file, text).unwrap();
        let tokens = |allow_special: bool| {
            let out = dir.path().join(format!("{name}-{allow_special}"));
            let options = TextOptions { allow_special, ..options(0.0, 1000) };
            let summary = run(std::slice::from_ref(&file), &out, &options).unwrap();
            assert_eq!(summary.plain_special, usize::from(!allow_special), "{name}");
            train_tokens(&out)
        };
        assert_eq!((tokens(false), tokens(true)), (ordinary.clone(), special.clone()), "{name}");
    }
}

/// Four documents, and a data set of them.
struct Existing {
    dir: TempDir,
    files: Vec<PathBuf>,
    out: PathBuf,
    before: Vec<(String, Vec<u8>)>,
}

impl Existing {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let files = documents(dir.path(), 4);
        let out = dir.path().join("out");
        run(&files, &out, &options(0.25, 10)).unwrap();
        let before = snapshot(&out);
        Self { dir, files, out, before }
    }
}

#[test]
fn existing_shards_are_replaced_only_with_overwrite() {
    let Existing { dir: _dir, files, out, before } = Existing::new();
    let message = run(&files, &out, &options(0.0, 1000)).unwrap_err().to_string();
    assert!(message.contains("train_000000.bin") && message.contains("--overwrite"), "{message}");
    assert_eq!(snapshot(&out), before);
    run(&files, &out, &TextOptions { overwrite: true, ..options(0.0, 1000) }).unwrap();
    let names: Vec<String> = snapshot(&out).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["dataset.json", "train_000000.bin"]);
}

/// Each error leaves the old data set as it was.
#[test]
fn a_failed_overwrite_keeps_the_old_data_set() {
    let Existing { dir, files, out, before } = Existing::new();
    let overwrite = TextOptions { overwrite: true, ..options(0.0, 10) };
    let fails = |path: &Path, part: &str| {
        let message = format!("{:#}", run(&[files[0].clone(), path.to_owned()], &out, &overwrite).unwrap_err());
        assert!(message.contains(part), "{message}");
        assert_eq!(snapshot(&out), before, "{part}");
        assert_eq!(fs::read_dir(&out).unwrap().count(), before.len(), "{part}");
    };
    let bad = dir.path().join("bad.jsonl");
    fs::write(&bad, format!("{}{{\"text\": 7}}\n", "{\"text\": \"long enough\"}\n".repeat(100_000))).unwrap();
    fails(&bad, "line 100001");
    fails(&dir.path().join("none"), "none");
    let empty = dir.path().join("empty.txt");
    fs::write(&empty, "").unwrap();
    // Without an old data set, no directory is left.
    for name in ["new", "new/a/b"] {
        run(std::slice::from_ref(&empty), &dir.path().join(name), &overwrite).unwrap_err();
        assert!(!dir.path().join("new").exists(), "{name}");
    }
    let message = format!("{:#}", run(&[empty], &out, &overwrite).unwrap_err());
    assert!(message.contains("found none") && message.contains("empty files: 1"), "{message}");
    assert_eq!(snapshot(&out), before);
}

#[test]
fn shards_do_not_depend_on_threads_or_batches() {
    let dir = tempfile::tempdir().unwrap();
    let lines =
        |i: usize| format!("{{\"text\": \"Line {i}, <|endoftext|> \\n and more: {}\"}}\n", "words ".repeat(i % 97));
    fs::write(dir.path().join("a.jsonl"), (0..3000).map(lines).collect::<String>()).unwrap();
    fs::write(dir.path().join("b.txt"), "A long document.\n It goes on. ".repeat(40_000)).unwrap();
    fs::write(dir.path().join("c.txt"), "x".repeat(300_000)).unwrap();
    let found = find(&["a.jsonl", "b.txt", "c.txt"].map(|name| dir.path().join(name)), &[], None).unwrap();
    let small = Sizes { chunk: 1000, batch: 5000, ..SIZES };
    for fraction in [0.0, 0.1, 0.0001] {
        let mut all = Vec::new();
        for (i, (threads, sizes)) in [(1, SIZES), (2, SIZES), (2, small), (3, small)].into_iter().enumerate() {
            let out = dir.path().join(format!("out-{fraction}-{i}"));
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let options = options(fraction, 50_000);
            pool.install(|| write_with(&found, &out, &options, sizes)).unwrap();
            all.push(snapshot(&out));
        }
        assert!(all[0].len() > 3);
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{fraction}");
    }
}

#[test]
fn what_is_not_read_or_not_valid_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("input");
    fs::create_dir_all(input.join(".git")).unwrap();
    fs::write(input.join(".git/config"), "text").unwrap();
    fs::write(input.join("a.txt"), b"valid \xff\xfe and \xe4\xb8 cut").unwrap();
    fs::write(input.join("binary.dat"), b"text\0text").unwrap();
    fs::write(input.join("empty.txt"), "").unwrap();
    std::os::unix::fs::symlink(input.join("a.txt"), input.join("link.txt")).unwrap();
    let out = dir.path().join("out");
    let summary = run(std::slice::from_ref(&input), &out, &options(0.0, 1000)).unwrap();
    for reason in [Reason::VersionControl, Reason::Binary, Reason::Empty, Reason::SymbolicLink] {
        assert_eq!(summary.skipped.count(reason), 1, "{reason}");
    }
    let printed = summary.skipped.to_string();
    for name in [".git", "binary.dat", "empty.txt", "link.txt"] {
        assert!(printed.contains(name), "{printed}");
    }
    assert_eq!(summary.invalid_utf8, [(input.join("a.txt"), 3)]);
    assert_eq!((summary.input.files, summary.input.documents, summary.input.skipped), (1, 1, 4));
    let expected = [&[50256][..], &plain("valid \u{fffd}\u{fffd} and \u{fffd} cut")].concat();
    assert_eq!(train_tokens(&out), expected);
    let dataset = Dataset::read(&out).unwrap().unwrap();
    assert_eq!(dataset.input, summary.input);
    assert_eq!((dataset.tokenizer.name.as_str(), dataset.tokenizer.vocab), ("gpt2", 50257));
}

#[test]
fn a_large_vocabulary_is_stored_in_32_bits() {
    let dir = tempfile::tempdir().unwrap();
    // Llama 3's file format, with enough tokens for ids above 65,535.
    let path = dir.path().join("tokenizer.model");
    let mut file = std::io::BufWriter::new(fs::File::create(&path).unwrap());
    let base64 = |bytes: &[u8]| {
        const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for group in bytes.chunks(3) {
            let [a, b, c] = [0, 1, 2].map(|i| u32::from(group.get(i).copied().unwrap_or(0)));
            let bits = a << 16 | b << 8 | c;
            for i in 0..4 {
                let digit = char::from(DIGITS[(bits >> (18 - 6 * i)) as usize & 63]);
                text.push(if i <= group.len() { digit } else { '=' });
            }
        }
        text
    };
    for id in 0..70_000u32 {
        let token = match id {
            0..=255 => vec![id as u8],
            _ => format!("q{id}").into_bytes(),
        };
        writeln!(file, "{} {id}", base64(&token)).unwrap();
    }
    drop(file);
    let tokenizer = Tokenizer::open(&path).unwrap();
    let text = dir.path().join("a.txt");
    fs::write(&text, "a<|begin_of_text|>").unwrap();
    let begin = tokenizer.document();
    assert!(begin > 65_535);
    let out = dir.path().join("out");
    run(&[text], &out, &TextOptions { tokenizer: tokenizer.clone(), ..options(0.0, 1000) }).unwrap();
    let ordinary = tokenizer.encode("a<|begin_of_text|>").unwrap();
    assert!(!ordinary.contains(&begin));
    assert_eq!(train_tokens(&out), [&[begin][..], &ordinary].concat());
    let bytes = fs::read(out.join("train_000000.bin")).unwrap();
    assert_eq!((bytes.len(), &bytes[..8]), (1024 + 4 * (1 + ordinary.len()), &[0xa1, 0xd9, 0x34, 1, 7, 0, 0, 0][..]));
    assert_eq!(fs::read(out.join("tokenizer.model")).unwrap(), fs::read(&path).unwrap());
    let dataset = Dataset::read(&out).unwrap().unwrap();
    let message = dataset.check_vocab(&out, "--model d12", 50257).unwrap_err().to_string();
    assert!(message.contains("d12") && message.contains("50257") && message.contains("tokenizer.model"), "{message}");
}

#[test]
fn invalid_settings_are_rejected_before_writing() {
    let dir = tempfile::tempdir().unwrap();
    let files = documents(dir.path(), 1);
    let out = dir.path().join("out");
    let fails = |options: &TextOptions, part: &str| {
        let message = run(&files, &out, options).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
        assert!(!out.exists());
    };
    fails(&options(1.0, 10), "--val-fraction 1: expected at least 0 and less than 1");
    fails(&options(0.0, 0), "--shard-tokens 0: expected 1 to 2147483647");
    let separator = Some(String::new());
    let empty = TextOptions { reading: Reading { separator, ..Reading::default() }, ..options(0.0, 10) };
    fails(&empty, "--separator: expected at least one character");
}
