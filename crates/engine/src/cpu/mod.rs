//! The CPU engine: f32, on all threads of the current rayon pool.
//!
//! It is the reference for every other engine. Functions are libm's, statistics and sums are in double precision, and results do
//! not depend on the number of threads.

mod activation;
mod adamw;
mod arena;
mod attention;
mod cast;
mod classifier;
mod decode;
mod encoder;
mod experts;
pub(crate) mod gemm;
mod global_norm;
mod matmul;
pub(crate) mod memory;
mod muon;
mod norm;
mod quantize;
mod rotary;
mod scale_blocks;
mod stream;
#[cfg(test)]
mod tests;
mod value_embedding;

use crate::ops::AttentionShape;
use crate::plan::{Group, Plan};
use crate::tensor::{DType, Tensor};
use crate::{
    BatchLayout, Engine, GraphKey, HostBuffer, HostProfile, Interval, Operation, Peak, PendingRead, ReadResult, Result,
    Workload,
};
use anyhow::{bail, ensure};
use arena::Arena;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::time::Instant;
use system::time;

/// Elements of one task in elementwise loops.
const CHUNK: usize = 1 << 15;

/// Runs each operation synchronously.
#[derive(Debug)]
pub struct Cpu {
    arena: Arena,
    /// (B, NH + 2 KV, T, HS): per-head gradients of attention. The first B NH heads also hold its per-head outputs.
    scratch: Option<Tensor>,
    reads: BTreeMap<u64, ReadResult>,
    start: Instant,
    next_read: u64,
    profile: Option<HostProfile>,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// Creates an engine without memory.
    pub fn new() -> Self {
        Self {
            arena: Arena::default(),
            scratch: None,
            reads: BTreeMap::new(),
            start: time::now(),
            next_read: 0,
            profile: None,
        }
    }

    /// Calls `work`, and records its start and end if there is a profile.
    fn profiled(&mut self, name: &str, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let begin = Instant::now();
        work(self)?;
        if let Some(profile) = &mut self.profile {
            profile.record(name, begin);
        }
        Ok(())
    }

    #[expect(clippy::needless_pass_by_value, reason = "as in the trait")]
    fn compute(&mut self, operation: Operation) -> Result<()> {
        let arena = &mut self.arena;
        match operation {
            Operation::EncoderForward(op) => encoder::forward(arena, op),
            Operation::EncoderBackward(op) => encoder::backward(arena, op),
            Operation::NormForward(op) => norm::forward(arena, &op),
            Operation::NormBackward(op) => norm::backward(arena, op),
            Operation::RotaryForward(op) => rotary::forward(arena, op),
            Operation::RotaryBackward(op) => rotary::backward(arena, op),
            Operation::MatmulForward(op) => matmul::forward(arena, &op),
            Operation::MatmulBackward(op) => matmul::backward(arena, &op),
            Operation::Activate(op) => activation::activate(arena, op),
            Operation::ActivateBackward(op) => activation::activate_backward(arena, op),
            Operation::ScaleBlocks(op) => scale_blocks::scale_blocks(arena, op),
            Operation::Mix(op) => stream::mix(arena, op),
            Operation::MixBackward(op) => stream::mix_backward(arena, op),
            Operation::Smear(op) => stream::smear(arena, op),
            Operation::SmearBackward(op) => stream::smear_backward(arena, &op),
            Operation::ValueEmbed(op) => value_embedding::forward(arena, op),
            Operation::ValueEmbedBackward(op) => value_embedding::backward(arena, &op),
            Operation::GateInputBackward(op) => value_embedding::input_backward(arena, op),
            Operation::Route(op) => experts::route(arena, op),
            Operation::ChoiceGradients(op) => experts::choice_gradients(arena, op),
            Operation::RouteBackward(op) => experts::route_backward(arena, &op),
            Operation::Dispatch(op) => experts::dispatch(arena, &op),
            Operation::Combine(op) => experts::combine(arena, op),
            Operation::AttentionForward(op) => {
                let scratch = self.scratch(op.out.len)?;
                attention::forward(&mut self.arena, scratch, &op)
            }
            Operation::AttentionBackward(op) => {
                let scratch = self.scratch(op.dqkv.len)?;
                attention::backward(&mut self.arena, scratch, &op)
            }
            Operation::Classifier(op) => classifier::classifier(arena, op),
            Operation::MostLikely(op) => classifier::most_likely(arena, op),
            Operation::Sum(op) => global_norm::sum(arena, op),
            Operation::GlobalNorm(op) => global_norm::global_norm(arena, op),
            Operation::SquaredSum(op) => global_norm::squared_sum(arena, op),
            Operation::SquareRoot(op) => global_norm::square_root(arena, op),
            Operation::AdamWUpdate(op) => adamw::adamw(arena, op),
            Operation::MuonMomentum(op) => muon::momentum(arena, op),
            Operation::Orthogonalize(op) => muon::orthogonalize(arena, op),
            Operation::MuonVariance(op) => muon::variance(arena, op),
            Operation::MuonApply(op) => muon::apply(arena, op),
            Operation::Quantize(op) => quantize::quantize(arena, op),
            Operation::Dequantize(op) => quantize::dequantize(arena, op),
            Operation::Fp8Scales(op) => quantize::scales(arena, op),
            Operation::DecodeEmbed(op) => decode::embed(arena, op),
            Operation::DecodeMatmul(op) => decode::matmul(arena, &op),
            Operation::DecodeAttention(op) => decode::attention(arena, &op),
            Operation::DecodeStep(op) => op.operations.iter().try_for_each(|&operation| self.execute(operation.into())),
            Operation::CacheFill(op) => decode::cache_fill(arena, op),
            Operation::CacheRead(op) => decode::cache_read(arena, op),
            Operation::SampleTokens(op) => decode::sample(arena, op),
        }
    }

