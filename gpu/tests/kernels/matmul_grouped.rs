//! The grouped `sm_90a` GEMM kernels compared with the kernels for one GEMM, bit for bit.

use crate::common::gemm::{
    Case, Inputs, OUT_SCALE, Type, all, allocate, read_written, reference, run, sized, stored, tensor_map, transpose,
    write,
};
use crate::common::{Tolerance, assert_close, assert_same, entries, for_all, multiples_of_8, noise};
use cuda_std::emulate::Memory;
use cuda_std::fp8::Fp8Format;
use cuda_std::{E4m3, Global, GlobalMut, bf16};
use gpu::experts::{GROUP_BLOCK, Groups};
use gpu::matmul::gemm::{Batching, EXACT_COLUMNS, Gemm, GemmLayout, GemmOutput, GemmPrecision, Pass};
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
const SIZES: [usize; 5] = [0, 1, 256, 129, 450];

fn gemms() -> Vec<Gemm> {
    let fp8 = |a, columns| GemmPrecision::Fp8 { a, columns };
    let (e4m3, e5m2) = (fp8(Fp8Format::E4m3, None), fp8(Fp8Format::E5m2, None));
    let exact = fp8(Fp8Format::E5m2, Some(EXACT_COLUMNS));
    let precisions = [(GemmPrecision::Bf16, [8, 1]), (e4m3, [5, 0]), (e5m2, [3, 1]), (exact, [0, 1])];
    let of_precision = |(precision, counts): (_, [usize; 2])| {
        let of = [Batching::Grouped, Batching::GroupedSum].map(|batching| all(precision, batching));
        assert_eq!(of.each_ref().map(Vec::len), counts, "{precision:?}");
        of.concat()
    };
    precisions.into_iter().flat_map(of_precision).collect()
}

/// A grouped GEMM, the rows of each group, its tile configuration, and the number of thread blocks.
struct GroupedCase {
    gemm: Gemm,
    sizes: Vec<usize>,
    tile: TileShape,
    blocks: usize,
}

impl GroupedCase {
    /// Returns the GEMM of groups with `sizes` rows. `size` is (N, K), or (M, N) if the GEMM sums over groups.
    fn new(gemm: Gemm, size: [usize; 2], sizes: &[usize], tile: TileShape, blocks: usize) -> Self {
        let rows = Groups::new(sizes.len(), sizes.iter().sum()).rows;
        let [x, y] = size;
        let gemm = match gemm.batching {
            Batching::GroupedSum => Gemm { k: rows, ..sized(gemm, [x, y, rows]) },
            _ => sized(gemm, [rows, x, y]),
        };
        Self { gemm, sizes: sizes.to_vec(), tile, blocks }
    }

    fn groups(&self) -> Groups {
        Groups::new(self.sizes.len(), self.sizes.iter().sum())
    }

