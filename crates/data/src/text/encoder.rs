//! Encodes a stream of documents, on all cores and in bounded memory.
//!
//! A thread reads documents into chunks, the thread pool encodes a batch of chunks, and another thread receives their tokens in
//! order. The tokens do not depend on the number of threads or the size of the batches.

use super::chunks::{Chunk, Chunker, Counts, SIZES, Sizes};
use crate::documents::Sink;
use anyhow::{Result, anyhow};
use rayon::prelude::*;
use std::panic;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, ScopedJoinHandle};
use tokenizer::Tokenizer;

/// The encoding of a chunk.
#[derive(Debug, Default)]
pub struct Encoded {
    pub ids: Vec<u32>,
    /// The positions at which documents begin. The ids before the first continue a document.
    pub starts: Vec<usize>,
    /// Number of special tokens in the text that were encoded as ordinary text.
    plain_special: usize,
}

/// Turns documents into tokens. A token precedes each document.
#[derive(Clone, Copy, Debug)]
pub struct Encoder<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Encode special tokens in the text, such as `<|endoftext|>`, as special tokens instead of ordinary text.
    pub allow_special: bool,
    /// Encode documents without text, instead of leaving them out.
    pub keep_empty: bool,
    pub sizes: Sizes,
}

impl<'a> Encoder<'a> {
    /// Returns an encoder with the rules of llm.c's scripts for named data sets.
    pub fn of_llmc(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, allow_special: false, keep_empty: true, sizes: SIZES }
    }

    /// Encodes the documents that `read` writes into its sink, and passes their tokens to `push`. Returns the result of `read`
    /// and the amount of text.
    pub fn run<R: Send>(
        &self,
        read: impl FnOnce(&mut dyn Sink) -> Result<R> + Send,
        push: impl FnMut(&Encoded) -> Result<()> + Send,
    ) -> Result<(R, Counts)> {
        thread::scope(|scope| {
            let (send_chunks, chunks) = sync_channel(1);
            let (send_tokens, tokens) = sync_channel(1);
            let reader = scope.spawn(move || {
                let mut chunker = Chunker::new(self.tokenizer, self.keep_empty, self.sizes, send_chunks);
                let result = read(&mut chunker)?;
                Ok((result, chunker.finish()?))
            });
            let writer = scope.spawn(|| write_all(tokens, push));
            let encoded = self.encode_all(chunks, &send_tokens);
            drop(send_tokens);
            let (written, read) = (join(writer), join(reader));
            // If the writer or the encoder failed, the reader only reports that they stopped.
            written?;
            let plain_special = encoded?;
            read.map(|(result, counts)| (result, Counts { plain_special, ..counts }))
        })
    }

    /// Encodes batches of chunks and passes them on in order. Returns the number of special tokens that became ordinary text.
    fn encode_all(&self, batches: Receiver<Vec<Chunk>>, send: &SyncSender<Vec<Encoded>>) -> Result<usize> {
        let mut plain_special = 0;
        for batch in batches {
            let encoded = batch.into_par_iter().map(|chunk| self.encode(&chunk)).collect::<Result<Vec<_>>>()?;
            plain_special += encoded.iter().map(|encoded| encoded.plain_special).sum::<usize>();
            if send.send(encoded).is_err() {
                // The writer failed and reports the reason.
                break;
            }
        }
        Ok(plain_special)
    }

    /// Returns the tokens of a chunk.
    fn encode(&self, chunk: &Chunk) -> Result<Encoded> {
        let tokenizer = self.tokenizer;
        let mut encoded = Encoded { ids: Vec::with_capacity(chunk.text.len() / 3), ..Encoded::default() };
        for (begins, text) in chunk.parts() {
            if begins {
                encoded.starts.push(encoded.ids.len());
                encoded.ids.push(tokenizer.document());
            }
            encoded.ids.extend(if self.allow_special {
                tokenizer.encode_with_special(text)?
            } else {
                encoded.plain_special += tokenizer.count_special(text);
                tokenizer.encode(text)?
            });
        }
        // Parts of a tokenizer.json may not be consistent with each other.
        let highest = encoded.ids.iter().max();
        if let Some(id) = highest.filter(|&&id| id as usize >= tokenizer.vocab()) {
            let vocab = tokenizer.vocab();
            return Err(anyhow!("{tokenizer}: expected ids below {vocab}, found {id}; check the tokenizer"));
        }
        Ok(encoded)
    }
}

fn write_all(batches: Receiver<Vec<Encoded>>, mut push: impl FnMut(&Encoded) -> Result<()>) -> Result<()> {
    batches.into_iter().flatten().try_for_each(|encoded| push(&encoded))
}

pub fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    /// Returns the tokens of documents by llm.c's rules, in chunks of `chunk` bytes.
    fn encode(documents: &[&str], chunk: usize) -> (Vec<u32>, Counts) {
        let gpt2 = Tokenizer::gpt2();
        let encoder = Encoder { sizes: Sizes { chunk, batch: 10, uncut: 1000 }, ..Encoder::of_llmc(&gpt2) };
        let mut ids = Vec::new();
        let read = |sink: &mut dyn Sink| {
            documents.iter().try_for_each(|document| {
                sink.text(document)?;
                sink.end()
            })
        };
        let push = |encoded: &Encoded| {
            assert!(encoded.starts.iter().all(|&start| encoded.ids[start] == 50256));
            ids.extend(&encoded.ids);
            Ok(())
        };
        let ((), counts) = encoder.run(read, push).unwrap();
        (ids, counts)
    }

    #[test]
    fn llmc_keeps_documents_without_text_and_special_tokens_as_text() {
        let gpt2 = Tokenizer::gpt2();
        let document = |text: &str| [vec![50256], gpt2.encode(text).unwrap()].concat();
        for documents in [&["", "", "a b c", "", "<|endoftext|> d", ""][..], &["a b c d", ""], &["", "a"]] {
            let expected: Vec<u32> = documents.iter().flat_map(|text| document(text)).collect();
            for chunk in [1, 3, 100] {
                let (ids, counts) = encode(documents, chunk);
                assert_eq!(ids, expected, "{documents:?}, {chunk}");
                assert_eq!(counts.documents + counts.empty, documents.len());
            }
        }
        assert_eq!(encode(&["", ""], 100).0, [50256, 50256]);
    }

    #[test]
    fn errors_of_both_sides_end_the_work() {
        let gpt2 = Tokenizer::gpt2();
        let encoder = Encoder::of_llmc(&gpt2);
        let failed = encoder.run(|_| -> Result<()> { bail!("damaged input") }, |_| Ok(())).unwrap_err();
        assert_eq!(failed.to_string(), "damaged input");
        let word = "word ".repeat(1 << 20);
        let endless = |sink: &mut dyn Sink| -> Result<()> {
            loop {
                sink.text(&word)?;
            }
        };
        let failed = encoder.run(endless, |_| bail!("disk full")).unwrap_err();
        assert_eq!(failed.to_string(), "disk full");
    }
}
