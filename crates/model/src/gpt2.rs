//! GPT-2's forward and backward pass.
//!
//! Data flow of a layer (B, T, C):
//! ```text
//! residual ─┬─ ln1 ─ qkv ─ attention ─ attproj ─┐
//!           └───────────────────────────────────┴─ residual2 ─┬─ ln2 ─ fc ─ gelu ─ fcproj ─┐
//!                                                             └────────────────────────────┴─ residual3
//! ```
//! attproj and fcproj add the residual stream to what they compute. Layer `l` ends with layer `l + 1`'s ln1.
//!
//! So the gradients of their biases are the column sums of the stream's gradient: of attproj's as ln2's backward leaves it, of
//! fcproj's as the next layer's ln1's or the last norm's does. The norm sums them up as it writes, where the engine has that for
//! less than the product ([`Engine::norm_sums_columns`]).
//!
//! The backward pass reads a layer's activations again. What [`Recompute`] names is not kept for it but lies in one buffer
//! for all layers, and is computed again by the operation that made it: the gradients are the same to the last bit.
//!
//! Logits, of which there are V for every token, never exist all at once: [`Gpt2::loss`] takes them in chunks of rows through
//! one buffer, from the last norm's output to the gradients of that and of wte.

use super::Descriptor;
use super::params::{Param, Params, Unit};
use super::store::{Layers, Store, Undivided, Zero};
use anyhow::{Context, ensure};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{
    AdamW, BatchLayout, Ending, Engine, GeluForward, GeluInput, Heads, LayerNorm, Linear, Optimized, Result, Scope,
};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A model laid out for batches of up to (B, T) tokens: handles into an engine's arena, no memory of its own.
#[derive(Clone, Debug)]
pub struct Gpt2 {
    pub descriptor: Descriptor,
    pub layout: Params,
    /// What ranks divide among them.
    pub zero: Zero,
    /// float, laid out by `layout`; of what ranks divide as [`Store`] has it, as are gradients and optimizer state.
    pub params: Tensor,
    pub(super) param_turns: Option<Tensor>,
    /// i32, as [`BatchLayout`] has it
    pub batch: Tensor,
    /// (B, T) f32, one loss per token, summed over micro-steps
    pub losses: Tensor,
    /// (chunk rows, Vp); shares memory with what the backward pass of the layers needs.
    logits: Tensor,
    pub training: Option<Training>,
    encoded: Tensor,
    layers: Vec<Layer>,
    last_norm: Norm,
}

/// What training needs besides the forward pass.
#[derive(Clone, Copy, Debug)]
pub struct Training {
    pub grads: Tensor,
    grad_turns: Option<Tensor>,
    pub m: Tensor,
    pub v: Tensor,
    pub master: Option<Tensor>,
    /// (2): sum of the step's losses and gradient norm, read together.
    pub stats: Tensor,
    /// (1) f32: the squared norm of this rank's part of the gradients, where they are divided in the end.
    pub squares: Option<Tensor>,
    /// (largest layer or embeddings) f32: optimizer state of one unit while it is gathered.
    pub gathered: Option<Tensor>,
    /// (Vp, C) f32: the gradient of wte while the chunks of a batch add to it, where gradients are not f32.
    dwte: Option<Tensor>,
    /// (B, T, C): gradient of the residual stream, which every layer adds to.
    dresidual: Tensor,
    /// (B, T, C)
    dchannels: Tensor,
    /// (B, T, 4C)
    dwide: Tensor,
    recompute: Recompute,
}

/// Output and statistics of a LayerNorm.
#[derive(Clone, Copy, Debug)]
struct Norm {
    out: Tensor,
    mean: Tensor,
    rstd: Tensor,
}

/// Activations of one layer that the backward pass reads again.
#[derive(Clone, Copy, Debug)]
struct Layer {
    ln1: Norm,
    qkv: Tensor,
    attention: Tensor,
    lse: Tensor,
    residual2: Tensor,
    ln2: Norm,
    fc: Tensor,
    fc_gelu: Tensor,
    residual3: Tensor,
}

/// What the backward pass computes again, so that it need not be kept for every layer. As numbers, llm.c's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum Recompute {
    #[default]
    Nothing,
    Gelu,
    GeluAndNorms,
}

impl Recompute {
    pub const ALL: [Self; 3] = [Self::Nothing, Self::Gelu, Self::GeluAndNorms];
}

