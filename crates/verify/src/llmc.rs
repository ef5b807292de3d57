//! Comparison of an engine with another implementation's debug state: logits, loss, all gradients, and the losses of
//! AdamW steps.

pub use crate::debug_state::DebugState;

use crate::tolerance::Tolerance;
use anyhow::{Context, Result, ensure};
use checkpoint::tensors::{Order, Slot};
use distributed::Ranks;
use engine::ops::{AdamW, RotaryPairs};
use engine::tensor::DType;
use engine::{BatchLayout, Engine};
use interchange::{ModelSource, convert_pairs};
use model::descriptor::Positions;
use model::fit;
use model::{Decoder, Param, PlanOptions, TrainStep, Unsharded};
use std::path::Path;
use system::progress::{self, Unit};

/// Maximum number of logit rows that are read at once.
const ROWS: usize = 64;

/// The error of a tensor against its reference.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Name of the tensor.
    pub name: String,
    /// Largest absolute difference. It is NaN if either tensor contains a NaN.
    pub max_abs_error: f32,
    /// [`max_abs_error`](Self::max_abs_error) divided by the largest absolute value of the reference.
    pub max_rel_error: f32,
    /// Bound of the error.
    pub bound: Bound,
}

/// The largest error that a comparison allows.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    /// A bound of the absolute error.
    Absolute(f32),
    /// A bound of the relative error.
    Relative(f32),
}

impl Comparison {
    /// Returns whether the error is within its bound.
    pub fn ok(&self) -> bool {
        match self.bound {
            Bound::Absolute(bound) => self.max_abs_error <= bound,
            Bound::Relative(bound) => self.max_rel_error <= bound,
        }
    }
}

/// Accumulates the error of a tensor that is compared in slices.
#[derive(Default)]
struct MaxError {
    error: f32,
    /// Largest absolute value of the reference.
    scale: f32,
}

impl MaxError {
    fn add(&mut self, actual: &[f32], expected: &[f32]) {
        for (actual, expected) in actual.iter().zip(expected) {
            let error = (actual - expected).abs();
            // A NaN is kept, because no later error compares greater.
            if error.is_nan() || error > self.error {
                self.error = error;
            }
            self.scale = self.scale.max(expected.abs());
        }
    }

    fn comparison(&self, name: impl Into<String>, bound: Bound) -> Comparison {
        let max_rel_error = if self.error == 0.0 { 0.0 } else { self.error / self.scale };
        Comparison { name: name.into(), max_abs_error: self.error, max_rel_error, bound }
    }
}

/// A model on an engine, and the debug state that it is compared with.
pub struct Verification<'a> {
    engine: &'a mut dyn Engine,
    model: Decoder,
    state: DebugState,
    layout: BatchLayout,
    tolerance: Tolerance,
}

impl<'a> Verification<'a> {
    /// Opens the model and the debug state, and loads the parameters and the batch into the engine. `tf32` is set if the engine
    /// computes f32 GEMMs in TF32.
    pub fn open(model: &Path, state: &Path, engine: &'a mut dyn Engine, tf32: bool) -> Result<Self> {
        let source = ModelSource::open(model)?;
        let descriptor = source.descriptor();
        let mut state = DebugState::open(state, &descriptor, source.padded_vocab())?;
        let layout = state.layout();
        let inputs = state.tokens("inputs", descriptor.vocab)?;
        let targets = state.tokens("targets", descriptor.vocab)?;
        let BatchLayout { b, t, .. } = layout;
        let capacity = PlanOptions::training(b, t);
        let (model, plan) = fit::plan(descriptor, capacity, engine)?;
        engine.allocate(&plan)?;
        source.load(&model, engine)?;
        let mut words = engine.host_buffer(layout.words())?;
        words[layout.inputs()].copy_from_slice(&inputs);
        words[layout.targets()].copy_from_slice(&targets);
        layout.sort(&mut words);
        engine.load_batch(model.batch, layout, words)?;
        let tolerance = Tolerance::of(engine.dtype() == DType::Bf16, tf32);
        Ok(Self { engine, model, state, layout, tolerance })
    }

    /// Runs a forward and a backward pass. Compares the logits, the loss and the gradient of each parameter tensor.
    pub fn gradients(&mut self) -> Result<Vec<Comparison>> {
        let mut comparisons = Vec::new();
        self.model.forward(self.engine, self.layout, &mut Unsharded)?;
        comparisons.push(self.logits()?);
        let mut step = TrainStep::new(&self.model, self.layout, 1);
        // The batch is loaded once and does not change.
        let targets = self.layout.targets().len();
        step.gradients(self.engine, &mut Ranks::default(), &mut |_| Ok(targets))?;
        let loss = self.mean_loss()?;
        let mut error = MaxError::default();
        error.add(&[loss], &self.state.floats(1)?);
        comparisons.push(error.comparison("loss", Bound::Absolute(self.tolerance.loss)));
        let mut tied = None;
        let slots = self.state.slots();
        let progress = progress::start("comparing gradients", Unit::Count, slots.len() as u64);
        for slot in slots {
            progress.add(1);
            match slot.param {
                // The file has the two gradients of a tied embedding one after the other.
                Some(Param::Wte) if self.model.descriptor.tied && self.state.order() == Order::LlmCLlama => {
                    tied = Some(self.state.floats(slot.elements)?);
                }
                Some(Param::LmHead) if self.model.descriptor.tied => {
                    let wte = tied.take().context("the file has the head after wte")?;
                    let head = self.state.floats(slot.elements)?;
                    let sum: Vec<f32> = wte.iter().zip(&head).map(|(wte, head)| wte + head).collect();
                    comparisons.push(self.gradient(Param::Wte, 1, &mut |_| Ok(sum.clone()))?);
                }
                Some(param) => {
                    let elements = slot.elements;
                    comparisons.push(self.gradient(param, slot.layers.len(), &mut |state| state.floats(elements))?);
                }
                None => self.zeros(slot)?,
            }
        }
        Ok(comparisons)
    }

