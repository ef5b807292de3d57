//! The FP8 types compared with the crate `float8`, with a table of known values, and with f64.

use cuda_std::emulate::Memory;
use cuda_std::fp8::{Bf16Scale, transpose_bytes};
use cuda_std::{E4m3, E5m2, Element, Fp8, Global, GlobalMut, Packet, kernel, thread};
use float8::{F8E4M3, F8E5M2};

/// The conversions of `float8` for one of the types.
trait Reference: Fp8 {
    fn decode(bits: u8) -> f32;
    fn encode(value: f32) -> u8;
}

impl Reference for E4m3 {
    fn decode(bits: u8) -> f32 {
        F8E4M3::from_bits(bits).to_f32()
    }

    fn encode(value: f32) -> u8 {
        F8E4M3::from_f32(value).to_bits()
    }
}

impl Reference for E5m2 {
    fn decode(bits: u8) -> f32 {
        F8E5M2::from_bits(bits).to_f32()
    }

    fn encode(value: f32) -> u8 {
        F8E5M2::from_f32(value).to_bits()
    }
}

/// Returns the finite non-negative numbers of a type in ascending order.
fn finite<T: Fp8>() -> Vec<f32> {
    let all = (0..=0x7f).map(|bits| T::from_bits(bits).to_f32());
    all.take_while(|x| x.is_finite()).collect()
}

fn check_codes<T: Reference>() {
    for bits in 0..=u8::MAX {
        let (got, want) = (T::from_bits(bits).to_f32(), T::decode(bits));
        if want.is_nan() {
            assert!(got.is_nan(), "{bits:#04x}: expected NaN, found {got}");
            assert_eq!(T::from_f32(got).to_bits(), 0x7f, "NaN {bits:#04x}");
            continue;
        }
        assert_eq!(got.to_bits(), want.to_bits(), "{bits:#04x}: expected {want}, found {got}");
        if want.is_finite() {
            assert_eq!(T::from_f32(got).to_bits(), bits, "round trip of {got}");
        }
    }
    assert_eq!(finite::<T>().last(), Some(&T::MAX));
}

#[test]
fn every_code_is_exact_in_bf16() {
    for scale in [Bf16Scale::MIN, 2f32.powi(-9), 1.0, Bf16Scale::MAX] {
        for first in (0..=0xf0u8).step_by(16) {
            let codes: [u8; 16] = std::array::from_fn(|i| first + i as u8);
            let packet = Packet::<E4m3>::from_packed(bytemuck::cast(codes));
            let numbers = packet.to_bf16(Bf16Scale::new(scale));
            for (i, code) in codes.into_iter().enumerate() {
                let number = E4m3::from_bits(code).to_f32();
                let number = if number.is_nan() { 480f32.copysign(number) } else { number };
                assert_eq!(
                    numbers[i / 8].get(i % 8).to_bits(),
                    (number * scale).to_bits(),
                    "{code:#04x} times {scale}"
                );
            }
        }
    }
}

#[test]
fn every_code_decodes_as_in_float8_and_survives_a_round_trip() {
    check_codes::<E4m3>();
    check_codes::<E5m2>();
}

fn check_samples<T: Reference>() {
    let check = |x: f32| {
        for x in [x, -x] {
            assert_eq!(T::from_f32(x).to_bits(), T::encode(x), "{x:e} ({:#010x})", x.to_bits());
        }
    };
    // Every f32 whose low 12 bits are zero, and its neighbors: all numbers, all ties, and what lies beside them.
    for high in 0..1u32 << 19 {
        for bits in [high << 12, (high << 12).wrapping_sub(1), high << 12 | 1, high << 12 | 0x7ff] {
            let x = f32::from_bits(bits & 0x7fff_ffff);
            // `float8` keeps the payload of a NaN, unlike the instruction.
            if !x.is_nan() {
                check(x);
            }
        }
    }
}

#[test]
fn conversion_from_f32_has_the_bits_of_float8() {
    check_samples::<E4m3>();
    check_samples::<E5m2>();
}

