//! Host side: the kernel launches for a shape.

use super::dkdv::{attention_backward_dkdv_wgmma_hs_64, dkdv_shared_bytes};
use super::dq::{attention_backward_dq_wgmma_hs_64, dq_shared_bytes};
use super::forward::{
    attention_forward_fp8_wgmma_select, attention_forward_wgmma_exists, attention_forward_wgmma_select,
    attention_forward_wgmma_values,
};
use super::fused::{PANEL_ELEMENTS, attention_backward_convert_dq, attention_backward_fused_wgmma, fused_shared_bytes};
use super::{CONSUMERS, TILE};
use crate::attention::launch::{Shape, backward_dot};
use crate::launch::KernelLaunch;
use crate::quantize::QuantizedOperands;
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::{E4m3, Global, GlobalMut, bf16};

/// Returns true if the kernels support this head size.
pub fn supports(head_size: usize) -> bool {
    attention_forward_wgmma_exists((head_size as u32,))
}

/// Returns the kernels' arguments B, T, KV and group.
fn sizes(shape: Shape) -> (u32, u32, u32, u32) {
    (shape.b as u32, shape.t as u32, shape.kv as u32, shape.group() as u32)
}

/// Returns a forward kernel.
///
/// # Panics
/// Panics if there is no kernel for the head size.
fn forward_kernel(launch: Option<Launch>, shape: Shape, sm_count: usize) -> KernelLaunch {
    let values = attention_forward_wgmma_values((shape.hs as u32,));
    let (Some(launch), Some((shared_bytes,))) = (launch, values) else {
        panic!("attention_wgmma: expected head size 64 or 128, found {}", shape.hs)
    };
    persistent(launch, shared_bytes(), sm_count)
}

/// Launches one block per SM.
fn persistent(launch: Launch, shared_bytes: usize, sm_count: usize) -> KernelLaunch {
    KernelLaunch { launch, grid: [sm_count as u32, 1, 1], shared_bytes }
}

/// Returns the launch of the forward pass: out (B, T, NH, HS) and lse (B, NH, T) from the tensor map over
/// qkv (B, T, (NH + 2 KV) HS).
///
/// # Panics
/// Panics if the head size is not [supported](supports).
pub fn forward(
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    shape: Shape,
    sm_count: usize,
) -> KernelLaunch {
    let (b, t, kv, group) = sizes(shape);
    let launch = attention_forward_wgmma_select((shape.hs as u32,), out, lse, qkv, b, t, kv, group);
    forward_kernel(launch, shape, sm_count)
}

/// Returns the launch of [`forward`] that also quantizes out.
///
/// # Panics
/// Panics if the head size is not [supported](supports).
pub fn forward_fp8(
    out: GlobalMut<bf16>,
    quantized: QuantizedOperands<E4m3>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    shape: Shape,
    sm_count: usize,
) -> KernelLaunch {
    let (b, t, kv, group) = sizes(shape);
    let QuantizedOperands { out: fp8, amax, scale } = quantized;
    let head_size = shape.hs as u32;
    let launch = attention_forward_fp8_wgmma_select((head_size,), out, fp8, amax, scale, lse, qkv, b, t, kv, group);
    forward_kernel(launch, shape, sm_count)
}

/// The operands of the backward pass.
#[derive(Clone, Copy)]
pub struct BackwardOperands {
    /// Gradient of qkv (B, T, NH + 2 KV, HS), the output.
    pub dqkv: GlobalMut<bf16>,
    /// Scratch memory (B, NH, T).
    pub d: GlobalMut<f32>,
    /// Gradient of out (B, T, NH, HS).
    pub dout: Global<bf16>,
    /// Output of the forward pass (B, T, NH, HS).
    pub out: Global<bf16>,
    /// Log-sum-exp of the forward pass (B, NH, T).
    pub lse: Global<f32>,
    /// Tensor map over qkv (B, T, (NH + 2 KV) HS).
    pub qkv_map: Global<TensorMap>,
    /// Tensor map over dout (B, T, NH HS).
    pub dout_map: Global<TensorMap>,
}

/// Returns true if the backward pass of this head size is [`backward_fused`].
pub fn is_fused(head_size: usize) -> bool {
    head_size == 128
}

/// Returns the three launches of the backward pass for head size 64, in order.
///
/// # Panics
/// Panics if the head size is not 64.
pub fn backward(operands: BackwardOperands, shape: Shape, sm_count: usize) -> [KernelLaunch; 3] {
    assert_eq!(shape.hs, 64, "attention_wgmma: expected head size 64 without a fused backward pass");
    let BackwardOperands { dqkv, d, dout, out, lse, qkv_map, dout_map } = operands;
    let dot = backward_dot(d, dout, out, shape);
    let (d, (b, t, kv, group)) = (d.reader(), sizes(shape));
    let dkdv = attention_backward_dkdv_wgmma_hs_64(dqkv, qkv_map, dout_map, lse, d, b, t, kv, group);
    let dq = attention_backward_dq_wgmma_hs_64(dqkv, qkv_map, dout_map, lse, d, b, t, kv, group);
    let dkdv = persistent(dkdv, dkdv_shared_bytes(), sm_count);
    [dot, dkdv, persistent(dq, dq_shared_bytes(), sm_count)]
}

/// Memory of the fused backward pass.
#[derive(Clone, Copy)]
pub struct FusedScratch {
    /// Sums of dQ: [`fused_dq_elements`] f32, not initialized.
    pub dq: GlobalMut<f32>,
    /// Counters: [`fused_counters`] words, zero before and after each launch.
    pub counters: GlobalMut<u32>,
}

/// Returns the number of panels of 64 queries of all sequences and query heads.
fn fused_panels(shape: Shape) -> usize {
    shape.b * shape.nh * CONSUMERS as usize * shape.t.div_ceil(TILE as usize)
}

/// Returns the elements of [`FusedScratch::dq`].
pub fn fused_dq_elements(shape: Shape) -> usize {
    fused_panels(shape) * PANEL_ELEMENTS
}

/// Returns the elements of [`FusedScratch::counters`].
pub fn fused_counters(shape: Shape) -> usize {
    fused_panels(shape) * CONSUMERS as usize + 1
}

/// Returns the three launches of the backward pass for head size 128, in order.
///
/// # Panics
/// Panics if the head size is not 128.
pub fn backward_fused(
    operands: BackwardOperands,
    scratch: FusedScratch,
    shape: Shape,
    sm_count: usize,
) -> [KernelLaunch; 3] {
    assert_eq!(shape.hs, 128, "attention_wgmma: expected head size 128 for the fused backward pass");
    let BackwardOperands { dqkv, d, dout, out, lse, qkv_map, dout_map } = operands;
    let FusedScratch { dq, counters } = scratch;
    let dot = backward_dot(d, dout, out, shape);
    let (d, (b, t, kv, group)) = (d.reader(), sizes(shape));
    let fused = attention_backward_fused_wgmma(dqkv, dq, counters, qkv_map, dout_map, lse, d, b, t, kv, group);
    let convert = KernelLaunch {
        launch: attention_backward_convert_dq(dqkv, dq.reader(), t, kv, group),
        grid: [t.div_ceil(TILE / CONSUMERS), kv * group, b],
        shared_bytes: 0,
    };
    [dot, persistent(fused, fused_shared_bytes(), sm_count), convert]
}
