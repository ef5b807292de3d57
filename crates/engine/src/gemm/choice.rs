//! The algorithms that the autotuner chose, as checkpoints and the cache store them.

use super::{Alignments, Gemm, GemmKey, cublaslt as translation};
use cublaslt::sys::MatmulAlgo;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Shape of a wgmma kernel's output tile, and the number of parts that K is split into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelConfig {
    /// Rows of a tile.
    #[serde(rename = "rows", default = "KernelConfig::default_rows")]
    pub tile_m: u32,
    /// Columns of a tile.
    #[serde(rename = "kernel")]
    pub tile_n: u32,
    /// Parts of K, whose sums are added in order.
    #[serde(rename = "splits", default = "KernelConfig::default_split_k")]
    pub split_k: u32,
}

impl KernelConfig {
    /// Rows of all tiles when only columns were stored.
    fn default_rows() -> u32 {
        128
    }

    fn default_split_k() -> u32 {
        1
    }
}

impl fmt::Display for KernelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.tile_m, self.tile_n)?;
        if self.split_k > 1 { write!(f, " split-k {}", self.split_k) } else { Ok(()) }
    }
}

/// The algorithm of a GEMM. Valid for one GPU model, driver and version of cuBLASLt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct Choice {
    /// The GEMM.
    pub gemm: Gemm,
    /// Alignments of its operands.
    pub alignments: Alignments,
    /// cuBLASLt's algorithm for the library part.
    pub algo: MatmulAlgo,
    /// The fastest wgmma kernel, if one computes this GEMM.
    pub kernel: Option<KernelConfig>,
    /// Whether the kernel is faster than cuBLASLt.
    pub kernel_wins: bool,
}

impl Choice {
    /// Returns the key of the GEMM.
    pub fn key(&self) -> GemmKey {
        (self.gemm, self.alignments)
    }
}

/// The stored form: cuBLASLt's problem, as in every checkpoint since version 0.1.
#[derive(Serialize, Deserialize)]
struct Stored {
    #[serde(flatten)]
    library: cublaslt::Choice,
    #[serde(flatten)]
    kernel: Option<KernelConfig>,
    #[serde(default)]
    kernel_wins: bool,
}

impl From<Choice> for Stored {
    fn from(choice: Choice) -> Self {
        let Choice { gemm, alignments, algo, kernel, kernel_wins } = choice;
        let problem = translation::stored_problem(&gemm);
        Self { library: cublaslt::Choice { problem, alignments, algo }, kernel, kernel_wins }
    }
}

impl TryFrom<Stored> for Choice {
    type Error = String;

    fn try_from(stored: Stored) -> Result<Self, String> {
        let Stored { library: cublaslt::Choice { problem, alignments, algo }, kernel, kernel_wins } = stored;
        let gemm = translation::gemm(&problem).ok_or_else(|| format!("unknown GEMM {problem:?}"))?;
        Ok(Self { gemm, alignments, algo, kernel, kernel_wins })
    }
}

/// The algorithms of all GEMMs of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Algorithms {
    /// GPU and versions for which these are valid.
    pub machine: String,
    /// One entry for each GEMM.
    pub choices: Vec<Choice>,
}

/// Measured times of one GEMM, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The GEMM.
    pub gemm: Gemm,
    /// Number of cuBLASLt's algorithms that were timed.
    pub candidates: usize,
    /// cuBLASLt's own first choice.
    pub library_first: f32,
    /// cuBLASLt's fastest algorithm, with the kernels for what it lacks.
    pub library: f32,
    /// The fastest wgmma kernel, if one computes this GEMM.
    pub kernel: Option<(KernelConfig, f32)>,
    /// A wgmma kernel for a part of the GEMM with the kernels for the rest, if that kernel beats cuBLASLt.
    pub unfused: Option<f32>,
}

impl Timing {
    /// Reports whether the wgmma kernel is the fastest, by more than the measurement noise.
    pub fn kernel_wins(&self) -> bool {
        self.kernel.is_some_and(|(_, milliseconds)| {
            let beats_unfused = self.unfused.is_none_or(|unfused| milliseconds < unfused);
            milliseconds < self.library * cublaslt::MARGIN && beats_unfused
        })
    }
}

/// The result of an autotuning pass.
#[derive(Clone, Debug, Default)]
pub struct Tuning {
    /// One entry for each GEMM that was timed.
    pub timings: Vec<Timing>,
    /// Duration of the pass.
    pub seconds: f64,
    /// The reason why the result could not be cached.
    pub cache_error: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::{GemmEpilogue, GemmLayout, GemmPrecision};

    const GEMM: Gemm = Gemm {
        m: 32,
        n: 64,
        k: 16,
        layout: GemmLayout::Nn,
        precision: GemmPrecision::Bf16,
        epilogue: GemmEpilogue::GeluBackwardRecompute,
        f32_output: false,
    };

    #[test]
    fn the_kernel_wins_only_if_nothing_else_is_faster() {
        let config = KernelConfig { tile_m: 128, tile_n: 192, split_k: 1 };
        let timing = Timing {
            gemm: GEMM,
            candidates: 1,
            library_first: 2.0,
            library: 1.0,
            kernel: Some((config, 0.98)),
            unfused: None,
        };
        assert!(timing.kernel_wins());
        assert!(!Timing { kernel: Some((config, 0.997)), ..timing }.kernel_wins(), "the difference is noise");
        assert!(Timing { unfused: Some(0.99), ..timing }.kernel_wins());
        assert!(!Timing { unfused: Some(0.97), ..timing }.kernel_wins());
        assert!(!Timing { kernel: None, ..timing }.kernel_wins());
    }

    /// The text is from a checkpoint of version 0.1.
    #[test]
    fn choices_of_old_checkpoints_are_read_and_written_unchanged() {
        let text = r#"{"problem":{"m":64,"n":32,"k":16,"transpose_a":false,"transpose_b":false,"element":"Bf16","epilogue":"DGeluAndGelu","accumulate":false,"batch":1,"output":null},"alignments":[256,16,256,64,0],"algo":[1,2,3,4,5,6,7,8],"rows":256,"kernel":192,"splits":5,"kernel_wins":true}"#;
        let choice: Choice = serde_json::from_str(text).unwrap();
        assert_eq!(choice.gemm, GEMM);
        assert_eq!(choice.kernel, Some(KernelConfig { tile_m: 256, tile_n: 192, split_k: 5 }));
        assert_eq!(serde_json::to_string(&choice).unwrap(), text);
        let without_kernel = text.replace(r#","rows":256,"kernel":192,"splits":5,"kernel_wins":true"#, "");
        let choice: Choice = serde_json::from_str(&without_kernel).unwrap();
        assert_eq!((choice.kernel, choice.kernel_wins), (None, false));
    }
}
