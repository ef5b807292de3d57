//! The optimizer.

use super::{Cuda, Float};
use crate::engine::{AdamW, Optimized, Result};
use crate::tensor::Tensor;
use anyhow::ensure;
use cuda_std::GlobalMut;
use gpu::adamw;

pub(super) fn adamw<T: Float>(cuda: &mut Cuda<T>, range: Optimized, stats: Tensor, settings: &AdamW) -> Result<()> {
    let n = range.params.len;
    ensure!(settings.step > 0, "adamw: steps count from 1");
    let masters = match range.master {
        Some(master) => cuda.output("master", master, n)?,
        None => GlobalMut::new(std::ptr::null_mut()),
    };
    let correction = |beta: f32| (1.0 / (1.0 - f64::from(beta).powi(settings.step as i32))) as f32;
    let launch = adamw::adamw::<T>(
        cuda.output("params", range.params, n)?,
        masters,
        cuda.output("m", range.m, n)?,
        cuda.output("v", range.v, n)?,
        cuda.input("grads", range.grads, n)?,
        cuda.input("stats", stats, 2)?,
        n as u64,
        settings.clip,
        settings.learning_rate,
        settings.beta1,
        settings.beta2,
        correction(settings.beta1),
        correction(settings.beta2),
        settings.eps,
        settings.weight_decay,
        settings.seed,
    );
    cuda.launch(&launch, [adamw::grid::<T>(n), 1, 1], 0)
}
