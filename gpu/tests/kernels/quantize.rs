//! The FP8 quantization kernels compared with conversions on the CPU, which are exact.

use crate::common::quantized::{self, bits, check_column_sums, transposed};
use crate::common::{for_all, noise, rounded, run, wide};
use bytemuck::Pod;
use cuda_std::emulate::Memory;
use cuda_std::shared::Layout;
use cuda_std::{E4m3, E5m2, Element, Fp8, Global, GlobalMut, bf16};
use gpu::quantize::{
    self, Extent, amax_bf16, count_losses, current_scale, delayed_scales, grid, quantize, quantize_transpose, scale_of,
    scales_grid, sum_rows, transpose_fp8, transpose_grid,
};
use proptest::strategy::Strategy;

tests! {
    kernels of "quantize.rs";
    once: amax_is_the_largest_magnitude, amax_accumulates_and_keeps_nan, any_length_is_quantized,
        values_saturate_and_others_become_nan, current_scale_fits_the_largest_magnitude,
        delayed_scales_fit_the_largest_finite_amax, losses_are_counted, any_shape_is_transposed, columns_are_summed,
        fp8_is_transposed, numbers_are_converted_exactly, rows_after_the_last_are_ignored,
        matrices_of_a_batch_are_transposed;
}

fn shared_bytes() -> usize {
    let mut layout = Layout::new();
    quantize::tile_and_maxima(&mut layout);
    layout.bytes()
}

fn maxima_bytes() -> usize {
    let mut layout = Layout::new();
    quantize::maxima(&mut layout);
    layout.bytes()
}

/// Returns values of many magnitudes.
fn values(len: usize, seed: u32) -> Vec<bf16> {
    let exponents = noise(len, seed ^ 1);
    let values: Vec<f64> = noise(len, seed).iter().zip(exponents).map(|(x, e)| x * (8.0 * e).exp2()).collect();
    rounded(&values)
}

/// Returns the bits of the largest magnitude.
fn largest(values: &[bf16]) -> u32 {
    values.iter().map(|x| x.to_f32().abs().to_bits()).max().unwrap_or(0)
}

/// Returns the bits of x / scale in FP8.
fn reference<T: Fp8>(values: &[bf16], scale: f32) -> Vec<u8> {
    quantized::reference::<T>(&wide(values), scale)
}

fn amax_of(values: &[bf16], before: f32) -> u32 {
    let mut memory = Memory::new();
    let (inp, amax) = (memory.input("inp", values), memory.buffer("amax", &[before.to_bits()]));
    run(&mut memory, &amax_bf16(amax, inp, Extent::all(values.len())), grid(values.len()), maxima_bytes());
    memory.read(amax)[0]
}

fn amax_is_the_largest_magnitude() {
    for_all(24, (1..4000usize, 0..u32::MAX), |(packets, seed)| {
        let values = values(8 * packets, seed);
        assert_eq!(amax_of(&values, 0.0), largest(&values));
    });
}

fn amax_accumulates_and_keeps_nan() {
    let mut some = values(8 * 1025, 3);
    assert_eq!(amax_of(&some, 1e9), 1e9f32.to_bits());
    // The last element, by the last thread that has any.
    some[8 * 1025 - 1] = bf16::from_f32(-1e10);
    assert_eq!(amax_of(&some, 1e9), some[8 * 1025 - 1].to_f32().abs().to_bits());
    some[100] = bf16::from_f32(f32::INFINITY);
    assert_eq!(amax_of(&some, 1e9), f32::INFINITY.to_bits());
    some[200] = bf16::from_bits(0xffc1);
    assert!(f32::from_bits(amax_of(&some, 1e9)).is_nan());
}

