//! Measurements of FP8 GEMMs on a GPU: the wgmma kernels beside cuBLASLt.

use super::functions::Functions;
use super::{Options, modules, shared_bytes};
use crate::Result;
use anyhow::{Context, ensure};
use cublaslt::{Element, Epilogue, Fp8, Handle, Matmuls, Operands, Problem};
use cuda_driver::{DeviceMemory, ElementType, Gpu, L2Promotion, Module, Stopwatch, Stream, Swizzle};
use cuda_std::fp8::Fp8Format;
use cuda_std::hopper::TensorMap;
use cuda_std::shared::Layout;
use cuda_std::{E4m3, Element as _, Global, GlobalMut, bf16};
use gpu::launch::{Extents, KernelLaunch};
use gpu::matmul::fp8_launch::{Fp8Epilogue, Fp8Gemm, Fp8Operands};
use gpu::matmul::launch::{GemmShape, Map, TileConfig};
use gpu::quantize::{self, QuantizedOperands, quantize_transpose as transpose, transpose_fp8};
use gpu::quantize_activation::{SwiGlu, quantize_activation, quantize_activation_gradient, tiles_and_maxima};
use gpu::rmsnorm;
use gpu::rmsnorm::launch::{Fp8ForwardOperands, Size};
use std::cell::Cell;

/// Alignment of the buffers in device memory.
const ALIGNMENT: usize = 1024;
/// Values that are generated on the host; buffers repeat them.
const VALUES: usize = 1 << 20;
/// f32 elements of scratch memory for partial sums.
const SCRATCH: usize = 16 << 20;
/// Rows and columns of the output that are compared with f64.
const CHECKED: [usize; 2] = [4, 256];
/// Milliseconds of the final measurement of a GEMM.
const SUSTAINED: f32 = 150.0;
/// Standard deviation of the operands before quantization to E4M3, in units of its numbers.
const DEVIATION: f32 = 64.0;

/// A GEMM out (M, N) = a (M, K) · b (N, K)ᵀ to measure.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Case {
    /// The shape.
    pub shape: GemmShape,
    /// Whether the result is added to out and K may be split.
    pub weight_gradient: bool,
}

/// One way to compute a GEMM, and its time.
#[derive(Clone, Debug)]
pub struct Fp8Timing {
    /// The kernel with its tile configuration, or the library.
    pub name: String,
    /// Milliseconds of a launch under sustained load.
    pub milliseconds: f32,
    /// The largest difference to cuBLASLt's result in bf16, in units of the root mean square of out. `None` for a weight
    /// gradient, which accumulates.
    pub error: Option<f64>,
}

/// Errors of the accumulation: root mean square and maximum of the difference to f64, in units of the root mean square
/// of the result.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Accumulation {
    /// Tensor cores accumulate over all of K.
    pub fast: [f64; 2],
    /// Sums over 128 columns of K are added in f32.
    pub exact: [f64; 2],
}

/// The time of a kernel that makes FP8 copies.
#[derive(Clone, Debug)]
pub struct QuantizationTiming {
    /// The kernel.
    pub name: String,
    /// Milliseconds of a launch under sustained load.
    pub milliseconds: f32,
    /// Bytes read and written.
    pub bytes: usize,
}

/// A GPU with the FP8 kernels and cuBLASLt.
pub struct Fp8Bench {
    stream: Stream,
    cublaslt: Matmuls,
    functions: Functions,
    gpu: Gpu,
    /// E4M3 values, repeated in the operands.
    values: [Vec<E4m3>; 2],
}

/// Buffers of one case in device memory.
struct Buffers {
    memory: DeviceMemory,
    used: Cell<usize>,
}

impl Buffers {
    fn new(gpu: &Gpu, bytes: usize) -> Result<Self> {
        Ok(Self { memory: DeviceMemory::new(gpu, bytes)?, used: Cell::new(0) })
    }

    fn take(&self, bytes: usize) -> Result<u64> {
        let start = self.used.get();
        let end = (start + bytes).next_multiple_of(ALIGNMENT);
        ensure!(
            end <= self.memory.bytes(),
            "bench: expected {end} bytes of device memory, found {}",
            self.memory.bytes()
        );
        self.used.set(end);
        Ok(self.memory.address() + start as u64)
    }
}

