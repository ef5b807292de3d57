//! Matmul plans, which are prepared once and run many times.

use crate::handle::Handle;
use crate::matmul::{GemmKey, GemmOperands, library_epilogue, operand_types, storage_type};
use crate::result::{Error, NOT_SUPPORTED, Owned, Result, check};
use crate::sys::{self, Functions, HeuristicResult, MatmulAlgo};
use cuda_driver::{DeviceMemory, Stream};
use gpu::matmul::gemm::{Bias, Gemm, GemmLayout, GemmOutput, GemmPrecision};
use gpu::matmul::launch::{ScaleFactors, StridedBatch};
use std::collections::HashMap;
use std::ffi::c_void;

/// The size of the workspace that NVIDIA recommends for compute capability 9.0. Earlier GPUs need less.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The matmuls of one stream. The descriptors and the algorithm of a matmul are created at its first run and kept.
pub struct Matmuls {
    pub(crate) plans: HashMap<(GemmKey, Option<StridedBatch>), MatmulPlan>,
    /// Selected algorithms. A plan that is created later uses them.
    pub(crate) chosen: HashMap<GemmKey, MatmulAlgo>,
    /// Memory for the temporary data of matmuls.
    pub(crate) workspace: DeviceMemory,
    pub(crate) handle: Handle,
}

/// The descriptors and the algorithm of a matmul.
pub(crate) struct MatmulPlan {
    desc: Owned,
    a: Owned,
    b: Owned,
    d: Owned,
    pub(crate) algo: MatmulAlgo,
}

impl Matmuls {
    /// Allocates a workspace. No plans exist yet.
    pub fn new(handle: Handle) -> Result<Self> {
        let workspace = DeviceMemory::new(handle.gpu(), WORKSPACE_BYTES)?;
        Ok(Self { plans: HashMap::new(), chosen: HashMap::new(), workspace, handle })
    }

    /// Queues a matmul. All matmuls of `self` must use the same `stream`, because they share a workspace.
    ///
    /// # Safety
    /// The addresses must be device memory of the sizes that `gemm` implies. The outputs must not
    /// overlap other operands. Nothing else may access the operands until the stream has completed the matmul.
    pub unsafe fn run(&mut self, stream: &Stream, gemm: &Gemm, operands: &GemmOperands) -> Result<()> {
        operands.validate(gemm)?;
        let key = (*gemm, operands.alignments());
        let plan_key = (key, operands.batch);
        if !self.plans.contains_key(&plan_key) {
            let plan = MatmulPlan::new(&self.handle, gemm, operands, self.chosen.get(&key))?;
            self.plans.insert(plan_key, plan);
        }
        let plan = self.plans.get_mut(&plan_key).expect("inserted above");
        // SAFETY: the caller's promise.
        unsafe { plan.run(&self.handle, &self.workspace, stream, gemm, operands) }
    }
}

fn device(address: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(address as usize)
}

impl Error {
    /// Adds the matmul to the description of a failed call.
    fn of(self, gemm: &Gemm) -> Self {
        match self {
            Self::Call { call, status } => Self::Call { call: format!("{call} of {gemm}"), status },
            other => other,
        }
    }
}

impl Owned {
    fn set_pointers(&mut self, operands: &GemmOperands) -> Result<()> {
        if let Some(bias) = operands.bias {
            self.set(sys::DESC_BIAS_POINTER, bias)?;
        }
        if let Some(preactivation) = operands.preactivation {
            self.set(sys::DESC_EPILOGUE_AUX_POINTER, preactivation)?;
        }
        if let Some([a, b]) = operands.fp8_scales {
            self.set(sys::DESC_A_SCALE_POINTER, b)?;
            self.set(sys::DESC_B_SCALE_POINTER, a)?;
        }
        Ok(())
    }
}

impl MatmulPlan {
    /// Creates a plan with the `chosen` algorithm if cuBLASLt supports it, otherwise with the first choice of its heuristic.
    fn new(handle: &Handle, gemm: &Gemm, operands: &GemmOperands, chosen: Option<&MatmulAlgo>) -> Result<Self> {
        if let Some(algo) = chosen {
            let plan = Self::with(handle, gemm, operands, *algo)?;
            if plan.is_possible(handle) {
                return Ok(plan);
            }
        }
        let best = candidates(handle, gemm, operands, 1)?;
        Self::with(handle, gemm, operands, best[0])
    }

    pub(crate) fn with(handle: &Handle, gemm: &Gemm, operands: &GemmOperands, algo: MatmulAlgo) -> Result<Self> {
        let (desc, [a, b, d]) = describe(handle.lt, gemm, operands).map_err(|error| error.of(gemm))?;
        Ok(Self { desc, a, b, d, algo })
    }

