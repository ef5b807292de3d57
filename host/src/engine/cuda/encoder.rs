//! Token and position embedding.

use super::{Cuda, Float, shared_bytes};
use crate::engine::{BatchLayout, Result, Scope};
use crate::tensor::Tensor;
use gpu::encoder;

/// f32 elements of scratch.
pub(super) fn scratch(scope: &Scope) -> usize {
    encoder::encoder_backward_partials(scope.b * scope.t, scope.channels)
}

pub(super) fn forward<T: Float>(
    cuda: &mut Cuda<T>,
    out: Tensor,
    batch: Tensor,
    layout: BatchLayout,
    wte: Tensor,
    wpe: Tensor,
    c: usize,
) -> Result<()> {
    let BatchLayout { b, t } = layout;
    let launch = encoder::encoder_forward::<T>(
        cuda.output("out", out, b * t * c)?,
        cuda.input("tokens", layout.tensor(batch, layout.inputs()), b * t)?,
        cuda.input("wte", wte, wte.len)?,
        cuda.input("wpe", wpe, t * c)?,
        (b * t) as u32,
        t as u32,
        c as u32,
    );
    cuda.launch(&launch, [encoder::encoder_forward_grid(b * t), 1, 1], 0)
}

pub(super) fn backward<T: Float>(
    cuda: &mut Cuda<T>,
    dwte: Tensor,
    dwpe: Tensor,
    dout: Tensor,
    batch: Tensor,
    layout: BatchLayout,
    c: usize,
    seed: u32,
) -> Result<()> {
    let BatchLayout { b, t } = layout;
    let positions = b * t;
    let dout = cuda.input("dout", dout, positions * c)?;
    // Elements of equal index in the two tables must not be rounded alike.
    let (wte_seed, wpe_seed) = (seed, !seed);
    let launch = encoder::encoder_backward_wpe::<T>(
        cuda.output("dwpe", dwpe, t * c)?,
        dout,
        b as u32,
        t as u32,
        c as u32,
        wpe_seed,
    );
    cuda.launch(&launch, [encoder::encoder_backward_wpe_grid::<T>(t, c), 1, 1], 0)?;

    let len = encoder::encoder_backward_partials(positions, c);
    let scratch = cuda.scratch(len)?;
    let dwte = cuda.output("dwte", dwte, dwte.len)?;
    let tokens = cuda.input("tokens", layout.tensor(batch, layout.inputs()), positions)?;
    let order = cuda.input("order", layout.tensor(batch, layout.order()), positions)?;
    let launch = encoder::encoder_backward_wte::<T>(
        dwte,
        cuda.output("scratch", scratch, len)?,
        dout,
        tokens,
        order,
        positions as u32,
        c as u32,
        wte_seed,
    );
    cuda.launch(&launch, [encoder::encoder_backward_wte_grid::<T>(positions, c), 1, 1], 0)?;
    let launch = encoder::encoder_backward_wte_runs::<T>(
        dwte,
        cuda.input("scratch", scratch, len)?,
        tokens,
        order,
        positions as u32,
        c as u32,
        wte_seed,
    );
    let grid = encoder::encoder_backward_wte_runs_grid::<T>(positions, c);
    cuda.launch(&launch, grid, shared_bytes(encoder::encoder_backward_wte_runs_shared::<T>))
}
