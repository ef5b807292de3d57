//! The grouped `sm_90a` GEMM kernels compared with the kernels for one GEMM, bit for bit.

use crate::common::gemm::{Case, Inputs, all, run, sized, tensor_map};
use crate::common::{assert_same, entries, for_all, multiples_of_8, noise, rounded, wide};
use cuda_std::emulate::Memory;
use cuda_std::{Global, GlobalMut, bf16};
use gpu::experts::{GROUP_BLOCK, Groups};
use gpu::matmul::gemm::{Batching, Gemm, GemmLayout, GemmPrecision, Pass};
use gpu::matmul::launch::{self, KernelOperands, Map, StridedBatch, TileConfig, TileShape, is_supported};
use proptest::arbitrary::any;
use proptest::collection::vec;
use proptest::sample::{Index, select};

tests! {
    kernels of "matmul/kernel.rs" where |entry| entry.contains("grouped");
    once: groups_have_the_bits_of_single_gemms, random_groups_have_the_bits_of_single_gemms,
        blocks_without_a_tile_read_the_groups_only, partial_blocks_are_rejected;
}

/// Groups of no row, one row, all rows of blocks, and more than a pipeline of steps.
const SIZES: [usize; 5] = [0, 1, 256, 129, 700];

fn gemms() -> Vec<Gemm> {
    let gemms = all(GemmPrecision::Bf16, Batching::Grouped);
    assert_eq!(gemms.len(), 9);
    gemms
}

/// A grouped GEMM, the rows of each group, its tile configuration, and the number of thread blocks.
struct GroupedCase {
    gemm: Gemm,
    sizes: Vec<usize>,
    tile: TileShape,
    blocks: usize,
}

impl GroupedCase {
    /// Returns the GEMM of groups with `sizes` rows. `size` is (N, K), or (M, N) if the groups have rows of both operands.
    fn new(gemm: Gemm, size: [usize; 2], sizes: &[usize], tile: TileShape, blocks: usize) -> Self {
        let rows = Groups::new(sizes.len(), sizes.iter().sum()).rows;
        let [x, y] = size;
        let shape = if gemm.layout == GemmLayout::Tn { [x, y, rows] } else { [rows, x, y] };
        Self { gemm: sized(gemm, shape), sizes: sizes.to_vec(), tile, blocks }
    }

    fn groups(&self) -> Groups {
        Groups::new(self.sizes.len(), self.sizes.iter().sum())
    }

    /// Returns the first row of each group, and the end of the last.
    fn starts(&self) -> Vec<usize> {
        let mut starts = vec![0];
        for size in &self.sizes {
            // Only a group that is summed over needs a block.
            let blocks = size.div_ceil(GROUP_BLOCK).max(usize::from(self.sums_rows()));
            starts.push(starts[starts.len() - 1] + blocks * GROUP_BLOCK);
        }
        starts
    }

    /// Returns the description of the groups for the kernel.
    fn description(&self) -> Vec<u32> {
        let starts = self.starts();
        let group_of = |block: usize| starts[1..].iter().position(|&end| block * GROUP_BLOCK < end).unwrap_or(0);
        let blocks = (0..self.groups().rows / GROUP_BLOCK).map(group_of);
        starts.iter().copied().chain(self.sizes.iter().copied()).chain(blocks).map(|word| word as u32).collect()
    }

    fn sums_rows(&self) -> bool {
        self.gemm.layout == GemmLayout::Tn
    }

    /// Returns the GEMM of a group, and its operands.
    fn single(&self, group: usize, inputs: &Inputs) -> (Case, Inputs) {
        let starts = self.starts();
        let (first, rows, count) = (starts[group], starts[group + 1] - starts[group], self.sizes.len());
        let all = self.groups().rows;
        let of_rows = |values: &[f64]| {
            let width = values.len() / all;
            values[first * width..(first + rows) * width].to_vec()
        };
        let of_matrices = |values: &[f64]| {
            let len = values.len() / count;
            values[group * len..(group + 1) * len].to_vec()
        };
        let (b, aux, m, k) = if self.sums_rows() {
            (of_rows(&inputs.b), of_matrices(&inputs.aux), self.gemm.m, rows)
        } else {
            (of_matrices(&inputs.b), of_rows(&inputs.aux), rows, self.gemm.k)
        };
        let gemm = Gemm { m, k, batching: Batching::One, ..self.gemm };
        let inputs = Inputs { a: of_rows(&inputs.a), b, aux, ..inputs.clone() };
        (Case::with_tile(gemm, self.tile, 3), inputs)
    }

    /// Returns operands. Rows that fill up a block are zeros, and rows behind all groups are NaN.
    fn inputs(&self, seed: u32) -> Inputs {
        let (Gemm { m, n, k, .. }, groups) = (self.gemm, self.groups());
        let [_, width] = self.gemm.output_shape();
        let starts = self.starts();
        let rows = |width: usize, seed| {
            let mut values = wide(&rounded::<bf16>(&noise(groups.rows * width, seed)));
            for (group, size) in self.sizes.iter().enumerate() {
                values[(starts[group] + size) * width..starts[group + 1] * width].fill(0.0);
            }
            values[starts[groups.count] * width..].fill(f64::NAN);
            values
        };
        let matrices = |len: usize, seed| wide(&rounded::<bf16>(&noise(groups.count * len, seed)));
        let (a, b, aux) = if self.sums_rows() {
            (rows(m, seed), rows(n, seed ^ 1), matrices(m * n, seed ^ 3))
        } else {
            (rows(k, seed), matrices(n * k, seed ^ 1), rows(width, seed ^ 3))
        };
        Inputs { a, b, bias: Vec::new(), aux, scales: [1.0; 2] }
    }

