//! Counts the pieces of documents, to train a tokenizer, and their tokens, to compare tokenizers.

use super::chunks::{self, Chunk, Chunker, Cuts, SIZES, Sizes};
use super::encoder::{Encoded, Encoder, join};
use super::{Enough, Summary, check_separator, read_all};
use crate::documents::{Found, Reading, Sink};
use anyhow::{Result, bail};
use rayon::prelude::*;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use tokenizer::Tokenizer;
use tokenizer::train::{Pieces, Splitter, Table};
use xxhash_rust::xxh3::Xxh3;

/// Memory that training may take, so that the process stays below 2 GB.
const MAX_TRAINING_BYTES: usize = 1300 << 20;

/// Counts the pieces of documents, or of their first `max_bytes` bytes, on all cores.
///
/// The rarest pieces are left out when training would take too much memory. The result does not depend on the number of threads.
pub fn count_pieces(
    found: &Found,
    reading: &Reading,
    splitter: &Splitter,
    max_bytes: Option<usize>,
) -> Result<(Pieces, Summary)> {
    count_pieces_with(found, reading, splitter, max_bytes, (SIZES, MAX_TRAINING_BYTES))
}

fn count_pieces_with(
    found: &Found,
    reading: &Reading,
    splitter: &Splitter,
    max_bytes: Option<usize>,
    (sizes, max_training_bytes): (Sizes, usize),
) -> Result<(Pieces, Summary)> {
    check_separator(reading)?;
    let cuts: &dyn Cuts = splitter;
    thread::scope(|scope| {
        let (send, batches) = sync_channel(1);
        let reader = scope.spawn(move || {
            let mut chunker = Chunker::new(cuts, false, sizes, send);
            let mut sample = Sample { sink: &mut chunker, left: max_bytes.unwrap_or(usize::MAX), in_document: false };
            let summary = read_all(found, reading, "counting words", &mut sample)?;
            Ok((summary, chunker.finish()?))
        });
        let counted = count_batches(batches, splitter, max_training_bytes);
        let read: Result<_> = join(reader);
        // If the counting failed, the reader only reports that it stopped.
        let pieces = counted?;
        let (mut summary, counts) = read?;
        summary.add(&counts)?;
        Ok((pieces, summary))
    })
}

fn count_batches(batches: Receiver<Vec<Chunk>>, splitter: &Splitter, max_training_bytes: usize) -> Result<Pieces> {
    let mut pieces = Pieces::default();
    for batch in batches {
        batch.into_par_iter().try_for_each_init(Table::default, |table, chunk| {
            for (_, text) in chunk.parts() {
                splitter.split(text, |piece| table.add(piece.as_bytes(), 1))?;
            }
            pieces.add(table);
            anyhow::Ok(())
        })?;
        // Batches depend on the documents only, and so does what is left out.
        pieces.limit(max_training_bytes);
    }
    Ok(pieces)
}

/// Passes on the first `left` bytes of the documents, and then ends the reading.
struct Sample<'a> {
    sink: &'a mut dyn Sink,
    left: usize,
    in_document: bool,
}

impl Sink for Sample<'_> {
    fn text(&mut self, text: &str) -> Result<()> {
        let head = &text[..text.floor_char_boundary(self.left)];
        self.in_document |= !head.is_empty();
        self.left -= head.len();
        self.sink.text(head)?;
        if head.len() < text.len() {
            if self.in_document {
                self.sink.end()?;
            }
            bail!(Enough);
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.in_document = false;
        self.sink.end()
    }
}

/// The tokens of some documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Number of tokens, without those that precede documents.
    pub tokens: usize,
    /// Bytes of text.
    pub bytes: usize,
    /// Whether the tokens decode to the text.
    pub is_exact: bool,
}

/// Encodes documents and counts their tokens, on all cores.
pub fn count_tokens(found: &Found, reading: &Reading, tokenizer: &Tokenizer) -> Result<Usage> {
    check_separator(reading)?;
    let encoder = Encoder { tokenizer, allow_special: false, keep_empty: false, sizes: SIZES };
    let (mut tokens, mut decoded) = (0, Xxh3::new());
    let push = |encoded: &Encoded| {
        for (begins, range) in chunks::parts(&encoded.starts, encoded.ids.len()) {
            // A token precedes the document.
            let ids = &encoded.ids[range][usize::from(begins)..];
            tokens += ids.len();
            decoded.update(&tokenizer.decode(ids));
        }
        Ok(())
    };
    let read = |sink: &mut dyn Sink| {
        let mut hashing = Hashing { sink, hash: Xxh3::new() };
        let summary = read_all(found, reading, "encoding", &mut hashing)?;
        Ok((summary, hashing.hash.digest()))
    };
    let ((mut summary, hash), counts) = encoder.run(read, push)?;
    summary.add(&counts)?;
    Ok(Usage { tokens, bytes: summary.input.bytes, is_exact: decoded.digest() == hash })
}

