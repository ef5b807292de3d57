//! Quantization to FP8 and its scales.

use super::{Cuda, Float, Fp8Bits, shared_bytes};
use crate::ops::{Dequantize, Fp8Format, Fp8Scales, Quantize, Scaling, largest_rounded};
use crate::tensor::{DType, Tensor};
use crate::{Engine, Result, Workload};
use anyhow::{Context, ensure};
use cuda_std::{E4m3, E5m2, Fp8, Global, GlobalMut, bf16};
use gpu::launch::KernelLaunch;
use gpu::quantize::{Extent, QuantizedOperands};
use gpu::{bias, column_sum, quantize};

impl<T: Float> Cuda<T> {
    /// Returns the address of FP8 numbers: `tensor`, which must hold at least `len`.
    pub(super) fn fp8<F: Fp8>(&self, name: &str, tensor: Tensor, len: usize) -> Result<GlobalMut<F>> {
        Ok(GlobalMut::new(self.arena.address::<Fp8Bits>(name, tensor, len)?.cast()))
    }

    /// Returns the kernel that quantizes. With `AMAX`, it also computes the largest magnitude.
    fn quantize_kernel<F: Fp8, const AMAX: bool>(&self, op: &Quantize) -> Result<KernelLaunch> {
        let [rows, columns] = op.shape;
        let (none, unused) = (GlobalMut::from_address(0), GlobalMut::from_address(0));
        let n = op.elements();
        let (inp, scale) = (self.input::<bf16>("inp", op.inp, n)?, self.input("scale", op.scale.scale, 1)?);
        let amax = self.magnitude(op)?;
        let out = op.out.map(|out| self.fp8::<F>("out", out, n)).transpose()?;
        let Some(transposed) = op.transposed else {
            let out = out.unwrap_or(GlobalMut::from_address(0));
            let launch = quantize::quantize::<F, AMAX>(out, amax, inp, scale, self.extent(op)?);
            let (grid, shared_bytes) = ([quantize::grid(n), 1, 1], shared_bytes(quantize::maxima));
            return Ok(KernelLaunch { launch, grid, shared_bytes });
        };
        let transposed = self.fp8::<F>("transposed", transposed, n)?;
        let sums = self.partial_sums(op)?;
        let (r, c, end) = (rows as u32, columns as u32, self.end(op)?);
        let launch = match (out, sums) {
            (Some(out), Some(sums)) => {
                quantize::quantize_transpose::<F, true, AMAX, true>(out, transposed, amax, sums, inp, scale, r, c, end)
            }
            (Some(out), None) => {
                quantize::quantize_transpose::<F, true, AMAX, false>(out, transposed, amax, none, inp, scale, r, c, end)
            }
            (None, _) => quantize::quantize_transpose::<F, false, AMAX, false>(
                unused, transposed, amax, none, inp, scale, r, c, end,
            ),
        };
        let [x, y, _] = quantize::transpose_grid(rows, columns);
        let (grid, shared_bytes) = ([x, y, op.matrices as u32], shared_bytes(quantize::tile_and_maxima));
        Ok(KernelLaunch { launch, grid, shared_bytes })
    }

    /// Returns the number of rows to quantize, or null for all.
    pub(super) fn end(&self, op: &Quantize) -> Result<Global<u32>> {
        let Some(groups) = op.groups else { return Ok(Global::null()) };
        self.end_of_groups(groups, op.shape[0])
    }

    fn extent(&self, op: &Quantize) -> Result<Extent> {
        let columns = op.shape[1] as u64;
        Ok(Extent { columns, rows: self.end(op)?, ..Extent::all(op.elements()) })
    }

    /// Returns the memory for the partial sums of the columns, if the operation sums them.
    pub(super) fn partial_sums(&self, op: &Quantize) -> Result<Option<GlobalMut<f32>>> {
        let len = quantize::sum_rows(op.shape[0]) * op.shape[1];
        op.column_sums.map(|_| self.output("scratch", self.scratch(len)?, len)).transpose()
    }

