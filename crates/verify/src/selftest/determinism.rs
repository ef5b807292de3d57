//! Training is a function of the seed: two runs on one machine agree in every bit.

use anyhow::{Context, bail, ensure};
use data::{Geometry, Loader, Prefetch, Tokens};
use distributed::Ranks;
use engine::ops::AdamW;
use engine::tensor::Tensor;
use engine::{Algorithms, Engine, Result};
use model::descriptor::GPT2_VOCAB;
use model::fit;
use model::{Descriptor, Gpt2, Param, PlanOptions, TrainStep};
use rng::{Mt19937, XorShift};
use std::cell::RefCell;
use std::fmt;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// A model and how it is trained.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub layers: usize,
    pub heads: usize,
    pub channels: usize,
    pub vocab: usize,
    pub b: usize,
    pub t: usize,
}

impl Scale {
    /// Small, but with GPT-2's vocabulary and head size, and rows enough for each kind of tile.
    pub const STANDARD: Self = Self { layers: 4, heads: 4, channels: 256, vocab: GPT2_VOCAB, b: 4, t: 256 };
}

/// Micro-batches of a step.
pub const GRAD_ACCUM: usize = 2;
const SEED: u32 = 42;

/// What is compared, in the order in which a step makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    Losses,
    Gradients,
    Norm,
    M,
    V,
    Masters,
    Weights,
}

impl Group {
    pub const ALL: [Self; 7] =
        [Self::Losses, Self::Gradients, Self::Norm, Self::M, Self::V, Self::Masters, Self::Weights];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Losses => "losses",
            Self::Gradients => "gradients",
            Self::Norm => "gradient norm",
            Self::M => "m",
            Self::V => "v",
            Self::Masters => "master weights",
            Self::Weights => "weights",
        }
    }
}

/// A tensor of a group: which parameter's, in which layer; losses and norm are of none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub group: Group,
    pub param: Option<(Param, usize)>,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.group.name())?;
        match self.param {
            None => Ok(()),
            Some((param, layer)) if param.layered() => write!(f, " of {} in layer {layer}", param.name()),
            Some((param, _)) => write!(f, " of {}", param.name()),
        }
    }
}

/// Hashes of every tensor after every step.
#[derive(Clone, Debug)]
pub struct Trace {
    parts: Vec<Part>,
    /// One hash for each part.
    steps: Vec<Vec<u64>>,
    pub last_loss: f32,
}

impl Trace {
    /// A hash of a group over all steps; `None` if there is no such group.
    pub fn hash(&self, group: Group) -> Option<u64> {
        let parts = self.parts.iter().enumerate().filter(|(_, part)| part.group == group).map(|(i, _)| i);
        let parts: Vec<usize> = parts.collect();
        let mut hash = Xxh3::new();
        for step in &self.steps {
            for &i in &parts {
                hash.update(&step[i].to_le_bytes());
            }
        }
        (!parts.is_empty()).then(|| hash.digest())
    }

    /// The first step, counted from 1, that left another bit somewhere, and the first tensor in which. Both must be of one
    /// scale, engine and number of steps.
    pub fn first_difference(&self, other: &Self) -> Option<(usize, Part)> {
        assert_eq!((&self.parts, self.steps.len()), (&other.parts, other.steps.len()));
        let differs = |a: &[u64], b: &[u64]| a.iter().zip(b).position(|(a, b)| a != b);
        let mut steps = self.steps.iter().zip(&other.steps).enumerate();
        steps.find_map(|(step, (a, b))| Some((step + 1, self.parts[differs(a, b)?])))
    }
}

/// A run from the seed, step by step.
pub struct Trial<'a> {
    engine: &'a mut dyn Engine,
    model: Gpt2,
    train: Prefetch,
    rounding: XorShift,
    trace: Trace,
    bytes: Vec<u8>,
    step: TrainStep,
}