impl From<Recompute> for u8 {
    fn from(recompute: Recompute) -> Self {
        recompute as Self
    }
}

impl TryFrom<u8> for Recompute {
    type Error = &'static str;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        Self::ALL.get(usize::from(number)).copied().ok_or("expected 0, 1 or 2")
    }
}

/// What the plan is made for.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    pub b: usize,
    pub t: usize,
    /// Gradients, optimizer state and activations of every layer; without it, a forward pass only.
    pub training: bool,
    /// Keep f32 master weights where the engine stores bf16.
    pub master_weights: bool,
    /// With `training`.
    pub recompute: Recompute,
}

/// Rows of logits at a time: enough that the products of a chunk fill a GPU, and at V = 50,304 in bf16 1.1 GB.
pub const CHUNK: usize = 11_264;

/// What chunks are rounded up to where they can be: tiles of products are whole then, and addresses aligned.
const CHUNK_MULTIPLE: usize = 128;

/// `rows` in as few chunks of at most `most` as there can be, all about as large: the rows of the first.
fn chunk_of(rows: usize, most: usize) -> usize {
    let chunks = rows.div_ceil(most).max(1);
    rows.div_ceil(chunks).next_multiple_of(CHUNK_MULTIPLE).min(most)
}

/// What a step's phases have in the same memory, one after another.
struct Phases {
    logits: Tensor,
    dwte: Option<Tensor>,
    /// d residual and d wide.
    backward: Option<[Tensor; 2]>,
    gathered: Option<Tensor>,
}

impl Phases {
    fn plan(plan: &mut Plan, capacity: Capacity, zero: Zero, layout: &Params, chunk: usize, float: DType) -> Self {
        let Capacity { b, t, training, .. } = capacity;
        let (vp, c) = Param::Wte.shape(layout.descriptor());
        let f32 = DType::F32;
        let (stream, wide, dwte) = ([b, t, c], [b, t, 4 * c], [vp, c]);
        let backward = [("d residual", &stream[..], float), ("d wide", &wide[..], float)];
        let backward = if training { &backward[..] } else { &[] };
        let backward_bytes: usize = backward.iter().map(|(_, shape, _)| shape.iter().product::<usize>()).sum();
        let backward_bytes = backward_bytes * float.bytes();
        // In bf16 a sum over chunks would be rounded after each of them.
        let dwte = (training && float != f32).then_some(("d wte", &dwte[..], f32));
        let beside = dwte.map_or(0, |_| 4 * vp * c);
        let free = backward_bytes.saturating_sub(beside) / (vp * float.bytes()) / CHUNK_MULTIPLE * CHUNK_MULTIPLE;
        let logits = [(b * t).min(chunk.max(free)), vp];
        let head: Vec<_> = [("logits", &logits[..], float)].into_iter().chain(dwte).collect();
        // Between two steps, when nothing else is in that memory.
        let unit = [layout.largest_layer().max(layout.unit(Unit::Embeddings).len())];
        let unit = [("one unit's optimizer state", &unit[..], f32)];
        let unit = if training && zero.divides_optimizer() { &unit[..] } else { &[] };
        let [head, backward, unit] = plan.share(Group::Activations, [&head, backward, unit]);
        Self {
            logits: head[0],
            dwte: head.get(1).copied(),
            backward: backward.try_into().ok(),
            gathered: unit.first().copied(),
        }
    }
}

impl Training {
    fn plan(
        plan: &mut Plan,
        zero: Zero,
        layout: &Params,
        (grads, grad_turns): (Tensor, Option<Tensor>),
        dchannels: Tensor,
        phases: &Phases,
        master_weights: bool,
        recompute: Recompute,
    ) -> Option<Self> {
        let [dresidual, dwide] = phases.backward?;
        let f32 = DType::F32;
        let mut state = |name| plan.add(Group::Optimizer, name, &[Store::elements_of_parts(layout)], f32);
        let (m, v) = (state("m"), state("v"));
        let master = master_weights.then(|| state("master"));
        let stats = plan.add(Group::Workspace, "stats", &[2], f32);
        let squares = zero.divides_optimizer().then(|| plan.add(Group::Workspace, "squared norm", &[1], f32));
        let Phases { dwte, gathered, .. } = *phases;
        Some(Self {
            grads,
            grad_turns,
            m,
            v,
            master,
            stats,
            squares,
            gathered,
            dwte,
            dresidual,
            dchannels,
            dwide,
            recompute,
        })
    }
}