    /// Returns whether this version of cuBLASLt supports the algorithm for this matmul with the workspace's size.
    fn is_possible(&self, handle: &Handle) -> bool {
        // SAFETY: this plain structure may be all zeros.
        let mut result: HeuristicResult = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptors are live. The call reads the algorithm and writes one result.
        let status = unsafe {
            (handle.lt.check)(
                handle.raw,
                self.desc.raw(),
                self.a.raw(),
                self.b.raw(),
                self.d.raw(),
                self.d.raw(),
                &raw const self.algo,
                &raw mut result,
            )
        };
        status == 0 && result.state == 0 && result.workspace_bytes <= WORKSPACE_BYTES
    }

    /// Queues the matmul.
    ///
    /// # Safety
    /// See [`Matmuls::run`]. `gemm` must be the one that the plan was created for.
    pub(crate) unsafe fn run(
        &mut self,
        handle: &Handle,
        workspace: &DeviceMemory,
        stream: &Stream,
        gemm: &Gemm,
        operands: &GemmOperands,
    ) -> Result<()> {
        self.desc.set_pointers(operands)?;
        let unscaled = ScaleFactors { alpha: 1.0, beta: f32::from(u8::from(gemm.epilogue.residual.is_some())) };
        let ScaleFactors { alpha, beta } = operands.scale.unwrap_or(unscaled);
        // SAFETY: the descriptors are live and describe the operands, which are the caller's promise. The workspace has the
        // size that the algorithm was selected for. The call reads alpha and beta before it returns.
        let status = unsafe {
            (handle.lt.matmul)(
                handle.raw,
                self.desc.raw(),
                (&raw const alpha).cast(),
                device(operands.b),
                self.a.raw(),
                device(operands.a),
                self.b.raw(),
                (&raw const beta).cast(),
                device(operands.residual.unwrap_or(operands.out)),
                self.d.raw(),
                device(operands.out),
                self.d.raw(),
                &raw const self.algo,
                device(workspace.address()),
                WORKSPACE_BYTES,
                stream.as_raw(),
            )
        };
        check(status, "cublasLtMatmul").map_err(|error| error.of(gemm))
    }
}

/// Returns up to `most` algorithms, in the order of cuBLASLt's heuristic, best first.
pub(crate) fn candidates(
    handle: &Handle,
    gemm: &Gemm,
    operands: &GemmOperands,
    most: usize,
) -> Result<Vec<MatmulAlgo>> {
    let (desc, [a, b, d]) = describe(handle.lt, gemm, operands).map_err(|error| error.of(gemm))?;
    let preference = prefer(handle.lt, gemm, operands)?;
    // SAFETY: this plain structure may be all zeros.
    let mut results = vec![unsafe { std::mem::zeroed::<HeuristicResult>() }; most];
    let mut count = 0;
    // SAFETY: the descriptors are live, and `results` has `most` elements.
    let status = unsafe {
        (handle.lt.heuristic)(
            handle.raw,
            desc.raw(),
            a.raw(),
            b.raw(),
            d.raw(),
            d.raw(),
            preference.raw(),
            most as i32,
            results.as_mut_ptr(),
            &raw mut count,
        )
    };
    results.truncate(count as usize);
    results.retain(|result| result.state == 0);
    // cuBLASLt returns 15, not supported, if it finds no algorithm.
    if status == NOT_SUPPORTED || (status == 0 && results.is_empty()) {
        return Err(Error::NoAlgorithm { gemm: *gemm });
    }
    check(status, "cublasLtMatmulAlgoGetHeuristic").map_err(|error| error.of(gemm))?;
    Ok(results.iter().map(|result| result.algo).collect())
}

