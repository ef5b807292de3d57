//! The memory plan of a model: every buffer that a run needs, before any of it is allocated.

use super::activations::Activations;
use super::adapters::AdapterBuffers;
use super::decoder::{Decoder, Frozen, Layer, SubLayer, Training};
use super::descriptor::{Descriptor, Positions};
use super::fp8::{self, Fp8, Fp8Options};
use super::fp8_head;
use super::fp8_weights::{Fp8Weights, WeightFormat};
use super::muon_buffers::{MuonBuffers, MuonSizes};
use super::offload::{Offload, Offloadable};
use super::params::{Param, Params};
use super::recompute::Recompute;
use super::sharding::{Store, Zero};
use super::storage::{MasterWeights, Moments};
use super::stream::{StreamBuffers, StreamGradients};
use super::sublayers;
use super::update::Optimizer;
use engine::ops::Master;
use engine::plan::{Group, Location, Plan};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, Engine, Workload};
use std::sync::Arc;

/// Sizes and options of a memory plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanOptions {
    /// Maximum number of sequences in a batch.
    pub b: usize,
    /// Maximum number of tokens in a sequence.
    pub t: usize,
    /// Plans gradients, optimizer state and the activations of every layer; otherwise a forward pass only.
    pub training: bool,
    /// Master weights where the engine stores bf16.
    pub master_weights: MasterWeights,
    /// Type of the moments where the engine stores bf16.
    pub moments: Moments,
    /// Tensors in the host's memory, if the engine is a GPU.
    pub offload: Offload,
    /// Whether the weights of all layers in FP8 are kept between the passes of a step. Otherwise each pass quantizes them, with the same bits.
    pub keeps_fp8_weights: bool,
    /// Activations to recompute in training.
    pub recompute: Recompute,
    /// Tensors that ranks shard.
    pub zero: Zero,
    /// Maximum number of rows of logits that exist at a time. More rows are used if the memory is available anyway.
    pub logit_rows: usize,
    /// Optimizer of the layers' matrices.
    pub optimizer: Optimizer,
    /// Set if training steps compute the layers' matmuls in FP8.
    pub fp8: Option<Fp8Options>,
    /// The engine's type for FP8 numbers if the weights of linear layers are in FP8. Only without training.
    pub fp8_weights: Option<DType>,
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
            offload: Offload::NONE,
            keeps_fp8_weights: true,
            recompute: Recompute::Nothing,
            zero: Zero::NONE,
            logit_rows: LOGIT_ROWS,
            optimizer: Optimizer::AdamW,
            fp8: None,
            fp8_weights: None,
        }
    }

    /// Plans a forward pass.
    pub const fn inference(b: usize, t: usize) -> Self {
        Self { training: false, master_weights: MasterWeights::None, ..Self::training(b, t) }
    }

    /// Sets the format of the weights of linear layers, if the engine and the model support it.
    pub fn with_weights(
        self,
        weights: WeightFormat,
        descriptor: &Descriptor,
        engine: &dyn Engine,
    ) -> engine::Result<Self> {
        Ok(Self { fp8_weights: weights.fp8_dtype(descriptor, engine)?, ..self })
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
    fp8_head: Option<[Tensor; fp8_head::BUFFERS]>,
    gathered: Option<Tensor>,
    muon: Option<MuonBuffers>,
}

