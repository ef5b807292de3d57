//! The `sm_90a` attention kernels compared with an f64 reference.

use crate::common::attention::{
    DOCUMENTS, Inputs, Precision, Results, assert_agrees, check_causal, check_convex, check_dominant_key,
    check_equal_scores, check_groups, check_heads, check_large_scores, check_spoilt_head, check_spoilt_position,
    check_spoilt_query_head, check_sums, check_zeros, multi_head,
};
use crate::common::{Tolerance, assert_same, for_all, quantized, read, rounded, run};
use cuda_std::emulate::Memory;
use cuda_std::hopper::{Extents, TensorMap};
use cuda_std::{E4m3, GlobalMut, bf16};
use gpu::attention::launch::{AttentionSizes, HEAD_SIZES};
use gpu::attention_wgmma::BOX;
use gpu::attention_wgmma::launch::{self, BackwardOperands, FusedScratch};
use gpu::launch::KernelLaunch;
use gpu::quantize::QuantizedOperands;
use proptest::strategy::Strategy;

tests! {
    kernels of "attention_wgmma";
    once: one_position_matches_reference, partial_tile_matches_reference, full_tile_matches_reference,
        several_tiles_match_reference, idle_blocks_match_reference, one_block_matches_reference,
        only_head_sizes_64_and_128_are_supported, outputs_are_convex_combinations_of_values, heads_are_independent,
        gradients_of_keys_and_values_sum_correctly, zero_inputs_match_reference, equal_scores_average_values,
        dominant_key_takes_all_attention, large_scores_match_reference, grouped_queries_match_reference,
        groups_share_keys_and_values, non_finite_position_spreads_only_within_its_tile,
        quantized_output_has_the_bits_of_separate_quantization, documents_match_reference, windows_match_reference;
    slow: masked_results_are_the_same_for_every_grid, non_finite_head_does_not_spread, non_finite_query_head_reaches_only_its_group,
        results_are_the_same_for_every_grid, attention_is_causal;
}

/// Fewer blocks than work tiles for most shapes, so that a block computes several tiles.
const BLOCKS: usize = 3;

fn attend(blocks: usize) -> impl Fn(&Inputs) -> Results {
    move |inputs| {
        let shape = inputs.shape;
        let AttentionSizes { b, t, nh, kv, hs } = shape;
        let rows = b * t * nh;
        let mut memory = Memory::new();
        let qkv = memory.input("qkv", &rounded::<bf16>(&inputs.qkv));
        let dout = memory.input("dout", &rounded(&inputs.dout));
        let qkv_map = memory.input(
            "map of qkv",
            &[TensorMap::emulated_tensor(qkv, Extents::Matrices([b, t, (nh + 2 * kv) * hs]), BOX)],
        );
        let dout_map =
            memory.input("map of dout", &[TensorMap::emulated_tensor(dout, Extents::Matrices([b, t, nh * hs]), BOX)]);
        let out = memory.output::<bf16>("out", rows * hs);
        let lse = memory.output("lse", rows);
        let dqkv = memory.output::<bf16>("dqkv", b * t * (nh + 2 * kv) * hs);
        let d = memory.output("d", rows);
        let counters = memory.zeroed("counters", launch::fused_counters(shape));
        let dq = memory.output("sums of dQ", launch::fused_dq_elements(shape));
        let mask = inputs.mask(&mut memory);
        let mut run = |kernel: &KernelLaunch| run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        run(&launch::forward(out, None, lse, qkv_map, shape, mask, blocks));
        let (out_reader, lse_reader) = (out.reader(), lse.reader());
        let operands = BackwardOperands { dqkv, d, dout, out: out_reader, lse: lse_reader, qkv_map, dout_map };
        let fused = launch::is_fused(hs).then_some(FusedScratch { dq, counters });
        launch::backward(operands, fused, shape, mask, blocks).iter().for_each(&mut run);
        assert!(
            memory.read(counters).iter().all(|&count| count == 0),
            "counters: expected zeros after the backward pass"
        );
        Results { shape, out: read(&memory, out), lse: read(&memory, lse), dqkv: read(&memory, dqkv) }
    }
}

