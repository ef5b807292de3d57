//! Every primitive in the CPU back end, exercised by small kernels.

use cuda_std::emulate::{Fault, Memory};
use cuda_std::shared::Layout;
use cuda_std::{
    CachePolicy, Element, Global, GlobalMut, Packet, SharedArray, SharedTile, async_copy, bf16, block, fence, kernel,
    math, thread, warp,
};

fn emulate(launch: &cuda_std::launch::Launch, grid: [u32; 3], shared: usize) {
    // SAFETY: each test allocates buffers that cover the grid.
    unsafe { launch.emulate(grid, shared) }.unwrap();
}

#[kernel(threads = 96)]
fn indices(out: GlobalMut<u32>) {
    let block = (thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y()) * thread::grid_dim_x()
        + thread::block_idx_x();
    let i = (block * thread::block_dim_x() + thread::thread_idx_x()) as usize;
    out.set(4 * i, i as u32);
    out.set(4 * i + 1, thread::thread_idx_x() + 1000 * thread::block_idx_x());
    out.set(4 * i + 2, thread::block_idx_y() + 1000 * thread::block_idx_z());
    out.set(4 * i + 3, thread::grid_dim_z() + 1000 * warp::lane());
}

#[test]
fn thread_and_block_indices_cover_the_grid() {
    let mut out = vec![0u32; 4 * 96 * 5 * 3 * 2];
    emulate(&indices(GlobalMut::new(out.as_mut_ptr())), [5, 3, 2], 0);
    for (i, got) in out.chunks(4).enumerate() {
        let (t, b) = (i as u32 % 96, i as u32 / 96);
        let (x, y, z) = (b % 5, b / 5 % 3, b / 15);
        assert_eq!(got, [i as u32, t + 1000 * x, y + 1000 * z, 2 + 1000 * (t % 32)]);
    }
}

#[kernel(threads = 256)]
fn block_sum(out: GlobalMut<f32>, inp: Global<f32>) {
    let scratch: SharedArray<f32> = Layout::new().array(32);
    let i = thread::index_1d();
    let sum = block::sum(inp.at(i), scratch);
    let max = block::max(inp.at(i), scratch);
    out.set(2 * i, sum);
    out.set(2 * i + 1, max);
}

#[test]
fn block_sum_and_max_match_cpu() {
    let inp: Vec<f32> = (0..1024).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
    let mut out = vec![0.0f32; 2048];
    emulate(&block_sum(GlobalMut::new(out.as_mut_ptr()), Global::new(inp.as_ptr())), [4, 1, 1], 128);
    for (block, inp) in inp.chunks(256).enumerate() {
        let (sum, max) = (inp.iter().sum::<f32>(), inp.iter().copied().fold(f32::MIN, f32::max));
        for got in out[512 * block..][..512].chunks(2) {
            assert_eq!(got, [sum, max]);
        }
    }
}

/// Computes three times the block-wide sums of M x N multiples of `inp`, with double-buffered scratch.
fn several_sums<const WARPS: usize, const N: usize, const M: usize>(out: GlobalMut<f32>, inp: Global<f32>) {
    let scratch: SharedArray<f32> = Layout::new().array(2 * N * M * WARPS);
    let i = thread::index_1d();
    for round in 0..3 {
        let values =
            core::array::from_fn(|m| core::array::from_fn(|n| inp.at(i) * (1 + m * N + n + 10 * round) as f32));
        let sums: [[f32; N]; M] = block::sums::<WARPS, N, M>(values, scratch.skip(round % 2 * N * M * WARPS));
        for (k, sum) in sums.as_flattened().iter().enumerate() {
            out.set((i * 3 + round) * N * M + k, *sum);
        }
    }
}

#[kernel(threads = 128)]
fn four_sums(out: GlobalMut<f32>, inp: Global<f32>) {
    several_sums::<4, 2, 2>(out, inp);
}

#[kernel(threads = 256)]
fn two_sums(out: GlobalMut<f32>, inp: Global<f32>) {
    several_sums::<8, 1, 2>(out, inp);
}

#[kernel(threads = 512)]
fn one_sum(out: GlobalMut<f32>, inp: Global<f32>) {
    several_sums::<16, 1, 1>(out, inp);
}

#[test]
fn block_sums_match_cpu() {
    let inp: Vec<f32> = (0..1024).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
    let from = Global::new(inp.as_ptr());
    for (launch, threads, count) in
        [(four_sums as fn(_, _) -> _, 128, 4), (two_sums as fn(_, _) -> _, 256, 2), (one_sum as fn(_, _) -> _, 512, 1)]
    {
        let mut out = vec![0.0f32; 1024 * 3 * count];
        emulate(&launch(GlobalMut::new(out.as_mut_ptr()), from), [1024 / threads as u32, 1, 1], 2 * 4 * 4 * 16);
        for (i, got) in out.chunks(3 * count).enumerate() {
            let sum = inp[i / threads * threads..][..threads].iter().sum::<f32>();
            let want: Vec<_> = (0..3 * count).map(|k| sum * (1 + k % count + 10 * (k / count)) as f32).collect();
            assert_eq!(got, want, "thread {i} of blocks of {threads}");
        }
    }
}