    /// Returns the losses of optimizer steps in the file, which follow the gradients. There are none if the model ties a head that the
    /// other implementation trains separately.
    pub fn recorded_losses(&mut self) -> Result<Vec<f32>> {
        let losses = self.state.floats(self.state.steps())?;
        Ok(if self.model.descriptor.tied { Vec::new() } else { losses })
    }

    /// Runs `steps` AdamW steps on the batch, with the settings of llm.c's test, and returns their losses.
    pub fn steps(&mut self, steps: usize) -> Result<Vec<f32>> {
        let learning_rate = match self.state.order() {
            Order::Params => 1e-4,
            Order::LlmCLlama => 1e-5,
        };
        let progress = progress::start("optimizer steps", Unit::Count, steps as u64);
        let (mut losses, targets) = (Vec::new(), self.layout.targets().len());
        for step in 1..=steps {
            let settings = AdamW {
                learning_rate,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.0,
                step: step as u32,
                clip: 1.0,
                seed: step as u32,
            };
            let mut step = TrainStep::new(&self.model, self.layout, 1);
            let decide = &mut |_: &mut dyn Engine, _| Ok(Some(settings.into()));
            step.run(self.engine, &mut Ranks::default(), &mut |_| Ok(targets), decide)?;
            losses.push(self.mean_loss()?);
            progress.add(1);
        }
        Ok(losses)
    }

    /// Compares the losses of optimizer steps with a reference.
    pub fn compare_losses(&self, actual: &[f32], expected: &[f32]) -> Vec<Comparison> {
        let compare = |(i, (actual, expected)): (usize, (&f32, &f32))| {
            let mut error = MaxError::default();
            error.add(&[*actual], &[*expected]);
            error.comparison(format!("loss of step {}", i + 1), Bound::Absolute(self.tolerance.step_loss))
        };
        actual.iter().zip(expected).enumerate().map(compare).collect()
    }

    fn logits(&mut self) -> Result<Comparison> {
        let (v, vp) = (self.model.descriptor.vocab, self.model.descriptor.padded_vocab());
        let rows = self.layout.b * self.layout.t;
        let mut error = MaxError::default();
        let chunk = ROWS.min(self.model.logit_rows());
        let progress = progress::start("comparing logits", Unit::Count, rows as u64);
        for row in (0..rows).step_by(chunk) {
            let rows = chunk.min(rows - row);
            let logits = self.model.logits(self.engine, row..row + rows)?;
            let actual = self.engine.read(logits)?;
            let expected = self.state.floats(rows * v)?;
            for (actual, expected) in actual.chunks(vp).zip(expected.chunks(v)) {
                error.add(&actual[..v], expected);
            }
            progress.add(rows as u64);
        }
        Ok(error.comparison("logits", Bound::Relative(self.tolerance.logits)))
    }

    /// Returns the mean of the step's losses.
    fn mean_loss(&mut self) -> Result<f32> {
        let rows = self.layout.b * self.layout.t;
        let losses = self.engine.read(self.model.losses.slice(0, rows))?;
        Ok((losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / rows as f64) as f32)
    }

    /// Compares the gradient of a tensor. `expected` returns that of the next layer.
    fn gradient(
        &mut self,
        param: Param,
        layers: usize,
        expected: &mut dyn FnMut(&mut DebugState) -> Result<Vec<f32>>,
    ) -> Result<Comparison> {
        let grads = self.model.training.context("the model was planned for training")?.grads;
        let mut error = MaxError::default();
        for layer in 0..layers {
            let actual = self.engine.read(self.model.layout.of(grads, param, layer))?;
            let expected = expected(&mut self.state)?;
            let expected = self.in_pairs_of_the_model(param, expected);
            // The padding rows of wte have no gradient. The file may have a different number of them.
            let common = actual.len().min(expected.len());
            error.add(&actual[..common], &expected[..common]);
            error.add(&actual[common..], &vec![0.0; actual.len() - common]);
        }
        Ok(error.comparison(format!("d{}", param.name()), Bound::Relative(self.tolerance.gradient)))
    }

    /// Reorders the rows of queries and keys in a gradient of the file to the rotary pairs of the model.
    fn in_pairs_of_the_model(&self, param: Param, mut gradient: Vec<f32>) -> Vec<f32> {
        let d = &self.model.descriptor;
        if let (Positions::Rotary(rotary), Order::LlmCLlama, Param::Qkvw) = (d.positions, self.state.order(), param)
            && rotary.pairs != RotaryPairs::Interleaved
        {
            let rotated = (d.heads + d.kv_heads) * d.head_size * d.channels;
            let row = d.channels * size_of::<f32>();
            let bytes = bytemuck::cast_slice(&gradient[..rotated]);
            let converted = convert_pairs(bytes, row, d.head_size, rotary.pairs);
            bytemuck::cast_slice_mut(&mut gradient[..rotated]).copy_from_slice(&converted);
        }
        gradient
    }

    /// Checks the gradients in place of biases that the model does not have.
    fn zeros(&mut self, slot: Slot) -> Result<()> {
        for _ in slot.layers {
            let found = self.state.floats(slot.elements)?.into_iter().find(|&value| value != 0.0);
            ensure!(
                found.is_none(),
                "debug state: expected zeros in place of the gradients of biases, found {}; the model has no biases",
                found.unwrap_or_default()
            );
        }
        Ok(())
    }
}
