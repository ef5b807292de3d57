//! Blocks of several dimensions, masks, 64-bit shuffles, atomics, f16, special functions, printing, traps and large parameters.

use cuda_std::emulate::{Fault, Memory, printed_by};
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, f16, gpu_println, kernel, math, thread, warp};

#[kernel(threads = (4, 3, 5))]
fn three_dimensions(out: GlobalMut<u32>) {
    let i = thread::linear_index() as usize;
    let block = thread::block_idx_x() as usize;
    let at = 4 * (60 * block + i);
    out.set(at, thread::thread_idx_x() + 10 * thread::thread_idx_y() + 100 * thread::thread_idx_z());
    out.set(at + 1, thread::block_dim_x() + 10 * thread::block_dim_y() + 100 * thread::block_dim_z());
    out.set(at + 2, warp::lane_id());
    thread::sync_threads();
    out.set(at + 3, warp::active_mask().count_ones());
}

#[test]
fn blocks_have_up_to_three_dimensions() {
    let mut memory = Memory::new();
    let out = memory.output("out", 4 * 60 * 2);
    let launch = three_dimensions(out);
    assert_eq!((launch.block(), launch.threads()), ([4, 3, 5], 60));
    launch.emulate_checked(&mut memory, [2, 1, 1], 0).unwrap();
    for (i, got) in memory.read(out).chunks(4).enumerate() {
        let t = i as u32 % 60;
        let (x, y, z) = (t % 4, t / 4 % 3, t / 12);
        assert_eq!(got, [x + 10 * y + 100 * z, 534, t % 32, if t < 32 { 32 } else { 28 }], "thread {t}");
    }
}

#[kernel(threads = (16, 2))]
fn lane_in_two_dimensions(out: GlobalMut<u32>) {
    out.set(0, warp::lane());
}

#[test]
fn functions_for_one_dimension_are_refused_in_two() {
    let mut memory = Memory::new();
    let out = memory.output("out", 1);
    let report = lane_in_two_dimensions(out).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap_err();
    assert_eq!(report.fault, Fault::Operand);
    assert!(report.to_string().contains("lane_id"), "{report}");
}

#[kernel(threads = 32)]
fn shuffles(wide: GlobalMut<u64>, signed: GlobalMut<i32>, double: GlobalMut<f64>, up: GlobalMut<u32>) {
    let lane = warp::lane();
    let i = lane as usize;
    let x = u64::from(lane) << 40 | u64::from(lane);
    wide.set(i, warp::shuffle_xor(x, 5));
    signed.set(i, warp::shuffle_down(-(lane as i32), 3));
    double.set(i, warp::shuffle(f64::from(lane) / 3.0, 31 - lane));
    up.set(i, warp::shuffle_up(lane, 4));
}

#[test]
fn shuffles_move_64_bit_and_signed_values_in_all_directions() {
    let mut memory = Memory::new();
    let (wide, signed) = (memory.output("wide", 32), memory.output("signed", 32));
    let (double, up) = (memory.output("double", 32), memory.output("up", 32));
    shuffles(wide, signed, double, up).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    let lanes = 0..32u32;
    let expected: Vec<u64> = lanes.clone().map(|l| u64::from(l ^ 5) << 40 | u64::from(l ^ 5)).collect();
    assert_eq!(memory.read(wide), expected);
    let expected: Vec<i32> = lanes.clone().map(|l| -(if l < 29 { l + 3 } else { l } as i32)).collect();
    assert_eq!(memory.read(signed), expected);
    assert_eq!(memory.read(double), lanes.clone().map(|l| f64::from(31 - l) / 3.0).collect::<Vec<_>>());
    assert_eq!(memory.read(up), lanes.map(|l| if l < 4 { l } else { l - 4 }).collect::<Vec<_>>());
}

/// Even lanes add over their own mask, lane 3 finds itself alone, and each half votes.
#[kernel(threads = 64)]
fn masks(out: GlobalMut<u32>) {
    let (lane, t) = (warp::lane(), thread::thread_idx_x() as usize);
    let mut found = 0;
    if lane.is_multiple_of(2) {
        let mut sum = lane;
        for step in [2, 4, 8, 16] {
            sum += warp::shuffle_masked(sum, lane ^ step, 0x5555_5555);
        }
        found = sum;
    } else if lane == 3 {
        found = warp::active_mask();
    }
    out.set(3 * t, found);
    let half = if lane < 16 { 0xffff } else { 0xffff_0000 };
    out.set(3 * t + 1, warp::ballot_masked(lane % 16 < 3, half));
    warp::sync_masked(half);
    out.set(3 * t + 2, warp::active_mask());
}