/// Compares the kernel that quantizes its output with `scale` with [`attend`] and separate quantization. `replaced` is the position and
/// the new value of an element of V in the last head of the last sequence.
fn check_quantized(
    shape: AttentionSizes,
    scale: f32,
    amax_before: Option<f32>,
    replaced: Option<(usize, f64)>,
    masked: bool,
) {
    let AttentionSizes { b, t, nh, kv, hs } = shape;
    let mut inputs = Inputs::random::<bf16>(shape, 2.0, 1 + t as u32);
    if masked {
        inputs = inputs.with_documents(&[50, 7, 90]).with_window(70);
    }
    if let Some((position, value)) = replaced {
        let at = inputs.qkv.len() - 1 - (t - 1 - position) * (nh + 2 * kv) * hs;
        inputs.qkv[at] = value;
    }
    let (want, n) = (attend(BLOCKS)(&inputs), b * t * nh * hs);
    let mut memory = Memory::new();
    let qkv = memory.input("qkv", &rounded::<bf16>(&inputs.qkv));
    let map = memory
        .input("map of qkv", &[TensorMap::emulated_tensor(qkv, Extents::Matrices([b, t, (nh + 2 * kv) * hs]), BOX)]);
    let (out, lse) = (memory.output::<bf16>("out", n), memory.output("lse", b * t * nh));
    let fp8 = memory.output::<E4m3>("out in FP8", n);
    let amax = amax_before.map_or(GlobalMut::null(), |before| memory.buffer("amax", &[before.to_bits()]));
    let operands = QuantizedOperands { out: fp8, amax, scale: memory.input("scale", &[scale]) };
    let mask = inputs.mask(&mut memory);
    let kernel = launch::forward(out, Some(operands), lse, map, shape, mask, BLOCKS);
    run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
    assert_same("out", &read(&memory, out), &want.out);
    assert_same("lse", &read(&memory, lse), &want.lse);
    quantized::check(&memory, fp8, &want.out, scale, amax_before.map(|before| (amax, before)));
}

fn quantized_output_has_the_bits_of_separate_quantization() {
    for hs in SIZES {
        // More blocks than work tiles, fewer, and a partial tile. The second scale saturates.
        check_quantized(multi_head(1, 64, 1, hs), 1.0 / 64.0, Some(0.0), None, false);
        check_quantized(AttentionSizes { b: 2, t: 144, nh: 4, kv: 2, hs }, 1.0 / 300.0, Some(0.1), None, false);
        check_quantized(AttentionSizes { b: 2, t: 144, nh: 4, kv: 2, hs }, 1.0 / 300.0, Some(0.1), None, true);
        check_quantized(multi_head(2, 128, 3, hs), 0.01, None, None, true);
        check_quantized(multi_head(1, 90, 1, hs), 0.01, Some(100.0), None, false);
        check_quantized(multi_head(1, 90, 1, hs), 0.01, Some(0.0), Some((45, f64::NAN)), false);
        check_quantized(multi_head(1, 90, 1, hs), 0.01, Some(0.0), Some((45, f64::INFINITY)), false);
        // The largest magnitude is in the last row, which belongs to the second consumer.
        check_quantized(multi_head(1, 90, 1, hs), 1.0, Some(0.0), Some((89, 10_000.0)), true);
    }
}

/// Supported head sizes.
const SIZES: [usize; 2] = [64, 128];
/// Rows of a work tile.
const TILE: usize = 128;

fn check(shape: AttentionSizes, blocks: usize) {
    let inputs = Inputs::random::<bf16>(shape, 2.0, 1 + shape.t as u32);
    assert_agrees(&inputs, &attend(blocks)(&inputs), bf16::ERRORS);
}

fn one_position_matches_reference() {
    for hs in SIZES {
        check(multi_head(1, 1, 1, hs), BLOCKS);
        check(multi_head(3, 1, 3, hs), BLOCKS);
    }
}

fn partial_tile_matches_reference() {
    for (t, hs) in [(17, 64), (63, 64), (63, 128), (64, 128), (65, 64), (65, 128), (127, 64)] {
        check(multi_head(1, t, 3, hs), 1);
        check(multi_head(3, t, 1, hs), BLOCKS);
    }
}

fn full_tile_matches_reference() {
    for (t, hs) in [(128, 64), (128, 128), (129, 64), (191, 128), (193, 64)] {
        check(multi_head(1, t, 3, hs), BLOCKS);
    }
}

