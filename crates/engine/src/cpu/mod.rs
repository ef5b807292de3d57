//! The CPU engine: f32, all threads of the current rayon pool. It is the reference for every other engine, so functions
//! are libm's, statistics and sums are taken in double precision, and results do not depend on the number of threads.

mod adamw;
mod arena;
mod attention;
mod cast;
mod classifier;
mod encoder;
mod gelu;
mod gemm;
mod global_norm;
mod layernorm;
mod matmul;
mod memory;
#[cfg(test)]
mod tests;

use super::{
    AdamW, BatchLayout, Ending, Engine, GeluInput, Heads, HostBuffer, LayerNorm, Linear, Optimized, Peak, Reading,
    Recurring, Result, Scope, Ticket, UpdateRange,
};
use crate::plan::{Group, Plan};
use crate::tensor::{DType, Tensor};
use anyhow::{bail, ensure};
use arena::Arena;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::time::Instant;

/// Elements that one task takes where every element is treated alike.
const CHUNK: usize = 1 << 15;

/// Runs each operation to its end before it returns.
#[derive(Debug)]
pub struct Cpu {
    arena: Arena,
    /// (3, b, t, c): attention's per-head gradients, and in its first third its per-head outputs.
    scratch: Option<Tensor>,
    reads: BTreeMap<u64, Reading>,
    start: Instant,
    tickets: u64,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    pub fn new() -> Self {
        Self { arena: Arena::default(), scratch: None, reads: BTreeMap::new(), start: Instant::now(), tickets: 0 }
    }

    fn scratch(&self, len: usize) -> Result<Tensor> {
        match self.scratch {
            Some(scratch) if scratch.len >= len => Ok(scratch.slice(0, len)),
            planned => bail!(
                "attention needs {len} elements of scratch memory, {} were planned: plan the engine for this batch size",
                planned.map_or(0, |scratch| scratch.len)
            ),
        }
    }
}

fn copy_words<T: bytemuck::Pod>(to: &mut [f32], values: &[T]) -> Result<()> {
    ensure!(to.len() == values.len(), "{} values for a tensor of {}", values.len(), to.len());
    bytemuck::cast_slice_mut(to).copy_from_slice(values);
    Ok(())
}

impl Engine for Cpu {
    fn describe(&self) -> String {
        match rayon::current_num_threads() {
            1 => "CPU, 1 thread".to_owned(),
            n => format!("CPU, {n} threads"),
        }
    }

    fn float(&self) -> DType {
        DType::F32
    }

    fn memory_free(&self) -> Result<usize> {
        Ok(memory::free())
    }

    fn repeat(&mut self, _: &Recurring, work: &mut dyn FnMut(&mut dyn Engine) -> Result<()>) -> Result<Option<String>> {
        work(self).map(|()| None)
    }

    fn peak(&self) -> Option<Peak> {
        None
    }

    fn plan(&mut self, plan: &mut Plan, scope: &Scope) {
        let Scope { b, t, channels, heads, training, .. } = *scope;
        let parts = if training { 3 } else { 1 };
        let shape = [parts, b, heads, t, channels / heads];
        self.scratch = Some(plan.add(Group::Workspace, "attention heads", &shape, DType::F32));
    }

    fn allocate(&mut self, plan: &Plan) -> Result<()> {
        self.arena = Arena::default();
        let free = memory::free();
        ensure!(
            plan.bytes() <= free,
            "the plan needs {} MiB of memory, {} MiB are free: take a smaller model, batch or sequence",
            plan.bytes() >> 20,
            free >> 20
        );
        self.arena = Arena::new(plan.bytes());
        Ok(())
    }

    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()> {
        ensure!(to.dtype == DType::F32, "write: the tensor is {}, expected f32", to.dtype.name());
        let [to] = self.arena.split("write", [("to", to, to.len)])?;
        copy_words(to, values)
    }

    fn read(&mut self, from: Tensor) -> Result<Vec<f32>> {
        ensure!(from.dtype == DType::F32, "read: the tensor is {}, expected f32", from.dtype.name());
        Ok(self.arena.get(from)?.to_vec())
    }

    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()> {
        ensure!(to.len() == from.bytes(), "reading {} bytes of a tensor of {}", to.len(), from.bytes());
        to.copy_from_slice(bytemuck::cast_slice(self.arena.get(from)?));
        Ok(())
    }

    fn write_bytes(&mut self, to: Tensor, bytes: &[u8]) -> Result<()> {
        ensure!(bytes.len() == to.bytes(), "writing {} bytes to a tensor of {}", bytes.len(), to.bytes());
        let [to] = self.arena.split("write_bytes", [("to", to, to.len)])?;
        bytemuck::cast_slice_mut(to).copy_from_slice(bytes);
        Ok(())
    }

    fn write_i32(&mut self, to: Tensor, values: &[i32]) -> Result<()> {
        ensure!(to.dtype == DType::I32, "write_i32: the tensor is {}, expected i32", to.dtype.name());
        let [to] = self.arena.split("write_i32", [("to", to, to.len)])?;
        copy_words(to, values)
    }

