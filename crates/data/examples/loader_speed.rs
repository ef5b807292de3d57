//! Measures the work of the prefetching thread of a rank on one CPU core: it reads a micro-batch from token files, checks the ids, and
//! sorts them for the encoder's backward pass. The files are in the page cache.
//!
//!     cargo run --release -p data --example loader_speed

use anyhow::Result;
use data::Loader;
use data::loader::Geometry;
use data::tokens::{self, Tokens, Width};
use rng::Mt19937;
use std::time::Instant;

/// Ids of the files, fewer than 2^16.
const VOCAB: u32 = 50257;

/// Tokens of a file.
const TOKENS: usize = 32 << 20;

/// Sequences and tokens of a micro-batch.
const B: usize = 16;
const T: usize = 1024;

fn main() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut random = Mt19937::new(1);
    let ids: Vec<u16> = (0..TOKENS).map(|_| random.below(VOCAB) as u16).collect();
    println!("{TOKENS} random ids, micro-batches of {B} x {T}");
    for (width, bytes) in [(Width::U16, 2), (Width::U32, 4)] {
        let path = directory.path().join("train.bin");
        tokens::write(&path, &ids, width)?;
        let mut loader = Loader::new(vec![Tokens::open(&path)?], Geometry::single(B, T), VOCAB as usize, Some(1))?;
        let layout = loader.layout();
        let mut words = vec![0; layout.words()];
        for sorts in [false, true] {
            let start = Instant::now();
            for _ in 0..loader.batches_per_epoch() {
                loader.next(&mut words)?;
                if sorts {
                    layout.sort(&mut words);
                }
            }
            let rate = (loader.batches_per_epoch() * B * T) as f64 / start.elapsed().as_secs_f64();
            let work = if sorts { "read, checked and sorted" } else { "read and checked" };
            println!(
                "{bytes} bytes, {work}: {:.1} million tokens/s, {:.0} MB/s",
                rate / 1e6,
                rate * bytes as f64 / 1e6
            );
        }
    }
    Ok(())
}