/// The tensors of kernels that quantize what they compute.
struct FusedTensors {
    inp: Global<bf16>,
    dout: Global<bf16>,
    transposed: GlobalMut<E4m3>,
}

/// The addresses of a case's buffers.
#[derive(Clone, Copy)]
struct Addresses {
    a: u64,
    b: u64,
    a_bf16: u64,
    b_bf16: u64,
    out: u64,
    reference: u64,
    f32_out: u64,
    scales: [u64; 2],
    scratch: u64,
}

/// Returns pseudo-random normally distributed values in E4M3.
fn normal_values(seed: u32) -> Vec<E4m3> {
    let mut state = u64::from(seed) << 32 | 0x9e37_79b9;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    // The sum of twelve uniform values has variance 1.
    (0..VALUES).map(|_| E4m3::from_f32(DEVIATION * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0))).collect()
}

impl Fp8Bench {
    /// Opens the GPU.
    ///
    /// # Errors
    /// If the GPU cannot run kernels for `sm_90a`.
    pub fn open(options: &Options) -> Result<Self> {
        let gpu = Gpu::open(options.gpu)?;
        let choice = modules::select(modules::EMBEDDED.modules()?, gpu.info(), options.kernels.as_deref())?;
        ensure!(
            choice.is_hopper(),
            "FP8: expected a GPU of compute capability 9.0 and sm_90a kernels, found {} with {choice} kernels",
            gpu.info().name
        );
        let module = Module::load(&gpu, &choice.to_string(), choice.image())?;
        let cublaslt = Matmuls::new(Handle::new(&gpu)?)?;
        let stream = Stream::new(&gpu)?;
        let values = [normal_values(1), normal_values(2)];
        Ok(Self { stream, cublaslt, functions: Functions::new(module), gpu, values })
    }

    /// Describes the GPU.
    pub fn describe(&self) -> String {
        self.gpu.info().name.clone()
    }

    /// Measures a GEMM: cuBLASLt in bf16, and cuBLASLt and the fastest kernel in FP8 in both modes.
    pub fn measure(&mut self, case: Fp8Case) -> Result<(Vec<Fp8Timing>, Option<Fp8Accumulation>)> {
        let GemmShape { m, n, k } = case.shape;
        let bytes = 3 * (m + n) * k + 4 * m * n + CHECKED[0] * n * 4 + SCRATCH * 4 + 256 * ALIGNMENT;
        let buffers = Buffers::new(&self.gpu, bytes)?;
        let take = |bytes| buffers.take(bytes);
        let at = Addresses {
            a: take(m * k)?,
            b: take(n * k)?,
            a_bf16: take(2 * m * k)?,
            b_bf16: take(2 * n * k)?,
            out: take(2 * m * n)?,
            reference: take(2 * m * n)?,
            f32_out: take(4 * CHECKED[0] * n)?,
            scales: [take(4)?, take(4)?],
            scratch: take(4 * SCRATCH)?,
        };
        self.fill(case, at)?;
        let mut timings = Vec::from_iter(self.library(case, at, None)?);
        for fast_accumulation in [true, false] {
            let fp8 = Fp8 { a_e5m2: false, b_e5m2: false, fast_accumulation };
            timings.extend(self.library(case, at, Some(fp8))?);
        }
        for exact in [false, true] {
            timings.push(self.kernel(case, at, exact, &buffers)?);
        }
        let accumulation = if case.weight_gradient { None } else { Some(self.accumulation(case.shape, at, &buffers)?) };
        Ok((timings, accumulation))
    }

    /// Writes the operands and the scales.
    fn fill(&self, case: Fp8Case, at: Addresses) -> Result<()> {
        let GemmShape { m, n, k } = case.shape;
        // A power of two, so that the operands in bf16 are exact. The sums are near 1.
        let scale = (-(DEVIATION * (k as f32).powf(0.25)).log2().round()).exp2();
        for ((values, address), (bf16_address, len)) in
            self.values.iter().zip([at.a, at.b]).zip([(at.a_bf16, m * k), (at.b_bf16, n * k)])
        {
            let scaled: Vec<bf16> = values.iter().map(|x| bf16::from_f32(x.to_f32() * scale)).collect();
            let mut start = 0;
            while start < len {
                let count = VALUES.min(len - start);
                // SAFETY: the buffers have `len` elements.
                unsafe {
                    self.stream.upload(address + start as u64, &values[..count])?;
                    self.stream.upload(bf16_address + 2 * start as u64, &scaled[..count])?;
                }
                start += count;
            }
        }
        for address in at.scales {
            // SAFETY: the buffer has one element.
            unsafe { self.stream.upload(address, &[scale])? };
        }
        Ok(self.stream.synchronize()?)
    }

