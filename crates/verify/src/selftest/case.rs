//! One operation on named tensors, and how to run it.

use super::compare::{Error, Tolerance};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, COOLDOWN, Engine, Result, Workload};
use std::thread::sleep;

/// What a tensor holds before the operation.
#[derive(Clone, Debug)]
pub enum Init {
    /// Uniform in mean ± spread.
    Uniform {
        mean: f32,
        spread: f32,
    },
    /// NaN: the operation must write every element.
    Poison,
    Zero,
    Values(Vec<f32>),
    /// i32 values below the bound.
    Tokens {
        below: i32,
    },
}

/// A tensor of a case.
#[derive(Clone, Debug)]
pub struct Operand {
    pub name: &'static str,
    pub len: usize,
    /// `None`: the engine's float type.
    pub dtype: Option<DType>,
    pub init: Init,
    /// Compared after the operation.
    pub checked: Option<Tolerance>,
}

type Operation = Box<dyn Fn(&mut dyn Engine, &[Tensor]) -> Result<()>>;

/// What must cross device memory at least once, and what must be computed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// Of the engine's type.
    pub floats: usize,
    pub bytes: usize,
    pub flops: usize,
}

impl Work {
    pub fn bytes(self, float: DType) -> usize {
        self.floats * float.bytes() + self.bytes
    }
}

/// Part of an operation: a kernel, or each of its GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Kernel(&'static str),
    /// A GEMM.
    Gemm,
}

impl Part {
    /// Reports whether an interval of a profile belongs to this part: an instance of the kernel (`sum_bf16`), or a GEMM, whose name
    /// begins with its sizes.
    pub fn is(self, name: &str) -> bool {
        match self {
            Self::Gemm => name.starts_with(|c: char| c.is_ascii_digit()),
            Self::Kernel(kernel) => name
                .strip_prefix(kernel)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with("_bf16") || rest.starts_with("_f32")),
        }
    }
}

pub struct Case {
    pub operation: &'static str,
    pub shape: String,
    pub work: Work,
    /// Of kernels among the operation's.
    pub parts: Vec<(Part, Work)>,
    pub(super) operands: Vec<Operand>,
    pub(super) scope: Workload,
    /// A batch of tokens below the vocabulary's size, loaded into the first operand.
    pub(super) batch: Option<(BatchLayout, i32)>,
    /// Gives the same bits wherever its kernel runs: integers, single rounded operations, sums of two or in a fixed order.
    pub(super) exact: bool,
    /// Makes operands that only the engine can.
    pub(super) before: Option<Operation>,
    pub(super) run: Operation,
}

/// What a case came to on an engine.
#[derive(Debug)]
pub struct Outcome {
    /// Of each checked tensor.
    pub errors: Vec<(&'static str, Error)>,
}

/// How long a case takes.
#[derive(Clone, Debug)]
pub struct Speed {
    /// Seconds on the engine's clock, of an operation among many in a row.
    pub samples: Vec<f64>,
    /// Of each of its kernels, between two marks, where the engine tells them apart.
    pub kernels: Vec<(String, Vec<f64>)>,
}

/// Times that are taken of an operation, and of each of its kernels.
const SAMPLES: usize = 11;
/// Seconds that the operations of one sample fill together, so that what surrounds them weighs little.
const SAMPLE: f64 = 3e-3;

/// Elements that are made on the host to be timed with; the rest are copies of them.
const MADE: usize = 1 << 21;

impl Case {
    /// Runs the case on `engine` and on `reference`, and compares.
    pub fn check(&self, engine: &mut dyn Engine, reference: &mut dyn Engine) -> Result<Outcome> {
        let float = engine.dtype();
        let want = self.outputs(reference, float)?;
        let got = self.outputs(engine, float)?;
        let errors = want.into_iter().zip(got).map(|((operand, want), (_, got))| {
            let tolerance = operand.checked.expect("only checked operands are read");
            (operand.name, Error::between(&got, &want, tolerance, operand.dtype.unwrap_or(float)))
        });
        Ok(Outcome { errors: errors.collect() })
    }

    /// As [`check`](Self::check) against the same kernels in the emulator, where an exact case may differ in no bit. In
    /// bf16 both sides are rounded, so what lies near the middle between two values may come out a unit, 2^-7, apart.
    pub fn check_emulated(&self, engine: &mut dyn Engine, emulated: &mut dyn Engine) -> Result<Outcome> {
        let mut outcome = self.check(engine, emulated)?;
        let unit = if engine.dtype() == DType::Bf16 { f32::powi(2.0, -7) } else { 0.0 };
        for (_, error) in &mut outcome.errors {
            error.allowed = if self.exact { 0.0 } else { error.allowed.max(unit) };
        }
        Ok(outcome)
    }

    /// Times the case, without comparing, once its matrix products are tuned.
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
        self.fill(engine, &tensors, float, MADE)?;
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
        let times = (SAMPLE / once).clamp(1.0, 300.0) as u32;
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

    fn outputs(&self, engine: &mut dyn Engine, float: DType) -> Result<Vec<(&Operand, Vec<f32>)>> {
        let mut plan = Plan::new();
        let tensors = self.plan(&mut plan, engine);
        engine.allocate(&plan)?;
        self.fill(engine, &tensors, float, usize::MAX)?;
        self.before(engine, &tensors)?;
        (self.run)(engine, &tensors)?;
        let checked = self.operands.iter().zip(&tensors).filter(|(operand, _)| operand.checked.is_some());
        checked.map(|(operand, tensor)| Ok((operand, engine.read(*tensor)?))).collect()
    }

    fn before(&self, engine: &mut dyn Engine, tensors: &[Tensor]) -> Result<()> {
        self.before.as_ref().map_or(Ok(()), |before| before(engine, tensors))
    }

    fn plan(&self, plan: &mut Plan, engine: &mut dyn Engine) -> Vec<Tensor> {
        let own = engine.dtype();
        let mut add = |o: &Operand| plan.add(Group::Activations, o.name, &[o.len], o.dtype.unwrap_or(own));
        let tensors = self.operands.iter().map(&mut add).collect();
        engine.plan(plan, &self.scope);
        tensors
    }

    /// Fills the operands with values that `float` can hold. Of each, so many are made; the rest are copies of them.
    fn fill(&self, engine: &mut dyn Engine, tensors: &[Tensor], float: DType, most: usize) -> Result<()> {
        let mut random = Random(0x5eed);
        for (operand, &tensor) in self.operands.iter().zip(tensors) {
            let rounded = |x: f32| match operand.dtype.unwrap_or(float) {
                DType::Bf16 => half::bf16::from_f32(x).to_f32(),
                _ => x,
            };
            let n = operand.len.min(most);
            let values: Vec<f32> = match &operand.init {
                Init::Uniform { mean, spread } => (0..n).map(|_| rounded(mean + spread * random.signed())).collect(),
                Init::Poison => vec![f32::NAN; n],
                Init::Zero => vec![0.0; n],
                Init::Values(values) => values.clone(),
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
            // A skewed distribution, as text has: half of all tokens are one of 16.
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

/// splitmix64: fast, and the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
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
    fn parts_are_told_by_name() {
        let sums = Part::Kernel("bias_backward");
        assert!(sums.is("bias_backward_bf16") && sums.is("bias_backward_f32_4x8") && sums.is("bias_backward"));
        assert!(!sums.is("bias_backward_reduce_bf16") && !sums.is("8x8x8 NT bf16 cuBLASLt"));
        assert!(Part::Gemm.is("8x8x8 NT bf16 cuBLASLt") && !Part::Gemm.is("bias_backward_bf16"));
    }
}
