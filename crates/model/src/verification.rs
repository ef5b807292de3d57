//! Detection of faulty hardware: a micro-batch is computed twice, and every tensor that an operation writes is compared bit for bit.
//!
//! Runs are bit-exact, so a difference means that a GPU computed or stored a wrong value. The first tensor that differs names the
//! operation and the layer. With several ranks that each have all parameters (ZeRO stage 0 or 1 without expert parallelism), the second
//! computation is in turn on the same GPU and on the GPU of each other rank; otherwise it is on the same GPU.

use super::data_parallel::{DataParallel, StopRequest};
use super::decoder::Decoder;
use super::fp8::Fp8;
use super::params::Unit;
use super::sharding::LayerHooks;
pub use super::train_step::Verification;

use super::train_step::TrainStep;
use anyhow::{Context, ensure};
use distributed::{Ranks, Transfer};
use engine::tensor::{Sharded, Tensor};
use engine::trace::{BitFlip, Entry, Tracer};
use engine::{Engine, Result};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::fmt;

/// Number of repetitions after a difference, which show whether it recurs.
const REPLAYS: usize = 2;

/// Two computations of a micro-batch gave different bits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub struct Difference {
    /// The rank to which the micro-batch belongs.
    pub rank: usize,
    /// The rank that computed it again.
    pub second: usize,
    /// The first tensor that differs, as the owner of the micro-batch first computed it.
    pub entry: Entry,
    /// Its digest in the second computation.
    pub found: u64,
    /// Index of the tensor among those that operations write, and the number of these.
    pub output: (usize, usize),
    /// For each further computation on rank `rank`, whether it gave the bits of the first one.
    pub replays: Vec<bool>,
}

impl Difference {
    /// Returns the rank with the GPU that is probably faulty. `None` if the replays are inconclusive.
    pub fn suspect(&self) -> Option<usize> {
        if self.rank == self.second || !self.replays.iter().all(|same| *same) {
            Some(self.rank)
        } else {
            Some(self.second)
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, second, entry, found, output: (index, count), replays } = self;
        let again = if rank == second { "when it was recomputed".to_owned() } else { format!("on rank {second}") };
        write!(
            f,
            "micro-batch of rank {rank}: expected the same bits {again}, found a difference that begins with {entry} (tensor {index} \
             of {count}, digests {:016x} and {found:016x})",
            entry.digest
        )?;
        let same = replays.iter().filter(|same| **same).count();
        write!(f, "; {same} of {} repetitions gave the same bits as the first computation", replays.len())
    }
}

/// Returns the index of the first entry that differs.
fn first_difference(first: &[Entry], second: &[Entry]) -> Option<usize> {
    let pairs = first.iter().zip(second);
    let within = pairs.enumerate().find(|(_, (a, b))| a != b).map(|(i, _)| i);
    within.or_else(|| (first.len() != second.len()).then(|| first.len().min(second.len()).saturating_sub(1)))
}

impl TrainStep {
    /// If it was requested, computes the loaded micro-batch twice and compares all that operations write. Losses and gradients are zero
    /// afterwards.
    ///
    /// # Errors
    /// A [`Difference`], on all ranks.
    pub(super) fn verify_if_requested(&mut self, engine: &mut dyn Engine, ranks: &mut Ranks) -> Result<()> {
        let Some(Verification { number, flip }) = self.verification.take() else { return Ok(()) };
        let (rank, world) = (ranks.rank(), ranks.world_size());
        let first = self.trace(engine, ranks, flip.filter(|flip| flip.rank == rank))?;
        // Other ranks exchange gradients or tokens in each pass. Those sums depend on the rank that has a batch.
        let shift = if self.model.zero.passes_communicate() { 0 } else { number % world };
        let difference = if shift == 0 {
            let second = self.trace(engine, ranks, None)?;
            compare(&first, &second, [rank, rank])
        } else {
            let own = self.exchange_batches(engine, ranks, shift)?;
            let second = self.trace(engine, ranks, None)?;
            engine.write_i32(self.batch(), &own)?;
            exchange_traces(ranks, &first, &second, shift)?
        };
        if ranks.any_rank(difference.is_some())? {
            let mut replays = Vec::new();
            for _ in 0..REPLAYS {
                replays.push(self.trace(engine, ranks, None)? == first);
            }
            return Err(agree(ranks, difference, &replays)?.into());
        }
        self.begin_micro_batch(engine)
    }

    /// Zeroes losses, gradients and the statistics of FP8, as they are before the first micro-batch of a step.
    fn begin_micro_batch(&self, engine: &mut dyn Engine) -> Result<()> {
        engine.zero(self.model.losses)?;
        engine.zero(self.model.training()?.grads)?;
        self.model.fp8.iter().flat_map(Fp8::shared_amaxes).try_for_each(|amaxes| engine.zero(amaxes))
    }

