//! FP8 in the linear layers of a decoder: copies of weights, scales, and the recipes that determine the scales.
//!
//! The four linear layers of each transformer layer multiply in FP8, in the forward and in the backward pass. The head may do so, too
//! ([`super::fp8_head`]). Their inputs and outputs, everything between them, gradients and master weights keep the engine's type.
//! A training step
//!
//! 1. computes the scales of delayed scaling from the statistics of earlier steps,
//! 2. quantizes each weight, in both layouts. If ranks shard the parameters, these are in the host's memory, or the results of all layers do
//!    not fit, each pass quantizes the weights of a layer when it enters it,
//! 3. quantizes the inputs of linear layers and the gradient of fc's output where they are computed, and the other gradients where
//!    GEMMs read them. Only attention's output is also kept in the engine's type.
//!
//! Passes outside of a training step do not use FP8: [`Decoder::plan`](crate::Decoder::plan) returns a model without it, and
//! [`TrainStep`](crate::TrainStep) adds it.

use super::descriptor::Descriptor;
use super::fp8_head::{self, Fp8Head};
use super::params::{Input, Output, Param, ParamKind};
use super::recompute::Recompute;
use anyhow::{Context, ensure};
use clap::ValueEnum;
use engine::gemm::EXACT_COLUMNS;
use engine::ops::{Fp8Accumulation, Fp8Format, Fp8Scale, Fp8Scales, Scaling};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{Engine, Result};
use serde::{Deserialize, Serialize};

/// Determines how tensors are scaled to FP8. Each tensor has one scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Recipe {
    /// Scales fit the largest magnitude of each tensor, found in an additional pass
    Current,
    /// Scales of inputs and gradients fit the largest magnitudes of the last 16 steps
    #[default]
    Delayed,
}

/// The settings of a run with FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Settings {
    /// Determines the scales.
    pub recipe: Fp8Recipe,
    /// How products are accumulated.
    pub accumulation: Fp8Accumulation,
    /// Whether the head multiplies in FP8, too, unless the model has adapters.
    pub head: bool,
}

impl Default for Fp8Settings {
    fn default() -> Self {
        Self { recipe: Fp8Recipe::default(), accumulation: Fp8Accumulation::default(), head: true }
    }
}

/// Settings of FP8 that an engine and a model have been checked for.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Options {
    recipe: Fp8Recipe,
    pub(super) accumulation: Fp8Accumulation,
    pub(super) head: bool,
    dtype: DType,
}

impl Fp8Options {
    /// Checks that `engine` computes in FP8, and that it can do so for batches of b x t tokens of a model.
    pub fn new(
        Fp8Settings { recipe, accumulation, head }: Fp8Settings,
        descriptor: &Descriptor,
        [b, t]: [usize; 2],
        engine: &dyn Engine,
    ) -> Result<Self> {
        let dtype = engine.fp8_dtype().with_context(|| {
            let device = engine.describe();
            format!("--precision fp8: expected a GPU of compute capability 8.9 or later and bf16, found {device}; use --precision bf16")
        })?;
        if descriptor.experts.is_some() {
            ensure!(
                descriptor.adapters.is_none(),
                "--precision fp8: adapters: expected a model without experts, found {descriptor}; use --precision bf16"
            );
            // Grouped GEMMs have no kernels with partial sums, except those of weight gradients.
            let longest = descriptor.fc_channels().max(descriptor.channels);
            ensure!(
                accumulation == Fp8Accumulation::Fast || longest <= EXACT_COLUMNS as usize,
                "--fp8-accumulation: expected fast, because experts have sums over more than {EXACT_COLUMNS} columns, found {}; \
                 use --fp8-accumulation fast",
                accumulation.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
            );
        }
        let instead = if dtype == DType::Fp8 { "use --precision bf16" } else { "use --precision fp32" };
        for (what, extent, fix) in [
            ("batch x seq", b * t, "change --batch or --seq"),
            ("channels", descriptor.channels, instead),
            ("channels of attention", descriptor.attention_channels(), instead),
            ("channels of queries, keys and values", descriptor.qkv_channels(), instead),
            ("channels of the MLP", descriptor.mlp_channels, instead),
        ] {
            ensure!(
                extent.is_multiple_of(MULTIPLE),
                "--precision fp8: {what}: expected a multiple of {MULTIPLE}, found {extent}; {fix}"
            );
        }
        let head = head && descriptor.adapters.is_none();
        Ok(Self { recipe, accumulation, head, dtype })
    }
}