#[test]
fn lanes_of_a_mask_work_together() {
    let mut memory = Memory::new();
    let out = memory.output("out", 3 * 64);
    masks(out).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    for (t, got) in memory.read(out).chunks(3).enumerate() {
        let lane = t as u32 % 32;
        let first = match lane {
            3 => 1 << 3,
            _ if lane.is_multiple_of(2) => (0..32).step_by(2).sum(),
            _ => 0,
        };
        let votes = if lane < 16 { 7 } else { 7 << 16 };
        assert_eq!(got, [first, votes, u32::MAX], "thread {t}");
    }
}

#[kernel(threads = 32)]
fn mask_without_the_lane() {
    warp::sync_masked(0x0000_ffff);
}

#[kernel(threads = 32)]
fn mask_with_an_absent_lane(out: GlobalMut<u32>) {
    if warp::lane() < 8 {
        out.set(0, warp::ballot_masked(true, 0x1ff));
    }
}

#[test]
fn masks_with_wrong_lanes_are_reported() {
    let mut memory = Memory::new();
    let out = memory.output("out", 1);
    let report = mask_without_the_lane().emulate_checked(&mut memory, [1, 1, 1], 0).unwrap_err();
    assert_eq!((report.fault, report.thread), (Fault::Operand, Some(16)), "{report}");
    let report = mask_with_an_absent_lane(out).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap_err();
    assert_eq!(report.fault, Fault::Deadlock, "{report}");
    assert!(report.to_string().contains("threads 0-7: waiting in an operation of the lanes in 0x000001ff"), "{report}");
}

/// Each thread updates counters in shared memory, and thread 0 adds the result to global memory.
#[kernel(threads = 128)]
fn atomics(
    words: GlobalMut<u32>,
    signed: GlobalMut<i32>,
    wide: GlobalMut<u64>,
    single: GlobalMut<f32>,
    double: GlobalMut<f64>,
) {
    let t = thread::thread_idx_x();
    let mut layout = Layout::new();
    let shared_words: SharedArray<u32> = layout.array(5);
    let shared_signed: SharedArray<i32> = layout.array(3);
    let shared_wide: SharedArray<u64> = layout.array(5);
    let shared_single: SharedArray<f32> = layout.array(1);
    let shared_double: SharedArray<f64> = layout.array(1);
    if t == 0 {
        for i in 0..5 {
            shared_words.set(i, 1000);
            shared_wide.set(i, 1 << 40);
        }
        for i in 0..3 {
            shared_signed.set(i, -5);
        }
        shared_single.set(0, 0.5);
        shared_double.set(0, 0.5);
    }
    thread::sync_threads();
    shared_words.fetch_add(0, t);
    shared_words.fetch_min(1, t + 3);
    shared_words.fetch_max(2, 2 * t + 900);
    shared_words.exchange(3, 7);
    if shared_words.compare_exchange(4, 1000, t) == 1000 {
        words.set(9, t);
    }
    shared_signed.fetch_add(0, -(t as i32));
    shared_signed.fetch_min(1, -(t as i32));
    shared_signed.fetch_max(2, t as i32 - 100);
    shared_wide.fetch_add(0, u64::from(t));
    shared_wide.fetch_min(1, u64::from(t) + 1);
    shared_wide.fetch_max(2, (1 << 40) + u64::from(t));
    shared_wide.exchange(3, 9 << 40);
    shared_wide.compare_exchange(4, 1 << 40, 5 << 40);
    shared_single.fetch_add(0, 1.0);
    shared_double.fetch_add(0, 1.0);
    words.fetch_add(8, 1);
    signed.fetch_add(3, -1);
    wide.fetch_add(5, 1 << 33);
    double.fetch_add(1, 0.25);
    thread::sync_threads();
    if t == 0 {
        for i in 0..5 {
            words.set(i, shared_words.at(i));
            wide.set(i, shared_wide.at(i));
        }
        for i in 0..3 {
            signed.set(i, shared_signed.at(i));
        }
        single.set(0, shared_single.at(0));
        double.set(0, shared_double.at(0));
    }
}

#[test]
fn atomics_update_shared_and_global_memory() {
    let mut memory = Memory::new();
    let (words, signed) = (memory.zeroed("words", 10), memory.zeroed("signed", 4));
    let (wide, single, double) = (memory.zeroed("wide", 6), memory.zeroed("single", 1), memory.zeroed("double", 2));
    atomics(words, signed, wide, single, double).emulate_checked(&mut memory, [1, 1, 1], 256).unwrap();
    let sum: u32 = (0..128).sum();
    let words = memory.read(words);
    assert_eq!(words[..4], [1000 + sum, 3, 900 + 254, 7]);
    // One thread has exchanged the value.
    assert!(words[4] < 128 && words[4] == words[9] && words[8] == 128, "{words:?}");
    assert_eq!(memory.read(signed), [-5 - sum as i32, -127, 27, -128]);
    let base = 1u64 << 40;
    assert_eq!(memory.read(wide), [base + u64::from(sum), 1, base + 127, 9 << 40, 5 << 40, 128 << 33]);
    assert_eq!((memory.read(single), memory.read(double)), (vec![128.5], vec![128.5, 32.0]));
}

