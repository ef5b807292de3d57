//! Additions to the residual stream: scaled sums and the smear.

use super::{Cuda, Float, gate, shared_bytes};
use crate::ops::{Documents, Mix, MixBackward, Smear, SmearBackward};
use crate::{Result, Workload};
use anyhow::ensure;
use cuda_std::{Global, GlobalMut};
use gpu::stream::{self, SmearSizes};
use gpu::{bias, column_sum};

/// Returns the f32 elements of scratch memory.
pub(super) fn scratch<T: Float>(workload: &Workload, sm_count: usize) -> usize {
    let (rows, c) = (workload.rows(), workload.channels);
    let smear = SmearPartials::new(rows, sm_count).len() + gate::scratch(c, sm_count);
    stream::mix_backward_partials::<T>(rows * c, sm_count).max(smear)
}

/// Checks that n elements consist of packets.
fn check_packets<T: Float>(operation: &str, n: usize) -> Result<()> {
    ensure!(
        n.is_multiple_of(T::PACKET),
        "{operation}: expected a multiple of {} elements in {}, found {n}; use another number of channels, or --device cpu",
        T::PACKET,
        T::DTYPE.name()
    );
    Ok(())
}

const fn sign(subtracts: bool) -> f32 {
    if subtracts { -1.0 } else { 1.0 }
}

pub(super) fn mix<T: Float>(cuda: &mut Cuda<T>, op: Mix) -> Result<()> {
    let Mix { out, inp, added, scale, added_scale, subtracts } = op;
    let n = out.len;
    check_packets::<T>("mix", n)?;
    let launch = stream::mix::<T>(
        cuda.output("out", out, n)?,
        cuda.input("inp", inp, n)?,
        cuda.input("added", added, n)?,
        cuda.optional_input("scale", scale, 1)?,
        cuda.optional_input("added_scale", added_scale, 1)?,
        sign(subtracts),
        n as u64,
    );
    cuda.launch(launch, [stream::mix_grid::<T>(n), 1, 1], 0)
}

pub(super) fn mix_backward<T: Float>(cuda: &mut Cuda<T>, op: MixBackward) -> Result<()> {
    let MixBackward { dout, dadded, dscale, dadded_scale, inp, added, scale, added_scale, subtracts } = op;
    let (n, sm_count, sign) = (dout.len, cuda.executor.sm_count(), sign(subtracts));
    check_packets::<T>("mix_backward", n)?;
    let blocks = stream::mix_backward_grid::<T>(n, sm_count);
    let sums = dscale.is_some() || dadded_scale.is_some();
    let (mut partials, mut terms) = (GlobalMut::null(), [Global::null(); 2]);
    if sums {
        let len = stream::mix_backward_partials::<T>(n, sm_count);
        partials = cuda.output("scratch", cuda.scratch(len)?, len)?;
        let (inp, added) = (cuda.input("inp", inp, n)?, cuda.input("added", added, n)?);
        // The kernel always reads two terms. If only one sum is needed, both are the same tensor, which is read from memory once.
        terms = match (dscale, dadded_scale) {
            (None, _) => [added; 2],
            (_, None) => [inp; 2],
            _ => [inp, added],
        };
    }
    let kernel = if sums { stream::mix_backward::<T, true> } else { stream::mix_backward::<T, false> };
    let launch = kernel(
        cuda.output("dout", dout, n)?,
        cuda.output("dadded", dadded, n)?,
        partials,
        terms[0],
        terms[1],
        cuda.optional_input("scale", scale, 1)?,
        cuda.optional_input("added_scale", added_scale, 1)?,
        sign,
        n as u64,
    );
    cuda.launch(launch, [blocks, 1, 1], if sums { shared_bytes(stream::mix_backward_shared) } else { 0 })?;
    if !sums {
        return Ok(());
    }
    let launch = stream::mix_backward_reduce::<T>(
        cuda.optional_output("dscale", dscale, 1)?,
        cuda.optional_output("dadded_scale", dadded_scale, 1)?,
        partials.reader(),
        sign,
        blocks,
    );
    cuda.launch(launch, [1, 1, 1], shared_bytes(column_sum::shared))
}