impl Gpt2 {
    /// Plans every buffer a run needs and returns the handles; nothing is allocated.
    pub fn plan(descriptor: Descriptor, capacity: Capacity, engine: &mut dyn Engine) -> (Self, Plan) {
        Self::plan_in_chunks(descriptor, capacity, CHUNK, engine)
    }

    /// As [`plan`](Self::plan), for ranks that divide things among them.
    pub fn plan_divided(
        descriptor: Descriptor,
        capacity: Capacity,
        zero: Zero,
        engine: &mut dyn Engine,
    ) -> (Self, Plan) {
        Self::plan_all(descriptor, capacity, zero, CHUNK, engine)
    }

    /// As [`plan`](Self::plan), with at most `chunk` rows of logits at a time, or as many as there is memory for anyway if
    /// those are more.
    pub fn plan_in_chunks(
        descriptor: Descriptor,
        capacity: Capacity,
        chunk: usize,
        engine: &mut dyn Engine,
    ) -> (Self, Plan) {
        Self::plan_all(descriptor, capacity, Zero::NONE, chunk, engine)
    }

    fn plan_all(
        descriptor: Descriptor,
        capacity: Capacity,
        zero: Zero,
        chunk: usize,
        engine: &mut dyn Engine,
    ) -> (Self, Plan) {
        let Capacity { b, t, training, recompute, .. } = capacity;
        let Descriptor { layers: l, heads, channels: c, .. } = descriptor;
        let vp = descriptor.padded_vocab();
        let layout = zero.layout(descriptor);
        let float = engine.float();
        let mut plan = Plan::new();
        let (params, param_turns) =
            Store::plan(&mut plan, Group::Parameters, "params", &layout, float, zero.divides_parameters());
        let grads = training
            .then(|| Store::plan(&mut plan, Group::Gradients, "grads", &layout, float, zero.divides_gradients()));

        let mut act = |name: &str, shape: &[usize], dtype| plan.add(Group::Activations, name, shape, dtype);
        // A forward pass alone reuses one layer's activations for all.
        let kept = if training { l } else { 1 };
        let (bt, f32) = (b * t, DType::F32);
        let encoded = act("encoded", &[b, t, c], float);
        let kept_norms = if training && recompute < Recompute::GeluAndNorms { l } else { 0 };
        let normed = act("normed", &[b, t, c], float);
        let mut norm = |name: &str, n: usize, outs: usize| {
            let out = (outs > 0).then(|| act(name, &[outs, b, t, c], float));
            let mean = act(&format!("{name} mean"), &[n, b, t], f32);
            let rstd = act(&format!("{name} rstd"), &[n, b, t], f32);
            move |i: usize| Norm {
                out: out.map_or(normed, |out| out.part(i, outs)),
                mean: mean.part(i, n),
                rstd: rstd.part(i, n),
            }
        };
        let (ln1, ln2) = (norm("ln1", kept, kept_norms), norm("ln2", kept, kept_norms));
        let lnf = norm("lnf", 1, 0);
        let qkv = act("qkv", &[kept, b, t, 3 * c], float);
        let attention = act("attention", &[kept, b, t, c], float);
        let lse = act("attention lse", &[kept, b, heads, t], f32);
        let residual2 = act("residual2", &[kept, b, t, c], float);
        let fc = act("fc", &[kept, b, t, 4 * c], float);
        let kept_gelus = if recompute < Recompute::Gelu { kept } else { 1 };
        let fc_gelu = act("fc gelu", &[kept_gelus, b, t, 4 * c], float);
        // The stream passes from layer to layer, so a forward pass alone needs two to alternate between.
        let streams = if training { l } else { l.min(2) };
        let residual3 = act("residual3", &[streams, b, t, c], float);
        let losses = act("losses", &[b, t], f32);
        let dchannels = training.then(|| act("d channels", &[b, t, c], float));
        let phases = Phases::plan(&mut plan, capacity, zero, &layout, chunk, float);
        let layers = (0..l)
            .map(|i| {
                let k = i % kept;
                Layer {
                    ln1: ln1(k),
                    qkv: qkv.part(k, kept),
                    attention: attention.part(k, kept),
                    lse: lse.part(k, kept),
                    residual2: residual2.part(k, kept),
                    ln2: ln2(k),
                    fc: fc.part(k, kept),
                    fc_gelu: fc_gelu.part(k % kept_gelus, kept_gelus),
                    residual3: residual3.part(i % streams, streams),
                }
            })
            .collect();

        let training = grads.zip(dchannels).and_then(|(grads, dchannels)| {
            let master_weights = float != f32 && capacity.master_weights;
            Training::plan(&mut plan, zero, &layout, grads, dchannels, &phases, master_weights, recompute)
        });
        let batch = plan.add(Group::Batch, "batch", &[BatchLayout { b, t }.words()], DType::I32);
        let scope = Scope {
            b,
            t,
            channels: c,
            heads,
            padded_vocab: vp,
            parameters: layout.elements(),
            parts: if zero.divides_optimizer() { l + 1 } else { 1 },
            ranges: layout.decay_ranges().len(),
            training: training.is_some(),
        };
        engine.plan(&mut plan, &scope);
        debug_assert_eq!(losses.len, bt);
        let last_norm = lnf(0);
        let model = Self {
            descriptor,
            layout,
            zero,
            params,
            param_turns,
            batch,
            losses,
            logits: phases.logits,
            training,
            encoded,
            layers,
            last_norm,
        };
        (model, plan)
    }

