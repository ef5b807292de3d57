//! The `mma.sync` attention kernels against an f64 reference, and against properties of causal attention.

use crate::common::attention::{
    DOCUMENTS, Inputs, Precision, Results, assert_agrees, check_causal, check_convex, check_dominant_key,
    check_equal_scores, check_groups, check_heads, check_large_scores, check_spoilt_head, check_spoilt_position,
    check_spoilt_query_head, check_sums, check_zeros, multi_head,
};
use crate::common::{for_all, read, rounded, run};
use cuda_std::bf16;
use cuda_std::emulate::Memory;
use gpu::attention::launch::{self, AttentionSizes, HEAD_SIZES, Mask};
use gpu::launch::KernelLaunch;
use proptest::sample::select;
use proptest::strategy::Strategy;

tests! {
    kernels of "attention";
    for both types: head_size_64_matches_f64_reference, head_size_80_matches_f64_reference,
        head_size_96_matches_f64_reference, head_size_128_matches_f64_reference, documents_match_f64_reference,
        windows_match_f64_reference;
    slow in f32: zero_scores_give_running_means, equal_scores_give_running_means, dominant_key_takes_all_attention,
        large_scores_do_not_overflow, gradients_sum_as_probabilities_require, outputs_are_convex_combinations_of_values, later_positions_do_not_affect_earlier_ones,
        heads_are_independent, nan_stays_in_its_head, nan_of_a_query_head_reaches_only_its_group,
        grouped_queries_match_f64_reference, groups_share_keys_and_values, nan_at_a_position_spreads_only_as_documented;
    once: unsupported_head_sizes_have_no_kernel;
}

fn attend<T: Precision>(inputs: &Inputs) -> Results {
    let shape = inputs.shape;
    let rows = shape.b * shape.t * shape.nh;
    let packed = shape.b * shape.t * (shape.nh + 2 * shape.kv) * shape.hs;
    let mut memory = Memory::new();
    let qkv = memory.input("qkv", &rounded::<T>(&inputs.qkv));
    let dout = memory.input("dout", &rounded::<T>(&inputs.dout));
    let out = memory.output::<T>("out", rows * shape.hs);
    let lse = memory.output("lse", rows);
    let dqkv = memory.output::<T>("dqkv", packed);
    let d = memory.output("d", rows);
    let mask = inputs.mask(&mut memory);
    let mut run = |kernel: &KernelLaunch| run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
    run(&launch::forward(out, lse, qkv, shape, mask).unwrap());
    launch::backward(dqkv, d, dout, qkv, out.reader(), lse.reader(), (shape, mask)).unwrap().iter().for_each(&mut run);
    memory.read(d);
    Results { shape, out: read(&memory, out), lse: read(&memory, lse), dqkv: read(&memory, dqkv) }
}

/// (B, T, NH). T is below, at and above the rows of a warp, of one tile, and of two tiles.
const SHAPES: [(usize, usize, usize); 10] = [
    (1, 1, 1),
    (3, 1, 3),
    (1, 15, 3),
    (3, 17, 1),
    (1, 63, 3),
    (3, 65, 3),
    (1, 127, 1),
    (1, 128, 1),
    (1, 129, 3),
    (1, 257, 1),
];

fn check_head_size<T: Precision>(hs: usize) {
    for (b, t, nh) in SHAPES {
        let inputs = Inputs::random::<T>(multi_head(b, t, nh, hs), 2.0, 1 + t as u32);
        assert_agrees(&inputs, &attend::<T>(&inputs), T::ERRORS);
    }
}

fn head_size_64_matches_f64_reference<T: Precision>() {
    check_head_size::<T>(64);
}

fn head_size_80_matches_f64_reference<T: Precision>() {
    check_head_size::<T>(80);
}

fn head_size_96_matches_f64_reference<T: Precision>() {
    check_head_size::<T>(96);
}

fn head_size_128_matches_f64_reference<T: Precision>() {
    check_head_size::<T>(128);
}

fn documents_match_f64_reference<T: Precision>() {
    for (i, lengths) in DOCUMENTS.iter().enumerate() {
        let shape = AttentionSizes { b: 1 + i % 2, t: 130 + 10 * (i % 3), nh: 2, kv: 1 + i % 2, hs: HEAD_SIZES[i % 4] };
        let inputs = Inputs::random::<T>(shape, 2.0, i as u32).with_documents(lengths);
        assert_agrees(&inputs, &attend::<T>(&inputs), T::ERRORS);
    }
}

fn windows_match_f64_reference<T: Precision>() {
    for (i, window) in [1, 2, 31, 32, 33, 64, 65, 100, 1000].into_iter().enumerate() {
        let shape = AttentionSizes { b: 1, t: 140, nh: 2, kv: 1, hs: HEAD_SIZES[i % 4] };
        let inputs = Inputs::random::<T>(shape, 2.0, i as u32).with_window(window);
        assert_agrees(&inputs, &attend::<T>(&inputs), T::ERRORS);
        let inputs = inputs.with_documents(&[70, 3, 40, 27]);
        assert_agrees(&inputs, &attend::<T>(&inputs), T::ERRORS);
    }
}