    /// Adds the partial sums of the columns to the column sums.
    pub(super) fn add_column_sums(&mut self, op: &Quantize) -> Result<()> {
        let (Some(sums), Some(partials)) = (op.column_sums, self.partial_sums(op)?) else { return Ok(()) };
        let [rows, columns] = op.shape;
        let (sums, slices) = (self.output::<T>("column sums", sums, columns)?, quantize::sum_rows(rows) as u32);
        let launch = bias::bias_backward_reduce::<T>(sums, partials.reader(), slices, columns as u32);
        self.launch(launch, [column_sum::grid(columns), 1, 1], shared_bytes(column_sum::shared))
    }

    /// Returns the address of the largest magnitude, as f32 bits.
    fn magnitude(&self, op: &Quantize) -> Result<GlobalMut<u32>> {
        Ok(GlobalMut::new(self.arena.address::<f32>("amax", op.scale.amax, 1)?.cast()))
    }

    /// Returns the scale, and where to keep the largest magnitude (null if it does not change), for a kernel that quantizes its
    /// result in place of writing it in bf16. Returns `None` if the scale, or the counts of losses, need the result in bf16.
    pub(super) fn given_scale(&self, op: &Quantize) -> Result<Option<(GlobalMut<u32>, Global<f32>)>> {
        check(self, op)?;
        let amax = match op.scaling {
            Scaling::Delayed if op.scale.counts.is_none() => self.magnitude(op)?,
            Scaling::Given => GlobalMut::null(),
            Scaling::Current | Scaling::Calibrate | Scaling::Delayed => return Ok(None),
        };
        Ok(Some((amax, self.input("scale", op.scale.scale, 1)?)))
    }

    /// Returns the operands of a kernel that quantizes its result to `op.out` in place of writing it in bf16.
    /// [`transpose_quantized`] must follow. Returns `None` if the result is needed in bf16 or in another format.
    pub(super) fn fused_operands<F: Fp8>(&self, op: &Quantize) -> Result<Option<QuantizedOperands<F>>> {
        let (Some(out), Some((amax, scale))) = (op.out, self.given_scale(op)?) else { return Ok(None) };
        let out = self.fp8("out", out, op.shape[0] * op.shape[1])?;
        Ok((op.format == F::FORMAT).then_some(QuantizedOperands { out, amax, scale }))
    }

    fn launch_quantize<F: Fp8>(&mut self, op: &Quantize) -> Result<()> {
        let kernel = if op.scaling == Scaling::Delayed {
            self.quantize_kernel::<F, true>(op)?
        } else {
            self.quantize_kernel::<F, false>(op)?
        };
        self.launch_kernel(&kernel)?;
        self.add_column_sums(op)
    }

    fn launch_transpose<F: Fp8>(&mut self, op: &Quantize) -> Result<()> {
        let ([rows, columns], Some(transposed)) = (op.shape, op.transposed) else { return Ok(()) };
        let out = op.out.context("quantize: expected a quantized tensor to transpose, found none")?;
        let (inp, out) =
            (self.fp8::<F>("out", out, rows * columns)?, self.fp8::<F>("transposed", transposed, rows * columns)?);
        let (scale, r, c) = (self.input("scale", op.scale.scale, 1)?, rows as u32, columns as u32);
        let launch = match self.partial_sums(op)? {
            Some(sums) => quantize::transpose_fp8::<F, true>(out, sums, inp.reader(), scale, r, c),
            // Formats do not differ.
            None => quantize::transpose_fp8::<E4m3, false>(
                GlobalMut::new(out.pointer().cast()),
                GlobalMut::from_address(0),
                Global::new(inp.pointer().cast()),
                scale,
                r,
                c,
            ),
        };
        let grid = quantize::transpose_grid(rows, columns);
        self.launch(launch, grid, shared_bytes(quantize::tile_and_maxima))?;
        self.add_column_sums(op)
    }
}

/// Returns the f32 elements of scratch memory for the column sums of gradients of a transformer layer.
pub(super) fn scratch(workload: &Workload) -> usize {
    let partials = |oc| quantize::sum_rows(workload.rows()) * oc;
    workload.linear_layers.iter().map(|&(oc, _)| partials(oc)).max().unwrap_or(0)
}

