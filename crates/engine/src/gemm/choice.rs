//! The algorithms that the autotuner chose, as checkpoints and the cache store them.

use super::{
    Alignments, Batching, Bias, Gemm, GemmEpilogue, GemmKey, GemmLayout, GemmOutput, GemmPrecision, Pass, Residual,
};
use crate::ops::Activation;
use cublaslt::sys::MatmulAlgo;
use cuda_std::fp8::Fp8Format;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Shape of a kernel's output tile, and the number of parts that K is split into.
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
#[serde(try_from = "StoredChoice", into = "StoredChoice")]
pub struct GemmChoice {
    /// The GEMM.
    pub gemm: Gemm,
    /// Alignments of its operands.
    pub alignments: Alignments,
    /// cuBLASLt's algorithm for the library part.
    pub algo: MatmulAlgo,
    /// The fastest kernel, if one computes this GEMM.
    pub kernel: Option<KernelConfig>,
    /// Whether the kernel is faster than cuBLASLt.
    pub kernel_wins: bool,
}

impl GemmChoice {
    /// Returns the key of the GEMM.
    pub fn key(&self) -> GemmKey {
        (self.gemm, self.alignments)
    }
}

/// The stored form, in cuBLASLt's column-major terms as in every checkpoint since version 0.1: A is our b, B our a, m our n.
#[derive(Serialize, Deserialize)]
struct StoredChoice {
    problem: StoredProblem,
    alignments: Alignments,
    algo: MatmulAlgo,
    #[serde(flatten)]
    kernel: Option<KernelConfig>,
    #[serde(default)]
    kernel_wins: bool,
}

#[derive(Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "keys of the file")]
struct StoredProblem {
    m: usize,
    n: usize,
    k: usize,
    transpose_a: bool,
    transpose_b: bool,
    element: StoredElement,
    epilogue: String,
    accumulate: bool,
    /// Always 1, for batches too. Ignored, and written for programs of earlier versions, which require it.
    #[serde(default)]
    batch: usize,
    #[serde(default)]
    output: Option<StoredElement>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    batched: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    grouped: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    groups_are_sums: bool,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum StoredElement {
    Bf16,
    F32,
    Tf32,
    Fp8 { a_e5m2: bool, b_e5m2: bool, columns: Option<u32> },
}

/// Returns the name of bias, activation and FP8 output, such as `GeluAuxBias`, `DGeluAndGelu` or `DGeluFp8`.
fn stored_name(GemmEpilogue { bias, activation, output, .. }: GemmEpilogue) -> String {
    let name = match (bias, activation) {
        (None, None) => "None".to_owned(),
        (Some(Bias::Add), None) => "Bias".to_owned(),
        (Some(Bias::Gradient), _) => "BiasGradB".to_owned(),
        (bias, Some((activation, Pass::Forward))) => {
            format!("{activation:?}Aux{}", if bias.is_some() { "Bias" } else { "" })
        }
        (_, Some((activation, Pass::Backward))) => format!("D{activation:?}"),
        (_, Some((activation, Pass::BackwardAndValue))) => format!("D{activation:?}And{activation:?}"),
    };
    name + if output == GemmOutput::Fp8 { "Fp8" } else { "" }
}

/// Returns the epilogue with a name, without its residual.
fn named(name: &str) -> Option<GemmEpilogue> {
    let passes = [Pass::Forward, Pass::Backward, Pass::BackwardAndValue];
    let of_function = |&activation: &Activation| passes.map(|pass| Some((activation, pass)));
    let activations = [None].into_iter().chain(Activation::ALL.iter().flat_map(of_function));
    activations
        .flat_map(|activation| [None, Some(Bias::Add), Some(Bias::Gradient)].map(|bias| (bias, activation)))
        .flat_map(|part| [GemmOutput::Storage, GemmOutput::Fp8].map(|output| (part, output)))
        .map(|((bias, activation), output)| GemmEpilogue { bias, activation, output, residual: None })
        .find(|epilogue| stored_name(*epilogue) == name)
}

impl From<&Gemm> for StoredProblem {
    fn from(gemm: &Gemm) -> Self {
        let element = match gemm.precision {
            GemmPrecision::Bf16 => StoredElement::Bf16,
            GemmPrecision::F32 => StoredElement::F32,
            GemmPrecision::Tf32 => StoredElement::Tf32,
            GemmPrecision::Fp8 { a, columns } => {
                StoredElement::Fp8 { a_e5m2: false, b_e5m2: a == Fp8Format::E5m2, columns }
            }
        };
        let Gemm { m, n, k, layout, epilogue, batching, .. } = *gemm;
        Self {
            m: n,
            n: m,
            k,
            transpose_a: layout == GemmLayout::Nt,
            transpose_b: layout == GemmLayout::Tn,
            element,
            epilogue: stored_name(epilogue),
            accumulate: epilogue.residual.is_some(),
            batch: 1,
            output: (epilogue.output == GemmOutput::F32).then_some(StoredElement::F32),
            batched: matches!(batching, Batching::Strided | Batching::Symmetric),
            grouped: batching == Batching::Grouped,
            groups_are_sums: batching == Batching::GroupedSum,
        }
    }
}

impl StoredProblem {
    /// Returns the GEMM, or `None` for one that no operation of the model computes.
    fn gemm(&self) -> Option<Gemm> {
        let layout = match (self.transpose_a, self.transpose_b) {
            (true, false) => GemmLayout::Nt,
            (false, false) => GemmLayout::Nn,
            (false, true) => GemmLayout::Tn,
            (true, true) => return None,
        };
        let precision = match self.element {
            StoredElement::Bf16 => GemmPrecision::Bf16,
            StoredElement::F32 => GemmPrecision::F32,
            StoredElement::Tf32 => GemmPrecision::Tf32,
            StoredElement::Fp8 { a_e5m2: true, .. } => return None,
            StoredElement::Fp8 { b_e5m2, columns, .. } => {
                let a = if b_e5m2 { Fp8Format::E5m2 } else { Fp8Format::E4m3 };
                GemmPrecision::Fp8 { a, columns }
            }
        };
        let batching = match (self.batched, layout) {
            (false, _) if self.grouped => Batching::Grouped,
            (false, _) if self.groups_are_sums => Batching::GroupedSum,
            (false, _) => Batching::One,
            (true, GemmLayout::Nn) => Batching::Strided,
            (true, _) => Batching::Symmetric,
        };
        let residual = if self.batched { Residual::Scaled } else { Residual::Add };
        let mut epilogue = GemmEpilogue { residual: self.accumulate.then_some(residual), ..named(&self.epilogue)? };
        if self.output.is_some() {
            epilogue.output = GemmOutput::F32;
        }
        Some(Gemm { m: self.n, n: self.m, k: self.k, layout, precision, batching, epilogue })
    }
}

impl From<GemmChoice> for StoredChoice {
    fn from(choice: GemmChoice) -> Self {
        let GemmChoice { gemm, alignments, algo, kernel, kernel_wins } = choice;
        Self { problem: (&gemm).into(), alignments, algo, kernel, kernel_wins }
    }
}

impl TryFrom<StoredChoice> for GemmChoice {
    type Error = String;