    /// Returns the first row of each group, and the end of the last.
    fn starts(&self) -> Vec<usize> {
        let mut starts = vec![0];
        for size in &self.sizes {
            // Only a group that is summed over needs a block.
            let blocks = size.div_ceil(GROUP_BLOCK).max(usize::from(self.sums()));
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

    fn sums(&self) -> bool {
        self.gemm.batching == Batching::GroupedSum
    }

    /// Returns the rows of a group in `values` (rows of all groups, ·), which may be stored transposed.
    fn of_group(&self, values: &[f64], group: usize, transposed: bool) -> Vec<f64> {
        let (starts, all) = (self.starts(), self.groups().rows);
        let (first, end) = (starts[group], starts[group + 1]);
        let width = values.len() / all;
        if transposed {
            values.chunks(all).flat_map(|row| row[first..end].to_vec()).collect()
        } else {
            values[first * width..end * width].to_vec()
        }
    }

    /// Returns true if the rows of groups are columns of K in memory.
    fn is_transposed(&self) -> bool {
        self.sums() && self.gemm.layout == GemmLayout::Nt
    }

    /// Returns the GEMM of a group, and its operands.
    fn single(&self, group: usize, inputs: &Inputs) -> (Case, Inputs) {
        let starts = self.starts();
        let (rows, count) = (starts[group + 1] - starts[group], self.sizes.len());
        let of_rows = |values: &[f64]| self.of_group(values, group, self.is_transposed());
        let of_matrices = |values: &[f64]| {
            let len = values.len() / count;
            values[group * len..(group + 1) * len].to_vec()
        };
        let (b, aux, m, k) = if self.sums() {
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
        let [a_type, b_type, _] = Case::with_tile(self.gemm, self.tile, 1).types();
        let starts = self.starts();
        let factor = if self.gemm.is_fp8() { 100.0 } else { 1.0 };
        let noise = |len: usize, seed| noise(len, seed).iter().map(|x| factor * x).collect::<Vec<_>>();
        let rows = |width: usize, seed, kind| {
            let mut values = stored(&noise(groups.rows * width, seed), kind);
            for (group, size) in self.sizes.iter().enumerate() {
                values[(starts[group] + size) * width..starts[group + 1] * width].fill(0.0);
            }
            values[starts[groups.count] * width..].fill(f64::NAN);
            if self.is_transposed() { transpose(&values, [groups.rows, width]) } else { values }
        };
        let matrices = |len: usize, seed, kind| stored(&noise(groups.count * len, seed), kind);
        let (a, b, aux) = if self.sums() {
            (rows(m, seed, a_type), rows(n, seed ^ 1, b_type), matrices(m * n, seed ^ 3, Type::Bf16))
        } else {
            (rows(k, seed, a_type), matrices(n * k, seed ^ 1, b_type), rows(width, seed ^ 3, Type::Bf16))
        };
        let scales = if self.gemm.is_fp8() { [0.01, 0.02] } else { [1.0; 2] };
        Inputs { a, b, bias: Vec::new(), aux, scales }
    }

    /// Runs the kernel. Returns out, second, and the transpose of an FP8 out; elements that the kernel does not write are NaN.
    fn run(&self, inputs: &Inputs) -> ([Vec<f64>; 3], f64) {
        let (gemm, mut memory) = (self.gemm, Memory::new());
        let [a_type, b_type, out_type] = Case::with_tile(gemm, self.tile, 1).types();
        let batch = StridedBatch { count: self.sizes.len(), ..StridedBatch::default() };
        let maps = launch::maps(&gemm, batch, self.tile);
        let a = write(&mut memory, "a", &inputs.a, a_type);
        let b = write(&mut memory, "b", &inputs.b, b_type);
        let aux = write(&mut memory, "aux", &inputs.aux, Type::Bf16);
        let [m, width] = gemm.output_shape();
        let (out, len) = if self.sums() {
            (write(&mut memory, "out", &inputs.aux, out_type), inputs.aux.len())
        } else {
            (allocate(&mut memory, "out", m * width, out_type), m * width)
        };
        let second = allocate(&mut memory, "second", m * gemm.n, Type::Bf16);
        let quantizes = gemm.epilogue.output == GemmOutput::Fp8;
        let transposed = if quantizes { memory.output("transposed", m * width) } else { GlobalMut::<E4m3>::null() };
        let groups = memory.input("groups", &self.description());
        let scales = inputs.scales.map(|scale| memory.input("scale", &[scale]));
        let (scale_out, amax) = (memory.input("scale of out", &[OUT_SCALE]), memory.zeroed("amax", 1));
        let mut map = |name: &str, address: u64, map: Map, used: bool| {
            if used { memory.input(name, &[tensor_map(address, map)]) } else { Global::null() }
        };
        let (pass, residual) = (gemm.epilogue.activation.map(|(_, pass)| pass), gemm.epilogue.residual.is_some());
        let reads_aux = residual || matches!(pass, Some(Pass::Backward | Pass::BackwardAndValue));
        let has_second = matches!(pass, Some(Pass::Forward | Pass::BackwardAndValue));
        let operands = KernelOperands {
            a: map("map of a", a, maps.a, true),
            b: map("map of b", b, maps.b, true),
            out: map("map of out", out, maps.out, true),
            aux: map("map of aux", if residual { out } else { aux }, maps.aux, reads_aux),
            second: map("map of second", second, maps.second, has_second),
            out_address: out,
            scales,
            scale_out,
            amax,
            transposed,
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
        let second = read_written(&memory, second, if has_second { m * gemm.n } else { 0 }, Type::Bf16);
        let address = transposed.pointer().addr() as u64;
        let transposed = read_written(&memory, address, if quantizes { m * width } else { 0 }, Type::E4m3);
        let amax = f64::from(f32::from_bits(memory.read(amax)[0]));
        ([read_written(&memory, out, len, out_type), second, transposed], amax)
    }

    /// Checks that each group has the bits of its GEMM alone, and that nothing behind the groups is written.
    fn check(&self, seed: u32) {
        let inputs = self.inputs(seed);
        let ([out, second, transposed], amax) = self.run(&inputs);
        let [mut want_out, mut want_second] = [Vec::new(), Vec::new()];
        let mut want_amax = 0.0f64;
        let what = format!("{}, {:?}, {:?}, {} blocks", self.gemm, self.tile, self.sizes, self.blocks);
        for group in (0..self.sizes.len()).filter(|&group| self.sums() || self.sizes[group] > 0) {
            let (case, inputs) = self.single(group, &inputs);
            if !case.config.is_supported(&case.gemm) {
                // Only grouped GEMMs with FP8 operands have this epilogue.
                let [got, got_second] = [&out, &second].map(|values| self.of_group(values, group, false));
                let want = reference(case, &inputs, &got_second);
                for (name, got, want) in [("out", &got, want.out), ("second", &got_second, want.second)] {
                    assert_close(&format!("{what}, group {group}, {name}"), got, &want, bf16::ROUNDING, 1e-2);
                }
                want_out.extend(got);
                want_second.extend(got_second);
                continue;
            }
            let single = run(case, &inputs);
            want_out.extend(single.out);
            want_second.extend(single.second);
            want_amax = want_amax.max(single.amax);
        }
        let [m, width] = self.gemm.output_shape();
        let want_transposed = if transposed.is_empty() { Vec::new() } else { transpose(&out, [m, width]) };
        assert_same(&format!("{what}, transpose"), &transposed, &want_transposed);
        assert_same(&format!("{what}, amax"), &[amax], &[want_amax]);
        for (name, got, mut want) in [("out", out, want_out), ("second", second, want_second)] {
            want.resize(got.len(), f64::NAN);
            assert_same(&format!("{what}, {name}"), &got, &want);
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
        let is_exact = matches!(gemm.precision, GemmPrecision::Fp8 { columns: Some(_), .. });
        let count = match (gemm.batching, gemm.epilogue.is_gated()) {
            (_, true) => 2,
            (Batching::GroupedSum, _) if is_exact => 2,
            (Batching::GroupedSum, _) => 6,
            _ => 3,
        };
        assert_eq!(tiles.len(), count, "{gemm}");
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
        let sized = |rows: usize| match gemm.batching {
            Batching::GroupedSum => Gemm { m: 64, n: 64, k: rows, ..gemm },
            _ => Gemm { m: rows, n: 64, k: 64, ..gemm },
        };
        assert!(is_supported(&sized(256)) && !is_supported(&sized(192)), "{gemm}");
    }
}
