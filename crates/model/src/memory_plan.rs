//! The memory plan of a model: every buffer that a run needs, before any of it is allocated.

use super::decoder::{Decoder, Layer, Norm, Training};
use super::descriptor::{self, Descriptor, Positions};
use super::fp8::{self, Fp8, Fp8Options};
use super::muon_buffers::{MuonBuffers, MuonSizes};
use super::params::{Param, Params, Unit};
use super::recompute::Recompute;
use super::sharding::{Store, Zero};
use super::storage::{MasterWeights, Moments};
use super::update::Optimizer;
use engine::ops::Master;
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, Engine, Workload};

/// Sizes and options of a memory plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanOptions {
    /// Most sequences of a batch.
    pub b: usize,
    /// Most tokens of a sequence.
    pub t: usize,
    /// Plans gradients, optimizer state and the activations of every layer; otherwise a forward pass only.
    pub training: bool,
    /// Master weights where the engine stores bf16.
    pub master_weights: MasterWeights,
    /// Type of the moments where the engine stores bf16.
    pub moments: Moments,
    /// Activations to recompute in training.
    pub recompute: Recompute,
    /// Tensors that ranks shard.
    pub zero: Zero,
    /// Most rows of logits that exist at a time. More are used if the memory is available anyway.
    pub logit_rows: usize,
    /// Optimizer of the layers' matrices.
    pub optimizer: Optimizer,
    /// Set if training steps compute the layers' matmuls in FP8.
    pub fp8: Option<Fp8Options>,
}

impl PlanOptions {
    /// Plans training with master weights and moments in f32, without recomputation or sharding.
    pub const fn training(b: usize, t: usize) -> Self {
        Self {
            b,
            t,
            training: true,
            master_weights: MasterWeights::F32,
            moments: Moments::F32,
            recompute: Recompute::Nothing,
            zero: Zero::NONE,
            logit_rows: LOGIT_ROWS,
            optimizer: Optimizer::AdamW,
            fp8: None,
        }
    }

    /// Plans a forward pass.
    pub const fn inference(b: usize, t: usize) -> Self {
        Self { training: false, master_weights: MasterWeights::None, ..Self::training(b, t) }
    }
}

/// Rows of logits at a time: enough for the GEMMs of a chunk to fill a GPU, and 1.1 GB in bf16 at V = 50,304.
pub const LOGIT_ROWS: usize = 11_264;

/// Chunks of rows are rounded up to this where possible, so that GEMM tiles are full and addresses aligned.
const CHUNK_MULTIPLE: usize = 128;

/// Returns the rows of the first chunk if `rows` are divided into as few chunks of at most `most` as possible, of about equal size.
pub(super) fn chunk_rows(rows: usize, most: usize) -> usize {
    let chunks = rows.div_ceil(most).max(1);
    rows.div_ceil(chunks).next_multiple_of(CHUNK_MULTIPLE).min(most)
}

/// Buffers that share memory, because the phases of a step use them one after another.
struct SharedBuffers {
    logits: Tensor,
    dhead: Option<Tensor>,
    /// dresidual and dwide.
    backward: Option<[Tensor; 2]>,
    /// Operands in FP8, also of the forward pass, which ends before there are logits.
    fp8: Option<[Tensor; fp8::BUFFERS]>,
    gathered: Option<Tensor>,
    muon: Option<MuonBuffers>,
}

