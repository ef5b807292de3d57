//! Conversion of text files to token shards, on all cores.

use super::tokens::{self, Width};
use anyhow::{Context, Result, ensure};
use indicatif::ProgressBar;
use rayon::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;

/// Bytes of text that are read and encoded before their tokens are written.
const BATCH_BYTES: usize = 64 << 20;
/// Minimum size of the chunks of a document that are encoded in parallel.
const CHUNK_BYTES: usize = 256 << 10;

/// Settings of [`write()`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Fraction of the text in the validation split, in [0, 1).
    pub val_fraction: f64,
    /// Tokens per shard. The last shard of a split holds the remaining tokens.
    pub shard_tokens: usize,
    /// Replace existing shards in the output directory.
    pub overwrite: bool,
}

/// The amounts of data read and written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Documents read.
    pub documents: usize,
    /// Bytes of text read.
    pub bytes: usize,
    /// The training split.
    pub train: Split,
    /// The validation split.
    pub val: Split,
}

/// The amount of data written for a split.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Shards written.
    pub shards: usize,
    /// Tokens in all shards.
    pub tokens: usize,
}

/// Returns the files in `paths`. Directories are searched recursively, in sorted order.
///
/// Within directories, only files with one of the `extensions` are returned; an empty list selects all files.
pub fn find(paths: &[PathBuf], extensions: &[String]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        let kind = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
        if kind.is_dir() {
            walk(path, extensions, &mut files)?;
        } else {
            files.push(path.clone());
        }
    }
    ensure!(
        !files.is_empty(),
        "{paths:?}: expected text files{}, found none",
        match extensions {
            [] => String::new(),
            some => format!(" with extension .{}", some.join(" or .")),
        }
    );
    Ok(files)
}

fn walk(directory: &Path, extensions: &[String], files: &mut Vec<PathBuf>) -> Result<()> {
    let context = || format!("cannot list {}", directory.display());
    let mut entries = fs::read_dir(directory)
        .with_context(context)?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<Result<Vec<_>, _>>()
        .with_context(context)?;
    entries.sort();
    for path in entries {
        let has_extension = || path.extension().is_some_and(|e| extensions.iter().any(|x| e == x.as_str()));
        // Symbolic links are skipped, because they could form a cycle.
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            walk(&path, extensions, files)?;
        } else if extensions.is_empty() || has_extension() {
            files.push(path);
        }
    }
    Ok(())
}

/// Tokenizes each file as one document with GPT-2's encoding, and writes `train_NNNNNN.bin` and `val_NNNNNN.bin` into
/// `out`.
///
/// The validation split consists of evenly spaced documents. With fewer than `1 / val_fraction` documents, it consists
/// of the end of each document instead. Invalid UTF-8 becomes U+FFFD.
pub fn write(files: &[PathBuf], out: &Path, options: &Options, progress: &ProgressBar) -> Result<Summary> {
    ensure!(
        (0.0..1.0).contains(&options.val_fraction),
        "--val-fraction {}: expected at least 0 and less than 1",
        options.val_fraction
    );
    ensure!(
        (1..=tokens::MAX_SHARD_TOKENS).contains(&options.shard_tokens),
        "--shard-tokens {}: expected 1 to {}",
        options.shard_tokens,
        tokens::MAX_SHARD_TOKENS
    );
    atomic_file::create_directory(out)?;
    remove_old_shards(out, options.overwrite)?;
    let tokenizer = Tokenizer::gpt2();
    let by_document = files.len() as f64 * options.val_fraction >= 1.0;
    let mut train = ShardWriter::new(out, "train", options.shard_tokens);
    let mut val = ShardWriter::new(out, "val", options.shard_tokens);
    let mut summary = Summary { documents: files.len(), ..Summary::default() };
    let mut next = 0;
    while next < files.len() {
        let mut batch = Vec::new();
        let mut size = 0;
        while next < files.len() && size < BATCH_BYTES {
            let bytes = fs::read(&files[next]).with_context(|| format!("cannot read {}", files[next].display()))?;
            size += bytes.len();
            batch.push(String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()));
            next += 1;
        }
        let first = next - batch.len();
        for (i, document) in encode(&tokenizer, &batch, progress)?.into_iter().enumerate() {
            if !by_document {
                let val_tokens = (document.len() as f64 * options.val_fraction) as usize;
                let (head, tail) = document.split_at(document.len() - val_tokens);
                train.extend(head)?;
                val.extend(tail)?;
            } else if is_validation(first + i, options.val_fraction) {
                val.extend(&document)?;
            } else {
                train.extend(&document)?;
            }
        }
        summary.bytes += size;
    }
    summary.train = train.finish()?;
    summary.val = val.finish()?;
    Ok(summary)
}

