//! Determinism of training: two runs with the same seed on one machine agree in every bit.

use anyhow::{Context, bail, ensure};
use data::{Geometry, Loader, Prefetch, Tokens};
use distributed::Ranks;
use engine::ops::AdamW;
use engine::tensor::Tensor;
use engine::{Algorithms, Engine, Result};
use model::descriptor::GPT2_VOCAB;
use model::fit;
use model::{Decoder, Descriptor, Fp8Options, Fp8Recipe, Fp8Settings, Param, PlanOptions, TrainStep};
use rng::{Mt19937, XorShift};
use std::cell::RefCell;
use std::fmt;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// The size of a model and of its batches.
#[derive(Clone, Copy, Debug)]
pub struct TrialShape {
    /// Number of layers.
    pub layers: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Number of channels.
    pub channels: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Sequences in a micro-batch.
    pub b: usize,
    /// Tokens in a sequence.
    pub t: usize,
}

impl TrialShape {
    /// A small model with GPT-2's vocabulary and head size, and enough rows for every tile shape.
    pub const STANDARD: Self = Self { layers: 4, heads: 4, channels: 256, vocab: GPT2_VOCAB, b: 4, t: 256 };
}

/// Micro-batches per step.
pub const GRAD_ACCUM: usize = 2;
const SEED: u32 = 42;

/// The groups of tensors that are compared, in the order in which a step computes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// The loss of each token.
    Losses,
    /// The gradients of the parameters.
    Gradients,
    /// The global gradient norm.
    Norm,
    /// AdamW's first moments.
    M,
    /// AdamW's second moments.
    V,
    /// The fp32 master weights.
    Masters,
    /// The parameters.
    Weights,
}

impl Group {
    /// All groups, in order.
    pub const ALL: [Self; 7] =
        [Self::Losses, Self::Gradients, Self::Norm, Self::M, Self::V, Self::Masters, Self::Weights];

    /// Returns the name for display.
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

/// Identifies a tensor of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorId {
    /// The group.
    pub group: Group,
    /// Parameter and layer that the tensor belongs to; `None` for the losses and the norm.
    pub param: Option<(Param, usize)>,
}

impl fmt::Display for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.group.name())?;
        match self.param {
            None => Ok(()),
            Some((param, layer)) if param.layered() => write!(f, " of {} in layer {layer}", param.name()),
            Some((param, _)) => write!(f, " of {}", param.name()),
        }
    }
}

/// The hashes of every tensor after every step.
#[derive(Clone, Debug)]
pub struct Trace {
    tensors: Vec<TensorId>,
    /// For each step, one hash per tensor.
    steps: Vec<Vec<u64>>,
    /// Mean loss of the last step.
    pub last_loss: f32,
}

impl Trace {
    /// Returns a hash of a group over all steps, or `None` if the model does not have the group.
    pub fn hash(&self, group: Group) -> Option<u64> {
        let indices = self.tensors.iter().enumerate().filter(|(_, tensor)| tensor.group == group).map(|(i, _)| i);
        let indices: Vec<usize> = indices.collect();
        let mut hash = Xxh3::new();
        for step in &self.steps {
            for &i in &indices {
                hash.update(&step[i].to_le_bytes());
            }
        }
        (!indices.is_empty()).then(|| hash.digest())
    }

    /// Returns the first step, counted from 1, after which the traces differ, and the first tensor that differs.
    ///
    /// # Panics
    /// If the traces have different tensors or different numbers of steps.
    pub fn first_difference(&self, other: &Self) -> Option<(usize, TensorId)> {
        assert_eq!((&self.tensors, self.steps.len()), (&other.tensors, other.steps.len()));
        let differs = |a: &[u64], b: &[u64]| a.iter().zip(b).position(|(a, b)| a != b);
        let mut steps = self.steps.iter().zip(&other.steps).enumerate();
        steps.find_map(|(step, (a, b))| Some((step + 1, self.tensors[differs(a, b)?])))
    }
}

/// A training run from a fixed seed, which records a [`Trace`].
pub struct Trial<'a> {
    engine: &'a mut dyn Engine,
    model: Decoder,
    train: Prefetch,
    rounding: XorShift,
    trace: Trace,
    bytes: Vec<u8>,
    step: TrainStep,
}

