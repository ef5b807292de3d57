//! Attention against softmax(Q Kᵀ / sqrt(HS), causal) V and its derivatives written out in f64.

mod common;

use common::attention::{
    Inputs, Precision, Results, assert_agrees, check_causal, check_convex, check_dominant_key, check_equal_scores,
    check_heads, check_large_scores, check_spoilt_head, check_spoilt_position, check_sums, check_zeros,
};
use common::{for_all, read, rounded, run};
use cuda_std::bf16;
use cuda_std::emulate::Memory;
use gpu::attention::launch::{self, HEAD_SIZES, Shape};
use gpu::launch::KernelLaunch;
use proptest::sample::select;
use proptest::strategy::Strategy;

tests! {
    kernels of "attention";
    for both types: head_size_64, head_size_80, head_size_96, head_size_128, convex, causal, heads_are_apart, sums,
        zeros, equal_scores, dominant_key, large_scores, spoilt_head, spoilt_position;
    once: other_head_sizes_are_refused;
}

fn attend<T: Precision>(inputs: &Inputs) -> Results {
    let shape = inputs.shape;
    let rows = shape.b * shape.t * shape.nh;
    let mut memory = Memory::new();
    let qkv = memory.input("qkv", &rounded::<T>(&inputs.qkv));
    let dout = memory.input("dout", &rounded::<T>(&inputs.dout));
    let out = memory.output::<T>("out", rows * shape.hs);
    let lse = memory.output("lse", rows);
    let dqkv = memory.output::<T>("dqkv", 3 * rows * shape.hs);
    let d = memory.output("d", rows);
    let mut run = |kernel: &KernelLaunch| run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
    run(&launch::forward(out, lse, qkv, shape).unwrap());
    launch::backward(dqkv, d, dout, qkv, out.reader(), lse.reader(), shape).unwrap().iter().for_each(&mut run);
    memory.read(d);
    Results { shape, out: read(&memory, out), lse: read(&memory, lse), dqkv: read(&memory, dqkv) }
}

/// Below, at and above a warp's rows, a tile, and two tiles; odd batches and heads.
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

fn head_size<T: Precision>(hs: usize) {
    for (b, t, nh) in SHAPES {
        let inputs = Inputs::random::<T>(Shape { b, t, nh, hs }, 2.0, 1 + t as u32);
        assert_agrees(&inputs, &attend::<T>(&inputs), T::ERRORS);
    }
}

fn head_size_64<T: Precision>() {
    head_size::<T>(64);
}

fn head_size_80<T: Precision>() {
    head_size::<T>(80);
}

fn head_size_96<T: Precision>() {
    head_size::<T>(96);
}

fn head_size_128<T: Precision>() {
    head_size::<T>(128);
}

fn shapes() -> impl Strategy<Value = Shape> {
    (1..4usize, 1..140usize, 1..4usize, select(&HEAD_SIZES)).prop_map(|(b, t, nh, hs)| Shape { b, t, nh, hs })
}

fn convex<T: Precision>() {
    for_all(6, (shapes(), 0.1..6.0, 0..u32::MAX), |(shape, range, seed)| {
        check_convex(attend::<T>, &Inputs::random::<T>(shape, range, seed), T::ROUNDING);
    });
}

fn causal<T: Precision>() {
    for_all(6, (shapes(), 0.0..1.0, 0..u32::MAX), |(shape, part, seed)| {
        let inputs = |seed| Inputs::random::<T>(shape, 3.0, seed);
        check_causal(attend::<T>, &inputs(seed), &inputs(!seed), (shape.t as f64 * part) as usize);
    });
}

fn heads_are_apart<T: Precision>() {
    for_all(6, (shapes(), 1..9usize, 0..u32::MAX), |(shape, turn, seed)| {
        check_heads(attend::<T>, &Inputs::random::<T>(shape, 3.0, seed), turn);
    });
}

fn sums<T: Precision>() {
    for_all(6, (shapes(), 0.1..3.0, 0..u32::MAX), |(shape, range, seed)| {
        check_sums(attend::<T>, &Inputs::random::<T>(shape, range, seed), 4.0 * T::ROUNDING);
    });
}

fn zeros<T: Precision>() {
    for hs in HEAD_SIZES {
        check_zeros(attend::<T>, Shape { b: 1, t: 65, nh: 1, hs }, T::ERRORS);
    }
}

fn equal_scores<T: Precision>() {
    for hs in HEAD_SIZES {
        check_equal_scores::<T>(attend::<T>, Shape { b: 1, t: 90, nh: 1, hs });
    }
}

fn dominant_key<T: Precision>() {
    for (hs, key) in HEAD_SIZES.into_iter().zip([0, 20, 67, 129]) {
        check_dominant_key::<T>(attend::<T>, Shape { b: 1, t: 130, nh: 1, hs }, key);
    }
}

fn large_scores<T: Precision>() {
    for hs in HEAD_SIZES {
        check_large_scores::<T>(attend::<T>, Shape { b: 1, t: 70, nh: 3, hs });
    }
}

/// Lengths that are not whole tiles: what fills up the last one must not come from the next sequence.
fn spoilt_head<T: Precision>() {
    for (hs, t) in HEAD_SIZES.into_iter().zip([65, 33, 70, 17]) {
        check_spoilt_head::<T>(attend::<T>, Shape { b: 3, t, nh: 3, hs }, [1, 1]);
    }
}

fn spoilt_position<T: Precision>() {
    for (hs, position) in HEAD_SIZES.into_iter().zip([80, 130, 5, 70]) {
        check_spoilt_position::<T>(attend::<T>, Shape { b: 1, t: 140, nh: 1, hs }, position, 128);
    }
}

fn other_head_sizes_are_refused() {
    let mut memory = Memory::new();
    let (input, out, lse) = (memory.input("qkv", &[]), memory.output::<bf16>("out", 0), memory.output("lse", 0));
    for hs in [0, 16, 72, 112, 160] {
        assert!(!HEAD_SIZES.contains(&hs));
        assert!(launch::forward::<bf16>(out, lse, input, Shape { b: 1, t: 1, nh: 1, hs }).is_none());
    }
}
