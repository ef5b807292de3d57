//! Layer normalisation.

use super::{Cuda, Float, bias, shared_bytes};
use crate::tensor::Tensor;
use crate::{LayerNorm, Result, Scope};
use anyhow::Context;
use cuda_std::GlobalMut;
use gpu::column_sum;
use gpu::layernorm::{self, Shape};

/// f32 elements of scratch; 0 for channels that no kernel takes, which the first operation says.
pub(super) fn scratch<T: Float>(scope: &Scope, multiprocessors: usize) -> usize {
    let partials = |shape: Shape| {
        shape.backward_partials(scope.b * scope.t, scope.channels, multiprocessors, shape.sums_columns())
    };
    Shape::of::<T>(scope.channels).map_or(0, partials)
}

/// Whether a kernel has the column sums of what it writes.
pub(super) fn sums_columns<T: Float>(channels: usize) -> bool {
    Shape::of::<T>(channels).is_some_and(Shape::sums_columns)
}

fn shape_of<T: Float>(channels: usize) -> Result<Shape> {
    Shape::of::<T>(channels).with_context(|| {
        format!(
            "LayerNorm over {channels} channels in {}: the kernels take multiples of {} up to {}",
            T::DTYPE.name(),
            T::PACKET,
            T::PACKET * 32 * 64
        )
    })
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: LayerNorm, inp: Tensor) -> Result<()> {
    let (shape, rows, n) = (shape_of::<T>(op.c)?, op.mean.len, op.mean.len * op.c);
    let launch = layernorm::dispatch!(
        shape,
        layernorm_forward::<T>(
            cuda.output("out", op.out, n)?,
            cuda.output("mean", op.mean, rows)?,
            cuda.output("rstd", op.rstd, rows)?,
            cuda.input("inp", inp, n)?,
            cuda.input("weight", op.weight, op.c)?,
            cuda.input("bias", op.bias, op.c)?,
            rows as u32,
            op.c as u32,
        )
    );
    let grid = shape.forward_grid(rows, cuda.executor.multiprocessors());
    cuda.launch(&launch, [grid, 1, 1], shape.forward_shared_bytes::<T>())
}

pub(super) fn backward<T: Float>(
    cuda: &mut Cuda<T>,
    dinp: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    column_sums: Option<Tensor>,
    dout: Tensor,
    inp: Tensor,
    op: LayerNorm,
) -> Result<()> {
    let (shape, rows, n) = (shape_of::<T>(op.c)?, op.mean.len, op.mean.len * op.c);
    let summed_here = column_sums.filter(|_| shape.sums_columns());
    let multiprocessors = cuda.executor.multiprocessors();
    let blocks = shape.backward_grid(rows, multiprocessors);
    let len = shape.backward_partials(rows, op.c, multiprocessors, summed_here.is_some());
    let scratch = cuda.scratch(len)?;
    let launch = layernorm::dispatch_backward!(
        shape,
        summed_here.is_some(),
        <T>(
            cuda.output("dinp", dinp, n)?,
            cuda.output("scratch", scratch, len)?,
            cuda.input("dout", dout, n)?,
            cuda.input("inp", inp, n)?,
            cuda.input("weight", op.weight, op.c)?,
            cuda.input("mean", op.mean, rows)?,
            cuda.input("rstd", op.rstd, rows)?,
            rows as u32,
            op.c as u32,
        )
    );
    cuda.launch(&launch, [blocks, 1, 1], shape.backward_shared_bytes::<T>())?;
    let launch = layernorm::layernorm_backward_reduce::<T>(
        cuda.output("dweight", dweight, op.c)?,
        cuda.output("dbias", dbias, op.c)?,
        match summed_here {
            Some(sums) => cuda.output("column_sums", sums, op.c)?,
            None => GlobalMut::new(std::ptr::null_mut()),
        },
        cuda.input("scratch", scratch, len)?,
        blocks,
        op.c as u32,
    );
    let grid = layernorm::reduce_grid(op.c, summed_here.is_some());
    cuda.launch(&launch, [grid, 1, 1], shared_bytes(column_sum::shared))?;
    match column_sums {
        Some(sums) if summed_here.is_none() => {
            let passes = bias::backward(cuda, sums, dinp, rows, op.c)?;
            passes.iter().try_for_each(|pass| cuda.launch(&pass.launch, pass.grid, pass.shared_bytes))
        }
        _ => Ok(()),
    }
}
