//! `bench gemm`: the GEMMs of a model's linear layers.

use super::table::{Cell, Column, Json, Table};
use crate::commands::resources::Hardware;
use crate::values::count;
use anyhow::ensure;
use engine::gemm::{GemmTiming, Pass};
use engine::ops::{
    Activation, ActivationForward, ActivationInput, AttentionShape, Epilogue, Fp8Accumulation, Fp8Backward, Fp8Forward,
    Fp8Scale, MatmulBackward, MatmulForward, MatmulShape, Scaling,
};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{Engine, Result, Workload};
use gpu::experts::Groups;
use model::Descriptor;
use system::progress::{self, Unit};

/// Time the GEMMs of a model: cuBLASLt's first choice, its fastest algorithm, and the fastest kernel of this program
#[derive(Clone, Debug, clap::Args)]
pub struct Gemm {
    /// Model, for example d12, d24 or gpt3:c768
    #[arg(short = 'e', long, default_value = "d12")]
    model: String,
    /// Sequences in a micro-batch
    #[arg(short, long, default_value = "64")]
    batch: usize,
    /// Tokens in a sequence
    #[arg(short = 't', long, default_value = "1024")]
    seq: usize,

    /// Time square matrices of this size instead of a model's
    #[arg(long, value_name = "N", value_parser = count)]
    square: Option<usize>,

    /// Time a linear layer with this number of rows, output channels and input channels instead of a model's; may be repeated
    #[arg(long, value_name = "ROWS,OUT,IN", value_parser = shape)]
    shape: Vec<MatmulShape>,

    /// Divide the rows of each --shape unevenly among this number of experts, each with a matrix of its own
    #[arg(long, value_name = "N", value_parser = count, requires = "shape")]
    experts: Option<usize>,

    /// Multiply in FP8, with fast and with exact accumulation
    #[arg(long)]
    fp8: bool,

    #[command(flatten)]
    hardware: Hardware,

    #[command(flatten)]
    pub(super) json: Json,
}

/// Parses rows, output channels and input channels.
fn shape(text: &str) -> std::result::Result<MatmulShape, String> {
    let numbers: Vec<usize> = text.split(',').filter_map(|number| number.parse().ok()).collect();
    match numbers[..] {
        [rows, oc, c] if text.split(',').count() == 3 => Ok(MatmulShape { rows, c, oc }),
        _ => Err(format!("expected ROWS,OUT,IN such as 65536,768,3072, found {text}")),
    }
}

const COLUMNS: &[Column] = &[
    Column::text("gemm", "GEMM", 52),
    Column::number("candidates", "candidates", 10, 0),
    Column::number("first_us", "first us", 9, 1),
    Column::number("best_us", "best us", 9, 1),
    Column::number("best_tflops", "TFLOP/s", 9, 0),
    Column::number("wgmma_us", "kernel us", 9, 1),
    Column::number("wgmma_tflops", "TFLOP/s", 9, 0),
    Column::text("wgmma_config", "tile", 22),
];

/// A linear layer of a model.
#[derive(Clone, Copy)]
struct Layer {
    shape: MatmulShape,
    /// The number of matrices among which the rows are divided, if there are several.
    experts: Option<usize>,
    bias: bool,
    /// A GELU follows the layer if it widens, and precedes it if it narrows.
    gelu: bool,
}

/// Runs the command.
pub fn run(options: &Gemm) -> Result<()> {
    let descriptor = options.model.parse::<Descriptor>()?;
    let mut engine = options.hardware.open_quietly()?;
    let mut table = Table::new("gemm", COLUMNS, &*engine, &options.json);
    table.print_heading()?;
    let modes = if options.fp8 { &[Some(Fp8Accumulation::Fast), Some(Fp8Accumulation::Exact)][..] } else { &[None] };
    modes.iter().try_for_each(|fp8| time_layers(&mut *engine, &layers(options, &descriptor), *fp8, &mut table))?;
    table.finish_rows()
}