impl SharedBuffers {
    fn plan(plan: &mut Plan, options: &PlanOptions, layout: &Params, dtype: DType) -> Self {
        let PlanOptions { b, t, training, zero, logit_rows, optimizer, recompute, moments, .. } = *options;
        let descriptor = layout.descriptor();
        let (vp, c) = Param::Wte.shape(descriptor);
        let f32 = DType::F32;
        let mlp = descriptor.experts.map_or(descriptor.fc_channels(), |experts| {
            sublayers::experts::widest_gradient(descriptor, zero, &experts, b * t).div_ceil(b * t)
        });
        let widest = mlp.max(descriptor.qkv_channels());
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
        let trains_head = descriptor.adapters.is_none();
        let dhead = (training && trains_head && dtype != f32).then_some((name, &dhead[..], f32));
        let beside = dhead.map_or(0, |_| 4 * vp * c);
        let in_fp8 = options.fp8.filter(|options| options.head).map(Fp8Options::dtype);
        let of_head = |rows| fp8_head::buffers(descriptor, rows);
        let row_in_fp8 = in_fp8.map_or(0, |dtype| of_head(1).iter().map(|(_, [a, b])| a * b * dtype.bytes()).sum());
        let row_bytes = vp * dtype.bytes() + row_in_fp8;
        let free = backward_bytes.saturating_sub(beside) / row_bytes / CHUNK_MULTIPLE * CHUNK_MULTIPLE;
        let logits = [(b * t).min(logit_rows.max(free)), vp];
        let head_buffers = of_head(logits[0]);
        let head_in_fp8 = in_fp8.map(|dtype| head_buffers.each_ref().map(|(name, shape)| (*name, &shape[..], dtype)));
        let head = [("logits", &logits[..], dtype)].into_iter().chain(dhead);
        let head: Vec<_> = head.chain(head_in_fp8.into_iter().flatten()).collect();
        // Used between two steps, when the other buffers are idle.
        let unit = [layout.units().map(|unit| layout.unit(unit).len()).max().unwrap_or(0)];
        let unit = [("one unit's optimizer state", &unit[..], f32)];
        let unit = if training && zero.shards_optimizer() { &unit[..] } else { &[] };
        // Muon updates as many layers at a time as fit in the memory that the other phases need anyway.
        let free = [&head[..], &backward, unit].map(engine::plan::bytes).into_iter().max().unwrap_or(0);
        let sizes = (training && optimizer == Optimizer::Muon)
            .then(|| MuonSizes::new(layout, [dtype, moments.dtypes(dtype)[1]], free));
        let muon: Vec<_> = sizes.iter().flat_map(|sizes| sizes.wanted(dtype)).collect();
        let [head, backward, unit, muon] = plan.share(Group::Activations, [&head, &backward, unit, &muon]);
        Self {
            logits: head[0],
            dhead: dhead.map(|_| head[1]),
            backward: backward.first_chunk().copied(),
            fp8: backward.last_chunk().copied().filter(|_| options.fp8.is_some()),
            fp8_head: head.last_chunk().copied().filter(|_| in_fp8.is_some()),
            gathered: unit.first().copied(),
            muon: sizes.zip(muon.try_into().ok()).map(|(sizes, muon)| MuonBuffers::new(&sizes, muon)),
        }
    }
}

/// Plans the sub-layers of each layer. Returns them and the loads of experts.
fn layers(
    activations: &mut Activations,
    d: &Descriptor,
    zero: Zero,
    dwide: Option<Tensor>,
) -> (Vec<Layer>, Option<Tensor>) {
    let attention = sublayers::attention::plan(activations, d);
    let loads = d.experts.map(|experts| sublayers::experts::plan_loads(activations, d, experts, dwide.is_some()));
    let mlp: Box<dyn Fn(usize) -> Arc<dyn SubLayer>> = match d.experts.zip(loads) {
        Some((experts, loads)) => {
            Box::new(sublayers::experts::plan(activations, d, (experts, zero), loads, dwide.is_some()))
        }
        None => Box::new(sublayers::mlp::plan(activations, d, dwide)),
    };
    ((0..d.layers).map(|layer| vec![attention(layer), mlp(layer)]).collect(), loads)
}

/// Plans the cosines and sines of rotary positions.
fn rotary_table(plan: &mut Plan, d: &Descriptor, t: usize) -> Option<Tensor> {
    let (Positions::Rotary(rotary), hs) = (d.positions, d.head_size) else { return None };
    Some(plan.add_constant("rotary table", &[t, hs / 2, 2], move || rotary.table(t, hs)))
}

/// Returns the sizes from which an engine plans its scratch memory and checks that it has kernels.
pub(super) fn workload(descriptor: &Descriptor, options: &PlanOptions) -> Workload {
    let layout = options.zero.layout(*descriptor);
    Workload {
        attention: descriptor.attention(options.b, options.t),
        channels: descriptor.channels,
        linear_layers: descriptor
            .params()
            .filter(|param| param.kind().is_gemm())
            .map(|p| p.linear_shape(descriptor))
            .collect(),
        mlp_channels: descriptor.mlp_channels,
        router: descriptor.experts.map(|experts| options.zero.router(&experts)),
        routed_tokens: options.zero.expert_ranks() * options.b * options.t,
        qk_norm: descriptor.qk_norm.map(|norm| norm.scope),
        padded_vocab: descriptor.padded_vocab(),
        parameters: layout.elements(),
        norm_tensors: if options.zero.shards_optimizer() { layout.units().count() } else { 1 },
        update_ranges: layout.group_ranges().len(),
        training: options.training,
    }
}

/// Plans m and v, and the master weights. `location` returns where tensors of a kind are.
fn optimizer_state(
    plan: &mut Plan,
    options: &PlanOptions,
    layout: &Params,
    dtype: DType,
    location: impl Fn(Offloadable) -> Location,
) -> (Tensor, Tensor, Master) {
    let shape = [Store::shard_elements(layout)];
    let mut state = |kind, name, dtype| plan.add_in(location(kind), Group::Optimizer, name, &shape, dtype);
    let [m, v] = options.moments.dtypes(dtype);
    let [m, v] = [("m", m), ("v", v)].map(|(name, dtype)| state(Offloadable::Moments, name, dtype));
    let mut master = |name, dtype| state(Offloadable::Master, name, dtype);
    let master = match options.master_weights {
        MasterWeights::F32 if dtype != DType::F32 => Master::F32(master("master", DType::F32)),
        MasterWeights::Remainder if dtype != DType::F32 => Master::Remainder(master("master remainder", DType::U16)),
        _ => Master::None,
    };
    (m, v, master)
}