    fn param(&self, param: Param, layer: usize) -> Tensor {
        self.param_store().tensor(param, layer)
    }

    fn norm_op(&self, norm: Norm, weight: Param, bias: Param, layer: usize, rows: usize) -> LayerNorm {
        let c = self.descriptor.channels;
        LayerNorm {
            out: norm.out.slice(0, rows * c),
            mean: norm.mean.slice(0, rows),
            rstd: norm.rstd.slice(0, rows),
            weight: self.param(weight, layer),
            bias: self.param(bias, layer),
            c,
        }
    }

    /// The batch that was loaded with `layout`, which must fit the plan, up to the last norm.
    pub fn forward(&self, engine: &mut dyn Engine, layout: BatchLayout) -> Result<()> {
        ensure!(self.param_turns.is_none(), "ranks divide the parameters of this model: they must gather them");
        self.forward_with(engine, layout, &mut Undivided)
    }

    /// As [`forward`](Self::forward), where `layers` has the parameters.
    pub fn forward_with(&self, engine: &mut dyn Engine, layout: BatchLayout, layers: &mut dyn Layers) -> Result<()> {
        let Descriptor { channels: c, heads, .. } = self.descriptor;
        let rows = layout.b * layout.t;
        let shape = Heads { b: layout.b, t: layout.t, heads, head_size: self.descriptor.head_size() };
        let linear = |c, oc| Linear { rows, c, oc };
        let rows_of = |tensor: Tensor, width: usize| tensor.slice(0, rows * width);

        let encoded = rows_of(self.encoded, c);
        engine.encoder_forward(encoded, self.batch, layout, self.param(Param::Wte, 0), self.param(Param::Wpe, 0), c)?;
        let after = |layer: usize| (layer + 1 < self.layers.len()).then_some(layer + 1);
        layers.parameters(engine, 0, after(0))?;
        engine.layernorm_forward(self.norm_op(self.layers[0].ln1, Param::Ln1w, Param::Ln1b, 0, rows), encoded)?;
        let mut residual = encoded;
        for (l, layer) in self.layers.iter().enumerate() {
            let p = |param| self.param(param, l);
            let (ln1, qkv, attention) =
                (rows_of(layer.ln1.out, c), rows_of(layer.qkv, 3 * c), rows_of(layer.attention, c));
            engine.matmul_forward(qkv, ln1, p(Param::Qkvw), Some(p(Param::Qkvb)), Ending::Sum, linear(c, 3 * c))?;
            engine.attention_forward(attention, layer.lse.slice(0, heads * rows), qkv, shape)?;
            let residual2 = rows_of(layer.residual2, c);
            let (weight, bias) = (p(Param::Attprojw), Some(p(Param::Attprojb)));
            engine.matmul_forward(residual2, attention, weight, bias, Ending::Residual(residual), linear(c, c))?;
            let ln2 = self.norm_op(layer.ln2, Param::Ln2w, Param::Ln2b, l, rows);
            engine.layernorm_forward(ln2, residual2)?;
            let (fc, fc_gelu) = (rows_of(layer.fc, 4 * c), rows_of(layer.fc_gelu, 4 * c));
            let (weight, bias) = (p(Param::Fcw), Some(p(Param::Fcb)));
            engine.matmul_forward(fc_gelu, ln2.out, weight, bias, Ending::Gelu(fc), linear(c, 4 * c))?;
            let residual3 = rows_of(layer.residual3, c);
            let (weight, bias) = (p(Param::Fcprojw), Some(p(Param::Fcprojb)));
            engine.matmul_forward(residual3, fc_gelu, weight, bias, Ending::Residual(residual2), linear(4 * c, c))?;
            let next = match self.layers.get(l + 1) {
                Some(next) => {
                    layers.parameters(engine, l + 1, None)?;
                    self.norm_op(next.ln1, Param::Ln1w, Param::Ln1b, l + 1, rows)
                }
                None => self.norm_op(self.last_norm, Param::Lnfw, Param::Lnfb, 0, rows),
            };
            engine.layernorm_forward(next, residual3)?;
            if let Some(next) = after(l) {
                layers.parameters(engine, next, after(next))?;
            }
            residual = residual3;
        }
        Ok(())
    }