/// Computes the sum of `inp` over each group of warps of the block, with double-buffered scratch.
fn sum_of_group<const WARPS: usize>(out: GlobalMut<f32>, inp: Global<f32>) {
    let groups = thread::block_dim_x() as usize / (32 * WARPS);
    let scratch: SharedArray<f32> = Layout::new().array(2 * groups * WARPS);
    let (i, group) = (thread::index_1d(), thread::thread_idx_x() / (32 * WARPS as u32));
    // The number of rounds differs between groups.
    for round in 0..=group as usize {
        let scratch = scratch.skip((round % 2 * groups + group as usize) * WARPS);
        let [[sum]] = block::sums_of_group::<WARPS, 1, 1>([[inp.at(i) * (1 + round) as f32]], scratch, group);
        out.set(i, sum);
    }
}

#[kernel(threads = 384)]
fn sum_of_four_warps(out: GlobalMut<f32>, inp: Global<f32>) {
    sum_of_group::<4>(out, inp);
}

#[kernel(threads = 384)]
fn sum_of_one_warp(out: GlobalMut<f32>, inp: Global<f32>) {
    sum_of_group::<1>(out, inp);
}

#[test]
fn warp_group_sums_match_cpu() {
    let inp: Vec<f32> = (0..768).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
    let from = Global::new(inp.as_ptr());
    for (launch, threads) in [(sum_of_four_warps as fn(_, _) -> _, 128), (sum_of_one_warp as fn(_, _) -> _, 32)] {
        let mut out = vec![0.0f32; 768];
        emulate(&launch(GlobalMut::new(out.as_mut_ptr()), from), [2, 1, 1], 2 * 12 * 4);
        for (i, got) in out.iter().enumerate() {
            let (rounds, first) = (1 + i % 384 / threads, i / threads * threads);
            let sum = inp[first..][..threads].iter().sum::<f32>() * rounds as f32;
            assert_eq!(got.to_bits(), sum.to_bits(), "thread {i} in groups of {threads}");
        }
    }
}

#[kernel(threads = 64)]
fn last_block(total: GlobalMut<f32>, partial: GlobalMut<f32>, counter: GlobalMut<u32>) {
    let (t, b) = (thread::thread_idx_x(), thread::block_idx_x());
    if t == 0 {
        partial.set(b as usize, b as f32);
    }
    fence::device();
    let last = t == 0 && counter.atomic_add(0, 1) == thread::grid_dim_x() - 1;
    if last {
        fence::device();
        let mut sum = 0.0;
        for i in 0..thread::grid_dim_x() as usize {
            sum += partial.at(i);
        }
        total.set(0, sum);
    }
    total.atomic_add(1, 1.0);
}

#[test]
fn last_block_sees_the_results_of_all_blocks() {
    let (mut total, mut partial, mut counter) = ([0.0f32; 2], vec![0.0f32; 500], [0u32]);
    let [t, p] = [total.as_mut_ptr(), partial.as_mut_ptr()].map(GlobalMut::new);
    emulate(&last_block(t, p, GlobalMut::new(counter.as_mut_ptr())), [500, 1, 1], 0);
    assert_eq!((total, counter), ([499.0 * 250.0, 64.0 * 500.0], [500]));
}

#[kernel(threads = 64)]
fn lanes(out: GlobalMut<u32>) {
    let (t, lane) = (thread::thread_idx_x(), warp::lane());
    let results = [
        warp::shuffle(t, 5),
        warp::shuffle(t, lane + 33),
        warp::shuffle_xor(t, 9),
        warp::shuffle_down(t, 3),
        warp::ballot(t.is_multiple_of(3)),
        u32::from(warp::any(t == 40)) + 2 * u32::from(warp::all(t < 32)),
        warp::index(),
        warp::max(-(t as f32)) as i32 as u32,
        warp::sum(t as f32) as u32,
    ];
    for (i, result) in results.into_iter().enumerate() {
        out.set(t as usize * 9 + i, result);
    }
}

#[test]
fn warp_exchanges_match_their_definitions() {
    let mut out = vec![0u32; 64 * 9];
    emulate(&lanes(GlobalMut::new(out.as_mut_ptr())), [1, 1, 1], 0);
    for (t, got) in out.chunks(9).enumerate() {
        let (t, lane, first) = (t as u32, t as u32 % 32, t as u32 / 32 * 32);
        let ballot = (0..32).fold(0, |bits, l| bits | u32::from((first + l) % 3 == 0) << l);
        let want = [
            first + 5,
            first + (lane + 1) % 32,
            first + (lane ^ 9),
            if lane + 3 < 32 { t + 3 } else { t },
            ballot,
            if first == 0 { 2 } else { 1 },
            first / 32,
            -(first as i32) as u32,
            (first..first + 32).sum(),
        ];
        assert_eq!(got, want, "thread {t}");
    }
}

/// Warp 0 produces values in two buffers, each with a pair of named barriers; the other warps accumulate them.
#[kernel(threads = 128)]
fn pipeline(out: GlobalMut<u32>) {
    let buffers: SharedArray<u32> = Layout::new().array(64);
    let (warp, lane) = (warp::index(), warp::lane() as usize);
    let mut sum = 0;
    for round in 0..20u32 {
        let (full, empty) = (1 + round % 2, 3 + round % 2);
        let at = round as usize % 2 * 32 + lane;
        if warp == 0 {
            if round >= 2 {
                thread::sync_named(empty, 128);
            }
            buffers.set(at, round * 1000 + lane as u32);
            thread::arrive_named(full, 128);
        } else {
            thread::sync_named(full, 128);
            sum += buffers.at(at) * warp;
            if round < 18 {
                thread::arrive_named(empty, 128);
            }
        }
    }
    out.set(thread::thread_idx_x() as usize, sum);
}