    /// Measures cuBLASLt, in bf16 without `fp8`. Returns `None` if it has no algorithm.
    fn library(&mut self, case: Fp8Case, at: Addresses, fp8: Option<Fp8>) -> Result<Option<Fp8Timing>> {
        let GemmShape { m, n, k } = case.shape;
        // Column-major: the transposed output.
        let problem = Problem {
            m: n,
            n: m,
            k,
            transpose_a: true,
            transpose_b: false,
            element: fp8.map_or(Element::Bf16, Element::Fp8),
            epilogue: Epilogue::None,
            accumulate: case.weight_gradient,
            output: None,
            batched: false,
        };
        let operands = Operands {
            a: if fp8.is_some() { at.b } else { at.b_bf16 },
            b: if fp8.is_some() { at.a } else { at.a_bf16 },
            d: if fp8.is_some() { at.out } else { at.reference },
            fp8_scales: fp8.is_some().then_some([at.scales[1], at.scales[0]]),
            ..Operands::default()
        };
        // SAFETY: the buffers have the sizes that the shape implies.
        let timing = match unsafe { self.cublaslt.tune(&self.stream, &problem, &operands) } {
            Err(cublaslt::Error::NoAlgorithm { .. }) => return Ok(None),
            timing => timing?,
        };
        let (cublaslt, stream) = (&mut self.cublaslt, &self.stream);
        // SAFETY: as above.
        let run = || Ok(unsafe { cublaslt.run(stream, &problem, &operands) }?);
        let milliseconds = sustained(stream, timing.best, run)?;
        let name = match fp8 {
            None => "cuBLASLt bf16",
            Some(Fp8 { fast_accumulation: true, .. }) => "cuBLASLt FP8 fast",
            Some(_) => "cuBLASLt FP8 exact",
        };
        let error = if fp8.is_some() { self.error(case, at)? } else { None };
        Ok(Some(Fp8Timing { name: name.to_owned(), milliseconds, error }))
    }

    /// Measures the fastest configuration of the kernel.
    fn kernel(&mut self, case: Fp8Case, at: Addresses, exact: bool, buffers: &Buffers) -> Result<Fp8Timing> {
        let epilogue = if case.weight_gradient { Fp8Epilogue::Residual } else { Fp8Epilogue::Plain };
        let gemm = Fp8Gemm { a: Fp8Format::E4m3, epilogue, exact };
        let sm_count = self.gpu.info().sm_count as usize;
        let clock = Stopwatch::new(&self.stream)?;
        let mut best: Option<(f32, TileConfig, Vec<KernelLaunch>)> = None;
        for config in gemm.candidate_configs(case.shape, sm_count, SCRATCH) {
            let launches = self.launches(gemm, case.shape, config, at, at.out, buffers)?;
            self.run(&launches)?;
            let (functions, stream) = (&mut self.functions, &self.stream);
            let milliseconds = clock.time(stream, 4, || run(functions, stream, &launches))?;
            if best.as_ref().is_none_or(|(fastest, ..)| milliseconds < *fastest) {
                best = Some((milliseconds, config, launches));
            }
        }
        let (estimate, TileConfig { tile, split_k }, launches) =
            best.with_context(|| format!("{gemm:?}: no configuration for {:?}", case.shape))?;
        let (functions, stream) = (&mut self.functions, &self.stream);
        let milliseconds = sustained(stream, estimate, || run(functions, stream, &launches))?;
        let mode = if exact { "exact" } else { "fast" };
        let slices = if split_k > 1 { format!(", K in {split_k}") } else { String::new() };
        let name = format!("kernel {mode}, {}x{}{slices}", tile.tile_m(), tile.tile_n());
        Ok(Fp8Timing { name, milliseconds, error: self.error(case, at)? })
    }