fn numbers_are_converted_exactly() {
    for_all(8, (1..700usize, 0..u32::MAX), |(packets, seed)| {
        let (n, scale) = (16 * packets, 2f32.powi(-(seed as i32 & 15)));
        let numbers: Vec<E4m3> = rounded(&noise(n, seed).iter().map(|x| 448.0 * x).collect::<Vec<_>>());
        let mut memory = Memory::new();
        let (out, inp) = (memory.output::<bf16>("out", n), memory.input("inp", &numbers));
        let launch = quantize::dequantize(out, inp, memory.input("scale", &[scale]), n as u64);
        run(&mut memory, &launch, quantize::dequantize_grid(n), 0);
        let want: Vec<_> = numbers.iter().map(|x| f64::from(x.to_f32() * scale)).collect();
        assert_eq!(wide(&memory.read(out)), want);
    });
}

fn check_quantize<T: Fp8 + Pod, const AMAX: bool>(values: &[bf16], scale: f32) {
    let mut memory = Memory::new();
    let (inp, scale_) = (memory.input("inp", values), memory.input("scale", &[scale]));
    let (out, amax) = (memory.output("out", values.len()), memory.buffer("amax", &[7]));
    run(
        &mut memory,
        &quantize::<T, AMAX>(out, amax, inp, scale_, Extent::all(values.len())),
        grid(values.len()),
        maxima_bytes(),
    );
    assert_eq!(bits(&memory.read(out)), reference::<T>(values, scale));
    assert_eq!(memory.read(amax)[0], if AMAX { largest(values).max(7) } else { 7 });
}

fn any_length_is_quantized() {
    let scales = (-8..8i32).prop_map(|exponent| 1.3 * 2f32.powi(exponent));
    for_all(16, (1..4000usize, 0..u32::MAX, scales), |(packets, seed, scale)| {
        let values = values(8 * packets, seed);
        check_quantize::<E4m3, false>(&values, scale);
        check_quantize::<E4m3, true>(&values, scale);
        check_quantize::<E5m2, false>(&values, scale);
        check_quantize::<E5m2, true>(&values, scale);
    });
}

fn values_saturate_and_others_become_nan() {
    let quantized = |values: [f32; 8]| {
        let mut memory = Memory::new();
        let (inp, scale) = (memory.input("inp", &values.map(bf16::from_f32)), memory.input("scale", &[2.0f32]));
        let (out, amax) = (memory.output("out", 8), memory.zeroed("amax", 1));
        run(&mut memory, &quantize::<E4m3, true>(out, amax, inp, scale, Extent::all(8)), 1, maxima_bytes());
        (bits(&memory.read(out)), f32::from_bits(memory.read(amax)[0]))
    };
    let finite = [448.0, -448.0, 1e3, 1e30, -1e30, 0.0, -0.0, 1e-30];
    assert_eq!(quantized(finite), (vec![0x76, 0xf6, 0x7e, 0x7e, 0xfe, 0, 0, 0], bf16::from_f32(1e30).to_f32()));
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for i in 0..8 {
            let (bits, amax) = quantized(std::array::from_fn(|j| if i == j { special } else { finite[j] }));
            assert!(bits == [0x7f; 8] && amax.is_nan() == special.is_nan() && !amax.is_finite(), "{special}: {bits:?}");
        }
    }
}

fn current_scale_fits_the_largest_magnitude() {
    let scale = |amax: f32| {
        let mut memory = Memory::new();
        let (amax, scale) = (memory.input("amax", &[amax.to_bits()]), memory.output("scale", 1));
        run(&mut memory, &current_scale(scale, amax, 448.0), 1, 0);
        memory.read(scale)[0]
    };
    assert_eq!(
        [448.0, 3.0, 0.0, 1e-40, f32::INFINITY].map(|amax| scale(amax).to_bits()),
        [1.0, 3.0 / 448.0, 1.0, f32::MIN_POSITIVE, f32::INFINITY].map(f32::to_bits)
    );
    assert!(scale(f32::NAN).is_nan());
}