    fn read_later(&mut self, from: Tensor) -> Result<Ticket> {
        let values = self.read(from)?;
        self.tickets += 1;
        self.reads.insert(self.tickets, Reading { values, at: self.start.elapsed() });
        Ok(Ticket(self.tickets))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Reading> {
        match self.reads.remove(&ticket.0) {
            Some(reading) => Ok(reading),
            None => bail!("read {} is not under way in this engine", ticket.0),
        }
    }

    fn host_buffer(&self, len: usize) -> Result<HostBuffer> {
        Ok(Box::new(vec![0; len]))
    }

    fn load_batch(&mut self, to: Tensor, layout: BatchLayout, words: HostBuffer) -> Result<Option<HostBuffer>> {
        ensure!(
            words.len() >= layout.words() && to.len >= layout.words(),
            "a batch of {} x {} tokens takes {} words: the buffer has {}, the tensor {}",
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
        let [values] = self.arena.split("zero", [("tensor", tensor, tensor.len)])?;
        values.par_chunks_mut(CHUNK).for_each(|chunk| chunk.fill(0.0));
        Ok(())
    }

    fn encoder_forward(
        &mut self,
        out: Tensor,
        batch: Tensor,
        layout: BatchLayout,
        wte: Tensor,
        wpe: Tensor,
        c: usize,
    ) -> Result<()> {
        encoder::forward(&mut self.arena, out, batch, layout, wte, wpe, c)
    }

    /// The seed is not used: f32 is not rounded.
    fn encoder_backward(
        &mut self,
        dwte: Tensor,
        dwpe: Tensor,
        dout: Tensor,
        batch: Tensor,
        layout: BatchLayout,
        c: usize,
    ) -> Result<()> {
        encoder::backward(&mut self.arena, dwte, dwpe, dout, batch, layout, c)
    }

    fn layernorm_forward(&mut self, op: LayerNorm, inp: Tensor) -> Result<()> {
        layernorm::forward(&mut self.arena, op, inp)
    }

    fn norm_sums_columns(&self, _: usize) -> bool {
        true
    }

    fn layernorm_backward(
        &mut self,
        dinp: Tensor,
        dweight: Tensor,
        dbias: Tensor,
        column_sums: Option<Tensor>,
        dout: Tensor,
        inp: Tensor,
        op: LayerNorm,
    ) -> Result<()> {
        layernorm::backward(&mut self.arena, dinp, dweight, dbias, column_sums, dout, inp, op)
    }

    fn matmul_forward(
        &mut self,
        out: Tensor,
        inp: Tensor,
        weight: Tensor,
        bias: Option<Tensor>,
        ending: Ending,
        shape: Linear,
    ) -> Result<()> {
        matmul::forward(&mut self.arena, out, inp, weight, bias, ending, shape)
    }

    fn matmul_backward(
        &mut self,
        dinp: Tensor,
        dweight: Tensor,
        dbias: Option<Tensor>,
        dout: Tensor,
        inp: Tensor,
        weight: Tensor,
        gelu: Option<GeluInput>,
        shape: Linear,
    ) -> Result<()> {
        matmul::backward(&mut self.arena, dinp, dweight, dbias, dout, inp, weight, gelu, shape)
    }

    fn attention_forward(&mut self, out: Tensor, lse: Tensor, qkv: Tensor, shape: Heads) -> Result<()> {
        let scratch = self.scratch(out.len)?;
        attention::forward(&mut self.arena, scratch, out, lse, qkv, shape)
    }

    fn attention_backward(
        &mut self,
        dqkv: Tensor,
        dout: Tensor,
        qkv: Tensor,
        out: Tensor,
        lse: Tensor,
        shape: Heads,
    ) -> Result<()> {
        let scratch = self.scratch(dqkv.len)?;
        attention::backward(&mut self.arena, scratch, dqkv, dout, qkv, out, lse, shape)
    }

    fn classifier(
        &mut self,
        logits: Tensor,
        losses: Tensor,
        targets: Tensor,
        v: usize,
        vp: usize,
        dloss: Option<f32>,
    ) -> Result<()> {
        classifier::classifier(&mut self.arena, logits, losses, targets, v, vp, dloss)
    }

    fn sum(&mut self, out: Tensor, values: Tensor) -> Result<()> {
        global_norm::sum(&mut self.arena, out, values)
    }

    fn global_norm(&mut self, norm: Tensor, grads: Tensor) -> Result<()> {
        global_norm::global_norm(&mut self.arena, norm, grads)
    }

    fn squared_sum(&mut self, out: Tensor, values: &[Tensor]) -> Result<()> {
        global_norm::squared_sum(&mut self.arena, out, values)
    }

    fn square_root(&mut self, out: Tensor, value: Tensor) -> Result<()> {
        global_norm::square_root(&mut self.arena, out, value)
    }

    fn adamw(&mut self, of: Optimized, ranges: &[UpdateRange], stats: Tensor, settings: &AdamW) -> Result<()> {
        adamw::adamw(&mut self.arena, of, ranges, stats, settings)
    }

    fn copy(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        ensure!(to.dtype == from.dtype, "copy of {} to {}", from.dtype.name(), to.dtype.name());
        self.arena.copy(to, from)
    }

    fn cast(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        cast::cast(&mut self.arena, to, from)
    }
}