/// Returns whether a document belongs to the validation split, which takes `fraction` of the documents, evenly spaced.
fn is_validation(document: usize, fraction: f64) -> bool {
    (document as f64 * fraction).floor() < ((document + 1) as f64 * fraction).floor()
}

/// Returns the tokens of each document, with `<|endoftext|>` first.
fn encode(tokenizer: &Tokenizer, documents: &[String], progress: &ProgressBar) -> Result<Vec<Vec<u32>>> {
    let chunks: Vec<(usize, &str)> = documents
        .iter()
        .enumerate()
        .flat_map(|(i, document)| chunks(document, CHUNK_BYTES).map(move |chunk| (i, chunk)))
        .collect();
    let encoded: Vec<Vec<u32>> = chunks
        .par_iter()
        .map(|(_, chunk)| {
            let ids = tokenizer.encode(chunk)?;
            progress.inc(chunk.len() as u64);
            Ok(ids)
        })
        .collect::<Result<_>>()?;
    let mut tokens = vec![vec![tokenizer.document()]; documents.len()];
    for ((document, _), ids) in chunks.iter().zip(encoded) {
        tokens[*document].extend(ids);
    }
    Ok(tokens)
}

/// Splits text into chunks that encode to the same tokens as the whole text. All chunks but the last have at least
/// `size` bytes.
///
/// A chunk ends after a line break between two non-whitespace characters, because the encoding's pattern always ends a
/// match there.
fn chunks(text: &str, size: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let mut search = size.max(1);
        let end = loop {
            let Some(at) = rest.as_bytes().get(search..).and_then(|b| b.iter().position(|&c| c == b'\n')) else {
                break rest.len();
            };
            let at = search + at;
            let before = rest[..at].chars().next_back();
            let after = rest[at + 1..].chars().next();
            if before.is_some_and(|c| !c.is_whitespace()) && after.is_some_and(|c| !c.is_whitespace()) {
                break at + 1;
            }
            search = at + 1;
        };
        let (chunk, after) = rest.split_at(end);
        rest = after;
        Some(chunk)
    })
}