#[test]
fn named_barriers_order_producer_and_consumers() {
    let mut memory = Memory::new();
    let out = memory.output("out", 128);
    pipeline(out).emulate_checked(&mut memory, [1, 1, 1], 256).unwrap();
    for (t, got) in memory.read(out).into_iter().enumerate() {
        let (warp, lane) = (t as u32 / 32, t as u32 % 32);
        assert_eq!(got, warp * (190 * 1000 + 20 * lane), "thread {t}");
    }
}

/// An asynchronous copy executes exactly at its wait, not before.
#[kernel(threads = 32)]
fn copies(out: GlobalMut<f32>, inp: Global<f32>) {
    let target: SharedArray<f32> = Layout::new().array(12);
    let t = thread::thread_idx_x() as usize;
    if t > 0 {
        return;
    }
    for i in 0..12 {
        target.set(i, -1.0);
    }
    target.copy_packet_async(0, inp, 4, true);
    target.copy_packet_async(4, inp, 1 << 40, false);
    async_copy::commit();
    target.copy_packet_async(8, inp, 8, true);
    async_copy::commit();
    let report = |row: usize| {
        for i in 0..12 {
            out.set(row * 12 + i, target.at(i));
        }
    };
    async_copy::wait::<2>();
    report(0);
    async_copy::wait::<1>();
    report(1);
    async_copy::wait::<0>();
    report(2);
}

#[test]
fn async_copies_execute_at_their_wait() {
    let inp: Vec<f32> = (0..12).map(|i| i as f32).collect();
    let mut out = [0.0f32; 36];
    emulate(&copies(GlobalMut::new(out.as_mut_ptr()), Global::new(inp.as_ptr())), [1, 1, 1], 48);
    let no = [-1.0; 4];
    assert_eq!(out[..12], [no, no, no].concat());
    assert_eq!(out[12..24], [[4.0, 5.0, 6.0, 7.0], [0.0; 4], no].concat());
    assert_eq!(out[24..], [[4.0, 5.0, 6.0, 7.0], [0.0; 4], [8.0, 9.0, 10.0, 11.0]].concat());
}

#[kernel(threads = 32, instances(bf16 = <bf16>, f32 = <f32>))]
fn packets<T: Element>(out: GlobalMut<T>, inp: Global<T>) {
    let scratch: SharedArray<T> = Layout::new().array(32 * 8);
    let i = thread::index_1d() * T::PACKET;
    let (kept, once) = (CachePolicy::evict_last(0.5), CachePolicy::evict_first());
    scratch.set_packet(i, inp.packet_streaming(i));
    out.set_packet_with(i, scratch.packet(i), once);
    let (x, y) = (out.packet_with(i, once), inp.skip(1).skip(T::PACKET - 1).packet_streaming_with(i, kept));
    out.set_packet_streaming(i, Packet::from_fn(|k| x.get(k) * 3.0 - y.get(k)));
}

fn packets_move<T: Element + bytemuck::Pod + PartialEq + std::fmt::Debug>() {
    let inp: Vec<T> = (0..33 * T::PACKET).map(|i| T::from_f32(i as f32 * 0.37)).collect();
    let mut memory = Memory::new();
    let (out, view) = (memory.output("out", 32 * T::PACKET), memory.input("inp", &inp));
    packets(out, view).emulate_checked(&mut memory, [1, 1, 1], 32 * 16).unwrap();
    for (i, got) in memory.read(out).into_iter().enumerate() {
        assert_eq!(got, T::from_f32(inp[i].to_f32() * 3.0 - inp[i + T::PACKET].to_f32()));
    }
}

#[test]
fn packet_accesses_preserve_values() {
    packets_move::<bf16>();
    packets_move::<f32>();
}

#[test]
fn bf16_rounds_to_nearest_even() {
    for (x, want) in [
        (1.0, 1.0),
        (1.0 + 1.0 / 256.0, 1.0),               // halfway, down to even
        (1.0 + 3.0 / 256.0, 1.0 + 4.0 / 256.0), // halfway, up to even
        (1.0 + 1.01 / 256.0, 1.0 + 2.0 / 256.0),
        (-1.0 - 1.01 / 256.0, -1.0 - 2.0 / 256.0),
        (f32::MAX, f32::INFINITY),
        (f32::NEG_INFINITY, f32::NEG_INFINITY),
        (-0.0, -0.0),
        (1e-40, f32::from_bits(0x1_0000)), // the smallest subnormal
    ] {
        assert_eq!(bf16::from_f32(x).to_f32().to_bits(), want.to_bits(), "{x}");
    }
    for x in [f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
        assert_eq!(bf16::from_f32(x).to_bits(), 0x7fff);
    }
    for bits in (0..=u16::MAX).filter(|&bits| !bf16::from_bits(bits).to_f32().is_nan()) {
        assert_eq!(bf16::from_f32(bf16::from_bits(bits).to_f32()).to_bits(), bits);
    }
}