/// Times layers, with FP8 operands if `fp8` is given, and prints their rows and sums.
fn time_layers(
    engine: &mut dyn Engine,
    layers: &[Layer],
    fp8: Option<Fp8Accumulation>,
    table: &mut Table,
) -> Result<()> {
    let us = |milliseconds: f32| 1e3 * f64::from(milliseconds);
    let (mut first, mut best, mut fastest) = (0.0, 0.0, 0.0);
    let progress = progress::start("timing layers", Unit::Count, layers.len() as u64);
    for &layer in layers {
        let timings = tune(engine, layer, fp8)?;
        progress.add(1);
        for timing in timings {
            table.row(&row(&timing))?;
            if matches!(timing.gemm.epilogue.activation, Some((_, Pass::BackwardAndValue))) {
                // The same GEMM as the previous one, with recomputation.
                continue;
            }
            if timing.candidates > 0 {
                first += us(timing.library_first);
                best += us(timing.library);
            }
            let kernel = timing.kernel.filter(|_| timing.kernel_wins()).map(|(_, milliseconds)| milliseconds);
            fastest += us(kernel.unwrap_or(timing.library));
        }
    }
    ensure!(
        fastest > 0.0,
        "expected a GPU, found {}, which has one implementation of each GEMM; use --device cuda",
        engine.describe()
    );
    let mut sum = |name: &str, [first, best, fastest]: [Option<f64>; 3]| {
        let [first, best, fastest] = [first, best, fastest].map(Cell::from);
        table.row(&[name.into(), Cell::Empty, first, best, Cell::Empty, fastest, Cell::Empty, Cell::Empty])
    };
    sum("sum", [Some(first), Some(best), None])?;
    sum("sum, each by the faster backend", [None, None, Some(fastest)])
}

fn layers(options: &Gemm, descriptor: &Descriptor) -> Vec<Layer> {
    let (c, vp, rows) = (descriptor.channels, descriptor.padded_vocab(), options.batch * options.seq);
    if !options.shape.is_empty() {
        let of = |&shape: &MatmulShape| {
            // The rows in the order of experts.
            let rows = options.experts.map_or(shape.rows, |experts| Groups::new(experts, shape.rows).rows);
            Layer { shape: MatmulShape { rows, ..shape }, experts: options.experts, bias: false, gelu: false }
        };
        return options.shape.iter().map(of).collect();
    }
    if let Some(n) = options.square {
        return vec![Layer { shape: MatmulShape { rows: n, c: n, oc: n }, experts: None, bias: false, gelu: false }];
    }
    [(c, 3 * c, false), (c, c, false), (c, 4 * c, true), (4 * c, c, true), (c, vp, false)]
        .map(|(c, oc, gelu)| Layer { shape: MatmulShape { rows, c, oc }, experts: None, bias: oc != vp, gelu })
        .to_vec()
}

fn row(timing: &GemmTiming) -> [Cell; 8] {
    let gemm = timing.gemm;
    let us = |milliseconds: f32| 1e3 * f64::from(milliseconds);
    // cuBLASLt computes no GEMMs of experts.
    let library = Some(timing.library).filter(|milliseconds| milliseconds.is_finite());
    let rate = |milliseconds: f32| 2.0 * (gemm.m * gemm.n * gemm.k) as f64 / us(milliseconds) / 1e6;
    [
        gemm.to_string().into(),
        timing.candidates.into(),
        library.map(|_| us(timing.library_first)).into(),
        library.map(us).into(),
        library.map(rate).into(),
        timing.kernel.map(|(_, time)| us(time)).into(),
        timing.kernel.map(|(_, time)| rate(time)).into(),
        timing.kernel.map(|(config, _)| config.to_string()).into(),
    ]
}

/// Plans the FP8 operands of a linear layer with this number of matrices and its gradients. The gradient of its output is in E5M2,
/// quantized before.
fn fp8_operands(
    plan: &mut Plan,
    shape: MatmulShape,
    matrices: usize,
    accumulation: Fp8Accumulation,
) -> (Fp8Forward, Fp8Backward) {
    let MatmulShape { rows, c, oc } = shape;
    let mut add = |name: &str, len: usize, dtype| plan.add(Group::Activations, name, &[len], dtype);
    let mut matrix = |name: &str, len| add(name, len, DType::Fp8);
    let (inp, inp_transposed) = (matrix("inp8", rows * c), matrix("inp8_t", rows * c));
    let weights = matrices * oc * c;
    let (weight, weight_transposed) = (matrix("weight8", weights), matrix("weight8_t", weights));
    let dout = [matrix("dout8", rows * oc), matrix("dout8_t", rows * oc)];
    let mut scale = |name: &str| add(name, 1, DType::F32);
    let (inp_scale, weight_scale) = (scale("inp_scale"), scale("weight_scale"));
    let dout_scale = Fp8Scale { scale: scale("dout_scale"), amax: scale("dout_amax"), counts: None };
    let forward = Fp8Forward { inp, inp_scale, out: None, weight, weight_scale, accumulation };
    let backward = Fp8Backward {
        dout,
        dout_is_quantized: true,
        dout_scale,
        dout_is_of_logits: false,
        scaling: Scaling::Given,
        inp_transposed,
        inp_is_quantized: true,
        inp_scale: Fp8Scale { scale: inp_scale, ..dout_scale },
        weight_transposed,
        weight_scale,
        accumulation,
        dinp: None,
    };
    (forward, backward)
}

