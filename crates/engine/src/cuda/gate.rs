//! The gradient of the weight of gates, which several operations have.

use super::{Cuda, Float, shared_bytes};
use crate::Result;
use crate::tensor::Tensor;
use cuda_std::Global;
use gpu::{bias, column_sum, gate};

/// Returns the f32 elements of scratch memory for at most `max_weights` weights and any number of rows.
pub(super) fn scratch(max_weights: usize, sm_count: usize) -> usize {
    gate::max_partials(max_weights, sm_count)
}

/// The inputs of gates. `rstd` and `norm_weight` may be null and count as ones then.
pub(super) struct Input<T> {
    /// (rows, C)
    pub inp: Global<T>,
    /// (rows)
    pub rstd: Global<f32>,
    /// (C)
    pub norm_weight: Global<T>,
}

/// The sizes of a gradient.
#[derive(Clone, Copy)]
pub(super) struct WeightGradient {
    pub rows: usize,
    pub heads: usize,
    /// Channels of the input.
    pub channels: usize,
    /// Weights of all heads.
    pub weights: usize,
}

impl WeightGradient {
    /// Returns the f32 elements of partial sums.
    pub fn partials<T: Float>(self, cuda: &Cuda<T>) -> usize {
        gate::partials(self.rows, self.weights, cuda.executor.sm_count())
    }

    /// Returns the sizes for the kernels.
    pub fn sizes(self) -> gate::Sizes {
        let gate_channels = self.weights / self.heads.max(1);
        let [rows, heads, channels, gate_channels] =
            [self.rows, self.heads, self.channels, gate_channels].map(|size| size as u32);
        gate::Sizes { rows, heads, channels, gate_channels }
    }

    /// Adds the gradient to `dweight`.
    pub fn add<T: Float>(
        self,
        cuda: &mut Cuda<T>,
        dweight: Tensor,
        dgates: Global<f32>,
        Input { inp, rstd, norm_weight }: Input<T>,
        partials: Tensor,
    ) -> Result<()> {
        let Self { rows, weights, .. } = self;
        let chunk = gate::chunk_rows(rows, weights, cuda.executor.sm_count());
        let chunks = rows.div_ceil(chunk) as u32;
        let dweight = cuda.output("dweight", dweight, weights)?;
        let partials = cuda.output("scratch", partials, self.partials(cuda))?;
        let (grid, shared) = (column_sum::grid(weights), shared_bytes(column_sum::shared));
        let launch =
            gate::gate_weight_backward::<T>(partials, dgates, inp, rstd, norm_weight, self.sizes(), chunk as u32);
        cuda.launch(launch, [grid, chunks, 1], shared)?;
        let launch = bias::bias_backward_reduce::<T>(dweight, partials.reader(), chunks, weights as u32);
        cuda.launch(launch, [grid, 1, 1], shared)
    }
}