#[test]
fn stochastic_rounding_is_unbiased() {
    for x in [1.0f32 + 0.3 / 128.0, -2.7 - 1e-5, 3.0, 1e-3] {
        let (low, high) = (f32::from_bits(x.to_bits() & 0xffff_0000), bf16::from_f32(x).to_f32());
        let step = (f32::from_bits((x.to_bits() & 0xffff_0000) + 0x1_0000) - low).abs();
        let mut mean = 0.0;
        for noise in 0..=0xffff {
            let got = bf16::round_stochastic(x, noise | 0xabcd_0000);
            assert_eq!(bf16::from_f32(got).to_f32().to_bits(), got.to_bits(), "{got} is not a bf16");
            assert!((got - x).abs() < step, "{x} was rounded to {got}, nearest {high}");
            mean += f64::from(got) / 65536.0;
        }
        assert!((mean - f64::from(x)).abs() <= f64::from(step) * 1e-4, "{x}: mean {mean}");
    }
    for noise in [0, 1, 0xffff] {
        assert_eq!(f32::round_stochastic(0.1, noise).to_bits(), 0.1f32.to_bits());
        for x in [f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1.5, f32::from_bits(0x0001_0000)] {
            assert_eq!(bf16::round_stochastic(x, noise).to_bits(), x.to_bits(), "{x}");
        }
        for bits in [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0xff80_ffff] {
            let x = bf16::round_stochastic(f32::from_bits(bits), noise);
            assert!(x.is_nan() && bf16::from_f32(x).to_f32().is_nan(), "{bits:x}: {x}");
        }
    }
    assert_eq!(bf16::round_stochastic(f32::MAX, 0).to_bits(), f32::INFINITY.to_bits());
}

#[test]
fn special_functions_are_accurate() {
    for i in -400..=400 {
        let x = i as f32 / 40.0;
        let close =
            |got: f32, want: f64| assert!((f64::from(got) - want).abs() <= 2e-6 * want.abs().max(1.0), "{x}: {got}");
        close(math::exp(x), f64::from(x).exp());
        close(math::exp2(x), f64::from(x).exp2());
        close(math::tanh(x), f64::from(x).tanh());
        close(math::sin_approx(30.0 * x), f64::from(30.0 * x).sin());
        close(math::cos_approx(30.0 * x), f64::from(30.0 * x).cos());
        if x > 0.0 {
            close(math::ln(x), f64::from(x).ln());
            close(math::sqrt(x), f64::from(x).sqrt());
            close(math::rsqrt(x), f64::from(x).sqrt().recip());
            close(math::recip(x), f64::from(x).recip());
        }
    }
    assert_eq!((math::exp2(-127.0), math::exp2(200.0), math::exp2(f32::NEG_INFINITY)), (0.0, f32::INFINITY, 0.0));
    assert_eq!(
        (math::recip(0.0), math::rsqrt(1e-40), math::ln(0.0)),
        (f32::INFINITY, f32::INFINITY, f32::NEG_INFINITY)
    );
    assert!(math::rsqrt(-1.0).is_nan() && math::ln(-1.0).is_nan());
    assert_eq!((math::sin_approx(-1e-40).to_bits(), math::cos_approx(1e-40).to_bits()), (1 << 31, 1f32.to_bits()));
    assert!(math::sin_approx(f32::INFINITY).is_nan() && math::cos_approx(f32::NEG_INFINITY).is_nan());
    assert_eq!((math::max(f32::NAN, 1.0), math::fma(3.0, 4.0, 5.0), math::tanh(100.0)), (1.0, 17.0, 1.0));
}

#[test]
fn layout_size_is_known_on_the_host() {
    let mut layout = Layout::new();
    let _: SharedArray<u32> = layout.array(3);
    let _: SharedTile<bf16, 16, 32> = layout.tile();
    let _: SharedArray<f32> = layout.array(1);
    assert_eq!(layout.bytes(), 128 + 16 * (32 + 8) * 2 + 4);
}

#[test]
fn missing_instance_panics_with_the_list_of_instances() {
    #[kernel(threads = 32, instances(small = <f32, 4>, large = <f32, 8>))]
    fn sized<T: Element, const N: usize>(out: GlobalMut<T>) {
        out.set(N, T::default());
    }
    let out = GlobalMut::new(std::ptr::null_mut::<f32>());
    assert_eq!((sized::<f32, 8>(out).name(), sized::<f32, 8>(out).threads()), ("sized_large", 32));
    let panic = std::panic::catch_unwind(|| sized::<f32, 16>(out)).unwrap_err();
    let text = panic.downcast_ref::<String>().expect("a formatted message");
    assert!(text.contains("kernel sized: expected one of the instances sized_small, sized_large, found"), "{text}");
}

#[test]
fn instances_are_selected_by_their_values_at_run_time() {
    #[kernel(threads = 32, instances([bf16 = bf16, f32 = f32] * [n4 = 4, n8 = 8]), select(N: usize))]
    fn filled<T: Element, const N: usize>(out: GlobalMut<T>) {
        if (thread::thread_idx_x() as usize) < N {
            out.set(thread::thread_idx_x() as usize, T::from_f32(N as f32));
        }
    }
    let (mut values, mut rounded) = ([0.0f32; 8], [bf16::default(); 8]);
    let launch = filled_select::<f32>((4,), GlobalMut::new(values.as_mut_ptr())).expect("an instance");
    assert_eq!(launch.name(), "filled_f32_n4");
    emulate(&launch, [1, 1, 1], 0);
    assert_eq!(values.map(f32::to_bits), [4.0f32, 4.0, 4.0, 4.0, 0.0, 0.0, 0.0, 0.0].map(f32::to_bits));
    emulate(&filled_select::<bf16>((8,), GlobalMut::new(rounded.as_mut_ptr())).expect("an instance"), [1, 1, 1], 0);
    assert_eq!(rounded.map(|x| x.to_f32().to_bits()), [8.0f32; 8].map(f32::to_bits));
    assert!(filled_exists::<f32>((8,)) && !filled_exists::<f32>((2,)));
    assert!(filled_select::<f32>((2,), GlobalMut::null()).is_none());
}