/// Creates the descriptors of the matmul and of cuBLASLt's A, B and D. Its matrices are column-major, so the row-major
/// out = op(a) · op(b) is its Dᵀ = op(b)ᵀ · op(a)ᵀ: its A is our b, its B is our a, its m is our n, and its n is our m.
fn describe(lt: &Functions, gemm: &Gemm, operands: &GemmOperands) -> Result<(Owned, [Owned; 3])> {
    let Gemm { m, n, k, layout, precision, epilogue, .. } = *gemm;
    let stored = storage_type(precision);
    let mut desc = Owned::matmul(lt, precision == GemmPrecision::Tf32)?;
    let op = |transposed| if transposed { sys::OP_T } else { sys::OP_N };
    desc.set(sys::DESC_TRANSA, op(layout == GemmLayout::Nt))?;
    desc.set(sys::DESC_TRANSB, op(layout == GemmLayout::Tn))?;
    let lacking = || Error::Operand { gemm: *gemm, what: "expected an epilogue that cuBLASLt has".to_owned() };
    desc.set(sys::DESC_EPILOGUE, library_epilogue(gemm).ok_or_else(lacking)?)?;
    if let GemmPrecision::Fp8 { columns, .. } = precision {
        desc.set(sys::DESC_FAST_ACCUM, i8::from(columns.is_none()))?;
    }
    if epilogue.bias == Some(Bias::Add) {
        desc.set(sys::DESC_BIAS_DATA_TYPE, stored)?;
    }
    if epilogue.activation.is_some() {
        desc.set(sys::DESC_EPILOGUE_AUX_DATA_TYPE, stored)?;
        desc.set(sys::DESC_EPILOGUE_AUX_LD, n as i64)?;
    }
    // The heuristic reads the pointers' alignment.
    desc.set_pointers(operands)?;

    // A row-major (rows, columns) matrix is a column-major (columns, rows) matrix.
    let matrix = |raw, rows, columns, stride: fn(StridedBatch) -> usize| -> Result<Owned> {
        let mut matrix = Owned::layout(lt, raw, columns, rows)?;
        if let Some(batch) = operands.batch {
            matrix.set(sys::LAYOUT_BATCH_COUNT, batch.count as i32)?;
            matrix.set(sys::LAYOUT_STRIDED_BATCH_OFFSET, stride(batch) as i64)?;
        }
        Ok(matrix)
    };
    let [a_type, b_type] = operand_types(precision);
    let (a_rows, a_columns) = if layout == GemmLayout::Tn { (k, m) } else { (m, k) };
    let (b_rows, b_columns) = if layout == GemmLayout::Nt { (n, k) } else { (k, n) };
    let out_type = if epilogue.output == GemmOutput::F32 { sys::R_32F } else { stored };
    let matrices = [
        matrix(b_type, b_rows, b_columns, |batch| batch.b)?,
        matrix(a_type, a_rows, a_columns, |batch| batch.a)?,
        matrix(out_type, m, n, |batch| batch.out)?,
    ];
    Ok((desc, matrices))
}

/// Maximum number of rows of a GEMM that adds a separate residual with split-K. Such a GEMM, as in generation, has fewer tiles than SMs.
const MAX_SPLIT_ROWS: usize = 256;

