//! Token and position embedding.

use super::{Cuda, Float, shared_bytes};
use crate::ops::{EncoderBackward, EncoderForward};
use crate::{BatchLayout, Result, Workload};
use gpu::encoder;

/// Returns the f32 elements of scratch memory, for the embedding of tokens and for those of values.
pub(super) fn scratch<T: Float>(workload: &Workload, sm_count: usize) -> usize {
    let positions = workload.rows();
    let partials = |c| {
        let chunk = encoder::encoder_backward_chunk::<T>(positions, c, sm_count);
        encoder::encoder_backward_partials(positions, c, chunk)
    };
    let values = workload.attention.kv_heads * workload.attention.head_size;
    partials(workload.channels).max(partials(values))
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: EncoderForward) -> Result<()> {
    let EncoderForward { out, batch, layout, wte, wpe, c } = op;
    let BatchLayout { b, t, .. } = layout;
    let out = cuda.output("out", out, b * t * c)?;
    let tokens = cuda.input("tokens", layout.tensor(batch, layout.inputs()), b * t)?;
    let wte = cuda.input("wte", wte, wte.len)?;
    let (positions, t, c) = ((b * t) as u32, t as u32, c as u32);
    let has_wpe = wpe.is_some();
    let wpe = cuda.optional_input("wpe", wpe, layout.t * op.c)?;
    let kernel = if has_wpe { encoder::encoder_forward::<T, true> } else { encoder::encoder_forward::<T, false> };
    let launch = kernel(out, tokens, wte, wpe, positions, t, c);
    cuda.launch(launch, [encoder::encoder_forward_grid(b * layout.t), 1, 1], 0)
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: EncoderBackward) -> Result<()> {
    let EncoderBackward { dwte, dwpe, dout, batch, layout, c } = op;
    let BatchLayout { b, t, .. } = layout;
    let positions = b * t;
    let dout = cuda.input("dout", dout, positions * c)?;
    let chunk = encoder::encoder_backward_chunk::<T>(positions, c, cuda.executor.sm_count());
    let len = encoder::encoder_backward_partials(positions, c, chunk);
    let scratch = cuda.scratch(len)?;
    let dwte = cuda.output("dwte", dwte, dwte.len)?;
    let sorted = cuda.input("sorted", layout.tensor(batch, layout.sorted()), positions)?;
    let seed = cuda.input("seed", layout.tensor(batch, layout.seed()), 1)?;
    let launch = encoder::encoder_backward_wte::<T>(
        dwte,
        cuda.output("scratch", scratch, len)?,
        dout,
        cuda.input("order", layout.tensor(batch, layout.order()), positions)?,
        sorted,
        seed,
        encoder::WteSizes { positions: positions as u32, channels: c as u32, chunk_len: chunk as u32 },
    );
    cuda.launch(launch, [encoder::encoder_backward_wte_grid::<T>(positions, c, chunk), 1, 1], 0)?;
    let partials = cuda.input("scratch", scratch, len)?;
    let [sequences, sequence, channels, chunk_len] = [b, t, c, chunk].map(|size| size as u32);
    let grid = if dwpe.is_some() {
        encoder::encoder_backward_rest_grid::<T, true>(b, t, c, chunk)
    } else {
        encoder::encoder_backward_rest_grid::<T, false>(b, t, c, chunk)
    };
    let kernel = if dwpe.is_some() {
        encoder::encoder_backward_rest::<T, true>
    } else {
        encoder::encoder_backward_rest::<T, false>
    };
    let dwpe = cuda.optional_output("dwpe", dwpe, t * c)?;
    let launch = kernel(dwte, dwpe, partials, dout, sorted, seed, sequences, sequence, channels, chunk_len);
    cuda.launch(launch, [grid, 1, 1], shared_bytes(encoder::encoder_backward_rest_shared::<T>))
}