impl SharedBuffers {
    fn plan(plan: &mut Plan, options: &PlanOptions, layout: &Params, dtype: DType) -> Self {
        let PlanOptions { b, t, training, zero, logit_rows, optimizer, recompute, .. } = *options;
        let descriptor = layout.descriptor();
        let (vp, c) = Param::Wte.shape(descriptor);
        let f32 = DType::F32;
        let widest = descriptor.fc_channels().max(descriptor.qkv_channels());
        let (stream, wide, dhead) = ([b, t, c], [b, t, widest], [vp, c]);
        let backward = [("d residual", &stream[..], dtype), ("d wide", &wide[..], dtype)];
        let backward = if training { &backward[..] } else { &[] };
        let fp8_buffers = fp8::buffers(descriptor, b * t, recompute);
        let in_fp8 =
            |options: Fp8Options| fp8_buffers.each_ref().map(|(name, shape)| (*name, &shape[..], options.dtype()));
        let fp8_buffers: Vec<_> = options.fp8.map(in_fp8).into_iter().flatten().collect();
        let backward = [backward, &fp8_buffers[..]].concat();
        let bytes = |(_, shape, dtype): &(_, &[usize], DType)| shape.iter().product::<usize>() * dtype.bytes();
        let backward_bytes: usize = backward.iter().map(bytes).sum();
        // In bf16 the sum over chunks would be rounded after each of them.
        let name = if descriptor.tied { "d wte" } else { "d lm_head" };
        let dhead = (training && dtype != f32).then_some((name, &dhead[..], f32));
        let beside = dhead.map_or(0, |_| 4 * vp * c);
        let free = backward_bytes.saturating_sub(beside) / (vp * dtype.bytes()) / CHUNK_MULTIPLE * CHUNK_MULTIPLE;
        let logits = [(b * t).min(logit_rows.max(free)), vp];
        let head: Vec<_> = [("logits", &logits[..], dtype)].into_iter().chain(dhead).collect();
        // Used between two steps, when the other buffers are idle.
        let unit = [layout.largest_layer().max(layout.unit(Unit::Embeddings).len())];
        let unit = [("one unit's optimizer state", &unit[..], f32)];
        let unit = if training && zero.shards_optimizer() { &unit[..] } else { &[] };
        // Muon updates as many layers at a time as fit in the memory that the other phases need anyway.
        let free = [&head[..], &backward, unit].map(engine::plan::bytes).into_iter().max().unwrap_or(0);
        let sizes = (training && optimizer == Optimizer::Muon).then(|| MuonSizes::new(layout, dtype, free));
        let muon: Vec<_> = sizes.iter().flat_map(|sizes| sizes.wanted(dtype)).collect();
        let [head, backward, unit, muon] = plan.share(Group::Activations, [&head, &backward, unit, &muon]);
        Self {
            logits: head[0],
            dhead: head.get(1).copied(),
            backward: backward.first_chunk().copied(),
            fp8: backward.last_chunk().copied().filter(|_| options.fp8.is_some()),
            gathered: unit.first().copied(),
            muon: sizes.zip(muon.try_into().ok()).map(|(sizes, muon)| MuonBuffers::new(&sizes, muon)),
        }
    }
}

/// The activations of all layers.
struct Activations {
    encoded: Tensor,
    embedding_norm: Option<Norm>,
    layers: Vec<Layer>,
    /// Whether the output of the activation shares memory with a gradient.
    shares_activated: bool,
    final_norm: Norm,
    losses: Tensor,
}

