//! Host side: selects the kernel instances of text generation, with their grids and shared memory.

use super::{attention, matvec, matvec_mma};
use crate::activation::Activation;
use crate::launch::{KernelLaunch, shared_bytes};
use cuda_std::mma::TensorCore;
use cuda_std::{E4m3, Element, Global, GlobalMut, bf16};

/// Most rows of [`matvec()`].
pub const MAX_ROWS: usize = 16;
/// Most rows in bf16 that FMA computes. Eight rows of Llama 3.2 1B take 1,371 us with FMA, and 1,601 us on tensor cores.
pub const MAX_FMA_ROWS: usize = 8;
/// Most rows of [`matvec()`] with a norm: with more, every warp would spend longer on the norm than on the weights.
pub const MAX_NORMED_ROWS: usize = 2;

/// The norm before a linear layer.
#[derive(Clone, Copy)]
pub enum InputNorm<T> {
    /// No norm.
    None,
    /// LayerNorm: weight (C) and bias (C).
    LayerNorm(Global<T>, Global<T>),
    /// RMSNorm: weight (C), which may be null, and eps.
    RmsNorm(Global<T>, f32),
}

/// A weight in FP8.
#[derive(Clone, Copy)]
pub struct Fp8Weight {
    /// (OC, C)
    pub weight: Global<E4m3>,
    /// (1): the factor of the weight, a power of two that [`Bf16Scale`](cuda_std::fp8::Bf16Scale) supports.
    pub scale: Global<f32>,
}

/// The operands of [`matvec()`].
#[derive(Clone, Copy)]
pub struct MatvecOperands<T> {
    /// (R, OC), or (R, OC / 2) with a gated activation
    pub out: GlobalMut<T>,
    /// (R, C)
    pub inp: Global<T>,
    /// (OC, C)
    pub weight: Global<T>,
    /// Replaces `weight` if it is set.
    pub fp8: Option<Fp8Weight>,
    /// (OC) or null
    pub bias: Global<T>,
    /// (R, OC) or null
    pub residual: Global<T>,
    /// The norm of inp.
    pub norm: InputNorm<T>,
}

/// The sizes of a linear layer, and the GPU's.
#[derive(Clone, Copy, Debug)]
pub struct MatvecSize {
    /// R
    pub rows: usize,
    /// C
    pub channels: usize,
    /// OC
    pub outputs: usize,
    /// The activation after the layer.
    pub activation: Option<Activation>,
    /// Number of SMs.
    pub sm_count: usize,
}

impl MatvecSize {
    /// Returns the warps that share the channels of the same columns: enough warps for the GPU, each with channels for all lanes. The lanes
    /// of a warp read `block` channels at a time.
    fn split(self, columns: usize, block: usize) -> u32 {
        /// Warps per SM.
        const WARPS: usize = 10;
        let (warps, blocks) = (self.outputs.div_ceil(columns), self.channels.div_ceil(block));
        let mut split = 1;
        while split < 8 && warps * split < WARPS * self.sm_count && 2 * split <= blocks {
            split *= 2;
        }
        split as u32
    }
}