#[test]
fn known_values_are_encoded_as_specified() {
    let tie = |exponent: i32, mantissa: f32| mantissa * 2f32.powi(exponent);
    for (value, e4m3, e5m2) in [
        (0.0, 0x00, 0x00),
        (-0.0, 0x80, 0x80),
        (1.0, 0x38, 0x3c),
        (-2.0, 0xc0, 0xc0),
        (448.0, 0x7e, 0x5f),
        // A tie of 448 and the absent 480, and what lies beyond: saturated.
        (464.0, 0x7e, 0x5f),
        (1e9, 0x7e, 0x7b),
        (-1e9, 0xfe, 0xfb),
        (f32::INFINITY, 0x7e, 0x7b),
        (f32::NEG_INFINITY, 0xfe, 0xfb),
        (57344.0, 0x7e, 0x7b),
        (61440.0, 0x7e, 0x7b),
        (f32::NAN, 0x7f, 0x7f),
        // Ties go to the even mantissa.
        (1.0625, 0x38, 0x3c),
        (1.1875, 0x3a, 0x3d),
        (1.125, 0x39, 0x3c),
        (1.375, 0x3b, 0x3e),
        // Smallest numbers, and half of them.
        (tie(-9, 1.0), 0x01, 0x18),
        (tie(-10, 1.0), 0x00, 0x14),
        (tie(-10, 1.001), 0x01, 0x14),
        (tie(-6, 1.0), 0x08, 0x24),
        (tie(-7, 1.75), 0x07, 0x23),
        (tie(-16, 1.0), 0x00, 0x01),
        (tie(-17, 1.0), 0x00, 0x00),
        (tie(-17, 1.5), 0x00, 0x01),
        (tie(-14, 1.0), 0x00, 0x04),
        (f32::from_bits(1), 0x00, 0x00),
    ] {
        assert_eq!(E4m3::from_f32(value).to_bits(), e4m3, "E4M3 of {value:e}");
        assert_eq!(E5m2::from_f32(value).to_bits(), e5m2, "E5M2 of {value:e}");
    }
}

#[test]
fn packed_conversions_put_the_first_number_in_the_lowest_byte() {
    assert_eq!(E4m3::pack_pair(1.0, -2.0), 0xc038);
    assert_eq!(E5m2::pack_pair(1.0, -2.0), 0xc03c);
    assert_eq!(E4m3::pack_four([1.0, -2.0, 0.0, 448.0]), 0x7e00_c038);
}

#[test]
fn bytes_are_transposed() {
    let rows: [u32; 4] = std::array::from_fn(|i| u32::from_le_bytes(std::array::from_fn(|j| (4 * i + j) as u8)));
    let columns: [u32; 4] = std::array::from_fn(|j| u32::from_le_bytes(std::array::from_fn(|i| (4 * i + j) as u8)));
    assert_eq!(transpose_bytes(rows), columns);
}

/// Converts inp (n) to FP8 and back, in packets of 16.
#[kernel(threads = 32, instances(e4m3 = <E4m3>, e5m2 = <E5m2>))]
fn quantize<T: Fp8>(quantized: GlobalMut<T>, restored: GlobalMut<f32>, inp: Global<f32>, packets: u32) {
    let packet = thread::index_1d();
    if packet < packets as usize {
        let first = packet * T::PACKET;
        quantized.set_packet(first, Packet::from_fn(|i| inp.at(first + i)));
        let packet = quantized.packet(first);
        for i in 0..T::PACKET {
            restored.set(first + i, packet.get(i));
        }
        let four = quantized.four(first + 4);
        quantized.set_four(first + 4, four);
    }
}

fn check_kernel<T: Fp8 + bytemuck::Pod>() {
    let values: Vec<f32> = (0..48 * 16).map(|i| (i as f32 - 300.0) * 1.7).collect();
    let mut memory = Memory::new();
    let inp = memory.input("inp", &values);
    let quantized = memory.output("quantized", values.len());
    let restored = memory.output("restored", values.len());
    quantize::<T>(quantized, restored, inp, 48).emulate_checked(&mut memory, [2, 1, 1], 0).unwrap();
    let want: Vec<T> = values.iter().map(|&x| T::from_f32(x)).collect();
    let bits = |values: Vec<T>| values.into_iter().map(T::to_bits).collect::<Vec<_>>();
    assert_eq!(memory.read(restored), want.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
    assert_eq!(bits(memory.read(quantized)), bits(want));
}

#[test]
fn packets_of_fp8_are_stored_and_loaded_in_order() {
    check_kernel::<E4m3>();
    check_kernel::<E5m2>();
}

fn check_stochastic<T: Fp8>() {
    let numbers = finite::<T>();
    for pair in numbers.windows(2) {
        for sign in [1.0, -1.0] {
            assert_eq!(T::round_stochastic(sign * pair[0], 0xffff).to_bits(), (sign * pair[0]).to_bits());
            // At a quarter of the distance, a quarter of the noise rounds away from zero.
            let x = sign * (pair[0] + (pair[1] - pair[0]) / 4.0);
            for noise in [0, 0x3fff, 0x4000, 0xffff] {
                let want = sign * pair[usize::from(noise < 0x4000)];
                let got = T::round_stochastic(x, noise);
                assert_eq!(got.to_bits(), want.to_bits(), "{x} with noise {noise:#x}: {got}, want {want}");
            }
        }
    }
    assert_eq!(T::round_stochastic(f32::NEG_INFINITY, 0).to_bits(), (-T::MAX).to_bits());
    assert!(T::round_stochastic(f32::NAN, 0).is_nan());
}

#[test]
fn stochastic_rounding_chooses_a_neighbor_by_proximity() {
    check_stochastic::<E4m3>();
    check_stochastic::<E5m2>();
}