#[test]
fn launch_arguments_are_passed_as_bytes() {
    #[kernel(threads = 32)]
    fn mixed(out: GlobalMut<f32>, n: u32, scale: f32, count: u64) {
        out.set(n as usize, scale + count as f32);
    }
    let pointer = std::ptr::without_provenance_mut::<f32>(0x1234_5678_9abc);
    mixed(GlobalMut::new(pointer), 7, 1.5, 1 << 40).with_arguments(|arguments| {
        assert_eq!(arguments.len(), 4);
        // SAFETY: the addresses of four arguments of these types.
        unsafe {
            assert_eq!(*arguments[0].cast::<usize>(), 0x1234_5678_9abc);
            assert_eq!((*arguments[1].cast::<u32>(), *arguments[2].cast::<f32>()), (7, 1.5));
            assert_eq!(*arguments[3].cast::<u64>(), 1 << 40);
        }
    });
}

#[test]
fn struct_arguments_are_passed_by_value() {
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Scalars {
        count: u64,
        values: [f32; 30],
    }
    #[kernel(threads = 32)]
    fn scaled(out: GlobalMut<f32>, scalars: Scalars) {
        out.set(0, scalars.values[29] * scalars.count as f32);
    }
    let mut out = [0.0; 4];
    let mut values = [0.0; 30];
    values[29] = 2.5;
    let launch = scaled(GlobalMut::new(out.as_mut_ptr()), Scalars { count: 3, values });
    launch.with_arguments(|arguments| {
        // SAFETY: the second argument is a `Scalars`, which has no padding.
        let passed = unsafe { *arguments[1].cast::<Scalars>() };
        assert_eq!((passed.count, passed.values), (3, values));
    });
    // SAFETY: the kernel writes element 0 of `out`.
    unsafe { launch.emulate([1, 1, 1], 0) }.unwrap();
    assert_eq!(out[0].to_bits(), 7.5f32.to_bits());
}

/// Each lane has the value `(t * 7 + 3) % 5`, or its negative, or a value that all lanes share.
#[kernel(threads = 64)]
fn matches_and_reductions(out: GlobalMut<u32>, signed: GlobalMut<i32>) {
    let t = thread::thread_idx_x();
    let (i, value) = (t as usize, (t * 7 + 3) % 5 + 4 * u32::from(t == 40));
    let matches =
        [warp::match_any(value), u32::from(warp::match_all(value)) + 2 * u32::from(warp::match_all(t / 32 + 9))];
    let numbers = [warp::reduce_add(value), warp::reduce_min(value), warp::reduce_max(value)];
    let bits = [warp::reduce_and(value | 1 << 8), warp::reduce_or(1 << (t % 20)), warp::reduce_xor(value << (t / 32))];
    let low = [warp::match_low_bits::<2>(value), warp::match_low_bits::<32>(value)];
    for (k, result) in matches.into_iter().chain(numbers).chain(bits).chain(low).enumerate() {
        out.set(10 * i + k, result);
    }
    let value = (t as i32 - 40) * 3;
    for (k, result) in
        [warp::reduce_add(value), warp::reduce_min(value), warp::reduce_max(value)].into_iter().enumerate()
    {
        signed.set(3 * i + k, result);
    }
}

#[test]
fn matches_and_reductions_of_a_warp_equal_their_definitions() {
    let mut memory = Memory::new();
    let (out, signed) = (memory.output("out", 10 * 64), memory.output("signed", 3 * 64));
    matches_and_reductions(out, signed).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    let value = |t: u32| (t * 7 + 3) % 5 + 4 * u32::from(t == 40);
    for (t, got) in memory.read(out).chunks(10).enumerate() {
        let t = t as u32;
        let lanes = || t / 32 * 32..t / 32 * 32 + 32;
        let values = || lanes().map(value);
        let same = |bits: u32| {
            let low = |l: u32| value(l) & bits;
            lanes().filter(|&l| low(l) == low(t)).fold(0, |mask, l| mask | 1 << (l % 32))
        };
        let want = [
            same(u32::MAX),
            2,
            values().sum(),
            values().min().unwrap(),
            values().max().unwrap(),
            values().fold(u32::MAX, |all, v| all & (v | 1 << 8)),
            lanes().fold(0, |any, l| any | 1 << (l % 20)),
            values().fold(0, |odd, v| odd ^ v << (t / 32)),
            same(3),
            same(u32::MAX),
        ];
        assert_eq!(got, want, "thread {t}");
    }
    for (t, got) in memory.read(signed).chunks(3).enumerate() {
        let first = (t as i32 / 32 * 32 - 40) * 3;
        assert_eq!(got, [32 * first + 3 * 16 * 31, first, first + 93], "thread {t}");
    }
}

/// Adds one to each element of x (128), a packet for each lane.
#[kernel(threads = 32)]
fn add_one_to_four(out: GlobalMut<u32>, x: Global<u32>) {
    let i = 4 * warp::lane() as usize;
    out.set_four(i, x.four_streaming(i).map(|word| word + 1));
}

#[test]
fn packets_of_words_are_copied() {
    let words: Vec<u32> = (0..128).collect();
    let mut memory = Memory::new();
    let (out, x) = (memory.output("out", 128), memory.input("x", &words));
    add_one_to_four(out, x).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    assert_eq!(memory.read(out), (1..129).collect::<Vec<u32>>());
}

