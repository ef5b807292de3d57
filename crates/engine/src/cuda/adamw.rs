//! The optimizer.

use super::{Cuda, Float};
use crate::plan::{Group, Plan};
use crate::tensor::{DType, Tensor};
use crate::{AdamW, Optimized, Result, Scope, UpdateRange};
use anyhow::{Context, ensure};
use cuda_std::{Global, GlobalMut};
use gpu::adamw::{self, Range};

/// The tables of the ranges that updates are given. They are the same in every step, so each is copied to the device once.
#[derive(Default)]
pub(super) struct Tables {
    /// i32, for so many ranges as the plan's scope has.
    room: Option<Tensor>,
    /// What is there, from its start on: one table after another.
    written: Vec<Range>,
}

impl Tables {
    pub(super) fn plan(&mut self, plan: &mut Plan, scope: &Scope) {
        let ranges = if scope.training { scope.ranges } else { 0 };
        let shape = [ranges, Range::WORDS];
        self.room = (ranges > 0).then(|| plan.add(Group::Workspace, "adamw ranges", &shape, DType::I32));
    }

    /// The memory has lost what was written.
    pub(super) fn forget(&mut self) {
        self.written.clear();
    }
}

/// Where a table is on the device.
fn table<T: Float>(cuda: &mut Cuda<T>, ranges: &[Range]) -> Result<Global<Range>> {
    // Others may be written over it before it is read again.
    cuda.not_recorded("a table of ranges")?;
    let Tables { room, written } = &cuda.update_ranges;
    let room = room.context("adamw: the plan was made for no updates")?;
    let (len, most) = (ranges.len(), room.len / Range::WORDS);
    ensure!(len <= most, "adamw: {len} ranges, {most} were planned: the plan was made for another model");
    let found = written.windows(len).position(|written| written == ranges);
    // What is queued reads the tables before those that are written over them arrive.
    let at = found.unwrap_or(if written.len() + len <= most { written.len() } else { 0 });
    let place = room.slice(at * Range::WORDS, len * Range::WORDS);
    let address = cuda.arena.address::<i32>("adamw ranges", place, place.len)?;
    if found.is_none() {
        cuda.update_ranges.written.truncate(at);
        let words: Vec<u32> = ranges.iter().flat_map(Range::words).collect();
        // SAFETY: `address` covers that many words of the arena; the memory is not page-locked, so read before the call
        // returns.
        unsafe { cuda.executor.upload(address.cast(), bytemuck::cast_slice(&words)) }?;
        cuda.update_ranges.written.extend(ranges);
    }
    Ok(Global::new(address.cast()))
}

pub(super) fn adamw<T: Float>(
    cuda: &mut Cuda<T>,
    of: Optimized,
    ranges: &[UpdateRange],
    stats: Tensor,
    settings: &AdamW,
) -> Result<()> {
    ensure!(settings.step > 0, "adamw: steps count from 1");
    of.ensure_holds(ranges)?;
    let n = of.params.len;
    let range = |range: &UpdateRange| Range::new(range.elements.start, range.elements.len(), range.decayed, range.seed);
    let mut ranges: Vec<_> = ranges.iter().map(range).collect();
    let grid = adamw::assign_blocks::<T>(&mut ranges);
    if grid == 0 {
        return Ok(());
    }
    let masters = match of.master {
        Some(master) => cuda.output("master", master, n)?,
        None => GlobalMut::new(std::ptr::null_mut()),
    };
    let correction = |beta: f32| (1.0 / (1.0 - f64::from(beta).powi(settings.step as i32))) as f32;
    let table = table(cuda, &ranges)?;
    let launch = adamw::adamw::<T>(
        cuda.output("params", of.params, n)?,
        masters,
        cuda.output("m", of.m, n)?,
        cuda.output("v", of.v, n)?,
        cuda.input("grads", of.grads, n)?,
        cuda.input("stats", stats, 2)?,
        table,
        ranges.len() as u32,
        settings.clip,
        settings.learning_rate,
        settings.beta1,
        settings.beta2,
        correction(settings.beta1),
        correction(settings.beta2),
        settings.eps,
        settings.weight_decay,
        settings.seed,
    );
    cuda.launch(&launch, [grid, 1, 1], 0)
}
