//! `wgmma.mma_async` for four values of N. Each accumulator is a separate operand, because an array passed by address
//! would be placed in memory.

use core::arch::asm;

/// Issues an FP8 wgmma with both operands in shared memory. `$types` gives the types of A and B.
macro_rules! wgmma_fp8 {
    ($array:ident, $a:ident, $b:ident, $accumulate:ident, $shape:literal, $types:literal: $first:ident $zero:literal $($d:ident $i:literal)*) => {
        // SAFETY: see `wgmma`.
        unsafe {
            asm!(
                concat!(
                    "{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0; wgmma.mma_async.sync.aligned.", $shape,
                    ".f32.", $types, " {{{", stringify!($first), "}", $(", {", stringify!($d), "}",)*
                    "}}, {a}, {b}, p, 1, 1; }}"
                ),
                accumulate = in(reg32) $accumulate as u32, a = in(reg64) $a, b = in(reg64) $b,
                $first = inout(reg32) $array[$zero], $($d = inout(reg32) $array[$i],)*
                options(nostack, preserves_flags));
        }
    };
}

macro_rules! wgmma {
    ($wgmma_ss:ident, $wgmma_rs:ident, $wgmma_fp8:ident, $fence:ident, $shape:literal, $shape_fp8:literal, $floats:literal: $($d:ident $i:literal)*) => {
        wgmma!(bf16 $wgmma_ss, $wgmma_rs, $fence, $shape, $floats: $($d $i)*);

        #[inline(always)]
        pub fn $wgmma_fp8<const A_E5M2: bool, const B_E5M2: bool>(
            d: &mut [f32; $floats],
            a: u64,
            b: u64,
            accumulate: bool,
        ) {
            match (A_E5M2, B_E5M2) {
                (false, false) => wgmma_fp8!(d, a, b, accumulate, $shape_fp8, "e4m3.e4m3": $($d $i)*),
                (false, true) => wgmma_fp8!(d, a, b, accumulate, $shape_fp8, "e4m3.e5m2": $($d $i)*),
                (true, false) => wgmma_fp8!(d, a, b, accumulate, $shape_fp8, "e5m2.e4m3": $($d $i)*),
                (true, true) => wgmma_fp8!(d, a, b, accumulate, $shape_fp8, "e5m2.e5m2": $($d $i)*),
            }
        }
    };
    (bf16 $wgmma_ss:ident, $wgmma_rs:ident, $fence:ident, $shape:literal, $floats:literal: $first:ident $zero:literal $($d:ident $i:literal)*) => {
        #[inline(always)]
        pub fn $wgmma_ss<const TRANSPOSE_A: u32, const TRANSPOSE_B: u32>(
            d: &mut [f32; $floats],
            a: u64,
            b: u64,
            accumulate: bool,
        ) {
            // SAFETY: the instruction operates on the warpgroup's registers and on the operands that the descriptors
            // refer to.
            unsafe {
                asm!(
                    concat!(
                        "{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0; wgmma.mma_async.sync.aligned.", $shape,
                        ".f32.bf16.bf16 {{{", stringify!($first), "}", $(", {", stringify!($d), "}",)*
                        "}}, {a}, {b}, p, 1, 1, {transpose_a}, {transpose_b}; }}"
                    ),
                    transpose_a = const TRANSPOSE_A, transpose_b = const TRANSPOSE_B,
                    accumulate = in(reg32) accumulate as u32, a = in(reg64) a, b = in(reg64) b,
                    $first = inout(reg32) d[$zero], $($d = inout(reg32) d[$i],)*
                    options(nostack, preserves_flags));
            }
        }

        #[inline(always)]
        pub fn $wgmma_rs<const TRANSPOSE_B: u32>(d: &mut [f32; $floats], a: [u32; 4], b: u64, accumulate: bool) {
            // SAFETY: see above, with A in registers.
            unsafe {
                asm!(
                    concat!(
                        "{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0; wgmma.mma_async.sync.aligned.", $shape,
                        ".f32.bf16.bf16 {{{", stringify!($first), "}", $(", {", stringify!($d), "}",)*
                        "}}, {{{a0}, {a1}, {a2}, {a3}}}, {b}, p, 1, 1, {transpose}; }}"
                    ),
                    accumulate = in(reg32) accumulate as u32, transpose = const TRANSPOSE_B, b = in(reg64) b,
                    a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                    $first = inout(reg32) d[$zero], $($d = inout(reg32) d[$i],)*
                    options(nostack, preserves_flags));
            }
        }

        #[inline(always)]
        pub fn $fence(d: &mut [f32; $floats]) {
            // SAFETY: the assembly contains no instruction; its operands keep the reads that follow after this point.
            unsafe {
                asm!(
                    concat!("// {", stringify!($first), "}", $(" {", stringify!($d), "}",)*),
                    $first = inout(reg32) d[$zero], $($d = inout(reg32) d[$i],)*
                    options(nostack, preserves_flags));
            }
        }
    };
}

