//! GELU and its gradient.

use super::file;
use crate::registry::{Family, Kernel};
use crate::session::{Input, Session, Tolerance, blocks};
use anyhow::Result;
use bytemuck::Pod;
use cuda_std::{Element, Global, GlobalMut, bf16};
use gpu::activation::{self, Gelu};
use kernels_gpu::gelu;

pub const FAMILY: Family = Family {
    name: "gelu",
    problem: "out (n) = gelu(inp (n)), and the gradient grad (n) *= gelu'(inp (n)).",
    kernels: &[
        Kernel::new(1, "gelu_naive", file!("gelu/naive.rs"), "One thread for each element, in f32.", |s| {
            let Problem { out, inp, n } = forward::<f32>(s)?;
            s.launch(gelu::naive::gelu_naive(out, inp.view, n as u64), blocks(n, 256), 0);
            Ok(())
        }),
        Kernel::new(2, "gelu_bf16", file!("gelu/bf16.rs"), "Storage in bf16 halves the bytes.", |s| {
            let Problem { out, inp, n } = forward::<bf16>(s)?;
            s.launch(gelu::bf16::gelu_bf16(out, inp.view, n as u64), blocks(n, 256), 0);
            Ok(())
        }),
        Kernel::new(
            3,
            "gelu_packets",
            file!("gelu/packets.rs"),
            "A thread accesses 8 elements at once, 16 bytes.",
            |s| {
                let Problem { out, inp, n } = forward::<bf16>(s)?;
                s.launch(gelu::packets::gelu_packets(out, inp.view, n as u64), blocks(n, 256 * 8), 0);
                Ok(())
            },
        ),
        Kernel::new(
            4,
            "gelu_production",
            "gpu/src/activation/gelu.rs",
            "One exponential instead of tanh, and loads that bypass L1.",
            |s| {
                let Problem { out, inp, n } = forward::<bf16>(s)?;
                let grid = [activation::grid::<bf16>(n), 1, 1];
                let launch = activation::activation_forward::<bf16, Gelu>(out, inp.view, n as u64, n as u32);
                s.launch(launch, grid, 0);
                Ok(())
            },
        ),
        Kernel::new(
            5,
            "gelu_backward_naive",
            file!("gelu/backward_naive.rs"),
            "The gradient in place, from the input alone.",
            |s| {
                let Problem { out, inp, n } = backward(s)?;
                s.launch(gelu::backward_naive::gelu_backward_naive(out, inp.view, n as u64), blocks(n, 256), 0);
                Ok(())
            },
        ),
        Kernel::new(
            6,
            "gelu_backward_production",
            "gpu/src/activation/gelu.rs",
            "Packets, and one exponential.",
            |s| {
                let Problem { out, inp, n } = backward(s)?;
                let grid = [activation::grid::<bf16>(n), 1, 1];
                let none = Global::null();
                let launch = activation::activation_backward::<bf16, Gelu>(out, none, inp.view, n as u64, n as u32);
                s.launch(launch, grid, 0);
                Ok(())
            },
        ),
    ],
};

/// The arrays of the forward pass, or of the backward pass, where `out` is the gradient.
struct Problem<T: 'static> {
    out: GlobalMut<T>,
    inp: Input<T>,
    n: usize,
}

/// Returns u = sqrt(2/pi) (x + 0.044715 x³).
fn argument(x: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))
}

fn forward<T: Element + Pod>(s: &mut Session) -> Result<Problem<T>> {
    let n = s.pick(3000, 64 << 20);
    let (inp, out) = (s.noise::<T>("inp", n, 4.0)?, s.output::<T>("out", n)?);
    let x = inp.values.clone();
    s.work.bytes = 2 * n * size_of::<T>();
    s.expect("out", out, n, Tolerance::BF16, move |i| 0.5 * x.at(i) * (1.0 + argument(x.at(i)).tanh()));
    Ok(Problem { out, inp, n })
}

fn backward(s: &mut Session) -> Result<Problem<bf16>> {
    let n = s.pick(3000, 64 << 20);
    let (inp, (grad, old)) = (s.noise::<bf16>("inp", n, 4.0)?, s.noisy_buffer::<bf16>("grad", n, 1.0)?);
    let x = inp.values.clone();
    s.work.bytes = 3 * n * size_of::<bf16>();
    s.expect("grad", grad, n, Tolerance::BF16, move |i| {
        let (x, t) = (x.at(i), argument(x.at(i)).tanh());
        let slope = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044_715 * x * x);
        old.at(i) * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
    });
    Ok(Problem { out: grad, inp, n })
}