#[kernel(threads = 32)]
fn unordered_with_atomics() {
    let counter: SharedArray<u32> = Layout::new().array(1);
    if thread::thread_idx_x() == 0 {
        counter.set(0, 0);
    } else {
        counter.fetch_add(0, 1);
    }
}

#[test]
fn a_plain_write_before_shared_atomics_needs_a_barrier() {
    let report = unordered_with_atomics().emulate_checked(&mut Memory::new(), [1, 1, 1], 16).unwrap_err();
    assert_eq!(report.fault, Fault::DataRace, "{report}");
}

#[kernel(threads = 32)]
fn halves(out: GlobalMut<f16>, back: GlobalMut<f32>, inp: Global<f32>) {
    let t = thread::thread_idx_x() as usize;
    let packet: Packet<f16> = Packet::from_fn(|i| inp.at(8 * t + i));
    out.set_packet(8 * t, packet);
    for i in 0..8 {
        back.set(8 * t + i, out.at(8 * t + i).to_f32());
    }
}

#[test]
fn f16_is_rounded_to_nearest_even() {
    let mut values =
        vec![0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, -1e9, 6e-8, 2.9e-8, 2.0f32.powi(-25), 1.0 + 2.0f32.powi(-11)];
    values.extend([1.0 + 3.0 * 2.0f32.powi(-11), f32::INFINITY, f32::NAN]);
    values.resize(256, 0.333_333_34);
    let mut memory = Memory::new();
    let inp = memory.input("inp", &values);
    let (out, back) = (memory.output("out", 256), memory.output("back", 256));
    halves(out, back, inp).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    let expected = [0, 0x8000, 0x3c00, 0x7bff, 0x7bff, 0x7c00, 0xfc00, 1, 0, 0, 0x3c00, 0x3c02, 0x7c00, 0x7fff, 0x3555];
    let got: Vec<u16> = memory.read(out).iter().map(|x| x.to_bits()).collect();
    assert_eq!(got[..15], expected);
    let back = memory.read(back);
    assert_eq!(back[..4], [0.0, 0.0, 1.0, 65504.0]);
    assert_eq!((back[7], back[11], back[14]), (2.0f32.powi(-24), 1.0 + 2.0f32.powi(-9), 0.333_251_95));
}

#[test]
fn stochastic_rounding_to_f16_gives_both_neighbors_in_proportion() {
    // A quarter of the way between two neighbors, for normal and subnormal numbers.
    for (below, above) in [(1.0f32, 1.0 + 2.0f32.powi(-10)), (2.0f32.powi(-20), 2.0f32.powi(-20) + 2.0f32.powi(-24))] {
        let value = below + 0.25 * (above - below);
        let (mut ups, noises) = (0, 1 << 16);
        for noise in 0..noises {
            let rounded = f16::round_stochastic(value, noise);
            let is_above = rounded.to_bits() == above.to_bits();
            assert!(is_above || rounded.to_bits() == below.to_bits(), "{rounded:e}");
            assert_eq!(f16::round_stochastic(-value, noise).to_bits(), (-rounded).to_bits());
            ups += u32::from(is_above);
        }
        assert_eq!(ups, noises / 4);
        assert_eq!(f16::round_stochastic(below, 0).to_bits(), below.to_bits());
    }
    assert_eq!(f16::round_stochastic(1e9, 3).to_bits(), f32::INFINITY.to_bits());
    assert!(f16::round_stochastic(f32::NAN, 3).is_nan());
}

#[kernel(threads = 64)]
fn functions(single: GlobalMut<f32>, double: GlobalMut<f64>, inp: Global<f64>) {
    let t = thread::thread_idx_x() as usize;
    let x = inp.at(t);
    single.set(3 * t, math::sin(x as f32));
    single.set(3 * t + 1, math::cos(x as f32));
    single.set(3 * t + 2, math::pow((x as f32).abs(), 1.7));
    for (i, y) in [
        math::double::sin(x),
        math::double::cos(x),
        math::double::pow(x.abs(), 1.7),
        math::double::exp(x / 1e5),
        math::double::ln(x.abs() + 1e-3),
        math::double::sqrt(x.abs()),
        math::double::tanh(x),
        math::double::fma(x, x, -1.0),
    ]
    .into_iter()
    .enumerate()
    {
        double.set(8 * t + i, y);
    }
}