fn delayed_scales_fit_the_largest_finite_amax() {
    for (n, steps) in [(1, 1), (8, 16), (300, 4)] {
        let mut amaxes: Vec<f32> = noise(n * steps, 9).iter().map(|x| x.abs() as f32).collect();
        amaxes[0] = f32::NAN;
        amaxes[n * steps / 2] = f32::INFINITY;
        if n > 1 {
            (0..steps).for_each(|step| amaxes[step * n + 1] = 0.0);
        }
        let mut memory = Memory::new();
        let (kept, scales) = (memory.buffer("amaxes", &amaxes), memory.output("scales", n));
        let launch = delayed_scales(scales, kept, n as u32, steps as u32, 448.0);
        run(&mut memory, &launch, scales_grid(n), 0);
        let most = |i: usize| amaxes.iter().skip(i).step_by(n).filter(|x| x.is_finite()).fold(0.0f32, |a, &b| a.max(b));
        let want: Vec<f32> = (0..n).map(|i| scale_of(most(i), 448.0)).collect();
        assert_eq!(memory.read(scales), want, "{n} x {steps}");
        let moved = [vec![0.0; n], amaxes[..n * (steps - 1)].to_vec()].concat();
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&memory.read(kept)), bits(&moved), "{n} x {steps}");
    }
}

fn count<T: Fp8 + Pod>(values: &[bf16], scale: f32) {
    let mut memory = Memory::new();
    let (inp, scale_) = (memory.input("inp", values), memory.input("scale", &[scale]));
    let counts = memory.buffer("counts", &[5, 7]);
    let (n, format) = (values.len(), T::FORMAT);
    let launch = count_losses(counts, inp, scale_, Extent::all(n), format.max(), format.largest_rounded_to_zero());
    run(&mut memory, &launch, grid(n), 0);
    let count = |lost: &dyn Fn(f32, f32) -> bool| {
        let with_fp8 = values.iter().map(|x| (x.to_f32(), T::from_f32(x.to_f32() * (1.0 / scale)).to_f32()));
        with_fp8.filter(|(x, fp8)| lost(*x, *fp8)).count() as u32
    };
    let saturated = count(&|x, _| x.abs() * (1.0 / scale) > format.max());
    let zeroed = count(&|x, fp8| x != 0.0 && fp8 == 0.0);
    assert_eq!(memory.read(counts), [5 + saturated, 7 + zeroed], "{n} elements, scale {scale}");
}

fn losses_are_counted() {
    let scales = (-16..4i32).prop_map(|exponent| 1.3 * 2f32.powi(exponent));
    for_all(16, (1..2000usize, 0..u32::MAX, scales), |(packets, seed, scale)| {
        let mut values = values(8 * packets, seed);
        values[8 * packets - 1] = bf16::from_f32(0.0);
        values[8 * packets - 2] = bf16::from_f32(-1e30);
        values[8 * packets - 3] = bf16::from_f32(1e-30);
        count::<E4m3>(&values, scale);
        count::<E5m2>(&values, scale);
    });
    // The largest numbers that stay, and that become 0.
    count::<E4m3>(&[448.0, 449.0, 1.0 / 1024.0, 1.1 / 1024.0, 0.0, -448.0, -450.0, -1e-9].map(bf16::from_f32), 1.0);
}

fn check_transpose<T: Fp8 + Pod, const BOTH: bool, const AMAX: bool, const SUMS: bool>(
    values: &[bf16],
    [rows, columns]: [usize; 2],
) {
    let scale = 0.7;
    let mut memory = Memory::new();
    let (inp, scale_) = (memory.input("inp", values), memory.input("scale", &[scale]));
    let out = if BOTH { memory.output("out", values.len()) } else { GlobalMut::from_address(0) };
    let (transposed_, amax) = (memory.output("transposed", values.len()), memory.buffer("amax", &[7]));
    let sums = if SUMS { memory.output("sums", sum_rows(rows) * columns) } else { GlobalMut::from_address(0) };
    let (r, c) = (rows as u32, columns as u32);
    let launch =
        quantize_transpose::<T, BOTH, AMAX, SUMS>(out, transposed_, amax, sums, inp, scale_, r, c, Global::null());
    run(&mut memory, &launch, transpose_grid(rows, columns), shared_bytes());
    let want = reference::<T>(values, scale);
    if BOTH {
        assert_eq!(bits(&memory.read(out)), want, "{rows} x {columns}");
    }
    assert_eq!(bits(&memory.read(transposed_)), transposed(&want, columns), "{rows} x {columns}");
    assert_eq!(memory.read(amax)[0], if AMAX { largest(values).max(7) } else { 7 });
    if SUMS {
        check_column_sums::<T>(&memory.read(sums), &want, columns, scale);
    }
}