    /// Returns the launches of a kernel with an output at `out`.
    fn launches(
        &self,
        gemm: Fp8Gemm,
        shape: GemmShape,
        config: TileConfig,
        at: Addresses,
        out: u64,
        buffers: &Buffers,
    ) -> Result<Vec<KernelLaunch>> {
        let maps = gemm.maps(shape, config.tile);
        let map = |base, map, bytes| self.tensor_map(base, map, bytes, buffers);
        let out_map = map(at.out, maps.out, 2)?;
        let operands = Fp8Operands {
            a: map(at.a, maps.a, 1)?,
            b: map(at.b, maps.b, 1)?,
            out: out_map,
            aux: out_map,
            second: out_map,
            bias: Global::from_address(0),
            scale_a: Global::from_address(at.scales[0]),
            scale_b: Global::from_address(at.scales[1]),
            scale_out: Global::from_address(0),
            amax: GlobalMut::from_address(0),
            out_address: out,
            scratch: GlobalMut::from_address(at.scratch),
        };
        Ok(gemm.launches(shape, config, operands, self.gpu.info().sm_count as usize))
    }

    /// Creates the tensor map of a matrix with elements of `bytes` bytes.
    fn tensor_map(&self, base: u64, map: Map, bytes: usize, buffers: &Buffers) -> Result<Global<TensorMap>> {
        let Extents::Matrix([rows, columns]) = map.extents else { unreachable!("FP8 GEMMs use matrices only") };
        let element = if bytes == 1 { ElementType::U8 } else { ElementType::Bf16 };
        let (extents, strides) = ([columns as u64, rows as u64], [(bytes * columns) as u64]);
        let tile = [map.tile.1, map.tile.0];
        let map =
            cuda_driver::TensorMap::tiled(element, base, extents, &strides, tile, Swizzle::B128, L2Promotion::B256)?;
        let address = buffers.take(size_of::<TensorMap>())?;
        // SAFETY: the buffer has the size of the map, and the driver reads pageable memory before the call returns.
        unsafe { self.stream.upload(address, map.as_words())? };
        Ok(Global::from_address(address))
    }

    /// Measures the kernels that make FP8 copies of a bf16 tensor (rows, columns), and a copy of that tensor.
    ///
    /// # Errors
    /// If a bf16 number has other FP8 bits on the GPU than on the CPU.
    pub fn measure_quantization(&mut self, rows: usize, columns: usize) -> Result<Vec<QuantizationTiming>> {
        let n = rows * columns;
        let buffers = Buffers::new(&self.gpu, 8 * n + 16 * ALIGNMENT)?;
        let take = |bytes| buffers.take(bytes);
        let (inp, copy, out, transposed) = (take(2 * n)?, take(2 * n)?, take(n)?, take(n)?);
        let (scale, amax, sums) = (take(4)?, take(4)?, take(4 * rows.max(quantize::sum_rows(rows) * columns))?);
        // Every bf16 number, again and again.
        let every: Vec<u16> = (0..=u16::MAX).collect();
        for start in (0..n).step_by(every.len()) {
            let count = every.len().min(n - start);
            // SAFETY: the buffer has n elements.
            unsafe { self.stream.upload(inp + 2 * start as u64, &every[..count])? };
        }
        // SAFETY: the buffer has one element.
        unsafe { self.stream.upload(scale, &[1.0f32])? };
        let (scale, amax) = (Global::from_address(scale), GlobalMut::from_address(amax));
        let sums = GlobalMut::from_address(sums);
        let (inp_, out_, transposed_) =
            (Global::from_address(inp), GlobalMut::from_address(out), GlobalMut::from_address(transposed));
        let (mut layout, mut maxima) = (Layout::new(), Layout::new());
        quantize::tile_and_maxima(&mut layout);
        quantize::maxima(&mut maxima);
        let elementwise =
            |launch| KernelLaunch { launch, grid: [quantize::grid(n), 1, 1], shared_bytes: maxima.bytes() };
        let transposing = |launch| KernelLaunch {
            launch,
            grid: quantize::transpose_grid(rows, columns),
            shared_bytes: layout.bytes(),
        };
        let (r, c) = (rows as u32, columns as u32);
        let fused = FusedTensors { inp: inp_, dout: Global::from_address(copy), transposed: transposed_ };
        // Kernels after these write out again, which is compared with the CPU.
        let fused = self.fused_kernels(fused, QuantizedOperands { out: out_, amax, scale }, sums, [rows, columns])?;
        let kernels = [
            ("amax", 2, elementwise(quantize::amax_bf16(amax, inp_, n as u64))),
            ("quantize", 3, elementwise(quantize::quantize::<E4m3, false>(out_, amax, inp_, scale, n as u64))),
            ("quantize, amax", 3, elementwise(quantize::quantize::<E4m3, true>(out_, amax, inp_, scale, n as u64))),
            (
                "quantize both layouts",
                4,
                transposing(transpose::<E4m3, true, false, false>(out_, transposed_, amax, sums, inp_, scale, r, c)),
            ),
            (
                "quantize both layouts, amax, sums",
                4,
                transposing(transpose::<E4m3, true, true, true>(out_, transposed_, amax, sums, inp_, scale, r, c)),
            ),
            (
                "quantize transposed, amax",
                3,
                transposing(transpose::<E4m3, false, true, false>(out_, transposed_, amax, sums, inp_, scale, r, c)),
            ),
            (
                "transpose FP8",
                2,
                transposing(transpose_fp8::<E4m3, false>(transposed_, sums, out_.reader(), scale, r, c)),
            ),
            (
                "transpose FP8, sums",
                2,
                transposing(transpose_fp8::<E4m3, true>(transposed_, sums, out_.reader(), scale, r, c)),
            ),
        ];
        let mut timings = Vec::new();
        let mut time = |name: &str, bytes: usize, run: &mut dyn FnMut() -> Result<()>| -> Result<()> {
            let milliseconds = sustained(&self.stream, 0.1, run)?;
            timings.push(QuantizationTiming { name: name.to_owned(), milliseconds, bytes });
            Ok(())
        };
        // SAFETY: both buffers have n bf16 elements.
        time("copy", 4 * n, &mut || Ok(unsafe { self.stream.copy(copy, inp, 2 * n) }?))?;
        let functions = &mut self.functions;
        for (name, bytes, kernel) in fused.iter().chain(&kernels) {
            time(name, bytes * n, &mut || run(functions, &self.stream, std::slice::from_ref(kernel)))?;
        }
        let got = self.read::<E4m3>(out, n.min(every.len()))?;
        for (bits, got) in every.into_iter().zip(got) {
            let want = E4m3::from_f32(quantize::scaled(bf16::from_bits(bits).to_f32(), 1.0));
            ensure!(got == want, "quantize: bf16 {bits:#06x}: expected E4M3 {want:?}, found {got:?}");
        }
        Ok(timings)
    }

