//! Attention for sm_90a, emulated and watched, against its derivatives written out in f64.

mod common;

use common::attention::{BF16, Buffer, Tolerance, compare, part, reference};
use cuda_std::emulate::{Memory, Report};
use cuda_std::hopper::TensorMap;
use cuda_std::{Element, Global, GlobalMut, bf16};
use gpu::attention::launch::Shape;
use gpu::attention_wgmma as attention;

/// Fewer than pieces of work, for most shapes, so that a block does several.
const BLOCKS: [u32; 3] = [3, 1, 1];

struct Run {
    out: Vec<f64>,
    lse: Vec<f64>,
    dqkv: Vec<f64>,
}

fn wide<T: Element + bytemuck::Pod>(memory: &Memory, view: GlobalMut<T>) -> Vec<f64> {
    memory.read(view).iter().map(|x| f64::from(x.to_f32())).collect()
}

fn rounded(values: &[f64]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x as f32)).collect()
}

/// A map over `rows` rows of `columns`, in `memory`.
fn map(memory: &mut Memory, name: &str, base: Global<bf16>, rows: usize, columns: usize) -> Global<TensorMap> {
    let (box_rows, box_columns) = attention::BOX;
    let map = TensorMap::emulated(base, rows, columns, 2 * columns, box_rows, box_columns);
    memory.input(name, &[map])
}

fn run(qkv: &[f64], dout: &[f64], Shape { b, t, nh, hs }: Shape) -> Result<Run, Report> {
    let mut memory = Memory::new();
    let rows = b * t * nh;
    let qkv = memory.input("qkv", &rounded(qkv));
    let qkv = map(&mut memory, "map of qkv", qkv, b * t, 3 * nh * hs);
    let dout_values = memory.input("dout", &rounded(dout));
    let dout_map = map(&mut memory, "map of dout", dout_values, b * t, nh * hs);
    let out = memory.output::<bf16>("out", rows * hs);
    let lse = memory.output::<f32>("lse", rows);
    let dqkv = memory.output::<bf16>("dqkv", 3 * rows * hs);
    let (b_, t_, nh_) = (b as u32, t as u32, nh as u32);

    let forward = attention::attention_forward_wgmma(out, lse, qkv, b_, t_, nh_);
    forward.emulate_checked(&mut memory, BLOCKS, attention::forward_shared_bytes())?;
    let out = wide(&memory, out);

    // rowsum(dout ∘ out), (B,NH,T).
    let d = |i: usize| {
        let (sequence, head, row) = (i / t / nh, i / t % nh, i % t);
        let at = ((sequence * t + row) * nh + head) * hs;
        (0..hs).map(|c| dout[at + c] * out[at + c]).sum::<f64>() as f32
    };
    let d = memory.input("d", &(0..rows).map(d).collect::<Vec<_>>());
    let keys = attention::attention_backward_keys_wgmma(dqkv, qkv, dout_map, lse.reader(), d, b_, t_, nh_);
    keys.emulate_checked(&mut memory, BLOCKS, attention::backward_keys_shared_bytes())?;
    let queries = attention::attention_backward_queries_wgmma(dqkv, qkv, dout_map, lse.reader(), d, b_, t_, nh_);
    queries.emulate_checked(&mut memory, BLOCKS, attention::backward_queries_shared_bytes())?;
    Ok(Run { out, lse: wide(&memory, lse), dqkv: wide(&memory, dqkv) })
}

fn check(b: usize, t: usize, nh: usize) {
    let shape = Shape { b, t, nh, hs: 64 };
    let qkv = Buffer::<bf16>::random(b * t * 3 * nh * shape.hs, 2.0, 1 + t as u64).values();
    let dout = Buffer::<bf16>::random(b * t * nh * shape.hs, 1.0, 1000 + t as u64).values();
    let expected = reference(&qkv, &dout, shape);
    let got = run(&qkv, &dout, shape).unwrap();
    let name = |what: &str| format!("{what} of B={b} T={t} NH={nh}");
    compare(&name("out"), &got.out, &expected.out, &BF16);
    compare(&name("lse"), &got.lse, &expected.lse, &Tolerance { mean: 2e-6, worst: 2e-5 });
    for (i, what) in ["dQ", "dK", "dV"].into_iter().enumerate() {
        compare(&name(what), &part(&got.dqkv, i, shape), &part(&expected.dqkv, i, shape), &BF16);
    }
}

#[test]
fn one_position() {
    check(2, 1, 3);
}

#[test]
fn just_over_half_a_tile() {
    check(2, 65, 3);
}

#[test]
fn just_over_a_tile() {
    check(2, 130, 3);
}

#[test]
fn several_tiles() {
    check(2, 300, 3);
}

/// Fewer pieces of work than blocks.
#[test]
fn idle_blocks() {
    check(1, 128, 1);
}
