//! A case: one engine operation on named tensors, with the code that compares and times it.

use super::compare::{ErrorStats, Tolerance};
use anyhow::bail;
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, COOLDOWN, Engine, Result, Workload};
use std::thread::sleep;

/// The contents of a tensor before the operation.
#[derive(Clone, Debug)]
pub enum Init {
    /// Uniform values in mean ± spread.
    Uniform { mean: f32, spread: f32 },
    /// NaN, which exposes elements that the operation does not write.
    Poison,
    /// Zeros.
    Zero,
    /// These values.
    Values(Vec<f32>),
    /// These i32 values.
    Words(Vec<i32>),
    /// i32 values from 0 to below the bound.
    Tokens { below: i32 },
    /// Nothing: the operation writes the tensor before it reads it.
    None,
}

/// A tensor of a case.
#[derive(Clone, Debug)]
pub struct Operand {
    pub name: &'static str,
    /// Number of elements.
    pub len: usize,
    /// Type of the elements; `None` for the engine's float type. FP8 is stored as the engine does.
    pub dtype: Option<DType>,
    pub init: Init,
    /// Tolerance of the comparison after the operation; `None` for a tensor that is not compared.
    pub checked: Option<Tolerance>,
}

/// Repetitions between two comparisons of bits.
const REPETITIONS_PER_CHECK: usize = 10;

type Operation = Box<dyn Fn(&mut dyn Engine, &[Tensor]) -> Result<()>>;

/// The minimum memory traffic of an operation, and its floating-point operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// Elements of the engine's float type that are read or written.
    pub floats: usize,
    /// Bytes of other types that are read or written.
    pub bytes: usize,
    /// Floating-point operations.
    pub flops: usize,
}

impl Work {
    /// Returns the memory traffic in bytes, for an engine with this float type.
    pub fn bytes(self, float: DType) -> usize {
        self.floats * float.bytes() + self.bytes
    }
}

/// A part of an operation with its own amount of work (FLOPs or bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The kernel with this name.
    Kernel(&'static str),
    /// Each GEMM of the operation.
    Gemm,
}

impl Part {
    /// Reports whether an interval of a profile belongs to this part: an instance of the kernel (`sum_bf16`), or a GEMM, whose name
    /// begins with its sizes.
    pub fn matches(self, name: &str) -> bool {
        match self {
            Self::Gemm => name.starts_with(|c: char| c.is_ascii_digit()),
            Self::Kernel(kernel) => name
                .strip_prefix(kernel)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with("_bf16") || rest.starts_with("_f32")),
        }
    }
}

/// An engine operation with its operands, to be compared with a reference or timed.
pub struct Case {
    /// Name of the operation.
    pub operation: &'static str,
    /// Shape of the operands, for display.
    pub shape: String,
    /// Work of the whole operation.
    pub work: Work,
    /// Work of some of the operation's kernels.
    pub parts: Vec<(Part, Work)>,
    pub(super) operands: Vec<Operand>,
    pub(super) workload: Workload,
    /// Layout and vocabulary size of a batch of random tokens, which is loaded into the first operand.
    pub(super) batch: Option<(BatchLayout, i32)>,
    /// Whether the kernel produces the same bits on a GPU and in the emulator. This holds for integer operations,
    /// elementwise operations, sums of two terms, and sums in a fixed order.
    pub(super) exact: bool,
    /// Repetitions that must give the same bits of the first operand on a GPU. The operation must not change its inputs.
    pub(super) repetitions: usize,
    /// Prepares operands that only the engine can compute.
    pub(super) before: Option<Operation>,
    pub(super) run: Operation,
}

/// The result of comparing a case.
#[derive(Debug)]
pub struct Outcome {
    /// Name and error of each compared tensor.
    pub errors: Vec<(&'static str, ErrorStats)>,
}

impl Outcome {
    /// Returns whether all errors are within their tolerance.
    pub fn ok(&self) -> bool {
        self.errors.iter().all(|(_, error)| error.ok())
    }
}

/// The measured times of a case.
#[derive(Clone, Debug)]
pub struct Speed {
    /// Mean seconds per operation of each sample, on the engine's clock.
    pub samples: Vec<f64>,
    /// Name and seconds of each kernel, if the engine can profile them.
    pub kernels: Vec<(String, Vec<f64>)>,
}

/// Number of samples of an operation and of each of its kernels.
const SAMPLES: usize = 11;
/// Duration of a sample in seconds. It is long enough to hide the overhead of reading the clock.
const SAMPLE_SECONDS: f64 = 3e-3;

/// Random elements that are generated on the host for timing. Larger tensors repeat them.
const TIMING_ELEMENTS: usize = 1 << 21;

impl Case {
    /// Runs the case on `engine` and on `reference`, and compares the results.
    pub fn check(&self, engine: &mut dyn Engine, reference: &mut dyn Engine) -> Result<Outcome> {
        let float = engine.dtype();
        let expected = self.outputs(reference, float)?;
        let actual = self.outputs(engine, float)?;
        let errors = expected.into_iter().zip(actual).map(|((operand, expected), (_, actual))| {
            let tolerance = operand.checked.expect("only checked operands are read");
            (operand.name, ErrorStats::between(&actual, &expected, tolerance, operand.dtype.unwrap_or(float)))
        });
        Ok(Outcome { errors: errors.collect() })
    }