/// The second warp of this block has 8 lanes.
#[kernel(threads = 40)]
fn reductions_of_few_lanes(out: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    out.set(3 * t as usize, warp::reduce_min(t + 1));
    out.set(3 * t as usize + 1, warp::match_any(0));
    out.set(3 * t as usize + 2, warp::reduce_and(3));
}

#[test]
fn lanes_that_do_not_exist_take_no_part_in_a_reduction() {
    let mut memory = Memory::new();
    let out = memory.output("out", 3 * 40);
    reductions_of_few_lanes(out).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    for (t, got) in memory.read(out).chunks(3).enumerate() {
        assert_eq!(got, if t < 32 { [1, u32::MAX, 3] } else { [33, 0xff, 3] }, "thread {t}");
    }
}

/// A reduction exchanges registers. It does not order memory accesses.
#[kernel(threads = 32)]
fn reduction_instead_of_a_barrier(out: GlobalMut<u32>) {
    let t = thread::thread_idx_x() as usize;
    out.set(t, 1);
    let sum = warp::reduce_add(1u32);
    out.set(t, out.at((t + 1) % 32) + sum);
}

#[test]
fn a_reduction_of_a_warp_orders_no_memory_accesses() {
    let mut memory = Memory::new();
    let out = memory.output("out", 32);
    let report = reduction_instead_of_a_barrier(out).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap_err();
    assert_eq!(report.fault, Fault::DataRace, "{report}");
}

#[kernel(threads = 32)]
fn reduction_in_a_branch(out: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let result = if t < 16 { warp::reduce_add(t) } else { warp::match_any(t) };
    out.set(t as usize, result);
}

#[test]
fn a_reduction_and_a_match_in_two_branches_of_a_warp_are_a_divergence() {
    let mut memory = Memory::new();
    let out = memory.output("out", 32);
    let report = reduction_in_a_branch(out).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap_err();
    assert_eq!(report.fault, Fault::Divergence, "{report}");
    let text = report.to_string();
    assert!(text.contains("a warp match") && text.contains("a warp reduction"), "{text}");
}

/// Each round counts other threads. The votes differ between rounds, and a thread passes its own vote of each round through memory.
#[kernel(threads = (16, 3, 2))]
fn votes(out: GlobalMut<u32>, votes: GlobalMut<u32>) {
    let t = thread::linear_index() as usize;
    for round in 0..5 {
        let yes = round > 0 && t < 20 * round;
        votes.set(t, u32::from(yes));
        let count = thread::sync_threads_count(yes);
        let next = votes.at((t + 40) % 96);
        let any = thread::sync_threads_or(t == 50 && round == 2);
        let all = thread::sync_threads_and(t != 95 || round == 3);
        out.set(4 * (5 * t + round), count);
        out.set(4 * (5 * t + round) + 1, u32::from(any));
        out.set(4 * (5 * t + round) + 2, u32::from(all));
        out.set(4 * (5 * t + round) + 3, next);
    }
}

#[test]
fn barriers_reduce_predicates_and_order_memory_accesses() {
    let mut memory = Memory::new();
    let (out, scratch) = (memory.output("out", 4 * 5 * 96), memory.output("votes", 96));
    votes(out, scratch).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    for (i, got) in memory.read(out).chunks(4).enumerate() {
        let (t, round) = (i / 5, i % 5);
        let next = u32::from((t + 40) % 96 < 20 * round);
        assert_eq!(got, [20 * round as u32, u32::from(round == 2), u32::from(round == 3), next], "thread {t}");
    }
}

/// Warp 1 returns before the barrier, or while the others wait.
#[kernel(threads = 96)]
fn votes_of_the_others(out: GlobalMut<u32>, late: u32) {
    let t = thread::thread_idx_x();
    if t / 32 == 1 {
        if late != 0 {
            thread::sync_named(1, 64);
        }
        return;
    }
    if late != 0 && t / 32 == 2 {
        thread::arrive_named(1, 64);
    }
    out.set(3 * t as usize, thread::sync_threads_count(true));
    out.set(3 * t as usize + 1, u32::from(thread::sync_threads_and(true)));
    out.set(3 * t as usize + 2, u32::from(thread::sync_threads_or(false)));
}

#[test]
fn warps_that_have_returned_have_no_vote() {
    for late in [0, 1] {
        let mut memory = Memory::new();
        let out = memory.zeroed("out", 3 * 96);
        votes_of_the_others(out, late).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
        let out = memory.read(out);
        for t in (0..32).chain(64..96) {
            assert_eq!(out[3 * t..][..3], [64, 1, 0], "thread {t}");
        }
    }
}

/// Warp 0 executes another barrier (`kind` 0), a branch of the warp does not arrive (1), or warp 1 never arrives (2).
#[kernel(threads = 64)]
fn wrong_votes(out: GlobalMut<u32>, kind: u32) {
    let t = thread::thread_idx_x();
    match kind {
        0 if t < 32 => thread::sync_threads(),
        1 if t == 40 => thread::sync_threads(),
        2 if t >= 32 => thread::sync_named(1, 64),
        _ => out.set(t as usize, thread::sync_threads_count(true)),
    }
}

#[test]
fn barriers_that_reduce_predicates_report_divergence() {
    let run = |kind| {
        let mut memory = Memory::new();
        let out = memory.output("out", 64);
        wrong_votes(out, kind).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap_err()
    };
    for (kind, fault, text) in [
        (0, Fault::Operand, "sync_threads_count at"),
        (0, Fault::Operand, "the first warp to arrive executes sync_threads ("),
        (1, Fault::Divergence, "sync_threads_count"),
        (2, Fault::Deadlock, "threads 0-31: waiting in sync_threads_count"),
    ] {
        let report = run(kind);
        assert_eq!(report.fault, fault, "{report}");
        assert!(report.to_string().contains(text), "{report}");
    }
}

