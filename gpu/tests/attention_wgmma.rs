//! Attention for sm_90a against its derivatives written out in f64.

mod common;

use common::attention::{
    Inputs, Precision, Results, assert_agrees, check_causal, check_convex, check_dominant_key, check_equal_scores,
    check_heads, check_large_scores, check_spoilt_head, check_spoilt_position, check_sums, check_zeros,
};
use common::{Tolerance, for_all, read, rounded, run};
use cuda_std::bf16;
use cuda_std::emulate::Memory;
use cuda_std::hopper::TensorMap;
use gpu::attention::launch::{HEAD_SIZES, Prepared, Shape};
use gpu::attention_wgmma::launch::{self, Maps};
use gpu::attention_wgmma::{BOX, TILE};
use proptest::strategy::Strategy;

tests! {
    kernels of "attention_wgmma";
    once: one_position, part_of_a_tile, a_tile, several_tiles, idle_blocks, one_block, other_head_sizes_are_refused,
        convex, causal, heads_are_apart, sums, zeros, equal_scores, dominant_key, large_scores, spoilt_head,
        spoilt_position;
}

/// Fewer than pieces of work, for most shapes, so that a block does several.
const BLOCKS: usize = 3;

fn attend(blocks: usize) -> impl Fn(&Inputs) -> Results {
    move |inputs| {
        let shape = inputs.shape;
        let Shape { b, t, nh, hs } = shape;
        let rows = b * t * nh;
        let mut memory = Memory::new();
        let qkv = memory.input("qkv", &rounded(&inputs.qkv));
        let dout = memory.input("dout", &rounded(&inputs.dout));
        let maps = Maps {
            qkv: memory.input("map of qkv", &[TensorMap::emulated_3d(qkv, [b, t, 3 * nh * hs], BOX)]),
            dout: memory.input("map of dout", &[TensorMap::emulated_3d(dout, [b, t, nh * hs], BOX)]),
        };
        let out = memory.output::<bf16>("out", rows * hs);
        let lse = memory.output("lse", rows);
        let dqkv = memory.output::<bf16>("dqkv", 3 * rows * hs);
        let d = memory.output("d", rows);
        let mut run = |kernel: &Prepared| run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        run(&launch::forward(out, lse, maps.qkv, shape, blocks));
        launch::backward(dqkv, d, dout, out.reader(), lse.reader(), maps, shape, blocks).iter().for_each(&mut run);
        Results { shape, out: read(&memory, out), lse: read(&memory, lse), dqkv: read(&memory, dqkv) }
    }
}

fn shape(b: usize, t: usize, nh: usize) -> Shape {
    Shape { b, t, nh, hs: 64 }
}

fn check(shape: Shape, blocks: usize) {
    let inputs = Inputs::random::<bf16>(shape, 2.0, 1 + shape.t as u32);
    assert_agrees(&inputs, &attend(blocks)(&inputs), bf16::ERRORS);
}

fn one_position() {
    check(shape(1, 1, 1), BLOCKS);
    check(shape(3, 1, 3), BLOCKS);
}

fn part_of_a_tile() {
    for t in [17, 63, 64, 65, 127] {
        check(shape(1, t, 3), 1);
        check(shape(3, t, 1), BLOCKS);
    }
}

fn a_tile() {
    for t in [128, 129, 191, 193] {
        check(shape(1, t, 3), BLOCKS);
    }
}

fn several_tiles() {
    check(shape(1, 300, 3), 5);
    check(shape(2, 640, 1), 4);
}

/// Fewer pieces of work than blocks.
fn idle_blocks() {
    check(shape(1, 128, 1), BLOCKS);
    check(shape(1, 200, 1), 5);
}

/// All rings go round many times, and every barrier changes its parity.
fn one_block() {
    check(shape(3, 260, 3), 1);
}

fn other_head_sizes_are_refused() {
    assert!(HEAD_SIZES.iter().all(|&hs| launch::takes(hs) == (hs == 64)));
}

fn shapes() -> impl Strategy<Value = Shape> {
    (1..4usize, 1..300usize, 1..4usize).prop_map(|(b, t, nh)| shape(b, t, nh))
}

fn convex() {
    for_all(6, (shapes(), 1..8usize, 0.1..6.0, 0..u32::MAX), |(shape, blocks, range, seed)| {
        check_convex(attend(blocks), &Inputs::random::<bf16>(shape, range, seed), bf16::ROUNDING);
    });
}

fn causal() {
    for_all(6, (shapes(), 1..8usize, 0.0..1.0, 0..u32::MAX), |(shape, blocks, part, seed)| {
        let inputs = |seed| Inputs::random::<bf16>(shape, 3.0, seed);
        check_causal(attend(blocks), &inputs(seed), &inputs(!seed), (shape.t as f64 * part) as usize);
    });
}

fn heads_are_apart() {
    for_all(6, (shapes(), 1..8usize, 1..9usize, 0..u32::MAX), |(shape, blocks, turn, seed)| {
        check_heads(attend(blocks), &Inputs::random::<bf16>(shape, 3.0, seed), turn);
    });
}

fn sums() {
    for_all(6, (shapes(), 1..8usize, 0.1..3.0, 0..u32::MAX), |(shape, blocks, range, seed)| {
        check_sums(attend(blocks), &Inputs::random::<bf16>(shape, range, seed), 4.0 * bf16::ROUNDING);
    });
}

fn zeros() {
    check_zeros(attend(BLOCKS), shape(1, 65, 1), bf16::ERRORS);
}

fn equal_scores() {
    check_equal_scores::<bf16>(attend(BLOCKS), shape(1, 190, 1));
}

fn dominant_key() {
    for key in [0, 20, 67, 129] {
        check_dominant_key::<bf16>(attend(BLOCKS), shape(1, 200, 1), key);
    }
}

fn large_scores() {
    check_large_scores::<bf16>(attend(BLOCKS), shape(1, 190, 3));
}

/// Lengths that are not whole tiles: what fills up the last one must not come from the next sequence.
fn spoilt_head() {
    for t in [17, 65, 200] {
        check_spoilt_head::<bf16>(attend(BLOCKS), shape(3, t, 3), [1, 1]);
    }
}

fn spoilt_position() {
    for position in [5, 100, 130, 280] {
        check_spoilt_position::<bf16>(attend(BLOCKS), shape(1, 300, 1), position, TILE as usize);
    }
}