/// Rows that a kernel must not process are infinite.
fn rows_after_the_last_are_ignored() {
    for (rows, end, columns) in [(384, 128, 48), (256, 0, 16), (256, 256, 144)] {
        let mut values = values(rows * columns, 5);
        values[end * columns..].fill(bf16::from_f32(f32::INFINITY));
        let (used, scale) = (&values[..end * columns], 0.7);
        let mut memory = Memory::new();
        let (inp, scale_) = (memory.input("inp", &values), memory.input("scale", &[scale]));
        let end_ = memory.input("end", &[end as u32]);
        let extent = Extent { columns: columns as u64, rows: end_, ..Extent::all(rows * columns) };
        let amaxes = [1, 2, 3].map(|_| memory.buffer("amax", &[7]));
        let (n, r, c) = (rows * columns, rows as u32, columns as u32);
        run(&mut memory, &amax_bf16(amaxes[0], inp, extent), grid(n), maxima_bytes());
        let out = memory.output::<E4m3>("out", n);
        run(&mut memory, &quantize::<E4m3, true>(out, amaxes[1], inp, scale_, extent), grid(n), maxima_bytes());
        let want = reference::<E4m3>(used, scale);
        let written = |memory: &Memory, out: GlobalMut<E4m3>| -> Vec<Option<u8>> {
            let value = |i| memory.slice(out.reader().skip(i), 1).ok().map(|value| value[0].to_bits());
            (0..n).map(value).collect()
        };
        let expected: Vec<_> = (0..n).map(|i| want.get(i).copied()).collect();
        assert_eq!(written(&memory, out), expected);
        let counts = memory.buffer("counts", &[5, 7]);
        run(&mut memory, &count_losses(counts, inp, scale_, extent, 448.0, 0.0), grid(n), 0);
        let saturated = used.iter().filter(|x| x.to_f32().abs() * (1.0 / scale) > 448.0).count() as u32;
        assert_eq!(memory.read(counts), [5 + saturated, 7]);
        let [out, transposed] = ["out", "transposed"].map(|name| memory.output::<E4m3>(name, n));
        let launch = quantize_transpose::<E4m3, true, true, false>(
            out,
            transposed,
            amaxes[2],
            GlobalMut::null(),
            inp,
            scale_,
            r,
            c,
            end_,
        );
        run(&mut memory, &launch, transpose_grid(rows, columns), shared_bytes());
        assert_eq!(written(&memory, out), expected);
        let expected: Vec<_> = (0..n).map(|i| expected[i % rows * columns + i / rows]).collect();
        assert_eq!(written(&memory, transposed), expected);
        assert_eq!(amaxes.map(|amax| memory.read(amax)[0]), [largest(used).max(7); 3]);
    }
}

fn matrices_of_a_batch_are_transposed() {
    let (count, rows, columns) = (3, 144, 32);
    let values = values(count * rows * columns, 5);
    let mut memory = Memory::new();
    let (inp, scale) = (memory.input("inp", &values), memory.input("scale", &[0.7]));
    let [out, transposed_] = ["out", "transposed"].map(|name| memory.output::<E4m3>(name, values.len()));
    let none = GlobalMut::null();
    let launch = quantize_transpose::<E4m3, true, false, false>(
        out,
        transposed_,
        GlobalMut::null(),
        none,
        inp,
        scale,
        rows as u32,
        columns as u32,
        Global::null(),
    );
    let [x, y, _] = transpose_grid(rows, columns);
    run(&mut memory, &launch, [x, y, count as u32], shared_bytes());
    let want = reference::<E4m3>(&values, 0.7);
    assert_eq!(bits(&memory.read(out)), want);
    let matrices = want.chunks(rows * columns).flat_map(|matrix| transposed(matrix, columns));
    assert_eq!(bits(&memory.read(transposed_)), matrices.collect::<Vec<_>>());
}

