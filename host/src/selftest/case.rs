//! One operation on named tensors, and how to run it.

use super::compare::{Error, Tolerance};
use crate::engine::{BatchLayout, Engine, Result, Scope};
use crate::plan::{Group, Plan};
use crate::tensor::{DType, Tensor};
use std::time::Instant;

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

pub struct Case {
    pub operation: &'static str,
    pub shape: String,
    pub(super) operands: Vec<Operand>,
    pub(super) scope: Scope,
    /// A batch of tokens below the vocabulary's size, loaded into the first operand.
    pub(super) batch: Option<(BatchLayout, i32)>,
    /// Gives the same bits wherever its kernel runs: integers, single rounded operations, sums of two or in a fixed order.
    pub(super) exact: bool,
    pub(super) run: Operation,
    /// Floats (of the engine's type) and other bytes that must cross device memory at least once.
    pub(super) floats_moved: usize,
    pub(super) bytes_moved: usize,
    pub(super) flops: usize,
}

/// What a case came to on an engine.
#[derive(Debug)]
pub struct Outcome {
    /// Of each checked tensor.
    pub errors: Vec<(&'static str, Error)>,
}

/// How fast a case ran.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    pub seconds: f64,
    pub bytes: usize,
    pub flops: usize,
}

impl Case {
    /// Runs the case on `engine` and on `reference`, and compares.
    pub fn check(&self, engine: &mut dyn Engine, reference: &mut dyn Engine) -> Result<Outcome> {
        let float = engine.float();
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
        let unit = if engine.float() == DType::Bf16 { f32::powi(2.0, -7) } else { 0.0 };
        for (_, error) in &mut outcome.errors {
            error.allowed = if self.exact { 0.0 } else { error.allowed.max(unit) };
        }
        Ok(outcome)
    }

    /// Times the case on random inputs, without comparing.
    pub fn time(&self, engine: &mut dyn Engine) -> Result<Speed> {
        let float = engine.float();
        let tensors = self.prepare(engine, float)?;
        let floats = tensors.iter().find(|t| t.dtype != DType::I32);
        let Some(&probe) = floats else { anyhow::bail!("{} has no tensor of floats", self.operation) };
        let probe = probe.slice(0, 1.min(probe.len));
        let repeat = |engine: &mut dyn Engine, times: u32| -> Result<f64> {
            engine.read(probe)?;
            let start = Instant::now();
            for _ in 0..times {
                (self.run)(engine, &tensors)?;
            }
            engine.read(probe)?;
            Ok(start.elapsed().as_secs_f64())
        };
        // Warm up, then as many as fill 30 ms, so that the one synchronisation weighs little; the best of three.
        repeat(engine, 2)?;
        let once = repeat(engine, 3)? / 3.0;
        let times = (0.03 / once).clamp(3.0, 300.0) as u32;
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            best = best.min(repeat(engine, times)? / f64::from(times));
        }
        Ok(Speed { seconds: best, bytes: self.floats_moved * float.bytes() + self.bytes_moved, flops: self.flops })
    }

    fn outputs(&self, engine: &mut dyn Engine, float: DType) -> Result<Vec<(&Operand, Vec<f32>)>> {
        let tensors = self.prepare(engine, float)?;
        (self.run)(engine, &tensors)?;
        let checked = self.operands.iter().zip(&tensors).filter(|(operand, _)| operand.checked.is_some());
        checked.map(|(operand, tensor)| Ok((operand, engine.read(*tensor)?))).collect()
    }

    /// Allocates and fills the operands; both engines get values that `float` can hold.
    fn prepare(&self, engine: &mut dyn Engine, float: DType) -> Result<Vec<Tensor>> {
        let mut plan = Plan::new();
        let own = engine.float();
        let mut add = |o: &Operand| plan.add(Group::Activations, o.name, &[o.len], o.dtype.unwrap_or(own));
        let tensors: Vec<Tensor> = self.operands.iter().map(&mut add).collect();
        engine.plan(&mut plan, &self.scope);
        engine.allocate(&plan)?;
        let mut random = Random(0x5eed);
        for (operand, &tensor) in self.operands.iter().zip(&tensors) {
            let rounded = |x: f32| match operand.dtype.unwrap_or(float) {
                DType::Bf16 => half::bf16::from_f32(x).to_f32(),
                _ => x,
            };
            match &operand.init {
                Init::Uniform { mean, spread } => {
                    let values: Vec<f32> = (0..operand.len).map(|_| rounded(mean + spread * random.signed())).collect();
                    engine.write(tensor, &values)?;
                }
                Init::Poison => engine.write(tensor, &vec![f32::NAN; operand.len])?,
                Init::Zero => engine.zero(tensor)?,
                Init::Values(values) => engine.write(tensor, values)?,
                Init::Tokens { below } => {
                    let tokens: Vec<i32> = (0..operand.len).map(|_| random.below(*below)).collect();
                    engine.write_i32(tensor, &tokens)?;
                }
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
            engine.load_batch(tensors[0], layout, words)?;
        }
        Ok(tensors)
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