impl Activations {
    /// A forward pass alone reuses the activations of one layer for all layers.
    fn plan(plan: &mut Plan, d: &Descriptor, options: &PlanOptions, dtype: DType) -> Self {
        let PlanOptions { b, t, training, recompute, fp8, .. } = *options;
        let (l, c, f32) = (d.layers, d.channels, DType::F32);
        let mut add = |name: &str, shape: &[usize], dtype| plan.add(Group::Activations, name, shape, dtype);
        let kept_residuals = if training { l } else { 1 };
        let kept = if recompute < Recompute::Layers { kept_residuals } else { 1 };
        let encoded = add("encoded", &[b, t, c], dtype);
        // In FP8, transposed copies are kept instead.
        let in_fp8 = |weight| fp8.is_some() && fp8::keeps_input(weight, recompute);
        let keeps_norms = training && recompute < Recompute::ActivationAndNorms && !in_fp8(Param::Fcw);
        let kept_norms = if keeps_norms { l } else { 0 };
        let normed = add("normed", &[b, t, c], dtype);
        let mut norm = |name: &str, n: usize, outs: usize| {
            let out = (outs > 0).then(|| add(name, &[outs, b, t, c], dtype));
            let mean = d.norm == descriptor::Norm::LayerNorm;
            let mean = mean.then(|| add(&format!("{name} mean"), &[n, b, t], f32));
            let rstd = add(&format!("{name} rstd"), &[n, b, t], f32);
            move |i: usize| Norm {
                out: out.map_or(normed, |out| out.part(i, outs)),
                mean: mean.map(|mean| mean.part(i, n)),
                rstd: rstd.part(i, n),
            }
        };
        let (ln1, ln2) = (norm("ln1", kept, kept_norms), norm("ln2", kept, kept_norms));
        let lnf = norm("lnf", 1, 0);
        let embedding_norm = d.embedding_norm.then(|| Norm { mean: None, ..norm("embedding norm", 1, 1)(0) });
        let qkv = add("qkv", &[kept, b, t, d.qkv_channels()], dtype);
        let qk_channels = (d.heads + d.kv_heads) * d.head_size;
        let qk_saved = d.qk_norm.map(|_| add("q and k before norm", &[kept, b, t, qk_channels], dtype));
        let attention = add("attention", &[kept, b, t, d.attention_channels()], dtype);
        let lse = add("attention lse", &[kept, b, d.heads, t], f32);
        let residual2 = add("residual2", &[kept, b, t, c], dtype);
        let fc = add("fc", &[kept, b, t, d.fc_channels()], dtype);
        let keeps_activated = recompute < Recompute::Activation && !in_fp8(Param::Fcprojw);
        let kept_activated = if keeps_activated { kept } else { 1 };
        // A forward pass in FP8 uses this memory only for evaluation, the backward pass only if the activation
        // is gated.
        let shares_activated = training && in_fp8(Param::Fcprojw) && !d.activation.is_gated();
        let activated = (!shares_activated).then(|| add("activated", &[kept_activated, b, t, d.mlp_channels], dtype));
        let residual3 = add("residual3", &[kept_residuals, b, t, c], dtype);
        let losses = add("losses", &[b, t], f32);
        let layer = |i: usize| {
            let k = i % kept;
            Layer {
                ln1: ln1(k),
                qkv: qkv.part(k, kept),
                qk_saved: qk_saved.map(|saved| saved.part(k, kept)),
                attention: attention.part(k, kept),
                lse: lse.part(k, kept),
                residual2: residual2.part(k, kept),
                ln2: ln2(k),
                fc: fc.part(k, kept),
                activated: match activated {
                    Some(activated) => activated.part(k % kept_activated, kept_activated),
                    // See `share_activated`.
                    None => fc.slice(0, 0),
                },
                residual3: residual3.part(i % kept_residuals, kept_residuals),
            }
        };
        let layers = (0..l).map(layer).collect();
        Self { encoded, embedding_norm, layers, shares_activated, final_norm: lnf(0), losses }
    }

    /// Places the output of the activation in `dwide`, if it has no memory of its own.
    fn share_activated(&mut self, dwide: Tensor, rows: usize, d: &Descriptor) {
        if self.shares_activated {
            self.layers.iter_mut().for_each(|layer| layer.activated = dwide.slice(0, rows * d.mlp_channels));
        }
    }
}

/// Returns the sizes from which an engine plans its scratch memory and checks that it has kernels.
pub(super) fn workload(descriptor: &Descriptor, options: &PlanOptions) -> Workload {
    let layout = options.zero.layout(*descriptor);
    Workload {
        attention: descriptor.attention(options.b, options.t),
        channels: descriptor.channels,
        fc_channels: descriptor.fc_channels(),
        mlp_channels: descriptor.mlp_channels,
        padded_vocab: descriptor.padded_vocab(),
        parameters: layout.elements(),
        norm_tensors: if options.zero.shards_optimizer() { descriptor.layers + 1 } else { 1 },
        // The embeddings are two ranges if the head has a learning rate of its own.
        update_ranges: layout.decay_ranges().len() + usize::from(layout.head().is_some()),
        training: options.training,
    }
}