    /// Reports whether the engine has kernels for the case: only some GPUs have those for experts.
    pub fn is_supported(&self, engine: &dyn Engine) -> bool {
        self.workload.router.is_none() || engine.check(&self.workload).is_ok()
    }

    /// Compares the case with the same kernels in the emulator.
    ///
    /// An exact case must agree in every bit. Both results are rounded to bf16, so values near a rounding boundary may
    /// differ by one unit in the last place, 2^-7.
    pub fn check_emulated(&self, engine: &mut dyn Engine, emulated: &mut dyn Engine) -> Result<Outcome> {
        let mut outcome = self.check(engine, emulated)?;
        let ulp = if engine.dtype() == DType::Bf16 { f32::powi(2.0, -7) } else { 0.0 };
        for (_, error) in &mut outcome.errors {
            error.tolerance = if self.exact { 0.0 } else { error.tolerance.max(ulp) };
        }
        Ok(outcome)
    }

    /// Tunes the GEMMs of the case and times it, without a comparison.
    pub fn time(&self, engine: &mut dyn Engine) -> Result<Speed> {
        let mut plan = Plan::new();
        let tensors = self.plan(&mut plan, engine);
        let clock = plan.add(Group::Workspace, "clock", &[1], DType::F32);
        engine.allocate(&plan)?;
        engine.tune(false, &mut |engine| {
            self.before(engine, &tensors)?;
            (self.run)(engine, &tensors)
        })?;
        let float = engine.dtype();
        self.fill(engine, &tensors, float, TIMING_ELEMENTS)?;
        self.before(engine, &tensors)?;
        sleep(COOLDOWN);
        let repeat = |engine: &mut dyn Engine, times: u32| -> Result<f64> {
            let start = engine.read_async(clock)?;
            for _ in 0..times {
                (self.run)(engine, &tensors)?;
            }
            let end = engine.read_async(clock)?;
            let start = engine.wait(start)?.completed_at;
            Ok((engine.wait(end)?.completed_at.saturating_sub(start)).as_secs_f64() / f64::from(times))
        };
        repeat(engine, 2)?;
        let once = repeat(engine, 3)?.max(1e-9);
        let times = (SAMPLE_SECONDS / once).clamp(1.0, 300.0) as u32;
        let samples = (0..SAMPLES).map(|_| repeat(engine, times)).collect::<Result<Vec<_>>>()?;

        let mut kernels: Vec<(String, Vec<f64>)> = Vec::new();
        if engine.start_profile().is_ok() {
            for _ in 0..SAMPLES {
                (self.run)(engine, &tensors)?;
            }
            for interval in engine.profile()? {
                let seconds = interval.end - interval.begin;
                match kernels.iter_mut().find(|(name, _)| *name == interval.name) {
                    Some((_, samples)) => samples.push(seconds),
                    None => kernels.push((interval.name, vec![seconds])),
                }
            }
        }
        Ok(Speed { samples, kernels })
    }

    /// Runs the case and returns its compared tensors.
    fn outputs(&self, engine: &mut dyn Engine, float: DType) -> Result<Vec<(&Operand, Vec<f32>)>> {
        let mut plan = Plan::new();
        let tensors = self.plan(&mut plan, engine);
        engine.allocate(&plan)?;
        self.fill(engine, &tensors, float, usize::MAX)?;
        self.before(engine, &tensors)?;
        (self.run)(engine, &tensors)?;
        self.repeat(engine, &tensors)?;
        let checked = self.operands.iter().zip(&tensors).filter(|(operand, _)| operand.checked.is_some());
        checked.map(|(operand, tensor)| Ok((operand, engine.read(*tensor)?))).collect()
    }

