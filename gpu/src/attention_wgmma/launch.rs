//! Host side: the kernel launches for a shape.

use super::backward::{SharedStorage, attention_backward};
use super::dkdv::DkDv;
use super::dq::Dq;
use super::forward::{attention_forward_wgmma_exists, attention_forward_wgmma_select, attention_forward_wgmma_values};
use super::fused::{self, PANEL_ELEMENTS, attention_backward_convert_dq, attention_backward_fused_wgmma_select};
use super::{CONSUMERS, TILE};
use crate::attention::launch::{AttentionSizes, Documents, Mask, backward_dot};
use crate::launch::{KernelLaunch, shared_bytes};
use crate::quantize::QuantizedOperands;
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::{E4m3, Global, GlobalMut, bf16};

/// Returns true if the kernels support this head size.
pub fn supports(head_size: usize) -> bool {
    attention_forward_wgmma_exists((head_size as u32, false, false))
}

/// Launches one block per SM.
fn persistent(launch: Launch, shared_bytes: usize, sm_count: usize) -> KernelLaunch {
    KernelLaunch { launch, grid: [sm_count as u32, 1, 1], shared_bytes }
}

/// Returns the launch of the forward pass: out (B, T, NH, HS) and lse (B, NH, T) from the tensor map over
/// qkv (B, T, (NH + 2 KV) HS). The kernel also quantizes out if there are operands for that.
///
/// # Panics
/// Panics if the head size is not [supported](supports).
pub fn forward(
    out: GlobalMut<bf16>,
    quantized: Option<QuantizedOperands<E4m3>>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    shape: AttentionSizes,
    mask: Mask,
    sm_count: usize,
) -> KernelLaunch {
    let (key, [b, t, kv, group]) = ((shape.hs as u32, quantized.is_some(), !mask.is_causal()), shape.arguments());
    let Documents { first_keys, query_tiles, .. } = mask.documents();
    let (fp8, amax, scale) = quantized.map(|next| (next.out, next.amax, next.scale)).unwrap_or_default();
    let window = mask.window();
    let launch = attention_forward_wgmma_select(
        key,
        out,
        lse,
        qkv,
        b,
        t,
        kv,
        group,
        fp8,
        amax,
        scale,
        first_keys,
        query_tiles,
        window,
    );
    let (Some(launch), Some((shared_bytes,))) = (launch, attention_forward_wgmma_values(key)) else {
        panic!("attention_wgmma: expected head size 64 or 128, found {}", shape.hs)
    };
    persistent(launch, shared_bytes(), sm_count)
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

/// Returns true if the backward pass of this head size is fused.
pub fn is_fused(head_size: usize) -> bool {
    head_size == 128
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
fn fused_panels(shape: AttentionSizes) -> usize {
    shape.b * shape.nh * CONSUMERS as usize * shape.t.div_ceil(TILE as usize)
}

/// Returns the elements of [`FusedScratch::dq`].
pub fn fused_dq_elements(shape: AttentionSizes) -> usize {
    fused_panels(shape) * PANEL_ELEMENTS
}

/// Returns the elements of [`FusedScratch::counters`].
pub fn fused_counters(shape: AttentionSizes) -> usize {
    fused_panels(shape) * CONSUMERS as usize + 1
}

/// Returns the number of key-value heads in a chunk of the fused pass. Tiles of one head wait for each other if they start together, so a
/// chunk has about as many heads as there are SMs for each tile of a head.
///
/// On an H200, 16 heads of 16 sequences, T = 4096: 197 TFLOP/s with 1 head in a chunk, 522 with 4, 505 with 16.
///
/// A document has few tiles, so that they start together unless those of more heads are between them. On an H100, 4 x 16 heads, T = 8192,
/// documents of mean length 1,024: 1.48 ms with 4 heads in a chunk, 1.23 with 8, 1.21 with 16, 1.31 with 32.
fn chunk_heads(shape: AttentionSizes, mask: Mask, sm_count: usize) -> u32 {
    let least = if mask.documents().first_keys.is_null() { 4 } else { 16 };
    least.max((sm_count / shape.t.div_ceil(TILE as usize)) as u32)
}

/// Returns the kernels of dK and dV, and of dQ, for HS = 64.
fn separate<const MASKED: bool>(operands: BackwardOperands, shape: AttentionSizes, mask: Mask) -> [Launch; 2] {
    let BackwardOperands { dqkv, d, lse, qkv_map, dout_map, .. } = operands;
    let (d, [b, t, kv, group], window) = (d.reader(), shape.arguments(), mask.window());
    let Documents { first_keys: first, last_queries: last, query_tiles, key_tiles } = mask.documents();
    [
        attention_backward::<DkDv<MASKED>>(
            dqkv, qkv_map, dout_map, lse, d, b, t, kv, group, first, last, key_tiles, window,
        ),
        attention_backward::<Dq<MASKED>>(
            dqkv,
            qkv_map,
            dout_map,
            lse,
            d,
            b,
            t,
            kv,
            group,
            first,
            last,
            query_tiles,
            window,
        ),
    ]
}

/// Returns the three launches of the backward pass, in order. `scratch` is present if the pass [is fused](is_fused).
///
/// # Panics
/// Panics if the head size is not [supported](supports), or if `scratch` does not fit the pass.
pub fn backward(
    operands: BackwardOperands,
    scratch: Option<FusedScratch>,
    shape: AttentionSizes,
    mask: Mask,
    sm_count: usize,
) -> [KernelLaunch; 3] {
    let fits = scratch.is_some() == is_fused(shape.hs);
    assert!(supports(shape.hs) && fits, "attention_wgmma: expected head size 64, or 128 with memory of the fused pass");
    let BackwardOperands { dqkv, d, dout, out, lse, qkv_map, dout_map } = operands;
    let dot = backward_dot(d, dout, out, shape);
    if let Some(FusedScratch { dq, counters }) = scratch {
        let (d, [b, t, kv, group], window) = (d.reader(), shape.arguments(), mask.window());
        let (key, Documents { first_keys, last_queries, .. }) = ((!mask.is_causal(),), mask.documents());
        let fused = attention_backward_fused_wgmma_select(
            key,
            dqkv,
            dq,
            counters,
            qkv_map,
            dout_map,
            lse,
            d,
            b,
            t,
            kv,
            group,
            first_keys,
            last_queries,
            window,
            chunk_heads(shape, mask, sm_count),
        );
        let fused = fused.expect("an instance for each mask");
        let fused = persistent(fused, shared_bytes(fused::SharedStorage::new), sm_count);
        let launch = attention_backward_convert_dq(dqkv, dq.reader(), t, kv, group);
        let grid = [t.div_ceil(TILE / CONSUMERS), kv * group, b];
        return [dot, fused, KernelLaunch { launch, grid, shared_bytes: 0 }];
    }
    let separate = if mask.is_causal() { separate::<false> } else { separate::<true> };
    let [dkdv, dq] = separate(operands, shape, mask);
    let (dkdv_bytes, dq_bytes) =
        (shared_bytes(SharedStorage::new::<DkDv<false>>), shared_bytes(SharedStorage::new::<Dq<false>>));
    [dot, persistent(dkdv, dkdv_bytes, sm_count), persistent(dq, dq_bytes, sm_count)]
}
