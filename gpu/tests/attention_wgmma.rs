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
use gpu::attention::launch::{HEAD_SIZES, Shape};
use gpu::attention_wgmma::BOX;
use gpu::attention_wgmma::launch::{self, Maps};
use gpu::launch::KernelLaunch;
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
        let mut run = |kernel: &KernelLaunch| run(&mut memory, &kernel.launch, kernel.grid, kernel.shared_bytes);
        run(&launch::forward(out, lse, maps.qkv, shape, blocks));
        launch::backward(dqkv, d, dout, out.reader(), lse.reader(), maps, shape, blocks).iter().for_each(&mut run);
        Results { shape, out: read(&memory, out), lse: read(&memory, lse), dqkv: read(&memory, dqkv) }
    }
}

fn shape(b: usize, t: usize, nh: usize, hs: usize) -> Shape {
    Shape { b, t, nh, hs }
}

/// Head sizes that have kernels.
const SIZES: [usize; 2] = [64, 128];
/// Rows of a piece of work.
const TILE: usize = 128;

fn check(shape: Shape, blocks: usize) {
    let inputs = Inputs::random::<bf16>(shape, 2.0, 1 + shape.t as u32);
    assert_agrees(&inputs, &attend(blocks)(&inputs), bf16::ERRORS);
}

fn one_position() {
    for hs in SIZES {
        check(shape(1, 1, 1, hs), BLOCKS);
        check(shape(3, 1, 3, hs), BLOCKS);
    }
}

fn part_of_a_tile() {
    for (t, hs) in [(17, 64), (63, 64), (63, 128), (64, 128), (65, 64), (65, 128), (127, 64)] {
        check(shape(1, t, 3, hs), 1);
        check(shape(3, t, 1, hs), BLOCKS);
    }
}

fn a_tile() {
    for (t, hs) in [(128, 64), (128, 128), (129, 64), (191, 128), (193, 64)] {
        check(shape(1, t, 3, hs), BLOCKS);
    }
}

fn several_tiles() {
    check(shape(1, 300, 3, 64), 5);
    check(shape(1, 300, 2, 128), 5);
    check(shape(2, 640, 1, 64), 4);
    check(shape(1, 640, 1, 128), 2);
}

/// Fewer pieces of work than blocks.
fn idle_blocks() {
    check(shape(1, 128, 1, 64), BLOCKS);
    check(shape(1, 200, 1, 128), 5);
}

/// All rings go round many times, and every barrier changes its parity.
fn one_block() {
    for hs in SIZES {
        check(shape(3, 260, 2, hs), 1);
    }
}

fn other_head_sizes_are_refused() {
    assert!(HEAD_SIZES.iter().all(|&hs| launch::takes(hs) == SIZES.contains(&hs)));
}

fn shapes() -> impl Strategy<Value = Shape> {
    (1..4usize, 1..300usize, 1..4usize, 0..2usize).prop_map(|(b, t, nh, size)| shape(b, t, nh, SIZES[size]))
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
    for hs in SIZES {
        check_zeros(attend(BLOCKS), shape(1, 65, 1, hs), bf16::ERRORS);
    }
}

fn equal_scores() {
    for hs in SIZES {
        check_equal_scores::<bf16>(attend(BLOCKS), shape(1, 190, 1, hs));
    }
}

fn dominant_key() {
    for (key, hs) in [(0, 64), (0, 128), (20, 64), (67, 64), (67, 128), (129, 64)] {
        check_dominant_key::<bf16>(attend(BLOCKS), shape(1, 200, 1, hs), key);
    }
}

fn large_scores() {
    for hs in SIZES {
        check_large_scores::<bf16>(attend(BLOCKS), shape(1, 190, 3, hs));
    }
}

/// Lengths that are not whole tiles: what fills up the last one must not come from the next sequence.
fn spoilt_head() {
    for (t, hs) in [(17, 64), (65, 128), (200, 64)] {
        check_spoilt_head::<bf16>(attend(BLOCKS), shape(3, t, 3, hs), [1, 1]);
    }
}

fn spoilt_position() {
    for (position, hs) in [(5, 64), (100, 64), (100, 128), (130, 64), (280, 64)] {
        check_spoilt_position::<bf16>(attend(BLOCKS), shape(1, 300, 1, hs), position, TILE);
    }
}
