//! The matrix products' algorithms that were found fastest, kept between runs: one file for each GPU model, architecture
//! of the kernels, driver, version of cuBLASLt and number of tiles that kernels have, in the user's cache directory.

use crate::atomic;
use crate::engine::{Choice, Result};
use anyhow::Context;
use cublaslt::Element;
use cuda_driver::Gpu;
use gpu::matmul::launch::Size;
use half::bf16;
use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;

pub struct Cache {
    /// GPU model, the kernels' architecture and versions that what is known is valid for.
    machine: String,
    /// `None` where the user has no cache directory.
    path: Option<PathBuf>,
}

impl Cache {
    pub fn of(gpu: &Gpu, architecture: &str) -> Result<Self> {
        let (_, library) = cublaslt::find()?;
        let (major, minor) = cuda_driver::driver_version()?;
        let model = gpu.info().name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        let machine = format!("{model}-{architecture}-driver-{major}.{minor}-cublaslt-{library}");
        // Choices of a checkpoint stay valid with more tiles; they are only no longer known to be the fastest.
        let name = format!("{machine}-tiles-{}.json", Size::ALL.len());
        let path = dirs::cache_dir().map(|cache| cache.join("llm-rs/products").join(name));
        Ok(Self { machine, path })
    }

    pub fn machine(&self) -> &str {
        &self.machine
    }

    /// What is known. A file that is not there or not whole is as good as none: it can be made again.
    pub fn load(&self) -> Vec<Choice> {
        let text = self.path.as_ref().and_then(|path| fs::read(path).ok());
        text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    /// Adds to the file what it lacks; what another run has written meanwhile stays.
    pub fn save(&self, choices: &[Choice]) -> Result<()> {
        let path = self.path.as_ref().context("there is no cache directory: neither XDG_CACHE_HOME nor HOME is set")?;
        let key = |choice: &Choice| (choice.library.problem, choice.library.alignments);
        let mut all: HashMap<_, _> = choices.iter().map(|choice| (key(choice), *choice)).collect();
        all.extend(self.load().iter().map(|choice| (key(choice), *choice)));
        let all: Vec<_> = all.into_values().collect();
        atomic::create_directory(path.parent().expect("the name was joined to a directory"))?;
        atomic::write(path, |file| Ok(file.write_all(&serde_json::to_vec(&all)?)?))
    }
}

/// Numbers in ±1 of this type, as bytes.
pub fn noise(element: Element, bytes: usize) -> Vec<u8> {
    let size = if element == Element::Bf16 { 2 } else { 4 };
    let number = |i: usize| gpu::noise::squirrel5(i as u32, 0) as f32 / u32::MAX as f32 * 2.0 - 1.0;
    (0..bytes / size)
        .flat_map(|i| {
            let bits = if size == 2 { u32::from(bf16::from_f32(number(i)).to_bits()) } else { number(i).to_bits() };
            bits.to_le_bytes().into_iter().take(size)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::KernelTiling;
    use cublaslt::sys::MatmulAlgo;
    use cublaslt::{Epilogue, Problem};

    fn choice(m: usize, algo: u64) -> Choice {
        let problem = Problem {
            m,
            n: 32,
            k: 16,
            transpose_a: true,
            transpose_b: false,
            element: Element::Bf16,
            epilogue: Epilogue::Bias,
            accumulate: false,
            output: None,
        };
        let library = cublaslt::Choice { problem, alignments: [256, 16, 256, 64, 0], algo: MatmulAlgo([algo; 8]) };
        Choice {
            library,
            kernel: (algo == 1).then_some(KernelTiling { rows: 256, columns: 192, splits: 5 }),
            kernel_wins: algo == 1,
        }
    }

    #[test]
    fn choices_are_kept_and_the_first_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let algorithms = Cache { machine: String::new(), path: Some(dir.path().join("deep/er/gpu.json")) };
        assert_eq!(algorithms.load(), []);
        algorithms.save(&[choice(64, 1)]).unwrap();
        // Two runs that tune the same product must compute alike afterwards.
        algorithms.save(&[choice(64, 2), choice(128, u64::MAX)]).unwrap();
        let mut known = algorithms.load();
        known.sort_by_key(|choice| choice.library.problem.m);
        assert_eq!(known, [choice(64, 1), choice(128, u64::MAX)]);
        fs::write(algorithms.path.as_ref().unwrap(), "[{\"problem\":").unwrap();
        assert_eq!(algorithms.load(), []);
    }

    #[test]
    fn noise_is_small_numbers_of_either_sign() {
        let bytes = noise(Element::Bf16, 4096);
        let numbers: Vec<_> = bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        assert!(numbers.iter().all(|x| x.abs() <= 1.0));
        let negative = numbers.iter().filter(|x| **x < 0.0).count();
        assert!((900..1150).contains(&negative), "{negative} of {}", numbers.len());
        assert_eq!(noise(Element::F32, 10).len(), 8);
    }
}