impl<'a> Trial<'a> {
    /// Initializes a model on `engine`, which computes in FP8 with a recipe if there is one. `algorithms` selects the GEMM
    /// algorithms, as in a resumed run; without it, they are tuned.
    pub fn new(
        engine: &'a mut dyn Engine,
        scale: TrialShape,
        recipe: Option<Fp8Recipe>,
        algorithms: Option<&Algorithms>,
    ) -> Result<Self> {
        let TrialShape { layers, heads, channels, vocab, b, t } = scale;
        let descriptor = Descriptor::gpt2(layers, heads, channels, t, vocab)?;
        let settings = |recipe| Fp8Settings { recipe, ..Fp8Settings::default() };
        let fp8 = recipe.map(|recipe| Fp8Options::new(settings(recipe), &descriptor, [b, t], engine));
        let capacity = PlanOptions { fp8: fp8.transpose()?, ..PlanOptions::training(b, t) };
        let (model, plan) = fit::plan(descriptor, capacity, engine)?;
        engine.allocate(&plan)?;
        if let Some(algorithms) = algorithms {
            ensure!(
                engine.adopt_algorithms(algorithms),
                "the second run cannot use the GEMM algorithms of the first run"
            );
        }
        let mut rng = Mt19937::new(SEED);
        // The token distribution is skewed, like that of text.
        let mut token = || rng.below(vocab as u32).min(rng.below(vocab as u32));
        let tokens = (0..=64 * b * t).map(|_| token()).collect();
        let shards = vec![Tokens::in_memory("random tokens", tokens)];
        let loader = Loader::new(shards, Geometry::single(b, t), vocab, Some(SEED))?;
        model.tune(engine, loader.layout())?;
        model.initialize(engine, SEED)?;
        let train = Prefetch::start(loader, engine)?;
        let tensors_of = |(group, _)| {
            let params: Vec<_> = match group {
                Group::Losses | Group::Norm => vec![None],
                _ => model.layout.file_order().map(Some).collect(),
            };
            params.into_iter().map(move |param| TensorId { group, param })
        };
        let tensors = groups(&model)?.into_iter().flat_map(tensors_of).collect();
        let trace = Trace { tensors, steps: Vec::new(), last_loss: f32::NAN };
        let rounding = XorShift { state: u64::from(SEED) };
        let step = TrainStep::new(&model, train.layout(), GRAD_ACCUM);
        Ok(Self { engine, model, train, rounding, trace, bytes: Vec::new(), step })
    }

    /// Captures the passes of a micro-batch in a CUDA graph, if the engine supports CUDA graphs.
    pub fn with_cuda_graph(self) -> Self {
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
        let load = &mut |engine: &mut dyn Engine| Ok(train.load_next(engine, model.batch, seed())?.targets);
        let decide = &mut |_: &mut dyn Engine, _| Ok(Some(AdamW { seed: seed(), ..settings }.into()));
        if let (_, Some(error)) = step.run(*engine, &mut Ranks::default(), load, decide)? {
            bail!("CUDA graph capture of a micro-batch failed: {error}");
        }
        self.trace.last_loss = engine.read(training.stats)?[0] / tokens;
        ensure!(
            self.trace.last_loss.is_finite(),
            "step {}: expected a finite loss, found {}",
            settings.step,
            self.trace.last_loss
        );
        let hashes = self.hashes()?;
        self.trace.steps.push(hashes);
        Ok(())
    }

    /// Returns the hash of every tensor.
    fn hashes(&mut self) -> Result<Vec<u64>> {
        let mut hashes = Vec::with_capacity(self.trace.tensors.len());
        for (group, tensor) in groups(&self.model)? {
            self.bytes.resize(tensor.bytes(), 0);
            self.engine.read_bytes(tensor, &mut self.bytes)?;
            let size = tensor.dtype.bytes();
            for id in self.trace.tensors.iter().filter(|id| id.group == group) {
                let range = id.param.map_or(0..tensor.len, |(param, layer)| self.model.layout.range(param, layer));
                hashes.push(xxh3_64(&self.bytes[range.start * size..range.end * size]));
            }
        }
        Ok(hashes)
    }

    /// Returns the trace of the completed steps.
    pub fn into_trace(self) -> Trace {
        self.trace
    }
}

