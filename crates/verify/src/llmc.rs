//! Holds an engine to another implementation's debug state: logits, loss, every gradient, and the losses of some steps.

pub use crate::debug_state::DebugState;

use crate::tolerance::Tolerance;
use anyhow::{Context, Result};
use checkpoint::model_file::ModelFile;
use distributed::Ranks;
use engine::ops::AdamW;
use engine::tensor::DType;
use engine::{BatchLayout, Engine};
use model::fit;
use model::{Gpt2, Param, PlanOptions, TrainStep, Unsharded};
use std::path::Path;

/// Rows of logits that are compared at once.
const ROWS: usize = 64;

/// What was compared, and how far apart it is.
#[derive(Clone, Debug)]
pub struct Comparison {
    pub name: String,
    /// Largest absolute difference; NaN if there is one in either.
    pub absolute: f32,
    /// That, relative to the largest value expected.
    pub relative: f32,
    pub allowed: Allowed,
}

/// The bound of a comparison.
#[derive(Clone, Copy, Debug)]
pub enum Allowed {
    Absolute(f32),
    Relative(f32),
}

impl Comparison {
    pub fn ok(&self) -> bool {
        match self.allowed {
            Allowed::Absolute(bound) => self.absolute <= bound,
            Allowed::Relative(bound) => self.relative <= bound,
        }
    }
}

/// Compares values piece by piece.
#[derive(Default)]
struct Difference {
    absolute: f32,
    largest: f32,
}

impl Difference {
    fn add(&mut self, got: &[f32], want: &[f32]) {
        for (got, want) in got.iter().zip(want) {
            let difference = (got - want).abs();
            // Once NaN, it stays: nothing is larger.
            if difference.is_nan() || difference > self.absolute {
                self.absolute = difference;
            }
            self.largest = self.largest.max(want.abs());
        }
    }

    fn comparison(&self, name: impl Into<String>, allowed: Allowed) -> Comparison {
        let relative = if self.absolute == 0.0 { 0.0 } else { self.absolute / self.largest };
        Comparison { name: name.into(), absolute: self.absolute, relative, allowed }
    }
}

/// A model with the state it is compared with.
pub struct Verification<'a> {
    engine: &'a mut dyn Engine,
    model: Gpt2,
    state: DebugState,
    layout: BatchLayout,
    padded_vocab: usize,
    tolerance: Tolerance,
}

impl<'a> Verification<'a> {
    /// Loads the model and the batch.
    pub fn open(model: &Path, state: &Path, engine: &'a mut dyn Engine) -> Result<Self> {
        let file = ModelFile::open(model)?;
        let (descriptor, padded_vocab) = (file.descriptor(), file.padded_vocab());
        let mut state = DebugState::open(state, &descriptor, padded_vocab)?;
        let layout = state.layout();
        let inputs = state.tokens("inputs", descriptor.vocab)?;
        let targets = state.tokens("targets", descriptor.vocab)?;
        let BatchLayout { b, t } = layout;
        let capacity = PlanOptions::training(b, t);
        let (model, plan) = fit::plan(descriptor, capacity, engine)?;
        engine.allocate(&plan)?;
        file.load(&model, engine)?;
        let mut words = engine.host_buffer(layout.words())?;
        words[layout.inputs()].copy_from_slice(&inputs);
        words[layout.targets()].copy_from_slice(&targets);
        layout.sort(&mut words);
        engine.load_batch(model.batch, layout, words)?;
        let tolerance = Tolerance::of(engine.dtype() == DType::Bf16);
        Ok(Self { engine, model, state, layout, padded_vocab, tolerance })
    }

    /// Compares the logits, the loss and the gradient of each parameter tensor.
    pub fn gradients(&mut self) -> Result<Vec<Comparison>> {
        let mut comparisons = Vec::new();
        self.model.forward(self.engine, self.layout, &mut Unsharded)?;
        comparisons.push(self.logits()?);
        let mut step = TrainStep::new(&self.model, self.layout, 1);
        // The batch is loaded once and does not change.
        step.gradients(self.engine, &mut Ranks::default(), &mut |_| Ok(()))?;
        let loss = self.mean_loss()?;
        let mut difference = Difference::default();
        difference.add(&[loss], &self.state.floats(1)?);
        comparisons.push(difference.comparison("loss", Allowed::Absolute(self.tolerance.loss)));
        for param in Param::ALL {
            comparisons.push(self.gradient(param)?);
        }
        Ok(comparisons)
    }

    /// Returns the losses of `steps` AdamW steps on the batch, with the settings of llm.c's test.
    pub fn steps(&mut self, steps: usize) -> Result<Vec<f32>> {
        let mut losses = Vec::new();
        for step in 1..=steps {
            let settings = AdamW {
                learning_rate: 1e-4,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.0,
                step: step as u32,
                clip: 1.0,
                seed: step as u32,
            };
            let mut step = TrainStep::new(&self.model, self.layout, 1);
            let decide = &mut |_: &mut dyn Engine, _| Ok(Some(settings));
            step.run(self.engine, &mut Ranks::default(), &mut |_| Ok(()), decide)?;
            losses.push(self.mean_loss()?);
        }
        Ok(losses)
    }

    pub fn compare_losses(&self, got: &[f32], want: &[f32]) -> Vec<Comparison> {
        let compare = |(i, (got, want)): (usize, (&f32, &f32))| {
            let mut difference = Difference::default();
            difference.add(&[*got], &[*want]);
            difference.comparison(format!("loss of step {}", i + 1), Allowed::Absolute(self.tolerance.step_loss))
        };
        got.iter().zip(want).enumerate().map(compare).collect()
    }

    fn logits(&mut self) -> Result<Comparison> {
        let (v, vp) = (self.model.descriptor.vocab, self.model.descriptor.padded_vocab());
        let rows = self.layout.b * self.layout.t;
        let mut difference = Difference::default();
        let chunk = ROWS.min(self.model.logit_rows());
        for row in (0..rows).step_by(chunk) {
            let rows = chunk.min(rows - row);
            let logits = self.model.logits(self.engine, row..row + rows)?;
            let got = self.engine.read(logits)?;
            let want = self.state.floats(rows * v)?;
            for (got, want) in got.chunks(vp).zip(want.chunks(v)) {
                difference.add(&got[..v], want);
            }
        }
        Ok(difference.comparison("logits", Allowed::Relative(self.tolerance.logits)))
    }

    /// Returns the mean of the step's losses.
    fn mean_loss(&mut self) -> Result<f32> {
        let rows = self.layout.b * self.layout.t;
        let losses = self.engine.read(self.model.losses.slice(0, rows))?;
        Ok((losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / rows as f64) as f32)
    }

    fn gradient(&mut self, param: Param) -> Result<Comparison> {
        let grads = self.model.training.context("the model was planned for training")?.grads;
        let descriptor = self.model.descriptor;
        let mut difference = Difference::default();
        for layer in 0..if param.layered() { descriptor.layers } else { 1 } {
            let got = self.engine.read(self.model.layout.of(grads, param, layer))?;
            let in_file = match param {
                Param::Wte => self.padded_vocab * descriptor.channels,
                _ => got.len(),
            };
            // Rows of padding, of which the file may have another number, have no gradient.
            let want = self.state.floats(in_file)?;
            let unpadded = got.len().min(want.len());
            difference.add(&got[..unpadded], &want[..unpadded]);
            difference.add(&got[unpadded..], &vec![0.0; got.len() - unpadded]);
        }
        Ok(difference.comparison(format!("d{}", param.name()), Allowed::Relative(self.tolerance.gradient)))
    }
}
