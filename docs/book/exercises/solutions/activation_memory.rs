//! Exercise: memory of the activations that the layers of a GPT-2 keep for the backward pass.
//!
//! The chapter "Memory" lists these tensors: 16 units of B T C values in bf16 for each layer, and mean, rstd and lse in f32. Compute their
//! bytes for each recomputation level, with the buffers of one layer for what is recomputed. Norms that are recomputed use a buffer that
//! exists anyway and does not count.

/// The sizes of a GPT-2 and of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// L, number of layers.
    pub layers: usize,
    /// C, number of channels.
    pub channels: usize,
    /// NH, number of heads.
    pub heads: usize,
    /// B, sequences of a micro-batch.
    pub batch: usize,
    /// T, tokens of a sequence.
    pub tokens: usize,
}

/// Returns the bytes of the activations of all layers. `level` is that of `--recompute`, from 0 to 3:
///
/// - 0 keeps everything,
/// - 1 recomputes the output of GELU into a buffer for one layer,
/// - 2 also recomputes the outputs of ln1 and ln2, into a buffer that does not count,
/// - 3 keeps only residual3 of each layer, and one layer's buffers for everything else.
pub fn activation_bytes(sizes: Sizes, level: u8) -> usize {
    let Sizes { layers, channels, heads, batch, tokens } = sizes;
    let rows = batch * tokens;
    let unit = 2 * rows * channels;
    let statistics = 4 * 4 * rows + 4 * rows * heads;
    let (norms, activated, residual3) = (2 * unit, 4 * unit, unit);
    let others = 9 * unit;
    match level {
        0 => layers * (norms + activated + residual3 + others + statistics),
        1 => activated + layers * (norms + residual3 + others + statistics),
        2 => activated + layers * (residual3 + others + statistics),
        _ => layers * residual3 + activated + others + statistics,
    }
}

/// Returns the largest batch whose activations, together with `bytes_per_parameter` for each of `parameters` parameters, fit into `memory`
/// bytes. It is 0 if not even one sequence fits. The batch of `sizes` does not count.
pub fn largest_batch(sizes: Sizes, level: u8, parameters: usize, bytes_per_parameter: usize, memory: usize) -> usize {
    // Activations are proportional to the batch.
    let one = activation_bytes(Sizes { batch: 1, ..sizes }, level);
    memory.saturating_sub(parameters * bytes_per_parameter) / one
}