    /// Rows of logits that there is room for.
    pub fn chunk(&self) -> usize {
        self.logits.len / self.descriptor.padded_vocab()
    }

    /// Logits (rows, Vp) of some rows of the batch, as many as [`chunk`](Self::chunk) at most, after a forward pass. They last
    /// until the next operation of the model.
    ///
    /// # Panics
    /// If there are more.
    pub fn logits(&self, engine: &mut dyn Engine, rows: Range<usize>) -> Result<Tensor> {
        let (c, vp) = (self.descriptor.channels, self.descriptor.padded_vocab());
        let (first, rows) = (rows.start, rows.len());
        let logits = self.logits.slice(0, rows * vp);
        let normed = self.last_norm.out.slice(first * c, rows * c);
        let wte = self.param(Param::Wte, 0);
        engine.matmul_forward(logits, normed, wte, None, Ending::Sum, Linear { rows, c, oc: vp })?;
        Ok(logits)
    }

    /// Adds each token's loss to `losses`, after a forward pass. With `dloss`, its factor in what is differentiated, begins the
    /// backward pass as well: adds the gradient of wte as the head, and leaves that of the last norm's output.
    pub fn loss(&self, engine: &mut dyn Engine, layout: BatchLayout, dloss: Option<f32>) -> Result<()> {
        let Descriptor { channels: c, vocab: v, .. } = self.descriptor;
        let vp = self.descriptor.padded_vocab();
        let (rows, targets) = (layout.b * layout.t, layout.tensor(self.batch, layout.targets()));
        let training = dloss.map(|_| self.training()).transpose()?;
        let dwte = |training: &Training| self.grad_store(training).tensor(Param::Wte, 0);
        if let Some(training) = training
            && let Some(sum) = training.dwte
        {
            engine.cast(sum, dwte(training))?;
        }
        let chunk = chunk_of(rows, self.chunk());
        for first in (0..rows).step_by(chunk) {
            let rows = chunk.min(rows - first);
            let logits = self.logits(engine, first..first + rows)?;
            engine.classifier(logits, self.losses.slice(first, rows), targets.slice(first, rows), v, vp, dloss)?;
            if let Some(training) = training {
                let of = |tensor: Tensor| tensor.slice(first * c, rows * c);
                let (dnormed, normed) = (of(training.dchannels), of(self.last_norm.out));
                let (sum, wte) = (training.dwte.unwrap_or_else(|| dwte(training)), self.param(Param::Wte, 0));
                engine.matmul_backward(dnormed, sum, None, logits, normed, wte, None, Linear { rows, c, oc: vp })?;
            }
        }
        match training {
            Some(training) => training.dwte.map_or(Ok(()), |sum| engine.cast(dwte(training), sum)),
            None => Ok(()),
        }
    }

    fn training(&self) -> Result<&Training> {
        self.training.as_ref().context("this model was planned for inference only")
    }