fn several_tiles_match_reference() {
    check(multi_head(1, 300, 3, 64), 5);
    check(multi_head(1, 300, 2, 128), 5);
    check(multi_head(2, 640, 1, 64), 4);
    check(multi_head(1, 640, 1, 128), 2);
}

/// Covers fewer work tiles than blocks.
fn idle_blocks_match_reference() {
    check(multi_head(1, 128, 1, 64), BLOCKS);
    check(multi_head(1, 200, 1, 128), 5);
}

fn documents_match_reference() {
    for (i, lengths) in DOCUMENTS.iter().enumerate() {
        for hs in SIZES {
            let shape = AttentionSizes { b: 1 + i % 2, t: 260 + 31 * (i % 3), nh: 2, kv: 1 + i % 2, hs };
            let inputs = Inputs::random::<bf16>(shape, 2.0, i as u32).with_documents(lengths);
            assert_agrees(&inputs, &attend(1 + i % 4)(&inputs), bf16::ERRORS);
        }
    }
}

fn windows_match_reference() {
    for (i, window) in [1, 2, 63, 64, 65, 127, 128, 129, 200, 1000].into_iter().enumerate() {
        for hs in SIZES {
            let shape = AttentionSizes { b: 1, t: 300, nh: 2, kv: 1, hs };
            let inputs = Inputs::random::<bf16>(shape, 2.0, i as u32).with_window(window);
            assert_agrees(&inputs, &attend(1 + i % 4)(&inputs), bf16::ERRORS);
            let inputs = inputs.with_documents(&[170, 3, 40, 87]);
            assert_agrees(&inputs, &attend(1 + i % 4)(&inputs), bf16::ERRORS);
        }
    }
}

fn masked_results_are_the_same_for_every_grid() {
    for hs in SIZES {
        let shape = AttentionSizes { b: 2, t: 330, nh: 4, kv: 2, hs };
        let inputs = Inputs::random::<bf16>(shape, 2.0, 7).with_documents(&[129, 40, 200, 5]).with_window(150);
        let want = attend(1)(&inputs);
        for blocks in [2, 5, 20] {
            let got = attend(blocks)(&inputs);
            assert_same("out", &got.out, &want.out);
            assert_same("dqkv", &got.dqkv, &want.dqkv);
        }
    }
}

/// All pipelines wrap around many times, so that the parity of every barrier changes.
/// Covers a last chunk of heads that is smaller than the others.
fn one_block_matches_reference() {
    for hs in SIZES {
        check(multi_head(1, 260, 5, hs), 1);
    }
}

/// Covers groups of 1, 2, 4 and 8 heads, multi-query attention, and both parities of every pipeline at the boundary of
/// two heads.
fn grouped_queries_match_reference() {
    for (b, t, nh, kv, hs, blocks) in [
        (1, 1, 2, 1, 64, BLOCKS),
        (2, 65, 4, 2, 64, BLOCKS),
        (2, 65, 4, 2, 128, 2),
        (1, 130, 8, 1, 64, 1),
        (2, 200, 4, 1, 128, 1),
        (1, 300, 6, 3, 64, 5),
        (1, 257, 6, 2, 128, 4),
        // More key-value heads than a chunk of the scheduler has.
        (3, 150, 4, 2, 128, 2),
        (3, 100, 8, 4, 64, 7),
    ] {
        check(AttentionSizes { b, t, nh, kv, hs }, blocks);
    }
}

/// Every sum has a fixed order: neither the number of blocks nor the block that computes a work tile changes a bit.
fn results_are_the_same_for_every_grid() {
    for (b, t, nh, kv, hs) in [(1, 300, 2, 2, 64), (1, 300, 2, 2, 128), (2, 257, 6, 3, 128), (1, 130, 4, 1, 128)] {
        let shape = AttentionSizes { b, t, nh, kv, hs };
        let inputs = Inputs::random::<bf16>(shape, 2.0, 7);
        let want = attend(1)(&inputs);
        for blocks in [2, 5, 20] {
            let got = attend(blocks)(&inputs);
            assert_same("out", &got.out, &want.out);
            assert_same("lse", &got.lse, &want.lse);
            assert_same("dqkv", &got.dqkv, &want.dqkv);
        }
    }
}

