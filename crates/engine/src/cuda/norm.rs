//! LayerNorm and RMSNorm.

use super::{Cuda, Float, Stored, bias, quantize};
use crate::ops::{
    LayerNormBackward, LayerNormForward, MatmulShape, NormForward, Quantize, RmsNormBackward, RmsNormForward,
};
use crate::tensor::Tensor;
use crate::{Result, Workload};
use anyhow::{Context, bail};
use cuda_std::{E4m3, Element, Global, GlobalMut, bf16};
use gpu::norm::launch::{self, BackwardOperands, ForwardOperands, Kind, Shape, Size, Weight};

/// Returns the f32 elements of scratch memory; 0 for channels that no kernel supports, which the first operation reports.
pub(super) fn scratch<T: Float>(workload: &Workload, sm_count: usize) -> usize {
    let (rows, channels) = (workload.rows(), workload.channels);
    let size = Size { norm: Kind::LayerNorm, rows, channels, sm_count };
    let sums = if fuses_column_sums::<T>(channels) { 3 } else { 2 };
    launch::backward_partials::<T>(size, sums).unwrap_or(0)
}

/// Reports whether LayerNorm's backward kernel also computes the column sums of its output.
pub(super) fn fuses_column_sums<T: Float>(channels: usize) -> bool {
    launch::sums_columns::<T>(channels)
}

/// Checks that the kernels support the channels.
pub(super) fn check<T: Float>(workload: &Workload) -> Result<()> {
    Shape::of::<T>(workload.channels).with_context(|| unsupported::<T>(workload.channels)).map(drop)
}

/// Returns the message for channels that no kernel supports.
fn unsupported<T: Float>(channels: usize) -> String {
    format!(
        "normalization in {}: expected a multiple of {} channels up to {}, found {channels}; change --channels, or use \
         --device cpu",
        T::DTYPE.name(),
        T::PACKET,
        Shape::max_channels::<T>()
    )
}

/// The parts of a forward pass that both norms have.
struct Forward {
    norm: Kind,
    out: Tensor,
    mean: Option<Tensor>,
    rstd: Tensor,
    inp: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    eps: f32,
    c: usize,
    quantized: Option<Quantize>,
}

impl From<&NormForward> for Forward {
    fn from(op: &NormForward) -> Self {
        match *op {
            NormForward::LayerNorm(LayerNormForward { out, mean, rstd, inp, weight, bias, c, quantized }) => Self {
                norm: Kind::LayerNorm,
                out,
                mean: Some(mean),
                rstd,
                inp,
                weight: Some(weight),
                bias: Some(bias),
                eps: 0.0,
                c,
                quantized,
            },
            NormForward::RmsNorm(RmsNormForward { out, rstd, inp, weight, c, eps, quantized }) => {
                Self { norm: Kind::RmsNorm, out, mean: None, rstd, inp, weight, bias: None, eps, c, quantized }
            }
        }
    }
}

impl Forward {
    fn size<T: Float>(&self, cuda: &Cuda<T>) -> Size {
        Size { norm: self.norm, rows: self.rstd.len, channels: self.c, sm_count: cuda.executor.sm_count() }
    }

    /// Returns the operands in a storage type.
    fn operands<T: Float, S: Element + Stored>(&self, cuda: &Cuda<T>) -> Result<ForwardOperands<S>> {
        let (rows, n) = (self.rstd.len, self.rstd.len * self.c);
        let parameter =
            |name, tensor: Option<Tensor>| tensor.map_or(Ok(Global::null()), |tensor| cuda.input(name, tensor, self.c));
        Ok(ForwardOperands {
            mean: self.mean.map_or(Ok(GlobalMut::null()), |mean| cuda.output("mean", mean, rows))?,
            rstd: cuda.output("rstd", self.rstd, rows)?,
            inp: cuda.input("inp", self.inp, n)?,
            weight: parameter("weight", self.weight)?,
            bias: parameter("bias", self.bias)?,
            eps: self.eps,
        })
    }
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: &NormForward) -> Result<()> {
    let op = Forward::from(op);
    let n = op.rstd.len * op.c;
    // The kernel that quantizes its output in place of writing it, if there is one.
    if let Some(next) = &op.quantized
        && let Some(quantized) = cuda.fused_operands::<E4m3>(next)?
    {
        let kernel = launch::forward_fp8(quantized, op.operands::<T, bf16>(cuda)?, op.size(cuda));
        let kernel = kernel.with_context(|| unsupported::<T>(op.c))?;
        cuda.launch(&kernel.launch, kernel.grid, kernel.shared_bytes)?;
        return quantize::transpose_quantized(cuda, next);
    }
    let out = cuda.output("out", op.out, n)?;
    let kernel = launch::forward::<T>(out, op.operands::<T, T>(cuda)?, op.size(cuda));
    let kernel = kernel.with_context(|| unsupported::<T>(op.c))?;
    cuda.launch(&kernel.launch, kernel.grid, kernel.shared_bytes)?;
    op.quantized.map_or(Ok(()), |next| quantize::quantize(cuda, next))
}