/// Creates the preferences of the heuristic: the size of the workspace, the alignments of the operands, and split-K only for
/// GEMMs that accumulate into D, or that add a residual to few rows.
///
/// Such GEMMs have few tiles and a long K, and would leave most of the GPU idle without split-K. The partial sums are in f32 and
/// are added in a fixed order. Other GEMMs do not use split-K: with split-K and a DGELU epilogue, cuBLASLt 13.1 reads the output
/// although beta is 0, so that a NaN in it remains.
fn prefer(lt: &Functions, gemm: &Gemm, operands: &GemmOperands) -> Result<Owned> {
    let splits = gemm.epilogue.residual.is_some() && (operands.residual.is_none() || gemm.m <= MAX_SPLIT_ROWS);
    let schemes = if splits { sys::REDUCTION_SCHEME_COMPUTE_TYPE } else { sys::REDUCTION_SCHEME_NONE };
    let mut preference = Owned::preference(lt)?;
    preference.set(sys::PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES)?;
    preference.set(sys::PREF_REDUCTION_SCHEME_MASK, schemes)?;
    let [a, b, d, ..] = operands.alignments();
    for (attribute, bytes) in [
        (sys::PREF_MIN_ALIGNMENT_A_BYTES, a),
        (sys::PREF_MIN_ALIGNMENT_B_BYTES, b),
        (sys::PREF_MIN_ALIGNMENT_C_BYTES, d),
        (sys::PREF_MIN_ALIGNMENT_D_BYTES, d),
    ] {
        preference.set(attribute, bytes)?;
    }
    Ok(preference)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle;
    use cuda_std::fp8::Fp8Format;
    use gpu::activation::Activation;
    use gpu::matmul::gemm::{Batching, GemmEpilogue, Pass};

    const NT: Gemm = Gemm {
        m: 32,
        n: 64,
        k: 16,
        layout: GemmLayout::Nt,
        precision: GemmPrecision::Bf16,
        batching: Batching::One,
        epilogue: GemmEpilogue::NONE,
    };

    fn fp8(columns: Option<u32>) -> GemmPrecision {
        GemmPrecision::Fp8 { a: Fp8Format::E5m2, columns }
    }

    /// Descriptors are host memory, so that cuBLASLt can create them without a GPU. If the library is not installed, the test
    /// checks the error message instead.
    #[test]
    fn cublaslt_accepts_every_descriptor_or_the_error_explains_its_absence() {
        let lt = match handle::library() {
            Ok(lt) => lt,
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("libcublasLt.so.1") && text.contains("pip install nvidia-cublas"), "{text}");
                assert!(text.contains("searched the dynamic linker's path, /"), "{text}");
                return;
            }
        };
        let plain = GemmEpilogue::NONE;
        let gelu = GemmEpilogue::BIAS.with(Activation::Gelu, Pass::Forward);
        let dgelu = plain.with(Activation::Gelu, Pass::Backward);
        for precision in [GemmPrecision::Bf16, GemmPrecision::F32, GemmPrecision::Tf32, fp8(None)] {
            for epilogue in [plain, GemmEpilogue::BIAS, gelu, dgelu] {
                for layout in [GemmLayout::Nt, GemmLayout::Tn] {
                    if layout == GemmLayout::Tn && precision == fp8(None) {
                        continue;
                    }
                    let f32_output = layout == GemmLayout::Tn && epilogue == plain;
                    let output = if f32_output { GemmOutput::F32 } else { GemmOutput::Storage };
                    let batched = epilogue == plain && layout == GemmLayout::Nt;
                    let batching = if batched { Batching::Strided } else { Batching::One };
                    let epilogue = GemmEpilogue { output, ..epilogue };
                    let gemm = Gemm { m: 256, n: 3072, k: 768, layout, precision, batching, epilogue };
                    let address_if = |used: bool| used.then_some(0x1000);
                    let batch = StridedBatch { count: 5, a: 768 * 256, b: 3072 * 768, out: 3072 * 256 };
                    let operands = GemmOperands {
                        a: 0x210,
                        b: 0x100,
                        out: 0x320,
                        bias: address_if(epilogue.bias.is_some()),
                        preactivation: address_if(epilogue.activation.is_some()),
                        batch: batched.then_some(batch),
                        fp8_scales: gemm.is_fp8().then_some([0x100, 0x200]),
                        ..GemmOperands::default()
                    };
                    operands.validate(&gemm).unwrap();
                    describe(lt, &gemm, &operands).unwrap_or_else(|error| panic!("{gemm}: {error}"));
                    prefer(lt, &gemm, &operands).unwrap();
                }
            }
        }
    }

    #[test]
    fn epilogues_that_cublaslt_lacks_are_refused() {
        let fp8_output = GemmEpilogue { output: GemmOutput::Fp8, ..GemmEpilogue::NONE };
        for epilogue in [
            GemmEpilogue::BIAS_GRADIENT,
            fp8_output,
            GemmEpilogue::NONE.with(Activation::Gelu, Pass::Forward),
            GemmEpilogue::NONE.with(Activation::Gelu, Pass::BackwardAndValue),
            GemmEpilogue::BIAS.with(Activation::SwiGlu, Pass::Forward),
        ] {
            assert_eq!(library_epilogue(&Gemm { epilogue, ..NT }), None);
        }
    }

    #[test]
    fn each_part_of_the_key_selects_another_plan() {
        let at = GemmOperands { a: 0x100, b: 0x200, out: 0x300, ..GemmOperands::default() };
        let residual = Gemm { epilogue: GemmEpilogue::RESIDUAL, ..NT };
        let f32_output = GemmEpilogue { output: GemmOutput::F32, ..GemmEpilogue::NONE };
        let keys = [
            (NT, at),
            (Gemm { m: 128, ..NT }, at),
            (Gemm { n: 128, ..NT }, at),
            (Gemm { k: 32, ..NT }, at),
            (Gemm { layout: GemmLayout::Nn, ..NT }, at),
            (Gemm { layout: GemmLayout::Tn, ..NT }, at),
            (Gemm { precision: GemmPrecision::F32, ..NT }, at),
            (Gemm { precision: GemmPrecision::Tf32, ..NT }, at),
            (Gemm { precision: fp8(Some(128)), ..NT }, at),
            (Gemm { precision: fp8(None), ..NT }, at),
            (Gemm { epilogue: GemmEpilogue::BIAS, ..NT }, at),
            (residual, at),
            (residual, GemmOperands { residual: Some(0x410), ..at }),
            (Gemm { epilogue: f32_output, ..NT }, at),
            (Gemm { batching: Batching::Strided, ..NT }, at),
            (NT, GemmOperands { a: 0x210, ..at }),
        ];
        let distinct: std::collections::HashSet<_> = keys.iter().map(|(gemm, at)| (*gemm, at.alignments())).collect();
        assert_eq!(distinct.len(), keys.len());
        // Other addresses of the same alignment share a plan.
        assert!(distinct.contains(&(NT, GemmOperands { b: 0x1100, ..at }.alignments())));
    }
}