    /// Returns kernels that quantize what they compute, with the bytes that they read and write per element of inp (rows,
    /// columns).
    fn fused_kernels(
        &self,
        FusedTensors { inp, dout, transposed }: FusedTensors,
        quantized: QuantizedOperands<E4m3>,
        rstd: GlobalMut<f32>,
        [rows, columns]: [usize; 2],
    ) -> Result<[(&'static str, usize, KernelLaunch); 3]> {
        let size = Size { rows, channels: columns, sm_count: self.gpu.info().sm_count as usize };
        let operands = Fp8ForwardOperands { quantized, rstd, inp, weight: None, eps: 1e-5 };
        let norm =
            rmsnorm::launch::forward_fp8(operands, size).context("bench: no RMSNorm has this number of channels")?;
        // Up and gate are the halves of a row.
        let (r, c, grid) = (rows as u32, columns as u32 / 2, quantize::transpose_grid(rows, columns / 2));
        let QuantizedOperands { out, amax, scale } = quantized;
        let activation = KernelLaunch {
            launch: quantize_activation::<SwiGlu, true, true>(out, transposed, amax, inp, scale, r, c),
            grid,
            shared_bytes: shared_bytes(quantize::tile_and_maxima),
        };
        let none = GlobalMut::null();
        let gradient = KernelLaunch {
            launch: quantize_activation_gradient::<SwiGlu, E4m3, false>(
                out, transposed, amax, none, dout, inp, scale, r, c,
            ),
            grid,
            shared_bytes: shared_bytes(tiles_and_maxima),
        };
        Ok([
            ("RMSNorm to FP8, amax", 3, norm),
            ("SwiGLU to both layouts, amax", 3, activation),
            ("SwiGLU's gradient to both layouts, amax", 5, gradient),
        ])
    }

    fn run(&mut self, launches: &[KernelLaunch]) -> Result<()> {
        run(&mut self.functions, &self.stream, launches)
    }

    /// Returns the largest difference of the first and last rows of out to cuBLASLt's result in bf16.
    fn error(&self, case: Fp8Case, at: Addresses) -> Result<Option<f64>> {
        if case.weight_gradient {
            return Ok(None);
        }
        let len = case.shape.m * case.shape.n;
        let count = len.min(VALUES);
        let (mut largest, mut squares) = (0.0f64, 0.0);
        for start in [0, len - count] {
            let read = |address| self.read::<bf16>(address + 2 * start as u64, count);
            for (got, want) in read(at.out)?.into_iter().zip(read(at.reference)?) {
                let (got, want) = (f64::from(got.to_f32()), f64::from(want.to_f32()));
                // A NaN must not pass as no error.
                largest = if (got - want).is_nan() { f64::NAN } else { largest.max((got - want).abs()) };
                squares += want * want;
            }
        }
        Ok(Some(largest / (squares / (2 * count) as f64).sqrt()))
    }

    /// Compares a few sums with f64.
    fn accumulation(&mut self, shape: GemmShape, at: Addresses, buffers: &Buffers) -> Result<Fp8Accumulation> {
        let [rows, columns] = [CHECKED[0].min(shape.m), CHECKED[1].min(shape.n)];
        let GemmShape { n, k, .. } = shape;
        let scale = f64::from(self.read::<f32>(at.scales[0], 1)?[0]);
        let [a, b] = [(at.a, rows), (at.b, columns)].map(|(address, rows)| self.read::<E4m3>(address, rows * k));
        let (a, b) = (a?, b?);
        let dot = |i: usize, j: usize| -> f64 {
            let (a, b) = (&a[i * k..][..k], &b[j * k..][..k]);
            scale * scale * a.iter().zip(b).map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum::<f64>()
        };
        let want: Vec<f64> = (0..rows * columns).map(|i| dot(i / columns, i % columns)).collect();
        let squares: f64 = want.iter().map(|x| x * x).sum();
        let mut errors = |exact| -> Result<[f64; 2]> {
            let gemm = Fp8Gemm { a: Fp8Format::E4m3, epilogue: Fp8Epilogue::AccumulateF32, exact };
            let config = gemm.candidate_configs(shape, 1, 0)[0];
            let shape = GemmShape { m: rows, ..shape };
            // SAFETY: the buffer has `rows` rows of n elements.
            unsafe { self.stream.fill(at.f32_out, 0, 4 * rows * n)? };
            let launches = self.launches(gemm, shape, config, at, at.f32_out, buffers)?;
            self.run(&launches)?;
            let got = self.read::<f32>(at.f32_out, rows * n)?;
            let difference = |i: usize| f64::from(got[i / columns * n + i % columns]) - want[i];
            let differences: Vec<f64> = (0..want.len()).map(difference).collect();
            let rms = (differences.iter().map(|x| x * x).sum::<f64>() / squares).sqrt();
            let largest = differences.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            Ok([rms, largest / (squares / want.len() as f64).sqrt()])
        };
        Ok(Fp8Accumulation { fast: errors(false)?, exact: errors(true)? })
    }

    fn read<T: bytemuck::Pod>(&self, address: u64, len: usize) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); len];
        // SAFETY: the callers pass parts of buffers; `values` outlives the copy.
        unsafe { self.stream.download(&mut values, address)? };
        self.stream.synchronize()?;
        Ok(values)
    }
}

/// Queues launches.
fn run(functions: &mut Functions, stream: &Stream, launches: &[KernelLaunch]) -> Result<()> {
    for KernelLaunch { launch, grid, shared_bytes } in launches {
        // SAFETY: the operands have the sizes that the shape implies, and outlive the launch.
        unsafe { functions.launch(stream, launch, *grid, *shared_bytes)? };
    }
    Ok(())
}

/// Returns the milliseconds of `run` under sustained load. One run takes about `estimate` milliseconds.
fn sustained(stream: &Stream, estimate: f32, mut run: impl FnMut() -> Result<()>) -> Result<f32> {
    let runs = (SUSTAINED / estimate.max(1e-3)).ceil() as u32;
    let clock = Stopwatch::new(stream)?;
    // Half of the time warms the GPU up.
    clock.time(stream, runs.div_ceil(2), &mut run)?;
    clock.time(stream, runs, &mut run)
}