/// Times the GEMMs of one linear layer, forward and backward.
fn tune(
    engine: &mut dyn Engine,
    Layer { shape, experts, bias, gelu }: Layer,
    fp8: Option<Fp8Accumulation>,
) -> Result<Vec<GemmTiming>> {
    let MatmulShape { rows, c, oc } = shape;
    let mut plan = Plan::new();
    let dtype = engine.dtype();
    let mut add = |name: &str, len: usize| plan.add(Group::Activations, name, &[len], dtype);
    let (inp, dinp, pre_inp) = (add("inp", rows * c), add("dinp", rows * c), add("pre_inp", rows * c));
    let (out, dout, pre_gelu) = (add("out", rows * oc), add("dout", rows * oc), add("pre_gelu", rows * oc));
    let matrices = experts.unwrap_or(1);
    let (weight, dweight) = (add("weight", matrices * oc * c), add("dweight", matrices * oc * c));
    let (biases, dbias) = (add("bias", c.max(oc)), add("dbias", oc));
    let groups = experts.map(|count| {
        let len = Groups { count, rows }.words();
        engine::ops::Groups { layout: plan.add(Group::Activations, "groups", &[len], DType::I32), count }
    });
    let operands = fp8.map(|accumulation| fp8_operands(&mut plan, shape, matrices, accumulation));
    let workload = Workload {
        attention: AttentionShape { b: 1, t: rows, heads: 1, kv_heads: 1, head_size: c.min(oc) },
        channels: c.min(oc),
        linear_layers: vec![(oc, c), (c, oc)],
        mlp_channels: 4 * c.min(oc),
        router: None,
        routed_tokens: 0,
        qk_norm: None,
        padded_vocab: c.max(oc),
        parameters: 0,
        norm_tensors: 1,
        update_ranges: 0,
        training: true,
    };
    engine.plan(&mut plan, &workload);
    engine.allocate(&plan)?;
    let tuning = engine.tune(true, &mut |engine| {
        let (widens, narrows) = (gelu && oc > c, gelu && oc < c);
        let epilogue = match bias {
            _ if widens => Epilogue::Activation(Activation::Gelu, pre_gelu),
            // A layer with as many output channels as the model adds to the residual stream.
            true if oc <= c => Epilogue::Residual(dout),
            _ => Epilogue::None,
        };
        let bias = |tensor: Tensor| bias.then_some(tensor);
        engine.run(MatmulForward {
            out,
            inp,
            weight,
            bias: bias(biases),
            epilogue,
            shape,
            fp8: operands.map(|(forward, _)| forward),
            groups,
        })?;
        // The previous layer recomputes the input from as many channels as this layer's output has.
        let previous = MatmulShape { rows, c: oc, oc: c };
        let forward = ActivationForward { inp: out, weight: dweight, bias: bias(biases), shape: previous };
        let input = ActivationInput { activation: Activation::Gelu, preactivation: pre_inp, recompute: Some(forward) };
        let activation = narrows.then_some(input);
        engine.run(MatmulBackward {
            adds_to_dinp: false,
            dinp,
            dweight: Some(dweight),
            // A quantized gradient has been summed when it was quantized.
            dbias: bias(dbias).filter(|_| fp8.is_none()),
            dout,
            inp,
            weight,
            activation,
            shape,
            fp8: operands.map(|(_, backward)| backward),
            groups,
        })
    })?;
    Ok(tuning.timings)
}
