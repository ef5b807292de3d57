//! `bench gemm`: the matrix products of a model.

use crate::commands::resources::Hardware;
use crate::engine::{Engine, Linear, Result, Timing};
use crate::model::Descriptor;
use crate::plan::{Group, Plan};
use crate::tensor::Tensor;

/// The matrix products of a model: cuBLASLt's first choice, the fastest of its candidates, and the fastest Rust kernel
#[derive(Clone, Debug, clap::Args)]
pub struct Gemm {
    /// d12, d24, gpt3:c768 …
    #[arg(short = 'e', long, default_value = "d12")]
    model: String,
    #[arg(short, long, default_value = "64")]
    batch: usize,
    #[arg(short = 't', long, default_value = "1024")]
    seq: usize,

    #[command(flatten)]
    hardware: Hardware,
}

pub fn run(options: &Gemm) -> Result<()> {
    let descriptor = options.model.parse::<Descriptor>()?;
    let mut engine = options.hardware.open_quietly()?;
    let (c, vp, rows) = (descriptor.channels, descriptor.padded_vocab(), options.batch * options.seq);
    println!(
        "{:<90} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "product", "candidates", "first us", "best us", "TFLOP/s", "Rust us", "TFLOP/s"
    );
    let (mut first, mut best, mut taken) = (0.0, 0.0, 0.0);
    for (c, oc, gelu) in [(c, 3 * c, false), (c, c, false), (c, 4 * c, true), (4 * c, c, true), (c, vp, false)] {
        let shape = Linear { rows, c, oc };
        for timing in layer(&mut *engine, shape, oc != vp, gelu)? {
            let library = timing.library;
            let p = library.problem;
            let rate = |milliseconds: f32| 2.0 * (p.m * p.n * p.k) as f64 / f64::from(milliseconds) / 1e9;
            print!(
                "{:<90} {:>10} {:>9.1} {:>9.1} {:>9.0}",
                p.to_string(),
                library.candidates,
                1e3 * library.first,
                1e3 * library.best,
                rate(library.best)
            );
            match timing.kernel {
                Some((columns, time)) => println!(" {:>9.1} {:>9.0}  {columns} columns", 1e3 * time, rate(time)),
                None => println!(),
            }
            first += library.first;
            best += library.best;
            taken += if timing.kernel_wins() { timing.kernel.unwrap_or_default().1 } else { library.best };
        }
    }
    println!("{:<90} {:>10} {:>9.1} {:>9.1}", "all", "", 1e3 * first, 1e3 * best);
    println!("{:<90} {:>10} {:>9} {:>9.1}", "all, each by the faster of the two", "", "", 1e3 * taken);
    Ok(())
}

/// Tunes one linear layer, forward and backward. `gelu`: behind it if it widens, before it if it narrows.
fn layer(engine: &mut dyn Engine, shape: Linear, bias: bool, gelu: bool) -> Result<Vec<Timing>> {
    let Linear { rows, c, oc } = shape;
    let mut plan = Plan::new();
    let float = engine.float();
    let mut add = |name: &str, len: usize| plan.add(Group::Activations, name, &[len], float);
    let (inp, dinp, pre_inp) = (add("inp", rows * c), add("dinp", rows * c), add("pre_inp", rows * c));
    let (out, dout, pre_gelu) = (add("out", rows * oc), add("dout", rows * oc), add("pre_gelu", rows * oc));
    let (weight, dweight, biases) = (add("weight", oc * c), add("dweight", oc * c), add("bias", oc));
    engine.allocate(&plan)?;
    let tuning = engine.tune(true, &mut |engine| {
        let pre = |used: bool, tensor: Tensor| (gelu && used).then_some(tensor);
        engine.matmul_forward(out, inp, weight, bias.then_some(biases), pre(oc > c, pre_gelu), shape)?;
        engine.matmul_backward(dinp, dweight, None, dout, inp, weight, pre(oc < c, pre_inp), shape)
    })?;
    Ok(tuning.timings)
}