impl Fp8Options {
    /// Returns the engine's type for FP8 numbers.
    pub(super) fn dtype(self) -> DType {
        self.dtype
    }
}

/// Rows and columns of all matrices are multiples of this, as FP8 GEMMs require.
const MULTIPLE: usize = 16;

/// Steps of which delayed scaling keeps the largest magnitudes.
const HISTORY: usize = 16;

/// Growth from the largest magnitude of earlier steps that delayed scaling leaves room for.
const MARGIN: f32 = 2.0;

/// Scales and largest magnitudes of one kind of tensor: inputs, weights or gradients of outputs, of the N linear layers of each layer, in
/// the order of [`Param::linear`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Slots {
    /// (L, N) f32
    scales: Tensor,
    /// (H, L, N) f32: largest magnitudes of the current step and of those before it.
    amaxes: Tensor,
    /// (H, L, N) f32: the largest magnitudes before the step in progress.
    before: Tensor,
    /// (L, N, 2) i32: numbers of values that saturate, and that become 0.
    counts: Tensor,
}

impl Slots {
    fn plan(plan: &mut Plan, name: &str, d: &Descriptor, history: usize) -> Self {
        let (layers, n) = (d.layers, Param::linear(d).count());
        let mut add =
            |what, shape: &[usize], dtype| plan.add(Group::Optimizer, format!("FP8 {name} {what}"), shape, dtype);
        Self {
            scales: add("scales", &[layers, n], DType::F32),
            amaxes: add("amaxes", &[history, layers, n], DType::F32),
            before: add("amaxes before", &[history, layers, n], DType::F32),
            counts: add("counts", &[layers, n, 2], DType::I32),
        }
    }

    /// Returns the largest magnitudes of the current step.
    fn newest(self) -> Tensor {
        self.amaxes.slice(0, self.scales.len)
    }
}

/// FP8 operands of the linear layers, which a layer's operations use one after another. They share memory with the logits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffers {
    /// (rows, C): inputs of qkv, attproj and fc, and gradients of the outputs of attproj and fcproj.
    pub(super) narrow: Tensor,
    /// (rows, widest): inputs of fcproj, and gradients of the outputs of fc and qkv. The GEMM of fc reads its input in `narrow`
    /// while it writes that of fcproj, and the GEMM of fcproj's input gradient does the same in the backward pass.
    pub(super) wide: Tensor,
    /// (widest, rows): a transposed gradient.
    pub(super) dout_transposed: Tensor,
    /// (C, rows): the transposed gradients of the outputs of attproj and fcproj, if the forward pass does not keep the activation. The GEMM
    /// that recomputes it writes `dout_transposed` before the gradient of fcproj's weight reads this. Otherwise empty.
    pub(super) narrow_transposed: Tensor,
    /// (C, rows): a transposed input that is not kept.
    pub(super) inp_transposed: Tensor,
}

impl Buffers {
    /// Returns the operand that holds the input of a linear layer.
    pub(super) fn input(&self, weight: Param) -> Tensor {
        if matches!(weight.kind(), ParamKind::Linear(Input::Activation, _)) { self.wide } else { self.narrow }
    }

    /// Returns the operands that hold the gradient of a linear layer's output, of `len` elements, and its transpose.
    pub(super) fn output_gradient(&self, weight: Param, len: usize) -> [Tensor; 2] {
        let narrow = matches!(weight.kind(), ParamKind::Linear(_, Output::Residual));
        let transposed =
            if narrow && self.narrow_transposed.len > 0 { self.narrow_transposed } else { self.dout_transposed };
        // A frozen model has no transposed operands.
        let transposed = transposed.slice(0, len.min(transposed.len));
        [if narrow { self.narrow } else { self.wide }.slice(0, len), transposed]
    }
}

/// The number of [`Buffers`].
pub(super) const BUFFERS: usize = 5;