    fn scratch(&self, len: usize) -> Result<Tensor> {
        match self.scratch {
            Some(scratch) if scratch.len >= len => Ok(scratch.slice(0, len)),
            planned => bail!(
                "attention: expected {len} elements of scratch memory, found {}; plan the engine for this batch size",
                planned.map_or(0, |scratch| scratch.len)
            ),
        }
    }
}

impl Engine for Cpu {
    fn describe(&self) -> String {
        match rayon::current_num_threads() {
            1 => "CPU, 1 thread".to_owned(),
            n => format!("CPU, {n} threads"),
        }
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn fp8_dtype(&self) -> Option<DType> {
        Some(DType::F32)
    }

    fn free_memory(&self) -> Result<usize> {
        Ok(memory::free())
    }

    fn fuses_column_sums(&self, _: usize) -> bool {
        true
    }

    fn execute(&mut self, operation: Operation) -> Result<()> {
        self.profiled(operation.name(), |engine| engine.compute(operation))
    }

    fn capture_or_replay(
        &mut self,
        _: &GraphKey,
        work: &mut dyn FnMut(&mut dyn Engine) -> Result<()>,
    ) -> Result<Option<String>> {
        work(self).map(|()| None)
    }

    fn peak(&self) -> Option<Peak> {
        None
    }

    fn plan(&mut self, plan: &mut Plan, workload: &Workload) {
        let Workload { attention, training, .. } = *workload;
        let AttentionShape { b, t, heads, head_size, .. } = attention;
        let parts = if training { attention.packed_heads() } else { heads };
        self.scratch = Some(plan.add(Group::Workspace, "attention heads", &[b, parts, t, head_size], DType::F32));
    }

    fn allocate(&mut self, plan: &Plan) -> Result<()> {
        self.arena = Arena::default();
        let free = memory::free();
        ensure!(
            plan.bytes() <= free,
            "memory: expected {} MiB free, found {} MiB; use a smaller model, batch or sequence",
            plan.bytes() >> 20,
            free >> 20
        );
        self.arena = Arena::new(plan.bytes())?;
        plan.constants().iter().try_for_each(|constant| self.write(constant.tensor, constant.values()))
    }

    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()> {
        ensure!(to.dtype == DType::F32, "write: expected an f32 tensor, found {}", to.dtype.name());
        ensure!(to.len == values.len(), "write: expected {} values, found {}", to.len, values.len());
        let [to] = self.arena.split("write", [("to", to, to.len)])?;
        to.copy_from_slice(values);
        Ok(())
    }

    fn read(&mut self, from: Tensor) -> Result<Vec<f32>> {
        ensure!(from.dtype == DType::F32, "read: expected an f32 tensor, found {}", from.dtype.name());
        Ok(self.arena.get(from)?.to_vec())
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        ensure!(to.len() == from.bytes(), "read: expected {} bytes, found {}", from.bytes(), to.len());
        to.copy_from_slice(bytemuck::cast_slice(self.arena.get(from)?));
        Ok(())
    }

    fn write_bytes(&mut self, to: Tensor, bytes: &[u8]) -> Result<()> {
        ensure!(bytes.len() == to.bytes(), "write: expected {} bytes, found {}", to.bytes(), bytes.len());
        let [to] = self.arena.split("write_bytes", [("to", to, to.len)])?;
        bytemuck::cast_slice_mut(to).copy_from_slice(bytes);
        Ok(())
    }

    fn read_async(&mut self, from: Tensor) -> Result<PendingRead> {
        let values = self.read(from)?;
        self.next_read += 1;
        self.reads.insert(self.next_read, ReadResult { values, completed_at: time::now() - self.start });
        Ok(PendingRead(self.next_read))
    }

    fn wait(&mut self, read: PendingRead) -> Result<ReadResult> {
        match self.reads.remove(&read.0) {
            Some(result) => Ok(result),
            None => bail!("read {} is not pending in this engine", read.0),
        }
    }

    fn host_buffer(&self, len: usize) -> Result<HostBuffer> {
        Ok(Box::new(memory::zeros(len)?))
    }

    fn load_batch(&mut self, to: Tensor, layout: BatchLayout, words: HostBuffer) -> Result<Option<HostBuffer>> {
        ensure!(
            words.len() >= layout.words() && to.len >= layout.words(),
            "load_batch: expected {2} words for a batch of {0} x {1} tokens, found a buffer of {3} and a tensor of {4}",
            layout.b,
            layout.t,
            layout.words(),
            words.len(),
            to.len
        );
        self.write_i32(to.slice(0, layout.words()), &words[..layout.words()])?;
        Ok(Some(words))
    }

    fn zero(&mut self, tensor: Tensor) -> Result<()> {
        self.profiled("zero", |engine| {
            let [values] = engine.arena.split("zero", [("tensor", tensor, tensor.len)])?;
            values.par_chunks_mut(CHUNK).for_each(|chunk| chunk.fill(0.0));
            Ok(())
        })
    }

    fn copy(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        ensure!(to.dtype == from.dtype, "copy: expected {}, found {}", to.dtype.name(), from.dtype.name());
        self.profiled("copy", |engine| engine.arena.copy(to, from))
    }

    fn cast(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        self.profiled("cast", |engine| cast::cast(&mut engine.arena, to, from))
    }

    fn start_profile(&mut self) -> Result<()> {
        self.profile = Some(HostProfile::start());
        Ok(())
    }

    fn profile(&mut self) -> Result<Vec<Interval>> {
        Ok(self.profile.take().map_or_else(Vec::new, HostProfile::finish))
    }
}