/// Does the same as [`quantize`] after another kernel has computed `out` and the largest magnitude.
pub(super) fn transpose_quantized<T: Float>(cuda: &mut Cuda<T>, op: &Quantize) -> Result<()> {
    match op.format {
        Fp8Format::E4m3 => cuda.launch_transpose::<E4m3>(op),
        Fp8Format::E5m2 => cuda.launch_transpose::<E5m2>(op),
    }
}

/// Checks that kernels quantize tensors of this shape.
pub(super) fn check<T: Float>(cuda: &Cuda<T>, op: &Quantize) -> Result<()> {
    let [rows, columns] = op.shape;
    ensure!(cuda.fp8_dtype().is_some(), "quantize: expected bf16 and a GPU with FP8, found {}", cuda.describe());
    ensure!(
        rows.is_multiple_of(16) && columns.is_multiple_of(16),
        "quantize: expected rows and columns that are multiples of 16, found {rows} x {columns}"
    );
    ensure!(
        op.column_sums.is_none() || op.out.is_some() && op.transposed.is_some() && op.matrices == 1,
        "quantize: column sums: expected both layouts of one matrix, found one layout or several matrices"
    );
    Ok(())
}

pub(super) fn quantize<T: Float>(cuda: &mut Cuda<T>, op: Quantize) -> Result<()> {
    check(cuda, &op)?;
    let (n, extent) = (op.elements(), cuda.extent(&op)?);
    if matches!(op.scaling, Scaling::Current | Scaling::Calibrate) {
        if op.scaling == Scaling::Current {
            cuda.zero(op.scale.amax)?;
        }
        let amax = cuda.magnitude(&op)?;
        let launch = quantize::amax_bf16(amax, cuda.input("inp", op.inp, n)?, extent);
        cuda.launch(launch, [quantize::grid(n), 1, 1], shared_bytes(quantize::maxima))?;
        let scale = cuda.output("scale", op.scale.scale, 1)?;
        cuda.launch(quantize::current_scale(scale, amax.reader(), op.format.max()), [1; 3], 0)?;
    }
    if let Some(counts) = op.scale.counts.filter(|_| op.scaling != Scaling::Given) {
        let (inp, scale) = (cuda.input("inp", op.inp, n)?, cuda.input("scale", op.scale.scale, 1)?);
        let counts = GlobalMut::new(cuda.arena.address::<i32>("counts", counts, 2)?.cast());
        let (largest, smallest) = (largest_rounded(op.format), op.format.largest_rounded_to_zero());
        let launch = quantize::count_losses(counts, inp, scale, extent, largest, smallest);
        cuda.launch(launch, [quantize::grid(n), 1, 1], 0)?;
    }
    match op.format {
        Fp8Format::E4m3 => cuda.launch_quantize::<E4m3>(&op),
        Fp8Format::E5m2 => cuda.launch_quantize::<E5m2>(&op),
    }
}

pub(super) fn dequantize<T: Float>(cuda: &mut Cuda<T>, op: Dequantize) -> Result<()> {
    let Dequantize { out, inp, scale } = op;
    let n = inp.len;
    ensure!(n.is_multiple_of(16), "dequantize: expected a multiple of 16 numbers, found {n}");
    let inp = cuda.fp8::<E4m3>("inp", inp, n)?.reader();
    let (out, scale) = (cuda.output("out", out, n)?, cuda.input("scale", scale, 1)?);
    cuda.launch(quantize::dequantize(out, inp, scale, n as u64), [quantize::dequantize_grid(n), 1, 1], 0)
}

pub(super) fn scales<T: Float>(cuda: &mut Cuda<T>, op: Fp8Scales) -> Result<()> {
    let Fp8Scales { scales, amaxes, largest } = op;
    let n = scales.len;
    ensure!(
        n > 0 && amaxes.len.is_multiple_of(n) && amaxes.dtype == DType::F32,
        "scales: expected amaxes of whole steps of {n}, found {} {}",
        amaxes.len,
        amaxes.dtype.name()
    );
    let steps = (amaxes.len / n) as u32;
    let (scales, amaxes) = (cuda.output("scales", scales, n)?, cuda.output("amaxes", amaxes, amaxes.len)?);
    let launch = quantize::delayed_scales(scales, amaxes, n as u32, steps, largest);
    cuda.launch(launch, [quantize::scales_grid(n), 1, 1], 0)
}