impl<'a> Trial<'a> {
    /// Matrix products are computed by `algorithms`, as in a run that goes on, or else by those that are found.
    pub fn new(engine: &'a mut dyn Engine, scale: Scale, algorithms: Option<&Algorithms>) -> Result<Self> {
        let Scale { layers, heads, channels, vocab, b, t } = scale;
        let descriptor = Descriptor::new(layers, heads, channels, t, vocab)?;
        let capacity = PlanOptions::training(b, t);
        let (model, plan) = fit::plan(descriptor, capacity, engine)?;
        engine.allocate(&plan)?;
        if let Some(algorithms) = algorithms {
            ensure!(
                engine.adopt_algorithms(algorithms),
                "the second run cannot compute matrix products as the first one did"
            );
        }
        let mut rng = Mt19937::new(SEED);
        // Some tokens are more common than others, as in a text.
        let mut token = || rng.below(vocab as u32).min(rng.below(vocab as u32)) as u16;
        let tokens: Vec<u16> = (0..=64 * b * t).map(|_| token()).collect();
        let shards = vec![Tokens::in_memory("random tokens", tokens)];
        let loader = Loader::new(shards, Geometry::single(b, t), vocab, Some(SEED))?;
        model.tune(engine, loader.layout())?;
        model.initialize(engine, SEED)?;
        let train = Prefetch::start(loader, engine)?;
        let parts_of = |(group, _)| {
            let params: Vec<_> = match group {
                Group::Losses | Group::Norm => vec![None],
                _ => model.layout.file_order().map(Some).collect(),
            };
            params.into_iter().map(move |param| Part { group, param })
        };
        let parts = groups(&model)?.into_iter().flat_map(parts_of).collect();
        let trace = Trace { parts, steps: Vec::new(), last_loss: f32::NAN };
        let rounding = XorShift { state: u64::from(SEED) };
        let step = TrainStep::new(&model, train.layout(), GRAD_ACCUM);
        Ok(Self { engine, model, train, rounding, trace, bytes: Vec::new(), step })
    }

    /// Has the engine record micro-steps, if it can record anything.
    pub fn with_graphs(self) -> Self {
        Self { step: self.step.capture_graphs(), ..self }
    }

    /// Runs one optimizer step.
    pub fn step(&mut self) -> Result<()> {
        let Self { engine, model, train, rounding, step, .. } = self;
        let training = model.training.context("the model was planned for inference only")?;
        let layout = train.layout();
        let tokens = (layout.b * layout.t * GRAD_ACCUM) as f32;
        let settings = AdamW {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: self.trace.steps.len() as u32 + 1,
            clip: 1.0,
            seed: 0,
        };
        let rounding = RefCell::new(rounding);
        let seed = || rounding.borrow_mut().next_u32();
        let load = &mut |engine: &mut dyn Engine| train.load_next(engine, model.batch, seed()).map(|_| ());
        let decide = &mut |_: &mut dyn Engine, _| Ok(Some(AdamW { seed: seed(), ..settings }));
        if let Some(error) = step.run(*engine, &mut Ranks::default(), load, decide)? {
            bail!("CUDA graph of a micro-batch: {error}");
        }
        self.trace.last_loss = engine.read(training.stats)?[0] / tokens;
        ensure!(self.trace.last_loss.is_finite(), "the loss of step {} is {}", settings.step, self.trace.last_loss);
        let hashes = self.hashes()?;
        self.trace.steps.push(hashes);
        Ok(())
    }

    /// Of every part.
    fn hashes(&mut self) -> Result<Vec<u64>> {
        let mut hashes = Vec::with_capacity(self.trace.parts.len());
        for (group, tensor) in groups(&self.model)? {
            self.bytes.resize(tensor.bytes(), 0);
            self.engine.read_bytes(tensor, &mut self.bytes)?;
            let size = tensor.dtype.bytes();
            for part in self.trace.parts.iter().filter(|part| part.group == group) {
                let range = part.param.map_or(0..tensor.len, |(param, layer)| self.model.layout.range(param, layer));
                hashes.push(xxh3_64(&self.bytes[range.start * size..range.end * size]));
            }
        }
        Ok(hashes)
    }

    pub fn into_trace(self) -> Trace {
        self.trace
    }
}

