//! Exercises of the book. The tests of an exercise fail until it is solved:
//!
//! ```console
//! cargo test --release -p exercises NAME -- --ignored
//! ```
//!
//! `solutions/` has a solution of each; `cargo test -p exercises` runs the same tests with the solutions.

#![warn(missing_docs)]
#![allow(unused_variables, clippy::needless_pass_by_value, reason = "an unsolved function does not use its parameters")]

pub mod activation_memory;
pub mod adamw_bias_correction;
pub mod attention_row_term;
pub mod column_sums;
pub mod cross_entropy_padding;
pub mod gelu_slope;
pub mod layernorm_variance;
pub mod linear_gradient;
pub mod model_flops;
pub mod occupancy;
pub mod online_softmax_merge;
pub mod ring_all_reduce;
pub mod rstd_gradient;
pub mod scan_race;
pub mod sectors;
pub mod shard_boundaries;
pub mod shared_tile_gemm;
pub mod stochastic_rounding;
pub mod token_order;
pub mod warp_argmax;
pub mod wave_quantization;
pub mod xor_swizzle;

/// The solutions, with the same names and signatures as the exercises.
#[path = "../solutions"]
pub mod solutions {
    pub mod activation_memory;
    pub mod adamw_bias_correction;
    pub mod attention_row_term;
    pub mod column_sums;
    pub mod cross_entropy_padding;
    pub mod gelu_slope;
    pub mod layernorm_variance;
    pub mod linear_gradient;
    pub mod model_flops;
    pub mod occupancy;
    pub mod online_softmax_merge;
    pub mod ring_all_reduce;
    pub mod rstd_gradient;
    pub mod scan_race;
    pub mod sectors;
    pub mod shard_boundaries;
    pub mod shared_tile_gemm;
    pub mod stochastic_rounding;
    pub mod token_order;
    pub mod warp_argmax;
    pub mod wave_quantization;
    pub mod xor_swizzle;
}

/// Defines the tests of an exercise, which call `solution::…`: once with the exercise, ignored by default, and once with the solution.
/// Under CI (`CI=true`), another test requires that each of them fails for the unsolved exercise.
#[macro_export]
macro_rules! tests {
    ($exercise:ident: { $($(#[$attribute:meta])* fn $name:ident() $body:block)+ }) => {
        mod exercise {
            #[allow(unused_imports, reason = "not every test file has imports")]
            use super::*;
            use $crate::$exercise as solution;
            $($(#[$attribute])* #[test] #[ignore = "fails until the exercise is solved"] fn $name() $body)+

            #[test]
            fn fails_until_solved() {
                if std::env::var_os("CI").is_none() {
                    return;
                }
                $(assert!(std::panic::catch_unwind($name).is_err(), "{}: expected a failure, found success", stringify!($name));)+
            }
        }
        mod solved {
            #[allow(unused_imports, reason = "not every test file has imports")]
            use super::*;
            use $crate::solutions::$exercise as solution;
            $($(#[$attribute])* #[test] fn $name() $body)+
        }
    };
}