/// Returns names and shapes of the [`Buffers`] for batches of `rows` tokens.
pub(super) fn buffers(d: &Descriptor, rows: usize, recompute: Recompute) -> [(&'static str, [usize; 2]); BUFFERS] {
    // Only the gradients of weights read transposed operands.
    let trains_weights = d.adapters.is_none();
    // Operands of experts have more rows. Their width is stated for `rows` rows.
    let width = |weight: Param, columns: usize| (weight.rows(d, rows) * columns).div_ceil(rows);
    let [inp, out] = [|(_, c)| c, |(oc, _)| oc]
        .map(|of: fn((usize, usize)) -> usize| move |weight: Param| width(weight, of(weight.linear_shape(d))));
    let unkept = Param::linear(d).filter(|&weight| trains_weights && !keeps_input(d, weight, recompute));
    let unkept = unkept.map(&inp).max().unwrap_or(0);
    let narrow = width(Param::Fcw, d.channels).max(d.attention_channels());
    let widest_output = Param::linear(d).map(out).max().unwrap_or(0);
    let widest = Param::linear(d).map(inp).max().unwrap_or(0).max(widest_output);
    let recomputes = trains_weights && !keeps_input(d, Param::Fcprojw, recompute) && !d.activation.is_gated();
    [
        ("FP8 narrow operand", [rows, narrow]),
        ("FP8 wide operand", [rows, widest]),
        ("FP8 dout transposed", [if trains_weights { widest_output } else { 0 }, rows]),
        ("FP8 narrow dout transposed", [if recomputes { d.channels } else { 0 }, rows]),
        ("FP8 inp transposed", [unkept, rows]),
    ]
}

/// Reports whether the forward pass keeps a linear layer's input for the backward pass in FP8 only: outputs of norms and of the
/// activation, unless they are recomputed. Attention's backward pass reads its output in the engine's type.
pub(super) fn keeps_input(d: &Descriptor, weight: Param, recompute: Recompute) -> bool {
    match weight.kind() {
        // A copy in expert order, which is made again together with the activation.
        ParamKind::Linear(Input::Norm, _) if weight.rows(d, 1) > 1 => recompute < Recompute::Activation,
        ParamKind::Linear(Input::Norm, _) => recompute < Recompute::ActivationAndNorms,
        ParamKind::Linear(Input::Activation, _) => recompute < Recompute::Activation,
        _ => false,
    }
}

/// The additional buffers of a model that stores the weights of its layers in FP8 only.
#[derive(Clone, Copy, Debug)]
struct Base {
    /// Scales of the inputs outside of training steps.
    evaluated: Slots,
    /// (largest weight) float
    staging: Tensor,
}

/// The FP8 state of a model. It holds handles into an engine's arena and owns no memory.
#[derive(Clone, Copy, Debug)]
pub struct Fp8 {
    pub(super) options: Fp8Options,
    /// Determines the scales of inputs and gradients in this step.
    pub(super) scaling: Scaling,
    /// Whether the values that quantization loses are counted.
    pub(super) counting: bool,
    /// Whether the copies of frozen weights are complete.
    pub(super) holds_frozen: bool,
    /// Set if the weights are in FP8 only.
    base: Option<Base>,
    pub(super) inputs: Slots,
    pub(super) weights: Slots,
    pub(super) gradients: Slots,
    /// (layers, elements of a layer's linear layers) FP8: weights and transposed weights. One layer if each pass quantizes them.
    copies: [Tensor; 2],
    /// Whether `copies` hold all layers.
    pub(super) holds_all_layers: bool,
    /// Operands of one linear layer at a time.
    pub(super) buffers: Buffers,
    /// (L, C, rows) FP8: transposed inputs that the forward pass keeps for the backward pass, by parameter.
    kept: [Option<Tensor>; Param::ALL.len()],
    /// Set if the head multiplies in FP8.
    pub(super) head: Option<Fp8Head>,
}

impl Fp8 {
    pub(super) fn plan(
        plan: &mut Plan,
        options: Fp8Options,
        descriptor: &Descriptor,
        [b, t]: [usize; 2],
        (holds_layers, recompute, float): (bool, Recompute, DType),
        ([narrow, wide, dout_transposed, narrow_transposed, inp_transposed], head): (
            [Tensor; BUFFERS],
            Option<[Tensor; fp8_head::BUFFERS]>,
        ),
    ) -> Self {
        let (d, layers, dtype) = (descriptor, descriptor.layers, options.dtype);
        let (scaling, history) = match options.recipe {
            Fp8Recipe::Current => (Scaling::Current, 1),
            // The first step reads whether there are statistics.
            Fp8Recipe::Delayed => (Scaling::Calibrate, HISTORY),
        };
        let elements = Param::linear(d).map(|weight| weight.len(d)).sum();
        let holds_all_layers = holds_layers || d.adapters.is_some();
        let copied = if holds_all_layers { layers } else { 1 };
        let mut add = |name: &str, shape: &[usize]| plan.add(Group::Workspace, format!("FP8 {name}"), shape, dtype);
        let copies = ["W", "W transposed"].map(|name| add(name, &[copied, elements]));
        let mut kept = [None; Param::ALL.len()];
        let trains_weights = d.adapters.is_none();
        for weight in Param::linear(d).filter(|&weight| trains_weights && keeps_input(d, weight, recompute)) {
            let name = format!("FP8 inp of {}", weight.name());
            let shape = [layers, weight.shape(d).1, weight.rows(d, b * t)];
            kept[weight as usize] = Some(plan.add(Group::Activations, name, &shape, dtype));
        }
        let base = d.is_fp8_base().then(|| {
            let largest = Param::linear(d).map(|weight| weight.len(d)).max().unwrap_or(0);
            Base {
                evaluated: Slots::plan(plan, "evaluated input", d, 1),
                staging: plan.add(Group::Workspace, "weight before FP8", &[largest], float),
            }
        });
        let head = head.map(|buffers| Fp8Head::plan(plan, options, d, buffers));
        let mut slots = |name, history| Slots::plan(plan, name, d, history);
        Self {
            options,
            scaling,
            counting: false,
            holds_frozen: d.is_fp8_base(),
            inputs: slots("input", history),
            weights: slots("weight", 1),
            gradients: slots("gradient", history),
            base,
            copies,
            holds_all_layers,
            buffers: Buffers { narrow, wide, dout_transposed, narrow_transposed, inp_transposed },
            kept,
            head,
        }
    }

    /// Returns the state of passes outside of training steps, if the weights are in FP8 only. It does not change the statistics of training.
    pub(super) fn for_evaluation(self) -> Option<Self> {
        let inputs = self.base?.evaluated;
        Some(Self { inputs, scaling: Scaling::Current, counting: false, ..self })
    }

    /// Returns where weights are written before they are quantized, if they are in FP8 only.
    pub(super) fn staging(&self) -> Option<Tensor> {
        self.base.map(|base| base.staging)
    }

    /// Returns the FP8 weights, without the transposed ones.
    pub(super) fn weights_copy(&self) -> Tensor {
        self.copies[0]
    }

    /// Returns where the forward pass keeps the transposed input (rows, C) of a linear layer.
    pub(super) fn kept_input(
        &self,
        d: &Descriptor,
        layer: usize,
        weight: Param,
        [rows, c]: [usize; 2],
    ) -> Option<Tensor> {
        self.kept[weight as usize].map(|kept| kept.part(layer, d.layers).slice(0, rows * c))
    }

    /// Returns this layer's FP8 weight and transposed weight.
    pub(super) fn weight(&self, d: &Descriptor, layer: usize, weight: Param) -> [Tensor; 2] {
        let all: usize = Param::linear(d).map(|weight| weight.len(d)).sum();
        let before: usize = Param::linear(d).take_while(|&other| other != weight).map(|weight| weight.len(d)).sum();
        let layer = if self.holds_all_layers { layer } else { 0 };
        self.copies.map(|copies| copies.slice(layer * all + before, weight.len(d)))
    }

    /// Returns the scale of a linear layer's tensor.
    pub(super) fn slot(&self, of: Slots, d: &Descriptor, layer: usize, weight: Param) -> Fp8Scale {
        let i = Param::linear(d).count() * layer + Param::linear(d).take_while(|&other| other != weight).count();
        let counts = self.counting.then(|| of.counts.slice(2 * i, 2));
        Fp8Scale { scale: of.scales.slice(i, 1), amax: of.amaxes.slice(i, 1), counts }
    }

    /// Copies the statistics of delayed scaling, so that [`restore_statistics`](Self::restore_statistics) can undo a step.
    pub(super) fn keep_statistics(&self, engine: &mut dyn Engine) -> Result<()> {
        self.delayed().into_iter().try_for_each(|slots| engine.copy(slots.before, slots.amaxes))
    }

    /// Restores the statistics of delayed scaling before the step in progress.
    pub(super) fn restore_statistics(&self, engine: &mut dyn Engine) -> Result<()> {
        self.delayed().into_iter().try_for_each(|slots| engine.copy(slots.amaxes, slots.before))
    }

    /// Returns the tensors with delayed scaling.
    fn delayed(&self) -> Vec<Slots> {
        match self.options.recipe {
            Fp8Recipe::Current => Vec::new(),
            Fp8Recipe::Delayed => vec![self.inputs, self.gradients],
        }
    }

    /// Begins a step: computes the scales of delayed scaling.
    ///
    /// If there are no statistics of earlier steps, the step calibrates: it scales each tensor by its own largest magnitude, which
    /// it keeps for the next step.
    pub(super) fn begin_step(&mut self, engine: &mut dyn Engine) -> Result<()> {
        if self.options.recipe == Fp8Recipe::Current {
            return Ok(());
        }
        if self.is_calibrating() {
            let known = engine.read(self.inputs.amaxes)?.iter().any(|amax| amax.is_finite() && *amax > 0.0);
            self.scaling = if known { Scaling::Delayed } else { Scaling::Calibrate };
        }
        for (slots, format) in [(self.inputs, Fp8Format::E4m3), (self.gradients, Fp8Format::E5m2)] {
            let largest = format.max() / MARGIN;
            engine.run(Fp8Scales { scales: slots.scales, amaxes: slots.amaxes, largest })?;
        }
        Ok(())
    }

    /// Reports whether this step scales each tensor by its own largest magnitude, for lack of statistics.
    fn is_calibrating(&self) -> bool {
        self.scaling == Scaling::Calibrate
    }

    /// Reports whether the operations of this micro-batch are those of most others.
    pub(super) fn repeats(&self) -> bool {
        !self.is_calibrating() && !self.counting
    }

    /// Begins or ends to count the values that quantization loses. The counts begin at 0.
    pub(super) fn set_counting(&mut self, engine: &mut dyn Engine, counting: bool) -> Result<()> {
        self.counting = counting;
        let all = [self.inputs, self.weights, self.gradients];
        if counting { all.into_iter().try_for_each(|slots| engine.zero(slots.counts)) } else { Ok(()) }
    }

    /// Returns this state without counting.
    pub(super) fn uncounted(self) -> Self {
        Self { counting: false, ..self }
    }

    /// Returns the statistics of this step that ranks must combine, so that their scales agree.
    ///
    /// With current scaling, each rank scales its own inputs and gradients. Weights and their scales are equal on all ranks.
    pub(super) fn shared_amaxes(&self) -> Vec<Tensor> {
        self.delayed().into_iter().map(Slots::newest).collect()
    }

    /// Returns the tensors that a checkpoint contains: the statistics of delayed scaling.
    pub fn state(&self) -> Vec<Tensor> {
        self.delayed().iter().map(|slots| slots.amaxes).collect()
    }
}

/// The values of one kind of tensor, over all layers, that quantization loses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fp8Counts {
    /// The tensor: `inputs of qkvw`, `weights of fcw` or `gradients of fcw`.
    pub tensor: String,
    /// Number of values.
    pub values: u64,
    /// Values that saturate.
    pub saturated: u64,
    /// Values that become 0.
    pub zeroed: u64,
}

