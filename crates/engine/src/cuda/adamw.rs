//! The optimizer.

use super::{Block8, Cuda, Float, StorageType};
use crate::ops::{AdamWUpdate, Master, UpdateRange};
use crate::plan::{Group, Plan};
use crate::tensor::{DType, Tensor};
use crate::{Result, Workload};
use anyhow::{Context, bail, ensure};
use cuda_std::{Global, GlobalMut, bf16};
use gpu::adamw::{self, Range, compact, eight_bit};

/// The range tables of the updates on the device. They are the same in every step, so each is copied once.
#[derive(Default)]
pub(super) struct Tables {
    /// i32: memory for the number of ranges in the plan's workload.
    memory: Option<Tensor>,
    /// The contents of the memory: one table after another.
    written: Vec<Range>,
}

impl Tables {
    pub(super) fn plan(&mut self, plan: &mut Plan, workload: &Workload) {
        let ranges = if workload.training { workload.update_ranges } else { 0 };
        let shape = [ranges, Range::WORDS];
        self.memory = (ranges > 0).then(|| plan.add(Group::Workspace, "adamw ranges", &shape, DType::I32));
    }

    /// Declares the memory overwritten.
    pub(super) fn invalidate(&mut self) {
        self.written.clear();
    }
}

/// Returns a table on the device, and copies it if it is not there yet.
fn table<T: Float>(cuda: &mut Cuda<T>, ranges: &[Range]) -> Result<Global<Range>> {
    // Another table may overwrite it before a graph reads it again.
    cuda.ensure_not_capturing("a table of update ranges")?;
    let Tables { memory, written } = &cuda.update_ranges;
    let memory = memory.context("adamw: this engine was planned for inference only")?;
    let (len, most) = (ranges.len(), memory.len / Range::WORDS);
    ensure!(len <= most, "adamw: expected at most {most} ranges as planned, found {len}");
    let found = written.windows(len).position(|written| written == ranges);
    // Launched updates read their tables before later copies on the same stream overwrite them.
    let at = found.unwrap_or(if written.len() + len <= most { written.len() } else { 0 });
    let place = memory.slice(at * Range::WORDS, len * Range::WORDS);
    let address = cuda.arena.address::<i32>("adamw ranges", place, place.len)?;
    if found.is_none() {
        cuda.update_ranges.written.truncate(at);
        let words: Vec<u32> = ranges.iter().flat_map(Range::words).collect();
        // SAFETY: `address` covers that many words of the arena; the driver reads pageable memory before the call
        // returns.
        unsafe { cuda.executor.upload(address.cast(), bytemuck::cast_slice(&words)) }?;
        cuda.update_ranges.written.extend(ranges);
    }
    Ok(Global::new(address.cast()))
}

pub(super) fn adamw<T: Float>(cuda: &mut Cuda<T>, op: AdamWUpdate) -> Result<()> {
    op.check_ranges()?;
    let AdamWUpdate { m, v, master, settings, .. } = op;
    ensure!(settings.step > 0, "adamw: expected a step of at least 1, found 0");
    ensure!(
        m.dtype.bytes() == v.dtype.bytes(),
        "adamw: expected m and v of one type, found {} and {}",
        m.dtype.name(),
        v.dtype.name()
    );
    match (T::DTYPE, m.dtype, master) {
        (_, DType::F32, Master::None | Master::F32(_)) => launch::<T, f32, f32>(cuda, op),
        (DType::Bf16, DType::Bf16, Master::None | Master::F32(_)) => launch::<T, bf16, f32>(cuda, op),
        (DType::Bf16, DType::F32, Master::Remainder(_)) => launch::<T, f32, u16>(cuda, op),
        (DType::Bf16, DType::Bf16, Master::Remainder(_)) => launch_compact(cuda, op),
        (DType::Bf16, DType::Block8 { .. }, Master::None | Master::F32(_)) => launch_8bit::<T, f32>(cuda, op),
        (DType::Bf16, DType::Block8 { .. }, Master::Remainder(_)) => launch_8bit::<T, u16>(cuda, op),
        (params, moments, _) => bail!(
            "adamw: expected moments in f32, or bf16 parameters with moments in f32, bf16 or 8bit; found {} parameters, {} moments, \
             {master:?}",
            params.name(),
            moments.name()
        ),
    }
}