wgmma!(wgmma_ss_n64, wgmma_rs_n64, wgmma_fp8_n64, fence_accumulators_n64, "m64n64k16", "m64n64k32", 32:
        d0 0 d1 1 d2 2 d3 3 d4 4 d5 5 d6 6 d7 7 d8 8 d9 9 d10 10 d11 11 d12 12 d13 13 d14 14 d15 15 d16 16 d17 17 d18
        18 d19 19 d20 20 d21 21 d22 22 d23 23 d24 24 d25 25 d26 26 d27 27 d28 28 d29 29 d30 30 d31 31
);
wgmma!(wgmma_ss_n128, wgmma_rs_n128, wgmma_fp8_n128, fence_accumulators_n128, "m64n128k16", "m64n128k32", 64:
        d0 0 d1 1 d2 2 d3 3 d4 4 d5 5 d6 6 d7 7 d8 8 d9 9 d10 10 d11 11 d12 12 d13 13 d14 14 d15 15 d16 16 d17 17 d18
        18 d19 19 d20 20 d21 21 d22 22 d23 23 d24 24 d25 25 d26 26 d27 27 d28 28 d29 29 d30 30 d31 31 d32 32 d33 33
        d34 34 d35 35 d36 36 d37 37 d38 38 d39 39 d40 40 d41 41 d42 42 d43 43 d44 44 d45 45 d46 46 d47 47 d48 48 d49
        49 d50 50 d51 51 d52 52 d53 53 d54 54 d55 55 d56 56 d57 57 d58 58 d59 59 d60 60 d61 61 d62 62 d63 63
);
wgmma!(wgmma_ss_n192, wgmma_rs_n192, wgmma_fp8_n192, fence_accumulators_n192, "m64n192k16", "m64n192k32", 96:
        d0 0 d1 1 d2 2 d3 3 d4 4 d5 5 d6 6 d7 7 d8 8 d9 9 d10 10 d11 11 d12 12 d13 13 d14 14 d15 15 d16 16 d17 17 d18 18
        d19 19 d20 20 d21 21 d22 22 d23 23 d24 24 d25 25 d26 26 d27 27 d28 28 d29 29 d30 30 d31 31 d32 32 d33 33 d34 34
        d35 35 d36 36 d37 37 d38 38 d39 39 d40 40 d41 41 d42 42 d43 43 d44 44 d45 45 d46 46 d47 47 d48 48 d49 49 d50 50
        d51 51 d52 52 d53 53 d54 54 d55 55 d56 56 d57 57 d58 58 d59 59 d60 60 d61 61 d62 62 d63 63 d64 64 d65 65 d66 66
        d67 67 d68 68 d69 69 d70 70 d71 71 d72 72 d73 73 d74 74 d75 75 d76 76 d77 77 d78 78 d79 79 d80 80 d81 81 d82 82
        d83 83 d84 84 d85 85 d86 86 d87 87 d88 88 d89 89 d90 90 d91 91 d92 92 d93 93 d94 94 d95 95
);
wgmma!(wgmma_ss_n256, wgmma_rs_n256, wgmma_fp8_n256, fence_accumulators_n256, "m64n256k16", "m64n256k32", 128:
        d0 0 d1 1 d2 2 d3 3 d4 4 d5 5 d6 6 d7 7 d8 8 d9 9 d10 10 d11 11 d12 12 d13 13 d14 14 d15 15 d16 16 d17 17 d18
        18 d19 19 d20 20 d21 21 d22 22 d23 23 d24 24 d25 25 d26 26 d27 27 d28 28 d29 29 d30 30 d31 31 d32 32 d33 33
        d34 34 d35 35 d36 36 d37 37 d38 38 d39 39 d40 40 d41 41 d42 42 d43 43 d44 44 d45 45 d46 46 d47 47 d48 48 d49
        49 d50 50 d51 51 d52 52 d53 53 d54 54 d55 55 d56 56 d57 57 d58 58 d59 59 d60 60 d61 61 d62 62 d63 63 d64 64
        d65 65 d66 66 d67 67 d68 68 d69 69 d70 70 d71 71 d72 72 d73 73 d74 74 d75 75 d76 76 d77 77 d78 78 d79 79 d80
        80 d81 81 d82 82 d83 83 d84 84 d85 85 d86 86 d87 87 d88 88 d89 89 d90 90 d91 91 d92 92 d93 93 d94 94 d95 95
        d96 96 d97 97 d98 98 d99 99 d100 100 d101 101 d102 102 d103 103 d104 104 d105 105 d106 106 d107 107 d108 108
        d109 109 d110 110 d111 111 d112 112 d113 113 d114 114 d115 115 d116 116 d117 117 d118 118 d119 119 d120 120
        d121 121 d122 122 d123 123 d124 124 d125 125 d126 126 d127 127
);