/// Returns the kernel, or `None` if there is none: too many rows, or rows that are not multiples of the packet. Tensor cores compute more
/// than eight rows in bf16, and weights in FP8, which need bf16. They need an even number of outputs.
pub fn matvec<T: TensorCore>(operands: MatvecOperands<T>, size: MatvecSize) -> Option<KernelLaunch> {
    let normed = !matches!(operands.norm, InputNorm::None);
    let most = if normed { MAX_NORMED_ROWS } else { MAX_ROWS };
    let on_tensor_cores = operands.fp8.is_some() || (size.rows > MAX_FMA_ROWS && T::PACKET == bf16::PACKET);
    let packet = operands.fp8.map_or(T::PACKET, |_| E4m3::PACKET);
    let multiple = size.activation.map_or(1, Activation::inputs).max(if on_tensor_cores { 2 } else { 1 });
    let supported = 0 < size.rows && size.rows <= most && size.channels.is_multiple_of(packet) && size.channels > 0;
    if !supported || !size.outputs.is_multiple_of(multiple) || size.outputs == 0 {
        return None;
    }
    let MatvecOperands { out, inp, weight, fp8, bias, residual, norm } = operands;
    let null = Global::null();
    let (kind, norm_weight, norm_bias, eps) = match norm {
        InputNorm::None => (matvec::PLAIN, null, null, 0.0),
        InputNorm::LayerNorm(weight, bias) => (matvec::LAYERNORM, weight, bias, 0.0),
        InputNorm::RmsNorm(weight, eps) => (matvec::RMSNORM, weight, null, eps),
    };
    let [rows, channels, outputs] = [size.rows, size.channels, size.outputs].map(|size| size as u32);
    let sizes = |split| matvec::Sizes {
        rows,
        channels,
        outputs,
        split,
        activation: size.activation.map_or(0, Activation::code),
        eps,
    };
    if on_tensor_cores {
        let key = (if size.rows <= MAX_NORMED_ROWS { MAX_NORMED_ROWS } else { MAX_ROWS }, kind);
        let sizes = sizes(size.split(matvec_mma::COLUMNS, matvec_mma::PACKETS * packet));
        let launch = match fp8 {
            Some(Fp8Weight { weight, scale }) => matvec_mma::matvec_mma_select::<T, E4m3>(
                key,
                out,
                inp,
                weight,
                scale,
                bias,
                residual,
                norm_weight,
                norm_bias,
                sizes,
            ),
            None => matvec_mma::matvec_mma_select::<T, bf16>(
                key,
                out,
                inp,
                Global::new(weight.pointer().cast()),
                Global::null(),
                bias,
                residual,
                norm_weight,
                norm_bias,
                sizes,
            ),
        };
        let (grid, shared_bytes) = ([sizes.grid(matvec_mma::COLUMNS), 1, 1], shared_bytes(matvec_mma::shared));
        return Some(KernelLaunch { launch: launch?, grid, shared_bytes });
    }
    let key = (size.rows.next_power_of_two(), kind);
    let (columns,) = matvec::matvec_values::<T>(key)?;
    let sizes = sizes(size.split(columns, 32 * T::PACKET));
    let launch = matvec::matvec_select::<T>(key, out, inp, weight, bias, residual, norm_weight, norm_bias, sizes)?;
    Some(KernelLaunch { launch, grid: [sizes.grid(columns), 1, 1], shared_bytes: shared_bytes(matvec::shared) })
}

/// The operands of [`attention()`].
#[derive(Clone, Copy)]
pub struct AttentionOperands<T> {
    /// (B, NH, HS)
    pub out: GlobalMut<T>,
    /// (B, NH, splits, HS + 2)
    pub partials: GlobalMut<f32>,
    /// (B, KV, T, HS)
    pub keys: GlobalMut<T>,
    /// (B, KV, T, HS)
    pub values: GlobalMut<T>,
    /// (B, NH + 2 KV, HS)
    pub qkv: Global<T>,
    /// (B, 8)
    pub slots: Global<i32>,
    /// (T, HS/2, 2), null without rotation
    pub table: Global<f32>,
    /// (HS) or null
    pub q_weight: Global<T>,
    /// (HS) or null
    pub k_weight: Global<T>,
}

/// Returns the kernels, or `None` if none supports the head size.
pub fn attention<T: TensorCore>(
    operands: AttentionOperands<T>,
    sizes: attention::Sizes,
    slots: usize,
) -> Option<Vec<KernelLaunch>> {
    if !attention::supports(sizes.head_size as usize) || sizes.kv_heads == 0 {
        return None;
    }
    let AttentionOperands { out, partials, keys, values, qkv, slots: state, table, q_weight, k_weight } = operands;
    let key = (if sizes.head_size <= 64 { 64 } else { 128 },);
    let launch = attention::decode_attention_select::<T>(
        key, out, partials, keys, values, qkv, state, table, q_weight, k_weight, sizes,
    )?;
    let shared_bytes = shared_bytes(|layout| attention::shared::<T>(layout, sizes));
    let mut kernels = vec![KernelLaunch { launch, grid: sizes.grid(slots), shared_bytes }];
    if sizes.splits > 1 {
        let launch = attention::decode_attention_combine::<T>(out, partials.reader(), state, sizes);
        kernels.push(KernelLaunch { launch, grid: sizes.combine_grid(slots), shared_bytes: 0 });
    }
    Some(kernels)
}