impl Decoder {
    /// Plans every buffer that a run needs and returns the handles. Nothing is allocated.
    pub fn plan(descriptor: Descriptor, options: PlanOptions, engine: &mut dyn Engine) -> (Self, Plan) {
        let PlanOptions { b, t, training, recompute, zero, fp8_weights, .. } = options;
        let layout = fp8_weights.map_or_else(|| zero.layout(descriptor), |_| Params::beside_fp8(descriptor));
        let (dtype, f32) = (engine.dtype(), DType::F32);
        let mut plan = Plan::new();
        let frozen = descriptor.adapters.map(|_| {
            let layout = Params::frozen(&descriptor);
            let of = (Group::Parameters, "frozen params");
            let (params, _) = Store::plan(&mut plan, of, &layout, dtype, false, Location::Device);
            (layout, params)
        });
        let has_host = engine.free_host_memory().is_some();
        let location =
            |kind| if has_host && options.offload.contains(kind) { Location::Host } else { Location::Device };
        let of = (Group::Parameters, "params");
        let (params, param_copies) =
            Store::plan(&mut plan, of, &layout, dtype, zero.shards_parameters(), location(Offloadable::Params));
        let fp8_weights = fp8_weights.map(|fp8| Fp8Weights::plan(&mut plan, &descriptor, dtype, fp8));
        let grads = training.then(|| {
            let of = (Group::Gradients, "grads");
            Store::plan(&mut plan, of, &layout, dtype, zero.shards_gradients(), Location::Device)
        });

        let rotary_table = rotary_table(&mut plan, &descriptor, t);
        let encoded = plan.add(Group::Activations, "encoded", &[b, t, descriptor.channels], dtype);
        let shared = SharedBuffers::plan(&mut plan, &options, &layout, dtype);
        let SharedBuffers { logits, dhead, backward, fp8, fp8_head, gathered, muon } = shared;
        let keeps_fp8 = options.fp8.is_some() && frozen.is_none();
        let offloads_outputs = training && location(Offloadable::Activations) == Location::Host;
        let mut activations = Activations::new(&mut plan, &descriptor, &options, dtype, keeps_fp8, offloads_outputs);
        let embedding_norm = descriptor.embedding_norm.then(|| activations.embedding_norm());
        let stream = StreamBuffers::plan(&mut activations, &descriptor, training);
        let (layers, expert_loads) = layers(&mut activations, &descriptor, zero, backward.map(|[_, dwide]| dwide));
        let final_norm = activations.final_norm([Param::Lnfw, Param::Lnfb]);
        let frozen = frozen.map(|(layout, params)| {
            let adapters = AdapterBuffers::plan(&mut activations, &descriptor, options.training);
            Frozen { layout, params, adapters }
        });
        let outputs = offloads_outputs.then(|| {
            let shape = [descriptor.layers, b, t, descriptor.channels];
            plan.add_in(Location::Host, Group::Activations, "outputs of layers", &shape, dtype)
        });
        let losses = plan.add(Group::Activations, "losses", &[b, t], f32);
        let widest = descriptor.channels.max(descriptor.attention_channels());
        let dchannels = training.then(|| plan.add(Group::Activations, "d channels", &[b, t, widest], dtype));

        let training = grads.zip(dchannels).zip(backward).map(|((grads, dchannels), backward)| {
            let (m, v, master) = optimizer_state(&mut plan, &options, &layout, dtype, location);
            let stream = StreamGradients::plan(&mut plan, &descriptor, [b, t], dtype);
            let stats = plan.add(Group::Workspace, "stats", &[2], f32);
            let squares = zero.shards_optimizer().then(|| plan.add(Group::Workspace, "squared norm", &[1], f32));
            let ((grads, grad_copies), [dresidual, dwide]) = (grads, backward);
            let fp8 = options.fp8.zip(fp8).map(|(fp8, buffers)| {
                let keeps_weights = param_copies.is_none() && options.keeps_fp8_weights;
                let kinds = (keeps_weights, recompute, dtype);
                Fp8::plan(&mut plan, fp8, &descriptor, [b, t], kinds, (buffers, fp8_head))
            });
            Training {
                grads,
                grad_copies,
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
                stream,
                recompute,
                expert_loads,
                muon,
                fp8,
            }
        });
        let batch = plan.add(Group::Batch, "batch", &[BatchLayout::new(b, t).with_documents().words()], DType::I32);
        engine.plan(&mut plan, &workload(&descriptor, &options));
        let model = Self {
            descriptor,
            layout,
            zero,
            frozen,
            params,
            param_copies,
            outputs,
            batch,
            losses,
            logits,
            training,
            // Passes outside of training steps have no other weights.
            fp8: training.and_then(|training| training.fp8).and_then(Fp8::for_evaluation),
            fp8_weights,
            rotary_table,
            encoded,
            embedding_norm,
            stream,
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