fn groups_share_keys_and_values() {
    for_all(4, (shapes(), 1..8usize, 0.1..3.0, 0..u32::MAX), |(shape, blocks, range, seed)| {
        check_groups(attend(blocks), &Inputs::random::<bf16>(shape, range, seed), 4.0 * bf16::ROUNDING);
    });
}

fn only_head_sizes_64_and_128_are_supported() {
    assert!(HEAD_SIZES.iter().all(|&hs| launch::supports(hs) == SIZES.contains(&hs)));
}

fn shapes() -> impl Strategy<Value = AttentionSizes> {
    (1..4usize, 1..300usize, 1..4usize, 1..3usize, 0..2usize).prop_map(|(b, t, kv, group, size)| AttentionSizes {
        b,
        t,
        nh: kv * group,
        kv,
        hs: SIZES[size],
    })
}

fn outputs_are_convex_combinations_of_values() {
    for_all(6, (shapes(), 1..8usize, 0.1..6.0, 0..u32::MAX), |(shape, blocks, range, seed)| {
        check_convex(attend(blocks), &Inputs::random::<bf16>(shape, range, seed), bf16::ROUNDING);
    });
}

fn attention_is_causal() {
    for_all(6, (shapes(), 1..8usize, 0.0..1.0, 0..u32::MAX), |(shape, blocks, part, seed)| {
        let inputs = |seed| Inputs::random::<bf16>(shape, 3.0, seed);
        check_causal(attend(blocks), &inputs(seed), &inputs(!seed), (shape.t as f64 * part) as usize);
    });
}

fn heads_are_independent() {
    for_all(6, (shapes(), 1..8usize, 1..9usize, 0..u32::MAX), |(shape, blocks, rotation, seed)| {
        check_heads(attend(blocks), &Inputs::random::<bf16>(shape, 3.0, seed), rotation);
    });
}

fn gradients_of_keys_and_values_sum_correctly() {
    for_all(6, (shapes(), 1..8usize, 0.1..3.0, 0..u32::MAX), |(shape, blocks, range, seed)| {
        check_sums(attend(blocks), &Inputs::random::<bf16>(shape, range, seed), 4.0 * bf16::ROUNDING);
    });
}

fn zero_inputs_match_reference() {
    for hs in SIZES {
        check_zeros(attend(BLOCKS), multi_head(1, 65, 1, hs), bf16::ERRORS);
    }
}

fn equal_scores_average_values() {
    for hs in SIZES {
        check_equal_scores::<bf16>(attend(BLOCKS), multi_head(1, 190, 1, hs));
    }
}

fn dominant_key_takes_all_attention() {
    for (key, hs) in [(0, 64), (0, 128), (20, 64), (67, 64), (67, 128), (129, 64), (129, 128)] {
        check_dominant_key::<bf16>(attend(BLOCKS), multi_head(1, 200, 1, hs), key);
    }
}

fn large_scores_match_reference() {
    for hs in SIZES {
        check_large_scores::<bf16>(attend(BLOCKS), multi_head(1, 190, 3, hs));
    }
}

/// Covers lengths that are not multiples of a tile: padding rows must not come from the next sequence.
fn non_finite_head_does_not_spread() {
    for (t, hs) in [(17, 64), (65, 128), (200, 64)] {
        check_spoilt_head::<bf16>(attend(BLOCKS), multi_head(3, t, 3, hs), [1, 1]);
        check_spoilt_head::<bf16>(attend(BLOCKS), AttentionSizes { b: 2, t, nh: 6, kv: 3, hs }, [1, 1]);
    }
}

fn non_finite_query_head_reaches_only_its_group() {
    for (hs, h) in [(64, 0), (64, 1), (128, 2), (128, 3)] {
        check_spoilt_query_head::<bf16>(attend(BLOCKS), AttentionSizes { b: 2, t: 130, nh: 4, kv: 2, hs }, [1, h]);
    }
}

fn non_finite_position_spreads_only_within_its_tile() {
    for (position, hs) in [(5, 64), (100, 128), (130, 64), (280, 128)] {
        check_spoilt_position::<bf16>(attend(BLOCKS), multi_head(1, 300, 1, hs), position, TILE);
    }
}