    /// Repeats the operation on a GPU, and compares the bits of its first operand.
    fn repeat(&self, engine: &mut dyn Engine, tensors: &[Tensor]) -> Result<()> {
        if self.repetitions == 0 || engine.device_tensor(tensors[0])?.is_none() {
            return Ok(());
        }
        let bits = |engine: &mut dyn Engine| {
            let mut bytes = vec![0; tensors[0].bytes()];
            engine.read_bytes(tensors[0], &mut bytes).map(|()| bytes)
        };
        let first = bits(engine)?;
        for repetition in 1..=self.repetitions {
            (self.run)(engine, tensors)?;
            // Most repetitions follow each other without a pause.
            if repetition % REPETITIONS_PER_CHECK == 0 && bits(engine)? != first {
                let Self { operation, shape, operands, .. } = self;
                bail!("{operation} {shape}: repetition {repetition} computed other bits of {}", operands[0].name);
            }
        }
        Ok(())
    }

    fn before(&self, engine: &mut dyn Engine, tensors: &[Tensor]) -> Result<()> {
        self.before.as_ref().map_or(Ok(()), |before| before(engine, tensors))
    }

    fn plan(&self, plan: &mut Plan, engine: &mut dyn Engine) -> Vec<Tensor> {
        let own = engine.dtype();
        let fp8 = engine.fp8_dtype().unwrap_or(DType::Fp8);
        let dtype = |o: &Operand| match o.dtype {
            Some(DType::Fp8) => fp8,
            // The CPU has moments in f32 only.
            Some(DType::Block8 { .. }) if own == DType::F32 => own,
            dtype => dtype.unwrap_or(own),
        };
        let mut add = |o: &Operand| plan.add(Group::Activations, o.name, &[o.len], dtype(o));
        let tensors = self.operands.iter().map(&mut add).collect();
        engine.plan(plan, &self.workload);
        tensors
    }

    /// Fills the operands with values that are representable in `float`. At most `max_elements` values are generated
    /// for an operand; the rest of the tensor repeats them.
    fn fill(&self, engine: &mut dyn Engine, tensors: &[Tensor], float: DType, max_elements: usize) -> Result<()> {
        let mut random = Random(0x5eed);
        for (operand, &tensor) in self.operands.iter().zip(tensors) {
            let rounded = |x: f32| match operand.dtype.unwrap_or(float) {
                DType::Bf16 => half::bf16::from_f32(x).to_f32(),
                // Three bits of mantissa. A block represents values down to 2^-9 of its largest one.
                DType::Block8 { .. } if x.abs() < 1.0 / 32.0 => 0.0,
                DType::Block8 { .. } => f32::from_bits(x.to_bits() >> 20 << 20),
                _ => x,
            };
            let n = operand.len.min(max_elements);
            let values: Vec<f32> = match &operand.init {
                Init::Uniform { mean, spread } => (0..n).map(|_| rounded(mean + spread * random.signed())).collect(),
                Init::Poison => vec![f32::NAN; n],
                Init::Zero => vec![0.0; n],
                Init::None => continue,
                Init::Values(values) => values.clone(),
                Init::Words(words) => {
                    engine.write_i32(tensor, words)?;
                    continue;
                }
                Init::Tokens { below } => {
                    let tokens: Vec<i32> = (0..operand.len).map(|_| random.below(*below)).collect();
                    engine.write_i32(tensor, &tokens)?;
                    continue;
                }
            };
            engine.write(tensor.slice(0, values.len()), &values)?;
            let mut filled = values.len();
            while filled < operand.len {
                let more = filled.min(operand.len - filled);
                engine.copy(tensor.slice(filled, more), tensor.slice(0, more))?;
                filled += more;
            }
        }
        if let Some((layout, vocab)) = self.batch {
            let mut words = engine.host_buffer(layout.words())?;
            // The distribution is skewed, like that of text: half of all tokens are among the first 16.
            for word in &mut words[..layout.targets().end] {
                let bound = if random.below(2) == 0 { vocab } else { vocab.min(16) };
                *word = random.below(bound);
            }
            layout.sort(&mut words);
            layout.set_seed(&mut words, 1234);
            engine.load_batch(tensors[0], layout, words)?;
        }
        Ok(())
    }
}

/// The splitmix64 generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a uniform value in [-1, 1).
    fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    fn below(&mut self, bound: i32) -> i32 {
        ((self.next() >> 33) % bound as u64) as i32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_match_profile_entries_by_name() {
        let sums = Part::Kernel("bias_backward");
        assert!(
            sums.matches("bias_backward_bf16")
                && sums.matches("bias_backward_f32_4x8")
                && sums.matches("bias_backward")
        );
        assert!(!sums.matches("bias_backward_reduce_bf16") && !sums.matches("8x8x8 NT bf16 cuBLASLt"));
        assert!(Part::Gemm.matches("8x8x8 NT bf16 cuBLASLt") && !Part::Gemm.matches("bias_backward_bf16"));
    }
}