    fn try_from(stored: StoredChoice) -> Result<Self, String> {
        let StoredChoice { problem, alignments, algo, kernel, kernel_wins } = stored;
        let gemm = problem.gemm().ok_or_else(|| format!("unknown GEMM with epilogue {}", problem.epilogue))?;
        Ok(Self { gemm, alignments, algo, kernel, kernel_wins })
    }
}

/// The algorithms of all GEMMs of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Algorithms {
    /// GPU and versions for which these are valid.
    pub machine: String,
    /// One entry for each GEMM.
    pub choices: Vec<GemmChoice>,
}

/// Measured times of one GEMM, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct GemmTiming {
    /// The GEMM.
    pub gemm: Gemm,
    /// Number of cuBLASLt's algorithms that were timed.
    pub candidates: usize,
    /// cuBLASLt's own first choice.
    pub library_first: f32,
    /// cuBLASLt's fastest algorithm, with the kernels for what it lacks.
    pub library: f32,
    /// The fastest kernel, if one computes this GEMM.
    pub kernel: Option<(KernelConfig, f32)>,
    /// A kernel for a part of the GEMM with the kernels for the rest, if that kernel beats cuBLASLt.
    pub unfused: Option<f32>,
}

impl GemmTiming {
    /// Reports whether the kernel is the fastest, by more than the measurement noise.
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
    pub timings: Vec<GemmTiming>,
    /// Duration of the pass.
    pub seconds: f64,
    /// The reason why the result could not be cached.
    pub cache_error: Option<String>,
    /// Seconds of each kind of a generation step that was timed.
    pub step_seconds: Vec<(StepKind, f64)>,
}

/// How a generation step is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepKind {
    /// A kernel for each operation.
    Kernels,
    /// The same with GEMMs for linear layers.
    Gemms,
    /// One launch.
    OneLaunch,
}

impl StepKind {
    /// Describes the kind after a time.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Kernels => "with separate kernels",
            Self::Gemms => "with GEMMs",
            Self::OneLaunch => "in one launch",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEMM: Gemm = Gemm {
        m: 32,
        n: 64,
        k: 16,
        layout: GemmLayout::Nn,
        precision: GemmPrecision::Bf16,
        batching: Batching::One,
        epilogue: GemmEpilogue::NONE.with(Activation::Gelu, Pass::BackwardAndValue),
    };