/// Passes on documents and computes the hash of their text.
struct Hashing<'a> {
    sink: &'a mut dyn Sink,
    hash: Xxh3,
}

impl Sink for Hashing<'_> {
    fn text(&mut self, text: &str) -> Result<()> {
        self.hash.update(text.as_bytes());
        self.sink.text(text)
    }

    fn end(&mut self) -> Result<()> {
        self.sink.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::find;
    use std::fs;
    use std::path::PathBuf;
    use tempfile::TempDir;
    use tokenizer::train::{Settings, train};

    /// Writes documents as lines of a JSON lines file.
    fn written(documents: &[&str]) -> (TempDir, Found) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("documents.jsonl");
        let lines: Vec<String> = documents.iter().map(|text| serde_json::json!({ "text": text }).to_string()).collect();
        fs::write(&path, lines.join("\n")).unwrap();
        (directory, find(&[path], &[], None).unwrap())
    }

    fn sizes(chunk: usize) -> Sizes {
        Sizes { chunk, batch: 4 * chunk, uncut: 1 << 20 }
    }

    fn counted(found: &Found, max_bytes: Option<usize>, chunk: usize) -> (Pieces, Summary) {
        let splitter = Splitter::new("gpt4").unwrap();
        count_pieces_with(found, &Reading::default(), &splitter, max_bytes, (sizes(chunk), usize::MAX)).unwrap()
    }

    /// Returns the `tokenizer.json` of a training.
    fn trained(pieces: Pieces) -> String {
        let settings = Settings { vocab: 400, special: vec!["<|endoftext|>".into()], min_frequency: 2 };
        train(pieces, &Splitter::new("gpt4").unwrap(), &settings, &mut || ()).unwrap().json().unwrap()
    }

    const DOCUMENTS: [&str; 4] = [include_str!("mod.rs"), include_str!("chunks.rs"), "", "née café naïve\r\n 12345"];

    #[test]
    fn merges_do_not_depend_on_the_chunks() {
        let (_directory, found) = written(&DOCUMENTS);
        let (pieces, summary) = counted(&found, None, 1 << 20);
        assert_eq!((summary.input.documents, summary.input.empty_documents, summary.input.files), (3, 1, 1));
        assert_eq!(summary.input.bytes, DOCUMENTS.iter().map(|text| text.len()).sum::<usize>());
        let expected = trained(pieces);
        for chunk in [1, 100, 5000] {
            assert_eq!(trained(counted(&found, None, chunk).0), expected, "{chunk}");
        }
    }

    #[test]
    fn a_sample_has_the_first_bytes() {
        let (_directory, found) = written(&["ab é", "cd", "ef"]);
        let sample = |max_bytes| {
            let (mut pieces, summary) = counted(&found, Some(max_bytes), 100);
            (summary.input.documents, summary.input.bytes, pieces.len())
        };
        // Four bytes end inside é.
        assert_eq!([1, 3, 4, 5, 6].map(sample), [(1, 1, 1), (1, 3, 2), (1, 3, 2), (1, 5, 2), (2, 6, 3)]);
        assert_eq!([8, 9, 100].map(sample), [(3, 8, 4), (3, 9, 4), (3, 9, 4)]);
    }

    #[test]
    fn what_is_left_out_does_not_depend_on_the_threads() {
        let (_directory, found) = written(&DOCUMENTS);
        let splitter = Splitter::new("gpt4").unwrap();
        let limited = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let limits = (sizes(300), 8000);
            let (mut pieces, _) =
                pool.install(|| count_pieces_with(&found, &Reading::default(), &splitter, None, limits)).unwrap();
            (pieces.len(), pieces.removed(), trained(pieces))
        };
        let one = limited(1);
        assert!(one.1 > 0);
        assert_eq!(limited(4), one);
    }

    #[test]
    fn expressions_that_match_nothing_end_the_reading() {
        let (_directory, found) = written(&["a Q"]);
        let error = count_pieces(&found, &Reading::default(), &Splitter::new("(?=Q)").unwrap(), None).unwrap_err();
        assert!(error.to_string().contains("found an empty match"), "{error}");
        let (_directory, found) = written(&["", ""]);
        let error = count_pieces(&found, &Reading::default(), &Splitter::new("gpt2").unwrap(), None).unwrap_err();
        assert!(error.to_string().contains("expected at least one document with text"), "{error}");
    }

    #[test]
    fn tokens_are_counted_without_those_between_documents() {
        let (_directory, found) = written(&["Hello, world!", "né", ""]);
        let usage = |tokenizer: &Tokenizer| count_tokens(&found, &Reading::default(), tokenizer).unwrap();
        assert_eq!(usage(&Tokenizer::bytes()), Usage { tokens: 16, bytes: 16, is_exact: true });
        assert_eq!(usage(&Tokenizer::gpt2()).tokens, 6);
        let none = find(&[PathBuf::from("/dev/null")], &[], None).unwrap();
        assert!(count_tokens(&none, &Reading::default(), &Tokenizer::gpt2()).is_err());
    }
}