/// The parts of a backward pass that both norms have.
struct Backward {
    norm: Kind,
    dinp: Tensor,
    dout: Tensor,
    inp: Tensor,
    mean: Option<Tensor>,
    rstd: Tensor,
    /// The weight and its gradient.
    weight: Option<[Tensor; 2]>,
    dbias: Option<Tensor>,
    column_sums: Option<Tensor>,
    c: usize,
}

impl Backward {
    fn run<T: Float>(self, cuda: &mut Cuda<T>) -> Result<()> {
        let Self { norm, dinp, dout, inp, mean, rstd, weight, dbias, column_sums, c } = self;
        let (rows, n) = (rstd.len, rstd.len * c);
        let size = Size { norm, rows, channels: c, sm_count: cuda.executor.sm_count() };
        let sums = usize::from(weight.is_some()) + usize::from(dbias.is_some()) + usize::from(column_sums.is_some());
        let partials = launch::backward_partials::<T>(size, sums).with_context(|| unsupported::<T>(c))?;
        let output = |name, tensor: Option<Tensor>| tensor.map(|tensor| cuda.output(name, tensor, c)).transpose();
        let weight = match weight {
            Some([weight, dweight]) => Some(Weight {
                weight: cuda.input("weight", weight, c)?,
                dweight: cuda.output("dweight", dweight, c)?,
                dbias: output("dbias", dbias)?,
                column_sums: output("column_sums", column_sums)?,
                partials: cuda.output("scratch", cuda.scratch(partials)?, partials)?,
            }),
            None => None,
        };
        let operands = BackwardOperands {
            dinp: cuda.output("dinp", dinp, n)?,
            dout: cuda.input("dout", dout, n)?,
            inp: cuda.input("inp", inp, n)?,
            mean: mean.map(|mean| cuda.input("mean", mean, rows)).transpose()?,
            rstd: cuda.input("rstd", rstd, rows)?,
            weight,
        };
        let kernels = launch::backward::<T>(operands, size).with_context(|| unsupported::<T>(c))?;
        cuda.launch_all(&kernels)
    }
}

pub(super) fn layernorm_backward<T: Float>(cuda: &mut Cuda<T>, op: LayerNormBackward) -> Result<()> {
    let LayerNormBackward { dinp, dweight, dbias, column_sums, dout, inp, weight, mean, rstd, c } = op;
    let fused_sums = column_sums.filter(|_| fuses_column_sums::<T>(c));
    let backward = Backward {
        norm: Kind::LayerNorm,
        dinp,
        dout,
        inp,
        mean: Some(mean),
        rstd,
        weight: Some([weight, dweight]),
        dbias: Some(dbias),
        column_sums: fused_sums,
        c,
    };
    backward.run(cuda)?;
    match column_sums {
        Some(sums) if fused_sums.is_none() => {
            let shape = MatmulShape { rows: rstd.len, c, oc: c };
            let kernels = bias::backward_kernels(cuda, sums, dinp, shape)?;
            cuda.launch_all(&kernels)
        }
        _ => Ok(()),
    }
}

pub(super) fn rmsnorm_backward<T: Float>(cuda: &mut Cuda<T>, op: RmsNormBackward) -> Result<()> {
    let RmsNormBackward { dinp, dweight, dout, inp, weight, rstd, c } = op;
    let weight = match (weight, dweight) {
        (Some(weight), Some(dweight)) => Some([weight, dweight]),
        (None, None) => None,
        _ => bail!("rmsnorm_backward: expected both weight and dweight or neither, found one"),
    };
    let (norm, mean, dbias, column_sums) = (Kind::RmsNorm, None, None, None);
    Backward { norm, dinp, dout, inp, mean, rstd, weight, dbias, column_sums, c }.run(cuda)
}