impl Decoder {
    /// Plans every buffer that a run needs and returns the handles. Nothing is allocated.
    pub fn plan(descriptor: Descriptor, options: PlanOptions, engine: &mut dyn Engine) -> (Self, Plan) {
        let PlanOptions { b, t, training, recompute, zero, .. } = options;
        let layout = zero.layout(descriptor);
        let (dtype, f32) = (engine.dtype(), DType::F32);
        let mut plan = Plan::new();
        let (params, param_buffers) =
            Store::plan(&mut plan, (Group::Parameters, "params"), &layout, dtype, zero.shards_parameters());
        let grads = training
            .then(|| Store::plan(&mut plan, (Group::Gradients, "grads"), &layout, dtype, zero.shards_gradients()));

        let rotary_table = match descriptor.positions {
            Positions::Learned => None,
            Positions::Rotary(rotary) => {
                let hs = descriptor.head_size;
                Some(plan.add_constant("rotary table", &[t, hs / 2, 2], move || rotary.table(t, hs)))
            }
        };
        let mut activations = Activations::plan(&mut plan, &descriptor, &options, dtype);
        let widest = descriptor.channels.max(descriptor.attention_channels());
        let dchannels = training.then(|| plan.add(Group::Activations, "d channels", &[b, t, widest], dtype));
        let SharedBuffers { logits, dhead, backward, fp8, gathered, muon } =
            SharedBuffers::plan(&mut plan, &options, &layout, dtype);
        if let Some([_, dwide]) = backward {
            activations.share_activated(dwide, b * t, &descriptor);
        }
        let Activations { encoded, embedding_norm, layers, final_norm, losses, .. } = activations;

        let training = grads.zip(dchannels).zip(backward).map(|((grads, dchannels), backward)| {
            let shape = [Store::shard_elements(&layout)];
            let mut state = |name, dtype| plan.add(Group::Optimizer, name, &shape, dtype);
            let moments = options.moments.dtype(dtype);
            let (m, v) = (state("m", moments), state("v", moments));
            let master = match options.master_weights {
                MasterWeights::F32 if dtype != f32 => Master::F32(state("master", f32)),
                MasterWeights::Remainder if dtype != f32 => Master::Remainder(state("master remainder", DType::U16)),
                _ => Master::None,
            };
            let stats = plan.add(Group::Workspace, "stats", &[2], f32);
            let squares = zero.shards_optimizer().then(|| plan.add(Group::Workspace, "squared norm", &[1], f32));
            let ((grads, grad_buffers), [dresidual, dwide]) = (grads, backward);
            let fp8 = options.fp8.zip(fp8);
            let fp8 =
                fp8.map(|(fp8, buffers)| Fp8::plan(&mut plan, fp8, &descriptor, [b, t], zero, recompute, buffers));
            Training {
                grads,
                grad_buffers,
                m,
                v,
                master,
                stats,
                squares,
                gathered,
                dhead,
                dresidual,
                dchannels,
                dwide,
                recompute,
                muon,
                fp8,
            }
        });
        let batch = plan.add(Group::Batch, "batch", &[BatchLayout { b, t }.words()], DType::I32);
        engine.plan(&mut plan, &workload(&descriptor, &options));
        let model = Self {
            descriptor,
            layout,
            zero,
            params,
            param_buffers,
            batch,
            losses,
            logits,
            training,
            fp8: None,
            rotary_table,
            encoded,
            embedding_norm,
            layers,
            final_norm,
        };
        (model, plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_few_and_about_equal() {
        let chunks = |rows, most| {
            let chunk = chunk_rows(rows, most);
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
