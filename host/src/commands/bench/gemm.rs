//! `bench gemm`: times the GEMMs of a model.

use super::table::{Cell, Column, Json, Table};
use crate::commands::resources::Hardware;
use crate::values::count;
use cublaslt::Epilogue;
use engine::plan::{Group, Plan};
use engine::tensor::Tensor;
use engine::{Ending, Engine, GeluForward, GeluInput, Linear, Result, Scope, Timing};
use model::Descriptor;

/// Time the GEMMs of a model: cuBLASLt's first choice, its fastest candidate, and the fastest Rust kernel
#[derive(Clone, Debug, clap::Args)]
pub struct Gemm {
    /// Model size, such as d12, gpt2-xl or gpt3:c768
    #[arg(short = 'e', long, value_name = "NAME", default_value = "d12")]
    model: String,
    /// Sequences in a batch
    #[arg(short, long, value_name = "B", default_value = "64", value_parser = count)]
    batch: usize,
    /// Tokens in a sequence
    #[arg(short = 't', long, value_name = "T", default_value = "1024", value_parser = count)]
    seq: usize,

    /// Time square matrices of this size instead
    #[arg(long, value_name = "N", value_parser = count)]
    square: Option<usize>,

    #[command(flatten)]
    hardware: Hardware,

    #[command(flatten)]
    json: Json,
}

const COLUMNS: &[Column] = &[
    Column::text("product", "GEMM", 90),
    Column::number("candidates", "candidates", 10, 0),
    Column::number("first_us", "first us", 9, 1),
    Column::number("best_us", "best us", 9, 1),
    Column::number("best_tflops", "TFLOP/s", 9, 0),
    Column::number("rust_us", "Rust us", 9, 1),
    Column::number("rust_tflops", "TFLOP/s", 9, 0),
    Column::text("rust_tiling", "tile configuration", 22),
];

pub fn run(options: &Gemm) -> Result<()> {
    let descriptor = options.model.parse::<Descriptor>()?;
    let mut engine = options.hardware.open_quietly()?;
    let (c, vp, rows) = (descriptor.channels, descriptor.padded_vocab(), options.batch * options.seq);
    let mut table = Table::new("gemm", COLUMNS, &*engine, &options.json);
    table.print_heading()?;
    let (mut first, mut best, mut taken) = (0.0, 0.0, 0.0);
    let layers = [(c, 3 * c, false), (c, c, false), (c, 4 * c, true), (4 * c, c, true), (c, vp, false)];
    let layers = match options.square {
        Some(n) => vec![(Linear { rows: n, c: n, oc: n }, false, false)],
        None => layers.map(|(c, oc, gelu)| (Linear { rows, c, oc }, oc != vp, gelu)).to_vec(),
    };
    for (shape, bias, gelu) in layers {
        for timing in layer(&mut *engine, shape, bias, gelu)? {
            let library = timing.library;
            let p = library.problem;
            let us = |milliseconds: f32| 1e3 * f64::from(milliseconds);
            let rate = |milliseconds: f32| 2.0 * (p.m * p.n * p.k) as f64 / us(milliseconds) / 1e6;
            table.row(&[
                p.to_string().into(),
                library.candidates.into(),
                us(library.first).into(),
                us(library.best).into(),
                rate(library.best).into(),
                timing.kernel.map(|(_, time)| us(time)).into(),
                timing.kernel.map(|(_, time)| rate(time)).into(),
                timing.kernel.map(|(tiling, _)| tiling.to_string()).into(),
            ])?;
            if p.epilogue == Epilogue::DGeluAndGelu {
                // An alternative to the previous GEMM, which the sum already contains.
                continue;
            }
            first += us(library.first);
            best += us(library.best);
            taken += us(if timing.kernel_wins() { timing.kernel.map_or(0.0, |(_, time)| time) } else { library.best });
        }
    }
    let mut sum = |name: &str, [first, best, taken]: [Option<f64>; 3]| {
        let [first, best, taken] = [first, best, taken].map(Cell::from);
        table.row(&[name.into(), Cell::Empty, first, best, Cell::Empty, taken, Cell::Empty, Cell::Empty])
    };
    sum("all", [Some(first), Some(best), None])?;
    sum("all, faster of the two for each", [None, None, Some(taken)])?;
    table.finish()
}

/// Tunes one linear layer, forward and backward. With `gelu`, a GELU follows a layer that widens, and precedes one that narrows.
fn layer(engine: &mut dyn Engine, shape: Linear, bias: bool, gelu: bool) -> Result<Vec<Timing>> {
    let Linear { rows, c, oc } = shape;
    let mut plan = Plan::new();
    let float = engine.float();
    let mut add = |name: &str, len: usize| plan.add(Group::Activations, name, &[len], float);
    let (inp, dinp, pre_inp) = (add("inp", rows * c), add("dinp", rows * c), add("pre_inp", rows * c));
    let (out, dout, pre_gelu) = (add("out", rows * oc), add("dout", rows * oc), add("pre_gelu", rows * oc));
    let (weight, dweight) = (add("weight", oc * c), add("dweight", oc * c));
    let (biases, dbias) = (add("bias", c.max(oc)), add("dbias", oc));
    let (channels, padded_vocab) = (c.min(oc), c.max(oc));
    let scope =
        Scope { b: 1, t: rows, channels, heads: 1, padded_vocab, parameters: 0, parts: 1, ranges: 0, training: true };
    engine.plan(&mut plan, &scope);
    engine.allocate(&plan)?;
    let tuning = engine.tune(true, &mut |engine| {
        let (widened, narrowed) = (gelu && oc > c, gelu && oc < c);
        let ending = match bias {
            _ if widened => Ending::Gelu(pre_gelu),
            // A layer with as many outputs as the model has channels adds to the residual stream.
            true if oc <= c => Ending::Residual(dout),
            _ => Ending::Sum,
        };
        let bias = |tensor: Tensor| bias.then_some(tensor);
        engine.matmul_forward(out, inp, weight, bias(biases), ending, shape)?;
        // The setting in which inp is recomputed: the previous layer computed it from as many columns as this one outputs.
        let before = Linear { rows, c: oc, oc: c };
        let again = Some(GeluForward { inp: out, weight: dweight, bias: bias(biases), shape: before });
        let before_gelu = narrowed.then_some(GeluInput { pre_gelu: pre_inp, again });
        engine.matmul_backward(dinp, dweight, bias(dbias), dout, inp, weight, before_gelu, shape)
    })?;
    Ok(tuning.timings)
}