    /// Computes the loaded micro-batch from zero losses and gradients, without averaging gradients over the ranks.
    fn trace(&mut self, engine: &mut dyn Engine, ranks: &mut Ranks, flip: Option<BitFlip>) -> Result<Vec<Entry>> {
        self.begin_micro_batch(engine)?;
        let place = RefCell::new("the embeddings".to_owned());
        let mut tracer = Tracer::new(engine, &place, flip);
        let model = &Decoder { fp8: self.model.fp8.map(Fp8::uncounted), ..self.model.clone() };
        let layout = self.layout;
        let dloss = model.zero.dloss(layout.b * layout.t * self.grad_accum);
        let stop = StopRequest::Never;
        let mut inner = DataParallel { model, ranks, buffers: &mut self.buffers, last: false, stop };
        let mut hooks = Placed { inner: &mut inner, place: &place };
        model.forward(&mut tracer, layout, &mut hooks)?;
        place.replace("the head".to_owned());
        model.loss(&mut tracer, layout, Some(dloss))?;
        model.backward(&mut tracer, layout, dloss, &mut hooks)?;
        let entries = tracer.finish();
        inner.wait_on_stream(engine)?;
        Ok(entries)
    }

    fn batch(&self) -> Tensor {
        self.model.batch.slice(0, self.layout.words())
    }

    /// Replaces the batch by that of the rank `shift` before this one. Returns this rank's own.
    fn exchange_batches(&self, engine: &mut dyn Engine, ranks: &mut Ranks, shift: usize) -> Result<Vec<i32>> {
        let batch = self.batch();
        let mut bytes = vec![0; batch.bytes()];
        engine.read_bytes(batch, &mut bytes)?;
        let (rank, world) = (ranks.rank(), ranks.world_size());
        let group = ranks.tcp_group().context("several ranks have a group")?;
        let all = group.gather(&bytes)?.concat();
        let all = group.broadcast_message(all)?;
        ensure!(all.len() == world * bytes.len(), "batches of all ranks: expected {} bytes each", bytes.len());
        let words = |bytes: &[u8]| -> Vec<i32> {
            bytes.chunks_exact(4).map(|word| i32::from_ne_bytes([word[0], word[1], word[2], word[3]])).collect()
        };
        let other = (rank + world - shift) % world;
        engine.write_i32(batch, &words(&all[other * bytes.len()..][..bytes.len()]))?;
        Ok(words(&bytes))
    }
}

/// Compares the trace of each rank's own batch with that of the rank that computed it again. Returns the first difference on rank
/// 0.
fn exchange_traces(ranks: &mut Ranks, own: &[Entry], other: &[Entry], shift: usize) -> Result<Option<Difference>> {
    let world = ranks.world_size();
    let group = ranks.tcp_group().context("several ranks have a group")?;
    let all = group.gather(&serde_json::to_vec(&(own, other))?)?;
    let traces: Vec<(Vec<Entry>, Vec<Entry>)> =
        all.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<_, _>>()?;
    Ok((0..traces.len()).find_map(|rank| {
        let second = (rank + shift) % world;
        compare(&traces[rank].0, &traces[second].1, [rank, second])
    }))
}

/// Returns the first difference between two computations of the batch of rank `rank`.
fn compare(first: &[Entry], second: &[Entry], [rank, by]: [usize; 2]) -> Option<Difference> {
    let at = first_difference(first, second)?;
    let found = second.get(at).map_or(0, |entry| entry.digest);
    Some(Difference {
        rank,
        second: by,
        entry: first[at].clone(),
        found,
        output: (at, first.len()),
        replays: Vec::new(),
    })
}

/// Returns the difference of the lowest rank that found one, with the replays of the rank to which its micro-batch belongs.
fn agree(ranks: &mut Ranks, difference: Option<Difference>, replays: &[bool]) -> Result<Difference> {
    let bytes = serde_json::to_vec(&(difference, replays))?;
    let all = ranks.gather(bytes)?;
    let found: Vec<(Option<Difference>, Vec<bool>)> =
        all.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<_, _>>()?;
    let first = found.iter().find_map(|(difference, _)| difference.clone());
    let first = first.map(|difference| Difference { replays: found[difference.rank].1.clone(), ..difference });
    ranks.broadcast(first)?.context("a rank has found a difference")
}

/// Hooks that name the part of the model that comes next.
struct Placed<'a> {
    inner: &'a mut dyn LayerHooks,
    place: &'a RefCell<String>,
}

impl LayerHooks for Placed<'_> {
    fn gather_parameters(&mut self, engine: &mut dyn Engine, layer: usize, next: Option<usize>) -> Result<()> {
        self.place.replace(format!("layer {layer}"));
        self.inner.gather_parameters(engine, layer, next)
    }

    fn begin_gradients(&mut self, engine: &mut dyn Engine, layer: usize) -> Result<()> {
        self.inner.begin_gradients(engine, layer)
    }

    fn gradients_ready(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()> {
        if unit == Unit::Layer(0) {
            self.place.replace("the embeddings".to_owned());
        }
        self.inner.gradients_ready(engine, unit)
    }

    fn parameters_updated(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()> {
        self.inner.parameters_updated(engine, unit)
    }

    fn gather_tokens(&mut self, engine: &mut dyn Engine, layer: usize, of: Sharded) -> Result<()> {
        self.inner.gather_tokens(engine, layer, of)
    }

    fn reduce_tokens(&mut self, engine: &mut dyn Engine, layer: usize, of: Sharded) -> Result<()> {
        self.inner.reduce_tokens(engine, layer, of)
    }

    fn wait_for_tokens(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.inner.wait_for_tokens(engine)
    }

    fn exchange(&mut self, engine: &mut dyn Engine, transfers: &[Transfer]) -> Result<()> {
        self.inner.exchange(engine, transfers)
    }

    fn wait_for_exchanges(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.inner.wait_for_exchanges(engine)
    }
}