    #[test]
    fn the_kernel_wins_only_if_nothing_else_is_faster() {
        let config = KernelConfig { tile_m: 128, tile_n: 192, split_k: 1 };
        let timing = GemmTiming {
            gemm: GEMM,
            candidates: 1,
            library_first: 2.0,
            library: 1.0,
            kernel: Some((config, 0.98)),
            unfused: None,
        };
        assert!(timing.kernel_wins());
        assert!(!GemmTiming { kernel: Some((config, 0.997)), ..timing }.kernel_wins(), "the difference is noise");
        assert!(GemmTiming { unfused: Some(0.99), ..timing }.kernel_wins());
        assert!(!GemmTiming { unfused: Some(0.97), ..timing }.kernel_wins());
        assert!(!GemmTiming { kernel: None, ..timing }.kernel_wins());
    }

    /// The text is from a checkpoint of version 0.1.
    #[test]
    fn choices_of_old_checkpoints_are_read_and_written_unchanged() {
        let text = r#"{"problem":{"m":64,"n":32,"k":16,"transpose_a":false,"transpose_b":false,"element":"Bf16","epilogue":"DGeluAndGelu","accumulate":false,"batch":1,"output":null},"alignments":[256,16,256,64,0],"algo":[1,2,3,4,5,6,7,8],"rows":256,"kernel":192,"splits":5,"kernel_wins":true}"#;
        let choice: GemmChoice = serde_json::from_str(text).unwrap();
        assert_eq!(choice.gemm, GEMM);
        assert_eq!(choice.kernel, Some(KernelConfig { tile_m: 256, tile_n: 192, split_k: 5 }));
        assert_eq!(serde_json::to_string(&choice).unwrap(), text);
        let without_kernel = text.replace(r#","rows":256,"kernel":192,"splits":5,"kernel_wins":true"#, "");
        let choice: GemmChoice = serde_json::from_str(&without_kernel).unwrap();
        assert_eq!((choice.kernel, choice.kernel_wins), (None, false));
    }
    /// Every name that a checkpoint of version 0.1 may contain.
    #[test]
    fn names_of_epilogues_survive() {
        for name in [
            "None",
            "Bias",
            "GeluAuxBias",
            "DGelu",
            "DGeluAndGelu",
            "BiasGradB",
            "ReluSquaredAux",
            "DReluSquared",
            "DReluSquaredAndReluSquared",
            "SwiGluAux",
            "DSwiGlu",
            "DSwiGluAndSwiGlu",
            "GeluAuxBiasFp8",
            "DGeluFp8",
        ] {
            assert_eq!(named(name).map(stored_name).as_deref(), Some(name));
        }
        assert_eq!(named("DTanh"), None);
    }

    #[test]
    fn every_gemm_survives() {
        let fp8 = |a, columns| GemmPrecision::Fp8 { a, columns };
        let scaled = GemmEpilogue { residual: Some(Residual::Scaled), ..GemmEpilogue::NONE };
        let f32_output = GemmEpilogue { output: GemmOutput::F32, ..GemmEpilogue::RESIDUAL };
        let (one, nt) = (Batching::One, GemmLayout::Nt);
        for (layout, precision, batching, epilogue) in [
            (nt, GemmPrecision::Bf16, one, GemmEpilogue { residual: Some(Residual::Add), ..GemmEpilogue::BIAS }),
            (nt, fp8(Fp8Format::E4m3, Some(128)), one, GemmEpilogue::BIAS.with(Activation::Gelu, Pass::Forward)),
            (nt, fp8(Fp8Format::E5m2, None), one, GemmEpilogue::RESIDUAL),
            (GemmLayout::Nn, GemmPrecision::F32, one, GemmEpilogue::NONE),
            (GemmLayout::Nn, GemmPrecision::Bf16, Batching::Strided, scaled),
            (nt, GemmPrecision::Bf16, Batching::Symmetric, scaled),
            (GemmLayout::Tn, GemmPrecision::Bf16, Batching::Symmetric, GemmEpilogue::NONE),
            (nt, GemmPrecision::Bf16, Batching::Grouped, GemmEpilogue::NONE.with(Activation::SwiGlu, Pass::Forward)),
            (GemmLayout::Tn, GemmPrecision::Bf16, Batching::GroupedSum, GemmEpilogue::RESIDUAL),
            (nt, fp8(Fp8Format::E5m2, None), Batching::GroupedSum, GemmEpilogue::RESIDUAL),
            (GemmLayout::Tn, GemmPrecision::Tf32, one, GemmEpilogue::BIAS_GRADIENT),
            (GemmLayout::Tn, GemmPrecision::Bf16, one, f32_output),
        ] {
            let gemm = Gemm { m: 3, n: 16, k: 5, layout, precision, batching, epilogue };
            let choice =
                GemmChoice { gemm, alignments: [16; 5], algo: MatmulAlgo([1; 8]), kernel: None, kernel_wins: false };
            let text = serde_json::to_string(&choice).unwrap();
            assert_eq!(serde_json::from_str::<GemmChoice>(&text).unwrap(), choice, "{text}");
        }
    }
}