    /// Where the gradients are.
    pub fn grad_store<'a>(&'a self, training: &Training) -> Store<'a> {
        Store::whole_or_turns(&self.layout, training.grads, training.grad_turns)
    }

    /// Adds the gradients of all parameters, from what [`loss`](Self::loss) left.
    pub fn backward(&self, engine: &mut dyn Engine, layout: BatchLayout) -> Result<()> {
        ensure!(self.zero == Zero::NONE, "ranks divide what belongs to this model: they must reduce its gradients");
        self.backward_with(engine, layout, &mut Undivided)
    }

    /// As [`backward`](Self::backward), where `layers` has the parameters and is given the gradients: those of the layers from
    /// the last to the first, then the embeddings'.
    pub fn backward_with(&self, engine: &mut dyn Engine, layout: BatchLayout, layers: &mut dyn Layers) -> Result<()> {
        let training = self.training()?;
        let Descriptor { channels: c, heads, .. } = self.descriptor;
        let rows = layout.b * layout.t;
        let shape = Heads { b: layout.b, t: layout.t, heads, head_size: self.descriptor.head_size() };
        let linear = |c, oc| Linear { rows, c, oc };
        let rows_of = |tensor: Tensor, width: usize| tensor.slice(0, rows * width);
        let grads = self.grad_store(training);
        let grad = |param, layer| grads.tensor(param, layer);
        let by_norms = engine.norm_sums_columns(c);
        let summed_by_norm = |param, layer| by_norms.then(|| grad(param, layer));
        let dresidual = rows_of(training.dresidual, c);
        let dchannels = rows_of(training.dchannels, c);

        let last_layer = self.layers.len() - 1;
        layers.parameters(engine, last_layer, last_layer.checked_sub(1))?;
        layers.gradients(engine, last_layer)?;
        let lnf = self.norm_op(self.last_norm, Param::Lnfw, Param::Lnfb, 0, rows);
        engine.zero(dresidual)?;
        let last = rows_of(self.layers[last_layer].residual3, c);
        let (dw, db, sums) = (grad(Param::Lnfw, 0), grad(Param::Lnfb, 0), summed_by_norm(Param::Fcprojb, last_layer));
        engine.layernorm_backward(dresidual, dw, db, sums, dchannels, last, lnf)?;

        for (l, layer) in self.layers.iter().enumerate().rev() {
            let (p, g) = (|param| self.param(param, l), |param| grad(param, l));
            let summed_by_product = |param| (!by_norms).then(|| g(param));
            let residual = rows_of(if l == 0 { self.encoded } else { self.layers[l - 1].residual3 }, c);
            let dwide = rows_of(training.dwide, 4 * c);
            let (fc, fc_gelu) = (rows_of(layer.fc, 4 * c), rows_of(layer.fc_gelu, 4 * c));
            let residual2 = rows_of(layer.residual2, c);
            let ln2 = self.norm_op(layer.ln2, Param::Ln2w, Param::Ln2b, l, rows);
            if training.recompute >= Recompute::GeluAndNorms {
                engine.layernorm_forward(ln2, residual2)?;
            }
            let forward =
                GeluForward { inp: ln2.out, weight: p(Param::Fcw), bias: Some(p(Param::Fcb)), shape: linear(c, 4 * c) };
            let again = (training.recompute >= Recompute::Gelu).then_some(forward);
            let gelu = Some(GeluInput { pre_gelu: fc, again });
            let (dw, db) = (g(Param::Fcprojw), summed_by_product(Param::Fcprojb));
            engine.matmul_backward(dwide, dw, db, dresidual, fc_gelu, p(Param::Fcprojw), gelu, linear(4 * c, c))?;
            let (dw, db) = (g(Param::Fcw), Some(g(Param::Fcb)));
            engine.matmul_backward(dchannels, dw, db, dwide, ln2.out, p(Param::Fcw), None, linear(c, 4 * c))?;
            let (dw, db, sums) = (g(Param::Ln2w), g(Param::Ln2b), summed_by_norm(Param::Attprojb, l));
            engine.layernorm_backward(dresidual, dw, db, sums, dchannels, residual2, ln2)?;

            let attention = rows_of(layer.attention, c);
            let (dw, db) = (g(Param::Attprojw), summed_by_product(Param::Attprojb));
            engine.matmul_backward(dchannels, dw, db, dresidual, attention, p(Param::Attprojw), None, linear(c, c))?;
            let (qkv, dqkv) = (rows_of(layer.qkv, 3 * c), rows_of(training.dwide, 3 * c));
            let lse = layer.lse.slice(0, heads * rows);
            engine.attention_backward(dqkv, dchannels, qkv, attention, lse, shape)?;
            let ln1 = self.norm_op(layer.ln1, Param::Ln1w, Param::Ln1b, l, rows);
            if training.recompute >= Recompute::GeluAndNorms {
                engine.layernorm_forward(ln1, residual)?;
            }
            let (dw, db) = (g(Param::Qkvw), Some(g(Param::Qkvb)));
            engine.matmul_backward(dchannels, dw, db, dqkv, ln1.out, p(Param::Qkvw), None, linear(c, 3 * c))?;
            let below = l.checked_sub(1);
            if let Some(below) = below {
                layers.gradients(engine, below)?;
            }
            let sums = below.and_then(|below| summed_by_norm(Param::Fcprojb, below));
            let (dw, db) = (g(Param::Ln1w), g(Param::Ln1b));
            engine.layernorm_backward(dresidual, dw, db, sums, dchannels, residual, ln1)?;
            layers.differentiated(engine, Unit::Layer(l))?;
            if let Some(below) = below {
                layers.parameters(engine, below, below.checked_sub(1))?;
            }
        }
        engine.encoder_backward(grad(Param::Wte, 0), grad(Param::Wpe, 0), dresidual, self.batch, layout, c)?;
        layers.differentiated(engine, Unit::Embeddings)
    }

    /// [`measure`](Self::measure)s and [`apply`](Self::apply)s.
    pub fn update(&self, engine: &mut dyn Engine, settings: &AdamW) -> Result<()> {
        self.measure(engine)?;
        self.apply(engine, settings, &mut Undivided)
    }

    /// Leaves the sum of `losses` in stats[0] and the gradients' norm in stats[1]; where ranks divide them, the square of their
    /// norm, of this rank's part, in `squares`: once it is summed over the ranks, [`take_root`](Self::take_root) goes on.
    pub fn measure(&self, engine: &mut dyn Engine) -> Result<()> {
        let training = self.training()?;
        engine.sum(training.stats.slice(0, 1), self.losses)?;
        match training.squares {
            Some(squares) => engine.squared_sum(squares, &self.grad_store(training).all_own()),
            None => engine.global_norm(training.stats.slice(1, 1), training.grads),
        }
    }

    /// Leaves the root of `squares`, if there are some, in stats[1].
    pub fn take_root(&self, engine: &mut dyn Engine) -> Result<()> {
        let training = self.training()?;
        training.squares.map_or(Ok(()), |squares| engine.square_root(training.stats.slice(1, 1), squares))
    }

    /// Clips the measured norm and applies AdamW to this rank's part: at once or, where ranks divide it, a unit at a time, of
    /// which `layers` is told; `settings.weight_decay` to matrices and embeddings only. Nothing changes unless what was
    /// measured is finite.
    pub fn apply(&self, engine: &mut dyn Engine, settings: &AdamW, layers: &mut dyn Layers) -> Result<()> {
        let training = self.training()?;
        let divided = self.zero.divides_optimizer();
        let ranges = self.layout.decay_ranges();
        for ranges in ranges.chunk_by(|a, b| !divided || a.unit == b.unit) {
            let unit = divided.then_some(ranges[0].unit);
            let own = unit.map_or(0..self.layout.elements(), |unit| self.layout.own(unit));
            let of = |store: Store| unit.map_or_else(|| store.all(), |unit| store.own(unit));
            let state = |tensor| of(self.state_store(tensor));
            let optimized = Optimized {
                params: of(self.param_store()),
                grads: of(self.grad_store(training)),
                m: state(training.m),
                v: state(training.v),
                master: training.master.map(state),
            };
            let ranges_of_own: Vec<_> = ranges.iter().filter_map(|range| range.within(&own)).collect();
            engine.adamw(optimized, &ranges_of_own, training.stats, settings)?;
            for ranges in ranges.chunk_by(|a, b| a.unit == b.unit) {
                layers.updated(engine, ranges[0].unit)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_few_and_about_equal() {
        let chunks = |rows, most| {
            let chunk = chunk_of(rows, most);
            (chunk, rows.div_ceil(chunk))
        };
        assert_eq!(chunks(65_536, 8192), (8192, 8));
        assert_eq!(chunks(9 * 1024, 8192), (4608, 2));
        assert_eq!(chunks(17 * 1024, 8192), (5888, 3));
        assert_eq!(chunks(100, 8192), (128, 1));
        assert_eq!(chunks(51, 10), (10, 6));
        for rows in 1..300 {
            for most in 1..150 {
                let (chunk, n) = chunks(rows, most);
                assert!(chunk <= most && n == rows.div_ceil(most), "{rows} in {n} chunks of {chunk}");
            }
        }
    }
}
