//! The AdamW update.

use super::file;
use crate::registry::{Family, Kernel};
use crate::session::{Input, Session, Tolerance, blocks};
use anyhow::Result;
use bytemuck::Pod;
use cuda_std::{Element, Global, GlobalMut, bf16};
use gpu::adamw::Range;
use kernels_gpu::adamw::{self, Constants};

pub const FAMILY: Family = Family {
    name: "adamw",
    problem: "One AdamW step for n parameters, with m and v in f32.",
    kernels: &[
        Kernel::new(7, "adamw_naive", file!("adamw/naive.rs"), "The whole update in one kernel, in f32.", |s| {
            let Problem { params, m, v, grads, n } = problem::<f32>(s, 1.0)?;
            let launch = adamw::naive::adamw_naive(params, m, v, grads.view, CONSTANTS, n as u64);
            s.launch(launch, blocks(n, 256), 0);
            Ok(())
        }),
        Kernel::new(
            8,
            "adamw_packets",
            file!("adamw/packets.rs"),
            "Four parameters for each thread, with all loads before the first store.",
            |s| {
                let Problem { params, m, v, grads, n } = problem::<f32>(s, 1.0)?;
                let launch = adamw::packets::adamw_packets(params, m, v, grads.view, CONSTANTS, n as u64);
                s.launch(launch, blocks(n, 256 * 4), 0);
                Ok(())
            },
        ),
        Kernel::new(
            9,
            "adamw_stochastic",
            file!("adamw/stochastic.rs"),
            "Parameters and gradients in bf16, with stochastic rounding instead of an f32 copy.",
            |s| {
                let Problem { params, m, v, grads, n } = problem::<bf16>(s, 1.0)?;
                let launch = adamw::stochastic::adamw_stochastic(params, m, v, grads.view, CONSTANTS, SEED, n as u64);
                s.launch(launch, blocks(n, 256 * 4), 0);
                Ok(())
            },
        ),
        Kernel::new(
            10,
            "adamw_clip",
            file!("adamw/clip.rs"),
            "Gradient clipping with a norm that the host never reads.",
            |s| {
                let Problem { params, m, v, grads, n } = problem::<bf16>(s, CLIP / NORM)?;
                let norm = s.input("norm", &[NORM])?;
                let launch = adamw::clip::adamw_clip(params, m, v, grads.view, norm, CLIP, CONSTANTS, SEED, n as u64);
                s.launch(launch, blocks(n, 256 * 4), 0);
                Ok(())
            },
        ),
        Kernel::new(
            11,
            "adamw_production",
            "gpu/src/adamw.rs",
            "All tensors of a model in one launch, and the same bits on every GPU.",
            production,
        ),
    ],
};

const SEED: u32 = 1234;
const CLIP: f32 = 1.0;
const NORM: f32 = 2.5;
/// The second moment of all parameters before the step.
const OLD_V: f32 = 0.02;
const CONSTANTS: Constants = Constants {
    learning_rate: 1e-2,
    beta1: 0.9,
    beta2: 0.95,
    correction1: 1.0 / (1.0 - 0.9 * 0.9),
    correction2: 1.0 / (1.0 - 0.95 * 0.95),
    epsilon: 1e-8,
    weight_decay: 0.1,
};

struct Problem<T: 'static> {
    params: GlobalMut<T>,
    m: GlobalMut<f32>,
    v: GlobalMut<f32>,
    grads: Input<T>,
    n: usize,
}

/// Creates a step with gradients that are multiplied by `scale`.
fn problem<T: Element + Pod>(s: &mut Session, scale: f32) -> Result<Problem<T>> {
    let n = s.pick(3000, 32 << 20);
    let (params, old_params) = s.noisy_buffer::<T>("params", n, 1.0)?;
    let (m, old_m) = s.noisy_buffer::<f32>("m", n, 0.1)?;
    let v = s.buffer("v", &vec![OLD_V; n])?;
    let grads = s.noise::<T>("grads", n, 0.5)?;
    s.work.bytes = n * (16 + 3 * size_of::<T>());
    let g = grads.values.clone();
    let update = move |i: usize| {
        let Constants { learning_rate, beta1, beta2, correction1, correction2, epsilon, weight_decay } = CONSTANTS;
        let [learning_rate, beta1, beta2] = [learning_rate, beta1, beta2].map(f64::from);
        let (g, old) = (f64::from(scale) * g.at(i), old_params.at(i));
        let m = beta1 * old_m.at(i) + (1.0 - beta1) * g;
        let v = beta2 * f64::from(OLD_V) + (1.0 - beta2) * g * g;
        let step = f64::from(correction1) * m / ((f64::from(correction2) * v).sqrt() + f64::from(epsilon));
        [m, v, old - learning_rate * (step + f64::from(weight_decay) * old)]
    };
    let (for_m, for_v) = (update.clone(), update.clone());
    s.expect("m", m, n, Tolerance::F32, move |i| for_m(i)[0]);
    s.expect("v", v, n, Tolerance::F32, move |i| for_v(i)[1]);
    // Stochastic rounding chooses one of two neighbors.
    s.expect("params", params, n, Tolerance::BF16, move |i| update(i)[2]);
    Ok(Problem { params, m, v, grads, n })
}

fn production(s: &mut Session) -> Result<()> {
    let Problem { params, m, v, grads, n } = problem::<bf16>(s, CLIP / NORM)?;
    let mut ranges = [Range::new(0, n, true, 0)];
    let blocks = gpu::adamw::assign_blocks::<bf16>(&mut ranges);
    let stats = s.input("stats", &[1.0, NORM])?;
    let table = s.input("ranges", &ranges[0].words())?;
    let Constants { learning_rate, beta1, beta2, correction1, correction2, epsilon, weight_decay } = CONSTANTS;
    let scalars = gpu::adamw::Scalars {
        grad_factor: 1.0,
        clip: CLIP,
        learning_rate,
        beta1,
        beta2,
        correction1,
        correction2,
        epsilon,
        weight_decay,
        seed: SEED,
        range_count: 1,
    };
    let ranges = Global::new(table.pointer().cast());
    let none = GlobalMut::<f32>::null();
    let launch = gpu::adamw::adamw::<bf16, f32, f32>(params, none, m, v, grads.view, stats, ranges, scalars);
    s.launch(launch, [blocks, 1, 1], 0);
    Ok(())
}