/// Sleeping orders no memory accesses.
#[kernel(threads = 64)]
fn sleeps(out: GlobalMut<u32>, read: u32) {
    let t = thread::thread_idx_x() as usize;
    out.set(t, 1);
    thread::nanosleep(1000);
    if read != 0 {
        out.set(t + 64, out.at((t + 32) % 64));
    }
}

#[test]
fn nanosleep_is_a_hint() {
    let run = |read| {
        let mut memory = Memory::new();
        let out = memory.zeroed("out", 128);
        sleeps(out, read).emulate_checked(&mut memory, [1, 1, 1], 0).map(|()| memory.read(out))
    };
    assert_eq!(run(0).unwrap(), [[1; 64], [0; 64]].concat());
    assert_eq!(run(1).unwrap_err().fault, Fault::DataRace);
}

/// Reductions and scans of a block, in the order of the threads. They share one scratch array without barriers.
fn reductions_and_scans(out: GlobalMut<u32>, floats: GlobalMut<f32>, wide: GlobalMut<u64>) {
    let mut layout = Layout::new();
    let (scratch, float_scratch, wide_scratch) =
        (layout.array(block::SCRATCH), layout.array(block::SCRATCH), layout.array(block::SCRATCH));
    let t = thread::linear_index();
    let (i, value) = (t as usize, t * 5 % 17 + 1);
    let results = [
        block::sum(value, scratch),
        block::reduce(value, u32::MAX, scratch, u32::min),
        block::inclusive_sum(value, scratch),
        block::exclusive_sum(value, scratch),
        block::scan(value, 0, scratch, u32::max).exclusive,
        block::scan(value, 0, scratch, u32::max).total,
    ];
    for (k, result) in results.into_iter().enumerate() {
        out.set(6 * i + k, result);
    }
    floats.set(2 * i, block::sum(value as f32, float_scratch));
    floats.set(2 * i + 1, block::max(value as f32, float_scratch));
    // The composition of x -> a x + b, which is not commutative: multiplier and constant in the halves.
    let compose = |f: u64, g: u64| {
        let [a, b, c, d] = [f >> 32, f & 0xffff_ffff, g >> 32, g & 0xffff_ffff];
        ((a * c) & 0xffff) << 32 | ((b * c + d) & 0xffff)
    };
    let scan = block::scan(3 << 32 | u64::from(value), 1 << 32, wide_scratch, compose);
    wide.set(3 * i, scan.inclusive);
    wide.set(3 * i + 1, scan.exclusive);
    wide.set(3 * i + 2, scan.total);
}

#[kernel(threads = 256)]
fn scans_in_one_dimension(out: GlobalMut<u32>, floats: GlobalMut<f32>, wide: GlobalMut<u64>) {
    reductions_and_scans(out, floats, wide);
}

#[kernel(threads = (12, 8))]
fn scans_in_two_dimensions(out: GlobalMut<u32>, floats: GlobalMut<f32>, wide: GlobalMut<u64>) {
    reductions_and_scans(out, floats, wide);
}

#[kernel(threads = (4, 4, 64))]
fn scans_in_three_dimensions(out: GlobalMut<u32>, floats: GlobalMut<f32>, wide: GlobalMut<u64>) {
    reductions_and_scans(out, floats, wide);
}

#[kernel(threads = 32)]
fn scans_of_one_warp(out: GlobalMut<u32>, floats: GlobalMut<f32>, wide: GlobalMut<u64>) {
    reductions_and_scans(out, floats, wide);
}

#[test]
fn block_reductions_and_scans_match_cpu_in_all_dimensions() {
    for (launch, threads) in [
        (scans_in_one_dimension as fn(_, _, _) -> cuda_std::launch::Launch, 256),
        (scans_in_two_dimensions, 96),
        (scans_in_three_dimensions, 1024),
        (scans_of_one_warp, 32),
    ] {
        let mut memory = Memory::new();
        let (out, floats) = (memory.output("out", 6 * threads), memory.output("floats", 2 * threads));
        let wide = memory.output("wide", 3 * threads);
        launch(out, floats, wide).emulate_checked(&mut memory, [1, 1, 1], 32 * 16).unwrap();
        let value = |t: usize| t as u32 * 5 % 17 + 1;
        let values = || (0..threads).map(value);
        let (sum, max) = (values().sum::<u32>(), values().max().unwrap());
        let (mut before, mut max_before, mut function) = (0, 0, [1, 0]);
        let apply = |[a, b]: [u64; 2], value: u32| [(a * 3) & 0xffff, (b * 3 + u64::from(value)) & 0xffff];
        let total = values().fold(function, apply);
        let word = |[a, b]: [u64; 2]| a << 32 | b;
        for t in 0..threads {
            let got = &memory.read(out)[6 * t..][..6];
            assert_eq!(got, [sum, 1, before + value(t), before, max_before, max], "thread {t} of {threads}");
            assert_eq!(memory.read(floats)[2 * t..][..2], [sum as f32, max as f32], "thread {t} of {threads}");
            let next = apply(function, value(t));
            let want = [word(next), word(function), word(total)];
            assert_eq!(memory.read(wide)[3 * t..][..3], want, "thread {t} of {threads}");
            (before, max_before, function) = (before + value(t), max_before.max(value(t)), next);
        }
    }
}