#[test]
fn special_functions_match_those_of_the_standard_library() {
    let inp: Vec<f64> = (0..64).map(|i| f64::from(i - 32) * 1.37 * 10.0f64.powi(i % 5)).collect();
    let mut memory = Memory::new();
    let (single, double) = (memory.output("single", 3 * 64), memory.output("double", 8 * 64));
    let view = memory.input("inp", &inp);
    functions(single, double, view).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    let (single, double) = (memory.read(single), memory.read(double));
    for (t, &x) in inp.iter().enumerate() {
        let s = f64::from(x as f32);
        let want = [s.sin(), s.cos(), s.abs().powf(f64::from(1.7f32))];
        for (got, want) in single[3 * t..].iter().zip(want) {
            assert!((f64::from(*got) - want).abs() <= 2.5e-7 * want.abs().max(1e-3), "{x}: {got} instead of {want}");
        }
        let a = x.abs();
        let want =
            [x.sin(), x.cos(), a.powf(1.7), (x / 1e5).exp(), (a + 1e-3).ln(), a.sqrt(), x.tanh(), x.mul_add(x, -1.0)];
        for (got, want) in double[8 * t..].iter().zip(want) {
            assert!((got - want).abs() <= 4e-16 * want.abs().max(1e-3), "{x}: {got} instead of {want}");
        }
    }
}

#[kernel(threads = 32)]
fn prints(x: f32, n: u64) {
    if thread::thread_idx_x() == 5 {
        gpu_println!("{{x}} is {} in thread {}: {} %", x, thread::thread_idx_x() as i32 - 6, n);
        gpu_println!("done");
    }
}

#[test]
fn kernels_print_lines() {
    let (result, lines) = printed_by(|| prints(0.5, 1 << 40).emulate_checked(&mut Memory::new(), [2, 1, 1], 0));
    result.unwrap();
    let expected = ["{x} is 0.5 in thread -1: 1099511627776 %", "done"];
    assert_eq!(lines, [expected, expected].as_flattened());
}

#[kernel(threads = 64)]
fn traps(n: u32) {
    if thread::thread_idx_x() == n {
        thread::trap();
    }
    thread::sync_threads();
}

#[test]
fn a_trap_is_reported_with_its_thread_and_line() {
    traps(100).emulate_checked(&mut Memory::new(), [1, 1, 1], 0).unwrap();
    let report = traps(40).emulate_checked(&mut Memory::new(), [1, 1, 1], 0).unwrap_err();
    assert_eq!((report.fault, report.thread), (Fault::Trap, Some(40)));
    assert!(report.to_string().contains("trap (crates/cuda_std/tests/emulator/features.rs:"), "{report}");
}

#[kernel(threads = 32)]
fn clocks(out: GlobalMut<u64>) {
    let t = thread::thread_idx_x() as usize;
    let (clock, time) = (thread::clock(), thread::nanoseconds());
    out.set(2 * t, thread::clock() - clock);
    out.set(2 * t + 1, thread::nanoseconds() - time);
}

#[test]
fn clocks_advance() {
    let mut memory = Memory::new();
    let out = memory.output("out", 64);
    clocks(out).emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    let out = memory.read(out);
    assert!(out.chunks(2).all(|pair| pair[0] > 0 && pair[1] < 1_000_000_000), "{out:?}");
}

/// More than the 128 bytes of the largest parameter before.
#[derive(Clone, Copy)]
#[repr(C)]
struct Table {
    scale: [f32; 500],
    offset: u64,
}

#[kernel(threads = 32)]
fn large_parameter(out: GlobalMut<f32>, table: Table, last: u32) {
    let t = thread::thread_idx_x() as usize;
    out.set(t, table.scale[15 * t] + table.offset as f32 + last as f32);
}

#[test]
fn struct_parameters_may_be_large() {
    let mut memory = Memory::new();
    let out = memory.output("out", 32);
    let table = Table { scale: std::array::from_fn(|i| i as f32), offset: 1000 };
    let launch = large_parameter(out, table, 7);
    launch.emulate_checked(&mut memory, [1, 1, 1], 0).unwrap();
    assert_eq!(memory.read(out), (0..32).map(|t| (15 * t + 1007) as f32).collect::<Vec<_>>());
    // The driver copies each argument from its address.
    let (offset, last) = launch.with_arguments(|arguments| {
        // SAFETY: the arguments have these types.
        unsafe { ((*arguments[1].cast::<Table>()).offset, *arguments[2].cast::<u32>()) }
    });
    assert_eq!((offset, last), (1000, 7));
}