/// Returns the groups of a model and their tensors, in the order of [`Group::ALL`].
fn groups(model: &Decoder) -> Result<Vec<(Group, Tensor)>> {
    let training = model.training.context("the model was planned for training")?;
    let of = |group| match group {
        Group::Losses => Some(model.losses),
        Group::Gradients => Some(training.grads),
        Group::Norm => Some(training.stats.slice(1, 1)),
        Group::M => Some(training.m),
        Group::V => Some(training.v),
        Group::Masters => training.master.tensor(),
        Group::Weights => Some(model.params),
    };
    Ok(Group::ALL.into_iter().filter_map(|group| Some((group, of(group)?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::cpu::Cpu;
    use engine::cuda::{EmulatedGpu, Precision};

    const SMALL: TrialShape = TrialShape { layers: 2, heads: 1, channels: 64, vocab: 300, b: 2, t: 16 };
    const STEPS: usize = 3;

    fn emulated(precision: Precision, hopper: bool) -> Box<dyn Engine> {
        engine::cuda::emulated(EmulatedGpu::new(hopper), precision, None, false)
    }

    /// Trains and calls `disturb` before each step, counted from 1.
    fn disturbed(mut engine: Box<dyn Engine>, disturb: impl FnMut(usize, &mut Trial)) -> Trace {
        run(Trial::new(&mut *engine, SMALL, None, None).unwrap(), disturb)
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
    fn two_runs_are_identical_with_and_without_cuda_graphs() {
        for ((a, b), mut c) in engines().into_iter().zip(engines()).zip(engines()) {
            let masters = a.dtype() != engine::tensor::DType::F32;
            let [a, b] = [a, b].map(|engine| disturbed(engine, |_, _| ()));
            assert_eq!(a.first_difference(&b), None);
            let captured = run(Trial::new(&mut *c, SMALL, None, None).unwrap().with_cuda_graph(), |_, _| ());
            assert_eq!(a.first_difference(&captured), None);
            for group in Group::ALL {
                assert_eq!(a.hash(group), b.hash(group));
                assert_eq!(a.hash(group).is_some(), group != Group::Masters || masters);
            }
            // Every tensor has changed in every step.
            for (i, tensor) in a.tensors.iter().enumerate() {
                let hashes: std::collections::HashSet<u64> = a.steps.iter().map(|step| step[i]).collect();
                assert_eq!(hashes.len(), STEPS, "{tensor}");
            }
        }
    }

    #[test]
    fn runs_in_fp8_are_identical_with_and_without_cuda_graphs() {
        for recipe in [Fp8Recipe::Current, Fp8Recipe::Delayed] {
            let trained = |graphs| {
                let mut engine = emulated(Precision::Bf16, true);
                let trial = Trial::new(&mut *engine, SMALL, Some(recipe), None).unwrap();
                run(if graphs { trial.with_cuda_graph() } else { trial }, |_, _| ())
            };
            let individually = trained(false);
            assert_eq!(individually.first_difference(&trained(true)), None, "{recipe:?}");
            let mut engine = emulated(Precision::Bf16, true);
            let in_bf16 = run(Trial::new(&mut *engine, SMALL, None, None).unwrap(), |_, _| ());
            assert!(individually.first_difference(&in_bf16).is_some());
        }
    }

    /// Changes one value by less than one percent before the second step.
    #[test]
    fn trace_locates_a_single_changed_value() {
        let whole = disturbed(Box::new(Cpu::new()), |_, _| ());
        let with_changed_value = |group: Group, param: Param, layer: usize| {
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
        let difference = |group, param, layer| whole.first_difference(&with_changed_value(group, param, layer));
        let tensor = |group, param, layer| TensorId { group, param: Some((param, layer)) };
        for (group, param, layer) in [(Group::M, Param::Qkvw, 1), (Group::V, Param::Fcb, 0), (Group::M, Param::Wpe, 0)]
        {
            assert_eq!(difference(group, param, layer), Some((2, tensor(group, param, layer))));
        }
        assert_eq!(tensor(Group::M, Param::Qkvw, 1).to_string(), "m of qkvw in layer 1");
        assert_eq!(tensor(Group::V, Param::Wpe, 0).to_string(), "v of wpe");
        // A changed weight first affects the losses or gradients computed from it.
        let (step, tensor) = difference(Group::Weights, Param::Fcw, 1).unwrap();
        assert!(step == 2 && matches!(tensor.group, Group::Losses | Group::Gradients), "{tensor}");
        let other = with_changed_value(Group::M, Param::Qkvw, 1);
        assert_ne!(whole.hash(Group::M), other.hash(Group::M));
    }

    #[test]
    fn trace_detects_a_different_rounding_seed_or_batch() {
        let bf16 = || emulated(Precision::Bf16, false);
        let whole = disturbed(bf16(), |_, _| ());
        let rounded = disturbed(bf16(), |step, trial| trial.rounding.state += u64::from(step == 3));
        assert_eq!(whole.first_difference(&rounded).unwrap().0, 3);
        let moved = disturbed(bf16(), |step, trial| {
            if step == 2 {
                trial.train.load_next(trial.engine, trial.model.batch, 0).unwrap();
            }
        });
        assert_eq!(whole.first_difference(&moved), Some((2, TensorId { group: Group::Losses, param: None })));
    }
}