impl Fp8 {
    /// Reads the counts of micro-batches of `rows` tokens.
    pub(super) fn read_counts(&self, engine: &mut dyn Engine, d: &Descriptor, rows: usize) -> Result<Vec<Fp8Counts>> {
        let mut all = Vec::new();
        for (name, slots) in [("inputs", self.inputs), ("weights", self.weights), ("gradients", self.gradients)] {
            let mut bytes = vec![0; slots.counts.bytes()];
            engine.read_bytes(slots.counts, &mut bytes)?;
            let counts: Vec<u64> = bytes.as_chunks().0.iter().map(|&b| u64::from(u32::from_le_bytes(b))).collect();
            let n = Param::linear(d).count();
            for (index, weight) in Param::linear(d).enumerate() {
                let (oc, c) = weight.linear_shape(d);
                let rows =
                    rows * d.experts.filter(|_| weight.experts(d) > 1).map_or(1, |experts| experts.active as usize);
                let of_layer = match name {
                    "weights" => weight.len(d),
                    "inputs" => rows * c,
                    _ => rows * oc,
                };
                let sum = |i: usize| counts.chunks(2 * n).map(|layer| layer[2 * index + i]).sum();
                all.push(Fp8Counts {
                    tensor: format!("{name} of {}", weight.name()),
                    values: (d.layers * of_layer) as u64,
                    saturated: sum(0),
                    zeroed: sum(1),
                });
            }
        }
        Ok(all)
    }
}
