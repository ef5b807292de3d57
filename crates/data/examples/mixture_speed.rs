//! Measures the loader of mixtures on one CPU core: it chooses sources, packs documents, reads a micro-batch from token files and checks
//! the ids. The files are in the page cache.
//!
//!     cargo run --release -p data --example mixture_speed

use anyhow::Result;
use data::Mixture;
use data::loader::Geometry;
use data::mixture::{Packing, Settings, Source};
use data::tokens::{self, Tokens, Width};
use rng::Mt19937;
use std::path::Path;
use std::time::Instant;

/// Ids of the files. The last one begins a document.
const VOCAB: u32 = 50257;

/// Tokens of a file, and files of a source.
const TOKENS: usize = 16 << 20;
const FILES: usize = 2;

/// Sequences of a micro-batch.
const B: usize = 16;

fn main() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut random = Mt19937::new(1);
    println!("three sources of {FILES} files of {TOKENS} tokens, 16-bit ids, micro-batches of {B} sequences");
    for mean in [100, 500, 1000] {
        for source in 0..3 {
            write(&mut random, mean, &directory.path().join(format!("{mean}_{source}")))?;
        }
        for t in [512, 1024, 2048] {
            for packing in [Packing::Stream, Packing::BestFit, Packing::Pad] {
                measure(directory.path(), mean, t, packing)?;
            }
        }
    }
    Ok(())
}

/// Writes the files of a source. The lengths of its documents are exponentially distributed.
fn write(random: &mut Mt19937, mean: usize, path: &Path) -> Result<()> {
    for file in 0..FILES {
        let mut ids: Vec<u16> = (0..TOKENS).map(|_| random.below(VOCAB - 1) as u16).collect();
        let mut at = 0;
        while at < TOKENS {
            ids[at] = (VOCAB - 1) as u16;
            at += 2 + (-(1.0 - random.next_f64()).ln() * mean as f64) as usize;
        }
        tokens::write(&path.with_extension(format!("{file}.bin")), &ids, Width::U16)?;
    }
    Ok(())
}

fn measure(directory: &Path, mean: usize, t: usize, packing: Packing) -> Result<()> {
    let source = |(i, weight): (usize, f64)| {
        let shards = (0..FILES).map(|file| Tokens::open(&directory.join(format!("{mean}_{i}.{file}.bin"))));
        Ok(Source { name: i.to_string(), shards: shards.collect::<Result<_>>()?, weight, max_epochs: None })
    };
    let sources = [0.6, 0.3, 0.1].into_iter().enumerate().map(source).collect::<Result<_>>()?;
    let settings = Settings {
        geometry: Geometry::single(B, t),
        vocab: VOCAB as usize,
        shuffle: Some(1),
        packing,
        separator: Some(VOCAB - 1),
    };
    let start = Instant::now();
    let mut mixture = Mixture::new(sources, settings)?;
    if packing == Packing::BestFit && t == 512 {
        let rate = (3 * TOKENS) as f64 / start.elapsed().as_secs_f64();
        println!("documents of {mean:4} tokens are found at {:.2} billion tokens/s", rate / 1e9);
    }
    let estimate = mixture.estimates()?[0].counts;
    let mut words = vec![0; mixture.layout().words()];
    let batches = 2 * TOKENS / (B * t);
    let start = Instant::now();
    for _ in 0..batches {
        mixture.next(&mut words)?;
    }
    let rate = (batches * B * t) as f64 / start.elapsed().as_secs_f64();
    let total = (estimate.used + estimate.cropped) as f64;
    println!(
        "documents of {mean:4} tokens, T {t:4}, {:8}: {:5.1} million tokens/s; used {:.1} %, cropped {:.1} %, padded {:.1} % of the rows",
        format!("{packing:?}"),
        rate / 1e6,
        100.0 * estimate.used as f64 / total,
        100.0 * estimate.cropped as f64 / total,
        100.0 * estimate.padded as f64 / (estimate.used + estimate.padded) as f64
    );
    Ok(())
}
