//! The autotuner's choices, kept between runs: one file for each GPU model, driver, cuBLASLt version and build of the kernels, in the user's
//! cache directory.

use crate::gemm::GemmChoice;
use crate::{Result, StepKind};
use anyhow::Context;
use cuda_driver::Gpu;
use std::collections::HashMap;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::io::Write;
use std::path::PathBuf;

/// The cache file of this machine.
pub struct GemmCache {
    machine: String,
    /// `None` if the user has no cache directory.
    path: Option<PathBuf>,
}

impl GemmCache {
    /// Returns the cache for a GPU and the kernels' architecture and [digest].
    pub fn new(gpu: &Gpu, architecture: &str, kernels: u64) -> Result<Self> {
        let (_, library) = cublaslt::find()?;
        let (major, minor) = cuda_driver::driver_version()?;
        let model = gpu.info().name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        let machine = format!("{model}-{architecture}-driver-{major}.{minor}-cublaslt-{library}");
        // A checkpoint's choices stay valid when the kernels change; they are only no longer known to be the fastest.
        let name = format!("{machine}-kernels-{kernels:016x}.json");
        let path = dirs::cache_dir().map(|cache| cache.join("llm-rs/gemms").join(name));
        Ok(Self { machine, path })
    }

    /// Returns the GPU model, the kernels' architecture and the versions for which the choices are valid.
    pub fn machine(&self) -> &str {
        &self.machine
    }

    /// Returns the stored choices; none if the file is missing or damaged, because they can be measured again.
    pub fn load(&self) -> Vec<GemmChoice> {
        let text = self.path.as_ref().and_then(|path| fs::read(path).ok());
        text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    /// Returns the fastest kind of the generation step with this digest, if it has been measured.
    pub fn step_kind(&self, step: u64) -> Option<StepKind> {
        self.load_steps().get(&step).copied()
    }

    /// Stores the fastest kind of a generation step. A choice that another run has stored meanwhile stays.
    pub fn save_step(&self, step: u64, kind: StepKind) -> Result<()> {
        let path = self.steps_path().context("no cache directory: set XDG_CACHE_HOME or HOME")?;
        let mut steps = self.load_steps();
        steps.entry(step).or_insert(kind);
        atomic_file::create_directory(path.parent().context("the cache file has no directory")?)?;
        atomic_file::write(&path, |file| Ok(file.write_all(&serde_json::to_vec(&steps)?)?))
    }

    fn load_steps(&self) -> HashMap<u64, StepKind> {
        let text = self.steps_path().and_then(|path| fs::read(path).ok());
        text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    fn steps_path(&self) -> Option<PathBuf> {
        self.path.as_ref().map(|path| path.with_extension("steps.json"))
    }

    /// Adds choices that the file lacks. A choice that another run has stored meanwhile stays.
    pub fn save(&self, choices: &[GemmChoice]) -> Result<()> {
        let path = self.path.as_ref().context("no cache directory: set XDG_CACHE_HOME or HOME")?;
        let mut all: HashMap<_, _> = choices.iter().map(|choice| (choice.key(), *choice)).collect();
        all.extend(self.load().iter().map(|choice| (choice.key(), *choice)));
        let all: Vec<_> = all.into_values().collect();
        atomic_file::create_directory(path.parent().context("the cache file has no directory")?)?;
        atomic_file::write(path, |file| Ok(file.write_all(&serde_json::to_vec(&all)?)?))
    }
}

/// Returns a digest, which takes 8 ms for the kernels' 12 MB of code.
pub fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::{Batching, Gemm, GemmEpilogue, GemmLayout, GemmPrecision, KernelConfig};
    use cublaslt::sys::MatmulAlgo;

    fn choice(n: usize, algo: u64) -> GemmChoice {
        let gemm = Gemm {
            m: 32,
            n,
            k: 16,
            layout: GemmLayout::Nt,
            precision: GemmPrecision::Bf16,
            batching: Batching::One,
            epilogue: GemmEpilogue::BIAS,
        };
        GemmChoice {
            gemm,
            alignments: [256, 16, 256, 64, 0],
            algo: MatmulAlgo([algo; 8]),
            kernel: (algo == 1).then_some(KernelConfig { tile_m: 256, tile_n: 192, split_k: 5 }),
            kernel_wins: algo == 1,
        }
    }

    #[test]
    fn stored_choices_are_read_back_and_the_first_one_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let cache = GemmCache { machine: String::new(), path: Some(dir.path().join("a/b/gpu.json")) };
        assert_eq!(cache.load(), []);
        cache.save(&[choice(64, 1)]).unwrap();
        // Two runs that tune the same GEMM must compute the same bits afterwards.
        cache.save(&[choice(64, 2), choice(128, u64::MAX)]).unwrap();
        let mut known = cache.load();
        known.sort_by_key(|choice| choice.gemm.n);
        assert_eq!(known, [choice(64, 1), choice(128, u64::MAX)]);
        fs::write(cache.path.as_ref().unwrap(), "[{\"problem\":").unwrap();
        assert_eq!(cache.load(), []);
    }
}
