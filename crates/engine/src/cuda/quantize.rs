//! Quantization to FP8 and its scales.

use super::{Cuda, Float, Fp8Bits, shared_bytes};
use crate::ops::{Fp8Format, Fp8Scales, Quantize, Scaling, largest_rounded};
use crate::tensor::{DType, Tensor};
use crate::{Engine, Result};
use anyhow::ensure;
use cuda_std::launch::Launch;
use cuda_std::{E4m3, E5m2, Fp8, GlobalMut, bf16};
use gpu::quantize;

impl<T: Float> Cuda<T> {
    /// Returns the address of FP8 numbers: `tensor`, which must hold at least `len`.
    pub(super) fn fp8<F: Fp8>(&self, name: &str, tensor: Tensor, len: usize) -> Result<GlobalMut<F>> {
        Ok(GlobalMut::new(self.arena.address::<Fp8Bits>(name, tensor, len)?.cast()))
    }

    /// Returns the kernel that quantizes, with its grid and shared memory. With `AMAX`, it also computes the largest magnitude.
    fn quantize_kernel<F: Fp8, const AMAX: bool>(&self, op: &Quantize) -> Result<(Launch, [u32; 3], usize)> {
        let [rows, columns] = op.shape;
        let n = rows * columns;
        let (inp, scale) = (self.input::<bf16>("inp", op.inp, n)?, self.input("scale", op.scale.scale, 1)?);
        let amax = self.magnitude(op)?;
        let out = op.out.map(|out| self.fp8::<F>("out", out, n)).transpose()?;
        let Some(transposed) = op.transposed else {
            let out = out.unwrap_or(GlobalMut::from_address(0));
            let launch = quantize::quantize::<F, AMAX>(out, amax, inp, scale, n as u64);
            return Ok((launch, [quantize::grid(n), 1, 1], shared_bytes(quantize::maxima)));
        };
        let transposed = self.fp8::<F>("transposed", transposed, n)?;
        let (r, c) = (rows as u32, columns as u32);
        let launch = match out {
            Some(out) => quantize::quantize_transpose::<F, true, AMAX>(out, transposed, amax, inp, scale, r, c),
            None => quantize::quantize_transpose::<F, false, AMAX>(
                GlobalMut::from_address(0),
                transposed,
                amax,
                inp,
                scale,
                r,
                c,
            ),
        };
        Ok((launch, quantize::transpose_grid(rows, columns), shared_bytes(quantize::tile_and_maxima)))
    }

    /// Returns the address of the largest magnitude, as f32 bits.
    fn magnitude(&self, op: &Quantize) -> Result<GlobalMut<u32>> {
        Ok(GlobalMut::new(self.arena.address::<f32>("amax", op.scale.amax, 1)?.cast()))
    }

    fn launch_quantize<F: Fp8>(&mut self, op: &Quantize) -> Result<()> {
        let (launch, grid, shared_bytes) = if op.scaling == Scaling::Delayed {
            self.quantize_kernel::<F, true>(op)?
        } else {
            self.quantize_kernel::<F, false>(op)?
        };
        self.launch(&launch, grid, shared_bytes)
    }
}

pub(super) fn quantize<T: Float>(cuda: &mut Cuda<T>, op: Quantize) -> Result<()> {
    let [rows, columns] = op.shape;
    ensure!(cuda.fp8_dtype().is_some(), "quantize: expected bf16 and kernels for sm_90a, found {}", cuda.describe());
    ensure!(
        rows.is_multiple_of(16) && columns.is_multiple_of(16),
        "quantize: expected rows and columns that are multiples of 16, found {rows} x {columns}"
    );
    if matches!(op.scaling, Scaling::Current | Scaling::Calibrate) {
        if op.scaling == Scaling::Current {
            cuda.zero(op.scale.amax)?;
        }
        let (n, amax) = (rows * columns, cuda.magnitude(&op)?);
        let launch = quantize::amax_bf16(amax, cuda.input("inp", op.inp, n)?, n as u64);
        cuda.launch(&launch, [quantize::grid(n), 1, 1], shared_bytes(quantize::maxima))?;
        let scale = cuda.output("scale", op.scale.scale, 1)?;
        cuda.launch(&quantize::current_scale(scale, amax.reader(), op.format.max()), [1; 3], 0)?;
    }
    if let Some(counts) = op.scale.counts.filter(|_| op.scaling != Scaling::Given) {
        let n = rows * columns;
        let (inp, scale) = (cuda.input("inp", op.inp, n)?, cuda.input("scale", op.scale.scale, 1)?);
        let counts = GlobalMut::new(cuda.arena.address::<i32>("counts", counts, 2)?.cast());
        let (largest, smallest) = (largest_rounded(op.format), op.format.largest_rounded_to_zero());
        let launch = quantize::count_losses(counts, inp, scale, n as u64, largest, smallest);
        cuda.launch(&launch, [quantize::grid(n), 1, 1], 0)?;
    }
    match op.format {
        Fp8Format::E4m3 => cuda.launch_quantize::<E4m3>(&op),
        Fp8Format::E5m2 => cuda.launch_quantize::<E5m2>(&op),
    }
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
    cuda.launch(&launch, [quantize::scales_grid(n), 1, 1], 0)
}
