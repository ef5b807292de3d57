//! The gradient of attention: dqkv (B, T, 3, NH, HS) from dout (B, T, NH, HS), qkv, and out and lse of the forward pass.
//!
//! With the probabilities P, dP = dout Vᵀ, D = the sum of dout ∘ out over each row, and dS = P ∘ (dP - D) / sqrt(HS):
//! dV = Pᵀ dout, dQ = dS K, dK = dSᵀ Q.

pub mod atomic;
pub mod two_kernels;
pub mod unfused;

use crate::attention::{HS, SCALE};
use cuda_std::{Global, Packet, bf16, math};

/// A row of HS elements, in the 32 registers that its bf16 take.
type Row = [Packet<bf16>; HS / 8];

/// Loads a row.
#[inline(always)]
fn row(from: Global<bf16>, first: usize) -> Row {
    core::array::from_fn(|p| from.packet(first + 8 * p))
}

/// Returns the dot product of `x` and a row in memory.
#[inline(always)]
fn dot(x: &Row, y: Global<bf16>, first: usize) -> f32 {
    let mut sum = 0.0;
    for p in 0..HS / 8 {
        let packet = y.packet(first + 8 * p);
        for i in 0..8 {
            sum = math::fma(x[p].get(i), packet.get(i), sum);
        }
    }
    sum
}

/// Adds `factor` times a row in memory to `sums`.
#[inline(always)]
fn add(sums: &mut [f32; HS], factor: f32, y: Global<bf16>, first: usize) {
    for p in 0..HS / 8 {
        let packet = y.packet(first + 8 * p);
        for i in 0..8 {
            sums[8 * p + i] = math::fma(factor, packet.get(i), sums[8 * p + i]);
        }
    }
}

/// Returns the probability and the gradient of the score from q · k, dout · v, lse and D.
#[inline(always)]
fn probability_and_gradient(product: f32, dp: f32, lse: f32, d: f32) -> [f32; 2] {
    let p = math::exp(product * SCALE - lse);
    [p, p * (dp - d) * SCALE]
}