/// The groups that a model has, and where they lie, in the order of [`Group::ALL`].
fn groups(model: &Gpt2) -> Result<Vec<(Group, Tensor)>> {
    let training = model.training.context("the model was planned for training")?;
    let of = |group| match group {
        Group::Losses => Some(model.losses),
        Group::Gradients => Some(training.grads),
        Group::Norm => Some(training.stats.slice(1, 1)),
        Group::M => Some(training.m),
        Group::V => Some(training.v),
        Group::Masters => training.master,
        Group::Weights => Some(model.params),
    };
    Ok(Group::ALL.into_iter().filter_map(|group| Some((group, of(group)?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::cpu::Cpu;
    use engine::cuda::{EmulatedGpu, Precision};

    const SMALL: Scale = Scale { layers: 2, heads: 1, channels: 64, vocab: 300, b: 2, t: 16 };
    const STEPS: usize = 3;

    fn emulated(precision: Precision, hopper: bool) -> Box<dyn Engine> {
        engine::cuda::emulated(EmulatedGpu { hopper, ..EmulatedGpu::default() }, precision, None, false)
    }

    /// A run in which something is done to the engine before each step, counted from 1.
    fn disturbed(mut engine: Box<dyn Engine>, disturb: impl FnMut(usize, &mut Trial)) -> Trace {
        run(Trial::new(&mut *engine, SMALL, None).unwrap(), disturb)
    }

    fn run(mut trial: Trial, mut disturb: impl FnMut(usize, &mut Trial)) -> Trace {
        for step in 1..=STEPS {
            disturb(step, &mut trial);
            trial.step().unwrap();
        }
        trial.into_trace()
    }

    fn engines() -> [Box<dyn Engine>; 4] {
        let emulated = |(precision, hopper)| emulated(precision, hopper);
        let [a, b, c] = [(Precision::Bf16, false), (Precision::Bf16, true), (Precision::Fp32, false)].map(emulated);
        [Box::new(Cpu::new()), a, b, c]
    }

    #[test]
    fn two_runs_are_identical() {
        for ((a, b), mut c) in engines().into_iter().zip(engines()).zip(engines()) {
            let masters = a.dtype() != engine::tensor::DType::F32;
            let [a, b] = [a, b].map(|engine| disturbed(engine, |_, _| ()));
            assert_eq!(a.first_difference(&b), None);
            let recorded = run(Trial::new(&mut *c, SMALL, None).unwrap().with_graphs(), |_, _| ());
            assert_eq!(a.first_difference(&recorded), None);
            for group in Group::ALL {
                assert_eq!(a.hash(group), b.hash(group));
                assert_eq!(a.hash(group).is_some(), group != Group::Masters || masters);
            }
            // Every tensor has moved, in every step.
            for (i, part) in a.parts.iter().enumerate() {
                let hashes: std::collections::HashSet<u64> = a.steps.iter().map(|step| step[i]).collect();
                assert_eq!(hashes.len(), STEPS, "{part}");
            }
        }
    }

    /// One value is another before the second step, by less than a hundredth.
    #[test]
    fn one_value_is_noticed_and_named() {
        let whole = disturbed(Box::new(Cpu::new()), |_, _| ());
        let with_another_value = |group: Group, param: Param, layer: usize| {
            disturbed(Box::new(Cpu::new()), |step, trial| {
                if step == 2 {
                    let groups = groups(&trial.model).unwrap();
                    let tensor = groups.into_iter().find(|(g, _)| *g == group).unwrap().1;
                    let at = trial.model.layout.of(tensor, param, layer).slice(5, 1);
                    let value = trial.engine.read(at).unwrap()[0];
                    trial.engine.write(at, &[f32::from_bits(value.to_bits() ^ (1 << 15))]).unwrap();
                }
            })
        };
        let difference = |group, param, layer| whole.first_difference(&with_another_value(group, param, layer));
        let part = |group, param, layer| Part { group, param: Some((param, layer)) };
        for (group, param, layer) in [(Group::M, Param::Qkvw, 1), (Group::V, Param::Fcb, 0), (Group::M, Param::Wpe, 0)]
        {
            assert_eq!(difference(group, param, layer), Some((2, part(group, param, layer))));
        }
        assert_eq!(part(Group::M, Param::Qkvw, 1).to_string(), "m of qkvw in layer 1");
        assert_eq!(part(Group::V, Param::Wpe, 0).to_string(), "v of wpe");
        // A weight shows in what is computed from it.
        let (step, part) = difference(Group::Weights, Param::Fcw, 1).unwrap();
        assert!(step == 2 && matches!(part.group, Group::Losses | Group::Gradients), "{part}");
        let other = with_another_value(Group::M, Param::Qkvw, 1);
        assert_ne!(whole.hash(Group::M), other.hash(Group::M));
    }

    #[test]
    fn another_rounding_seed_or_batch_is_noticed() {
        let bf16 = || emulated(Precision::Bf16, false);
        let whole = disturbed(bf16(), |_, _| ());
        let rounded = disturbed(bf16(), |step, trial| trial.rounding.state += u64::from(step == 3));
        assert_eq!(whole.first_difference(&rounded).unwrap().0, 3);
        let moved = disturbed(bf16(), |step, trial| {
            if step == 2 {
                trial.train.load_next(trial.engine, trial.model.batch, 0).unwrap();
            }
        });
        assert_eq!(whole.first_difference(&moved), Some((2, Part { group: Group::Losses, param: None })));
    }
}