    /// Runs the kernel. Returns out and second; elements that the kernel does not write are NaN.
    fn run(&self, inputs: &Inputs) -> [Vec<f64>; 2] {
        let (gemm, mut memory) = (self.gemm, Memory::new());
        let batch = StridedBatch { count: self.sizes.len(), ..StridedBatch::default() };
        let maps = launch::maps(&gemm, batch, self.tile);
        let mut input =
            |name: &str, values: &[f64]| memory.input(name, &rounded::<bf16>(values)).pointer().addr() as u64;
        let [a, b, aux] = [("a", &inputs.a), ("b", &inputs.b), ("aux", &inputs.aux)].map(|(name, x)| input(name, x));
        let [m, width] = gemm.output_shape();
        let (out, len) = if self.sums_rows() {
            (memory.buffer("out", &rounded::<bf16>(&inputs.aux)), inputs.aux.len())
        } else {
            (memory.output("out", m * width), m * width)
        };
        let second: GlobalMut<bf16> = memory.output("second", m * gemm.n);
        let groups = memory.input("groups", &self.description());
        let mut map = |name: &str, address: u64, map: Map, used: bool| {
            if used { memory.input(name, &[tensor_map(address, map)]) } else { Global::null() }
        };
        let address = |buffer: GlobalMut<bf16>| buffer.pointer().addr() as u64;
        let (pass, residual) = (gemm.epilogue.activation.map(|(_, pass)| pass), gemm.epilogue.residual.is_some());
        let reads_aux = residual || matches!(pass, Some(Pass::Backward | Pass::BackwardAndValue));
        let has_second = matches!(pass, Some(Pass::Forward | Pass::BackwardAndValue));
        let operands = KernelOperands {
            a: map("map of a", a, maps.a, true),
            b: map("map of b", b, maps.b, true),
            out: map("map of out", address(out), maps.out, true),
            aux: map("map of aux", if residual { address(out) } else { aux }, maps.aux, reads_aux),
            second: map("map of second", address(second), maps.second, has_second),
            out_address: address(out),
            count: self.sizes.len(),
            groups,
            ..KernelOperands::default()
        };
        for kernel in launch::launches(&gemm, TileConfig { tile: self.tile, split_k: 1 }, operands, self.blocks) {
            entries::launched(&kernel.launch);
            if let Err(report) = kernel.launch.emulate_checked(&mut memory, kernel.grid, kernel.shared_bytes) {
                panic!("{gemm}, {:?}, {:?}, {} blocks: {report}", self.tile, self.sizes, self.blocks);
            }
        }
        [(out, len), (second, if has_second { m * gemm.n } else { 0 })].map(|(buffer, len)| {
            let value = |i| memory.slice(buffer.reader().skip(i), 1).map_or(f64::NAN, |value| wide(value)[0]);
            (0..len).map(value).collect()
        })
    }

    /// Checks that each group has the bits of its GEMM alone, and that nothing behind the groups is written.
    fn check(&self, seed: u32) {
        let inputs = self.inputs(seed);
        let [out, second] = self.run(&inputs);
        let [mut want_out, mut want_second] = [Vec::new(), Vec::new()];
        for group in (0..self.sizes.len()).filter(|&group| self.sums_rows() || self.sizes[group] > 0) {
            let (case, inputs) = self.single(group, &inputs);
            let single = run(case, &inputs);
            want_out.extend(single.out);
            want_second.extend(single.second);
        }
        for (name, got, mut want) in [("out", out, want_out), ("second", second, want_second)] {
            want.resize(got.len(), f64::NAN);
            let what = format!("{}, {:?}, {:?}, {} blocks, {name}", self.gemm, self.tile, self.sizes, self.blocks);
            assert_same(&what, &got, &want);
        }
    }
}

/// Returns the tile shapes of a grouped GEMM.
fn tiles(gemm: Gemm) -> Vec<TileShape> {
    let gemm = sized(gemm, [128; 3]);
    TileShape::ALL.into_iter().filter(|&tile| TileConfig { tile, split_k: 1 }.is_supported(&gemm)).collect()
}

fn groups_have_the_bits_of_single_gemms() {
    for (i, gemm) in gemms().into_iter().enumerate() {
        let tiles = tiles(gemm);
        assert_eq!(
            tiles.len(),
            if gemm.epilogue.is_gated() {
                2
            } else if gemm.layout == GemmLayout::Tn {
                6
            } else {
                3
            }
        );
        for (j, tile) in tiles.into_iter().enumerate() {
            GroupedCase::new(gemm, [200, 136], &SIZES, tile, [1, 4, 7][(i + j) % 3]).check(7);
        }
    }
}

fn random_groups_have_the_bits_of_single_gemms() {
    let numbers = (1..9usize, any::<Index>(), 0..u32::MAX);
    let sizes = vec(0..300usize, 1..6);
    for_all(12, (select(gemms()), multiples_of_8(300), multiples_of_8(200), sizes, numbers), |case| {
        let (gemm, x, y, sizes, (blocks, which, seed)) = case;
        GroupedCase::new(gemm, [x, y], &sizes, *which.get(&tiles(gemm)), blocks).check(seed);
    });
}

fn blocks_without_a_tile_read_the_groups_only() {
    for gemm in gemms() {
        for tile in tiles(gemm) {
            GroupedCase::new(gemm, [64, 64], &[130], tile, 16).check(7);
        }
    }
}

fn partial_blocks_are_rejected() {
    for gemm in gemms() {
        let sized = |rows: usize| match gemm.layout {
            GemmLayout::Tn => Gemm { m: 64, n: 64, k: rows, ..gemm },
            _ => Gemm { m: rows, n: 64, k: 64, ..gemm },
        };
        assert!(is_supported(&sized(256)) && !is_supported(&sized(192)), "{gemm}");
    }
}