fn shapes() -> impl Strategy<Value = (usize, usize)> {
    (1..20usize, 1..20usize).prop_map(|(rows, columns)| (16 * rows, 16 * columns))
}

fn any_shape_is_transposed() {
    for_all(12, (shapes(), 0..u32::MAX), |((rows, columns), seed)| {
        let (values, shape) = (values(rows * columns, seed), [rows, columns]);
        check_transpose::<E4m3, false, false, false>(&values, shape);
        check_transpose::<E4m3, false, true, false>(&values, shape);
        check_transpose::<E4m3, true, false, false>(&values, shape);
        check_transpose::<E4m3, true, true, false>(&values, shape);
        check_transpose::<E5m2, false, false, false>(&values, shape);
        check_transpose::<E5m2, false, true, false>(&values, shape);
        check_transpose::<E5m2, true, false, false>(&values, shape);
        check_transpose::<E5m2, true, true, false>(&values, shape);
    });
}

fn columns_are_summed() {
    for_all(8, (shapes(), 0..u32::MAX), |((rows, columns), seed)| {
        let (mut values, shape) = (values(rows * columns, seed), [rows, columns]);
        check_transpose::<E4m3, true, false, true>(&values, shape);
        check_transpose::<E4m3, true, true, true>(&values, shape);
        check_transpose::<E5m2, true, false, true>(&values, shape);
        check_transpose::<E5m2, true, true, true>(&values, shape);
        for bad in [seed as usize, 7 * seed as usize + 1] {
            values[bad % (rows * columns)] = bf16::from_f32(f32::INFINITY);
        }
        check_transpose::<E5m2, true, true, true>(&values, shape);
    });
}

fn check_transpose_fp8<T: Fp8 + Pod, const SUMS: bool>(values: &[u8], [rows, columns]: [usize; 2]) {
    let mut memory = Memory::new();
    let stored: Vec<T> = values.iter().map(|&bits| T::from_bits(bits)).collect();
    let (inp, out, scale) = (memory.input("inp", &stored), memory.output("out", values.len()), 0.3);
    let scale_ = if SUMS { memory.input("scale", &[scale]) } else { Global::from_address(0) };
    let sums = if SUMS { memory.output("sums", sum_rows(rows) * columns) } else { GlobalMut::from_address(0) };
    let launch = transpose_fp8::<T, SUMS>(out, sums, inp, scale_, rows as u32, columns as u32);
    run(&mut memory, &launch, transpose_grid(rows, columns), shared_bytes());
    assert_eq!(bits(&memory.read(out)), transposed(values, columns), "{rows} x {columns}");
    if SUMS {
        check_column_sums::<T>(&memory.read(sums), values, columns, scale);
    }
}

fn fp8_is_transposed() {
    for_all(24, (shapes(), 0..u32::MAX), |((rows, columns), seed)| {
        let any: Vec<u8> = (0..rows * columns).map(|i| gpu::noise::squirrel5(i as u32, seed) as u8).collect();
        check_transpose_fp8::<E4m3, false>(&any, [rows, columns]);
        check_transpose_fp8::<E4m3, true>(&any, [rows, columns]);
        // Conversions to E5M2 give neither infinities nor other NaNs.
        let converted: Vec<u8> = any.iter().map(|x| if x & 0x7c == 0x7c { 0xff } else { *x }).collect();
        check_transpose_fp8::<E5m2, true>(&converted, [rows, columns]);
        let finite: Vec<u8> = any.iter().map(|x| if x & 0x7c == 0x7c { x ^ 0x40 } else { *x }).collect();
        check_transpose_fp8::<E4m3, true>(&finite, [rows, columns]);
        check_transpose_fp8::<E5m2, true>(&finite, [rows, columns]);
    });
}
