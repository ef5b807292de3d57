//! Encoding of a stream of documents, on all cores and in bounded memory.

use anyhow::{Result, anyhow};
use rayon::prelude::*;
use std::sync::mpsc::sync_channel;
use std::thread;
use tokenizer::Tokenizer;

/// Bytes of text that are encoded together. Three batches are in memory at a time.
const BATCH_BYTES: usize = 16 << 20;

/// Receives documents. It fails if the encoder has stopped.
pub type Push<'a> = dyn FnMut(String) -> Result<()> + 'a;

/// Encodes the documents that `read` pushes, and passes the tokens of each to `write`, in order. The document token precedes
/// each document.
///
/// Reading runs on a thread of its own. The results do not depend on the number of threads.
pub fn documents(
    tokenizer: &Tokenizer,
    read: impl FnOnce(&mut Push) -> Result<()> + Send,
    mut write: impl FnMut(&[u32]) -> Result<()>,
) -> Result<()> {
    let (sender, receiver) = sync_channel::<Vec<String>>(1);
    thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut batch = Vec::new();
            let mut size = 0;
            let stopped = |_| anyhow!("the encoder has stopped");
            read(&mut |document| {
                size += document.len();
                batch.push(document);
                if size >= BATCH_BYTES {
                    size = 0;
                    sender.send(std::mem::take(&mut batch)).map_err(stopped)?;
                }
                Ok(())
            })?;
            sender.send(batch).map_err(stopped)
        });
        let encode_all = || {
            // The receiver is moved, so that an error disconnects the reader.
            for batch in receiver {
                let encoded: Vec<Result<Vec<u32>>> =
                    batch.par_iter().map(|document| encode(tokenizer, document)).collect();
                for ids in encoded {
                    write(&ids?)?;
                }
            }
            Ok(())
        };
        let encoded = encode_all();
        let read = reader.join().map_err(|_| anyhow!("the reader of the documents panicked"))?;
        // If encoding failed, the reader fails because of it.
        encoded.and(read)
    })
}

fn encode(tokenizer: &Tokenizer, document: &str) -> Result<Vec<u32>> {
    let mut ids = vec![tokenizer.document()];
    ids.extend(tokenizer.encode(document)?);
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn documents_keep_their_order_for_any_number_of_threads() {
        let document = |i: usize| format!("Document {i}. {}", "to be or not to be ".repeat(i % 7 * 3000));
        let expected: Vec<u32> = (0..700).flat_map(|i| encode(&Tokenizer::gpt2(), &document(i)).unwrap()).collect();
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut found = Vec::new();
            let read = |push: &mut Push| (0..700).try_for_each(|i| push(document(i)));
            let write = |ids: &[u32]| {
                found.extend_from_slice(ids);
                Ok(())
            };
            pool.install(|| documents(&Tokenizer::gpt2(), read, write)).unwrap();
            assert!(found == expected, "{threads} threads");
        }
    }

    #[test]
    fn errors_of_both_sides_end_the_work() {
        let gpt2 = Tokenizer::gpt2();
        let failed = documents(&gpt2, |_| bail!("damaged input"), |_| Ok(())).unwrap_err();
        assert!(format!("{failed:#}").contains("damaged input"), "{failed:#}");
        let endless = |push: &mut Push| loop {
            push("word ".repeat(1 << 20))?;
        };
        let failed = documents(&gpt2, endless, |_| bail!("disk full")).unwrap_err();
        assert!(format!("{failed:#}").contains("disk full"), "{failed:#}");
    }
}