/// Uses the scratch array of a scan (`kind` 0) or reduction (1) after it, without a barrier, or with one (2).
#[kernel(threads = 64)]
fn reuse(out: GlobalMut<u32>, kind: u32) {
    let scratch: SharedArray<u32> = Layout::new().array(block::SCRATCH);
    let t = thread::thread_idx_x();
    // The first barrier of the function precedes its first access.
    if t < 32 {
        scratch.set(t as usize, t);
    }
    let result = if kind == 1 { block::sum(t, scratch) } else { block::exclusive_sum(t, scratch) };
    if kind == 2 {
        thread::sync_threads();
    }
    if t == 0 {
        scratch.set(1, 0);
    }
    out.set(t as usize, result);
}

#[test]
fn reuse_of_scratch_without_a_barrier_is_a_data_race() {
    let run = |kind| {
        let mut memory = Memory::new();
        let out = memory.output("out", 64);
        reuse(out, kind).emulate_checked(&mut memory, [1, 1, 1], 128)
    };
    for kind in [0, 1] {
        let report = run(kind).unwrap_err();
        assert_eq!(report.fault, Fault::DataRace, "{report}");
        assert!(report.to_string().contains("shared memory + 4"), "{report}");
    }
    run(2).unwrap();
}

const MAX_KEYS: usize = 1000;

fn sort_shared(layout: &mut Layout) -> [SharedArray<u32>; 3] {
    [layout.array(MAX_KEYS), layout.array(MAX_KEYS), layout.array(block::sort_pairs_scratch(MAX_KEYS, 96))]
}

/// Sorts `n` keys in shared memory, alone or with their indices. No barrier is needed before or after.
fn sort_block(out: GlobalMut<u32>, inp: Global<u32>, n: u32, pairs: u32) {
    let [keys, values, scratch] = sort_shared(&mut Layout::new());
    let (t, threads, n) = (thread::linear_index() as usize, 96, n as usize);
    for i in (t..n).step_by(threads) {
        keys.set(i, inp.at(i));
        values.set(i, i as u32);
    }
    if pairs == 0 {
        block::sort(keys, n, scratch);
    } else {
        block::sort_pairs(keys, values, n, scratch);
    }
    scratch.set(t, 0);
    for i in (t..n).step_by(threads) {
        out.set(i, keys.at(n - 1 - i));
        if pairs != 0 {
            out.set(n + i, values.at(n - 1 - i));
        }
    }
}

#[kernel(threads = 96)]
fn sorts(out: GlobalMut<u32>, inp: Global<u32>, n: u32, pairs: u32) {
    sort_block(out, inp, n, pairs);
}

#[kernel(threads = (3, 16, 2))]
fn sorts_in_three_dimensions(out: GlobalMut<u32>, inp: Global<u32>, n: u32, pairs: u32) {
    sort_block(out, inp, n, pairs);
}

#[test]
fn block_sorts_are_stable_and_match_cpu() {
    let bytes = |pairs| {
        let mut layout = Layout::new();
        sort_shared(&mut layout);
        // Without pairs, the array for scratch is shorter.
        layout.bytes() - if pairs == 0 { 4 * MAX_KEYS } else { 0 }
    };
    for n in [0, 1, 2, 31, 32, 33, 95, 96, 97, 640, MAX_KEYS] {
        for (case, mask) in [u32::MAX, 0x8000_0001, 0xff, 0x00f0_0f00, 0].into_iter().enumerate() {
            let keys: Vec<u32> =
                (0..n as u32).map(|i| (i + 1).wrapping_mul(2_654_435_769).reverse_bits() & mask).collect();
            let mut sorted: Vec<(u32, u32)> = keys.iter().copied().zip(0..).collect();
            sorted.sort_by_key(|(key, _)| *key);
            sorted.reverse();
            for pairs in [0, 1] {
                let mut memory = Memory::new();
                let (out, inp) =
                    (memory.output("out", (2 * n).max(1)), memory.input("inp", &[&keys[..], &[0]].concat()));
                let launch = if case % 2 == 0 { sorts } else { sorts_in_three_dimensions };
                launch(out, inp, n as u32, pairs).emulate_checked(&mut memory, [1, 1, 1], bytes(pairs)).unwrap();
                let expected = sorted.iter().map(|(key, _)| *key);
                let got = memory.slice(Global::new(out.pointer()), if pairs == 0 { n } else { 2 * n }).unwrap();
                if pairs == 0 {
                    assert_eq!(got, expected.collect::<Vec<_>>(), "{n} keys with mask {mask:x}");
                } else {
                    let values = sorted.iter().map(|(_, value)| *value);
                    assert_eq!(got, expected.chain(values).collect::<Vec<_>>(), "{n} pairs with mask {mask:x}");
                }
            }
        }
    }
}

/// The second warp of this block has 8 lanes.
#[kernel(threads = 40)]
fn scan_of_a_part_of_a_warp(out: GlobalMut<u32>) {
    let scratch = Layout::new().array(block::SCRATCH);
    out.set(thread::index_1d(), block::inclusive_sum(1, scratch));
}

#[test]
fn scans_need_whole_warps() {
    let mut memory = Memory::new();
    let out = memory.output("out", 40);
    let report = scan_of_a_part_of_a_warp(out).emulate_checked(&mut memory, [1, 1, 1], 128).unwrap_err();
    assert_eq!(report.fault, Fault::Uninitialized, "{report}");
}