/// Checks the sizes of a smear, and returns them.
fn smear_sizes<T: Float>(rows: usize, t: usize, c: usize, channels: usize) -> Result<SmearSizes> {
    ensure!(
        t > 0 && channels <= c,
        "smear: expected tokens and at most {c} channels of the gate, found {t} and {channels}"
    );
    check_packets::<T>("smear", c)?;
    let [rows, sequence, channels, gate_channels] = [rows, t, c, channels].map(|size| size as u32);
    Ok(SmearSizes { rows, sequence, channels, gate_channels })
}

/// Returns the first position of the document of each token; null if the batch does not state it.
fn first_keys<T: Float>(cuda: &Cuda<T>, documents: Option<Documents>, rows: usize) -> Result<Global<i32>> {
    cuda.optional_input("first_keys", documents.map(|documents| documents.first_keys), rows)
}

pub(super) fn smear<T: Float>(cuda: &mut Cuda<T>, op: Smear) -> Result<()> {
    let Smear { out, gates, inp, before, weight, scale, documents, t, c } = op;
    let rows = gates.len;
    let sizes = smear_sizes::<T>(rows, t, c, weight.len)?;
    let launch = stream::smear::<T>(
        cuda.output("out", out, rows * c)?,
        cuda.output("gates", gates, rows)?,
        cuda.input("inp", inp, rows * c)?,
        cuda.optional_input("before", before, rows / t * c)?,
        cuda.input("weight", weight, weight.len)?,
        cuda.input("scale", scale, 1)?,
        first_keys(cuda, documents, rows)?,
        sizes,
    );
    cuda.launch(launch, [stream::smear_grid(rows), 1, 1], 0)
}

/// The partial results of [`smear_backward`], in f32: a value per row, and the parts of the gradient of the scale.
struct SmearPartials {
    /// Elements of the values per row, and of the parts that follow them. Both are multiples of 4.
    lens: [usize; 2],
    blocks: u32,
}

impl SmearPartials {
    fn new(rows: usize, sm_count: usize) -> Self {
        let blocks = stream::smear_backward_grid(rows, sm_count);
        Self { lens: [rows, blocks as usize].map(|len| len.next_multiple_of(4)), blocks }
    }

    fn len(&self) -> usize {
        self.lens.iter().sum()
    }
}

pub(super) fn smear_backward<T: Float>(cuda: &mut Cuda<T>, op: &SmearBackward) -> Result<()> {
    let SmearBackward { dinp, dweight, dscale, dout, gates, inp, weight, scale, documents, t, c } = *op;
    let rows = gates.len;
    let sizes = smear_sizes::<T>(rows, t, c, weight.len)?;
    let first = SmearPartials::new(rows, cuda.executor.sm_count());
    let [of_rows, of_blocks] = first.lens;
    let gate_gradient = gate::WeightGradient { rows, heads: 1, channels: c, weights: weight.len };
    let scratch = cuda.scratch(first.len() + gate_gradient.partials(cuda))?;
    let dsums = cuda.output("scratch", scratch.slice(0, of_rows), rows)?;
    let partials: GlobalMut<f32> = cuda.output("scratch", scratch.slice(of_rows, of_blocks), of_blocks)?;
    let inputs = cuda.input("inp", inp, rows * c)?;
    let launch = stream::smear_backward::<T>(
        cuda.output("dinp", dinp, rows * c)?,
        dsums,
        partials,
        cuda.input("dout", dout, rows * c)?,
        cuda.input("gates", gates, rows)?,
        inputs,
        cuda.input("weight", weight, weight.len)?,
        cuda.input("scale", scale, 1)?,
        first_keys(cuda, documents, rows)?,
        sizes,
    );
    cuda.launch(launch, [first.blocks, 1, 1], shared_bytes(stream::smear_backward_shared))?;
    if let Some(dscale) = dscale {
        let dscale = cuda.output("dscale", dscale, 1)?;
        let launch = bias::bias_backward_reduce::<T>(dscale, partials.reader(), first.blocks, 1);
        cuda.launch(launch, [column_sum::grid(1), 1, 1], shared_bytes(column_sum::shared))?;
    }
    let Some(dweight) = dweight else { return Ok(()) };
    let x = gate::Input { inp: inputs, rstd: Global::null(), norm_weight: Global::null() };
    let len = gate_gradient.partials(cuda);
    gate_gradient.add(cuda, dweight, dsums.reader(), x, scratch.slice(first.len(), len))
}