/// The operands of the kernels for parameters `T`, first moments `M`, second moments `V` and master weights `W`.
struct AdamWOperands<T, M, V, W> {
    params: GlobalMut<T>,
    masters: GlobalMut<W>,
    m: GlobalMut<M>,
    v: GlobalMut<V>,
    grads: Global<T>,
    stats: Global<f32>,
    ranges: Global<Range>,
    scalars: adamw::Scalars,
    /// Thread blocks.
    grid: u32,
}

/// Returns the operands, or `None` if there are no elements to update.
fn operands<T: Float, P: Float, M: StorageType, V: StorageType, W: StorageType>(
    cuda: &mut Cuda<T>,
    op: &AdamWUpdate,
) -> Result<Option<AdamWOperands<P, M, V, W>>> {
    let AdamWUpdate { params, grads, m, v, master, ranges, stats, grad_factor, settings } = *op;
    let range = |range: &UpdateRange| Range::new(range.elements.start, range.elements.len(), range.decayed, range.seed);
    let mut ranges: Vec<_> = ranges.iter().map(range).collect();
    let grid = adamw::assign_blocks::<T>(&mut ranges);
    if grid == 0 {
        return Ok(None);
    }
    let correction = |beta: f32| (1.0 / (1.0 - f64::from(beta).powi(settings.step as i32))) as f32;
    let scalars = adamw::Scalars {
        grad_factor,
        clip: settings.clip,
        learning_rate: settings.learning_rate,
        beta1: settings.beta1,
        beta2: settings.beta2,
        correction1: correction(settings.beta1),
        correction2: correction(settings.beta2),
        epsilon: settings.eps,
        weight_decay: settings.weight_decay,
        seed: settings.seed,
        range_count: ranges.len() as u32,
    };
    let n = params.len;
    Ok(Some(AdamWOperands {
        params: cuda.output("params", params, n)?,
        masters: cuda.optional_output("master", master.tensor(), n)?,
        m: cuda.output("m", m, n)?,
        v: cuda.output("v", v, n)?,
        grads: cuda.input("grads", grads, n)?,
        stats: cuda.input("stats", stats, 2)?,
        ranges: table(cuda, &ranges)?,
        scalars,
        grid,
    }))
}

/// Launches the kernel for parameters `T`, moments `M` and master weights `W`.
fn launch<T: Float, M: Float, W: StorageType + gpu::weights::Master>(
    cuda: &mut Cuda<T>,
    op: AdamWUpdate,
) -> Result<()> {
    let Some(operands) = operands::<T, T, M, M, W>(cuda, &op)? else { return Ok(()) };
    let AdamWOperands { params, masters, m, v, grads, stats, ranges, scalars, grid } = operands;
    let launch = adamw::adamw::<T, M, W>(params, masters, m, v, grads, stats, ranges, scalars);
    cuda.launch(launch, [grid, 1, 1], 0)
}

/// Launches the kernel for bf16 parameters and moments, and remainders.
fn launch_compact<T: Float>(cuda: &mut Cuda<T>, op: AdamWUpdate) -> Result<()> {
    let Some(operands) = operands::<T, bf16, bf16, bf16, u16>(cuda, &op)? else { return Ok(()) };
    let AdamWOperands { params, masters, m, v, grads, stats, ranges, scalars, grid } = operands;
    let scaled = compact::Scaled::new(&scalars);
    let launch = compact::adamw_compact(params, masters, m, v, grads, stats, ranges, scalars, scaled);
    cuda.launch(launch, [grid, 1, 1], 0)
}

/// Launches the kernel for bf16 parameters, moments in blocks, and master weights `W`.
fn launch_8bit<T: Float, W: StorageType + gpu::weights::Master>(cuda: &mut Cuda<T>, op: AdamWUpdate) -> Result<()> {
    let Some(operands) = operands::<T, bf16, Block8<true>, Block8<false>, W>(cuda, &op)? else { return Ok(()) };
    let AdamWOperands { params, masters, m, v, grads, stats, ranges, scalars, grid } = operands;
    let (m, v) = (GlobalMut::new(m.pointer().cast()), GlobalMut::new(v.pointer().cast()));
    let scaled = compact::Scaled::new(&scalars);
    let launch = eight_bit::adamw_8bit::<W>(params, masters, m, v, grads, stats, ranges, scalars, scaled);
    cuda.launch(launch, [grid, 1, 1], 0)
}