/// Removes the shards of an earlier run, or fails if there are any and `overwrite` is not set.
fn remove_old_shards(out: &Path, overwrite: bool) -> Result<()> {
    for pattern in ["train_[0-9][0-9][0-9][0-9][0-9][0-9].bin", "val_[0-9][0-9][0-9][0-9][0-9][0-9].bin"] {
        let directory = glob::Pattern::escape(&out.to_string_lossy());
        for old in glob::glob(&format!("{directory}/{pattern}"))? {
            let old = old?;
            ensure!(
                overwrite,
                "{} already exists: expected a directory without shards; use another --out directory, or --overwrite",
                old.display()
            );
            fs::remove_file(&old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
    }
    Ok(())
}

/// Collects the tokens of a split and writes them as shards of `size` tokens.
struct ShardWriter<'a> {
    out: &'a Path,
    split: &'a str,
    size: usize,
    pending: Vec<u32>,
    written: Split,
}

impl<'a> ShardWriter<'a> {
    fn new(out: &'a Path, split: &'a str, size: usize) -> Self {
        Self { out, split, size, pending: Vec::new(), written: Split::default() }
    }

    fn extend(&mut self, mut ids: &[u32]) -> Result<()> {
        while !ids.is_empty() {
            let (head, tail) = ids.split_at(ids.len().min(self.size - self.pending.len()));
            self.pending.extend_from_slice(head);
            ids = tail;
            if self.pending.len() == self.size {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        tokens::write(
            &self.out.join(format!("{}_{:06}.bin", self.split, self.written.shards)),
            &self.pending,
            Width::U16,
        )?;
        self.written.shards += 1;
        self.written.tokens += self.pending.len();
        self.pending.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<Split> {
        if !self.pending.is_empty() {
            self.flush()?;
        }
        Ok(self.written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokens;
    use proptest::prelude::*;

    fn options(val_fraction: f64, shard_tokens: usize) -> Options {
        Options { val_fraction, shard_tokens, overwrite: false }
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

    fn documents(dir: &Path, n: usize) -> Vec<PathBuf> {
        let path = |i| dir.join(format!("{i:03}.txt"));
        for i in 0..n {
            fs::write(path(i), format!("Document number {i}.\nIt ends here.\n")).unwrap();
        }
        (0..n).map(path).collect()
    }

    #[test]
    fn documents_are_delimited_split_and_sharded() {
        let dir = tempfile::tempdir().unwrap();
        let files = documents(dir.path(), 40);
        let out = dir.path().join("out");
        let summary = write(&files, &out, &options(0.1, 100), &ProgressBar::hidden()).unwrap();
        let (train_shards, train) = read_all(&out.join("train_*.bin"));
        let (val_shards, val) = read_all(&out.join("val_*.bin"));
        assert_eq!(summary.train, Split { shards: train_shards, tokens: train.len() });
        assert_eq!(summary.val, Split { shards: val_shards, tokens: val.len() });
        assert_eq!(train_shards, train.len().div_ceil(100));
        let decode = |ids: &[u32]| {
            Tokenizer::gpt2().text(ids).split("<|endoftext|>").skip(1).map(String::from).collect::<Vec<_>>()
        };
        let (train, val) = (decode(&train), decode(&val));
        assert_eq!((train.len(), val.len()), (36, 4));
        assert_eq!(val[0], "Document number 9.\nIt ends here.\n");
        assert_eq!(train[9], "Document number 10.\nIt ends here.\n");
    }

    #[test]
    fn single_document_is_split_at_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let files = documents(dir.path(), 1);
        let summary = write(&files, dir.path(), &options(0.25, 1000), &ProgressBar::hidden()).unwrap();
        assert_eq!((summary.train.tokens, summary.val.tokens), (9, 2));
        let (_, val) = read_all(&dir.path().join("val_*.bin"));
        assert_eq!(Tokenizer::gpt2().text(&val), ".\n");
    }

    #[test]
    fn existing_shards_are_replaced_only_with_overwrite() {
        let dir = tempfile::tempdir().unwrap();
        let files = documents(dir.path(), 4);
        write(&files, dir.path(), &options(0.0, 10), &ProgressBar::hidden()).unwrap();
        let message = write(&files, dir.path(), &options(0.0, 1000), &ProgressBar::hidden()).unwrap_err().to_string();
        assert!(message.contains("train_000000.bin") && message.contains("--overwrite"), "{message}");
        let overwrite = Options { overwrite: true, ..options(0.0, 1000) };
        write(&files, dir.path(), &overwrite, &ProgressBar::hidden()).unwrap();
        assert_eq!(read_all(&dir.path().join("train_*.bin")).0, 1);
    }

    #[test]
    fn find_searches_directories_and_errors_name_missing_paths() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        for name in ["z.rs", "b/a.rs", "b/c.md", "x.bin"] {
            fs::write(dir.path().join(name), "text").unwrap();
        }
        let extensions = ["rs".to_owned(), "md".to_owned()];
        let found = find(&[dir.path().to_owned()], &extensions).unwrap();
        let names: Vec<_> = found.iter().map(|p| p.strip_prefix(dir.path()).unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["b/a.rs", "b/c.md", "z.rs"]);
        let message = format!("{:#}", find(&["/nowhere".into()], &[]).unwrap_err());
        assert!(message.contains("/nowhere"), "{message}");
        let message = find(&[dir.path().to_owned()], &["tex".to_owned()]).unwrap_err().to_string();
        assert!(message.contains(".tex"), "{message}");
    }

    proptest! {
        #[test]
        fn chunks_encode_like_the_whole_text(text in "([a-z0-9é.!' ]{0,4}[ \n\t\r\u{a0}]{0,3}){0,30}", size in 1..20usize) {
            prop_assert_eq!(chunks(&text, size).collect::<String>(), text.clone());
            let encode = |text: &str| Tokenizer::gpt2().encode(text).unwrap();
            let ids: Vec<u32> = chunks(&text, size).flat_map(encode).collect();
            prop_assert_eq!(ids, encode(&text));
        }
    }
}