/// (T, NH, KV): groups of 1, 2, 4 and 8 heads, multi-query attention among them.
const GROUPS: [(usize, usize, usize); 6] = [(1, 2, 1), (65, 4, 2), (17, 8, 1), (90, 4, 1), (130, 6, 3), (129, 8, 4)];

fn grouped_queries_match_f64_reference<T: Precision>() {
    for (i, (t, nh, kv)) in GROUPS.into_iter().enumerate() {
        let (b, hs) = (1 + i % 2, HEAD_SIZES[i % 4]);
        let inputs = Inputs::random::<T>(AttentionSizes { b, t, nh, kv, hs }, 2.0, 1 + t as u32);
        assert_agrees(&inputs, &attend::<T>(&inputs), T::ERRORS);
    }
}

fn groups_share_keys_and_values<T: Precision>() {
    for_all(4, (shapes(), 0.1..3.0, 0..u32::MAX), |(shape, range, seed)| {
        check_groups(attend::<T>, &Inputs::random::<T>(shape, range, seed), 4.0 * T::ROUNDING);
    });
}

fn shapes() -> impl Strategy<Value = AttentionSizes> {
    (1..3usize, 1..140usize, 1..3usize, 1..4usize, select(&HEAD_SIZES))
        .prop_map(|(b, t, kv, group, hs)| AttentionSizes { b, t, nh: kv * group, kv, hs })
}

fn outputs_are_convex_combinations_of_values<T: Precision>() {
    for_all(4, (shapes(), 0.1..6.0, 0..u32::MAX), |(shape, range, seed)| {
        check_convex(attend::<T>, &Inputs::random::<T>(shape, range, seed), T::ROUNDING);
    });
}

fn later_positions_do_not_affect_earlier_ones<T: Precision>() {
    for_all(4, (shapes(), 0.0..1.0, 0..u32::MAX), |(shape, part, seed)| {
        let inputs = |seed| Inputs::random::<T>(shape, 3.0, seed);
        check_causal(attend::<T>, &inputs(seed), &inputs(!seed), (shape.t as f64 * part) as usize);
    });
}

fn heads_are_independent<T: Precision>() {
    for_all(4, (shapes(), 1..9usize, 0..u32::MAX), |(shape, shift, seed)| {
        check_heads(attend::<T>, &Inputs::random::<T>(shape, 3.0, seed), shift);
    });
}

fn gradients_sum_as_probabilities_require<T: Precision>() {
    for_all(4, (shapes(), 0.1..3.0, 0..u32::MAX), |(shape, range, seed)| {
        check_sums(attend::<T>, &Inputs::random::<T>(shape, range, seed), 4.0 * T::ROUNDING);
    });
}

fn zero_scores_give_running_means<T: Precision>() {
    for hs in HEAD_SIZES {
        check_zeros(attend::<T>, multi_head(1, 65, 1, hs), T::ERRORS);
    }
}

fn equal_scores_give_running_means<T: Precision>() {
    for hs in HEAD_SIZES {
        check_equal_scores::<T>(attend::<T>, multi_head(1, 90, 1, hs));
    }
}

fn dominant_key_takes_all_attention<T: Precision>() {
    for (hs, key) in HEAD_SIZES.into_iter().zip([0, 20, 67, 129]) {
        check_dominant_key::<T>(attend::<T>, multi_head(1, 130, 1, hs), key);
    }
}

fn large_scores_do_not_overflow<T: Precision>() {
    for hs in HEAD_SIZES {
        check_large_scores::<T>(attend::<T>, multi_head(1, 70, 3, hs));
    }
}

/// The lengths are not multiples of a tile: the rows that fill the last tile must not come from the next sequence.
fn nan_stays_in_its_head<T: Precision>() {
    for (hs, (t, nh)) in HEAD_SIZES.into_iter().zip([(65, 3), (33, 6), (17, 6), (70, 3)]) {
        check_spoilt_head::<T>(attend::<T>, AttentionSizes { b: 2, t, nh, kv: 3, hs }, [1, 1]);
    }
}

fn nan_of_a_query_head_reaches_only_its_group<T: Precision>() {
    for (hs, (t, h)) in HEAD_SIZES.into_iter().zip([(66, 0), (17, 1), (33, 2), (5, 3)]) {
        check_spoilt_query_head::<T>(attend::<T>, AttentionSizes { b: 2, t, nh: 4, kv: 2, hs }, [1, h]);
    }
}

fn nan_at_a_position_spreads_only_as_documented<T: Precision>() {
    for (hs, position) in HEAD_SIZES.into_iter().zip([80, 130, 5, 70]) {
        check_spoilt_position::<T>(attend::<T>, multi_head(1, 140, 1, hs), position, 128);
    }
}

fn unsupported_head_sizes_have_no_kernel() {
    let mut memory = Memory::new();
    let (input, out, lse) = (memory.input("qkv", &[]), memory.output::<bf16>("out", 0), memory.output("lse", 0));
    for hs in [0, 16, 72, 112, 160] {
        assert!(!HEAD_SIZES.contains(&hs));
        assert!(launch::forward::<bf16>(out, lse, input, multi_head(1, 1, 1, hs), Mask::default()).is_none());
    }
}
