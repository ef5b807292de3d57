//! Matmul plans, which are prepared once and run many times.

use crate::handle::{Handle, Workspace};
use crate::matmul::{Batch, Element, Operands, Problem, Scale};
use crate::result::{Error, NOT_SUPPORTED, Owned, Result, check};
use crate::sys::{self, Functions, HeuristicResult, MatmulAlgo};
use cuda_driver::Stream;
use std::collections::HashMap;
use std::ffi::c_void;

/// The key that an algorithm is selected by: the matmul and the alignments of its operands.
pub(crate) type Key = (Problem, [u32; 5]);

/// The matmuls of one stream. The descriptors and the algorithm of a matmul are created at its first run and kept.
pub struct Matmuls {
    pub(crate) plans: HashMap<(Key, Option<Batch>), Plan>,
    /// Selected algorithms. A plan that is created later uses them.
    pub(crate) chosen: HashMap<Key, MatmulAlgo>,
    workspace: Workspace,
    pub(crate) handle: Handle,
}

/// The descriptors and the algorithm of a matmul.
pub(crate) struct Plan {
    desc: Owned,
    a: Owned,
    b: Owned,
    d: Owned,
    pub(crate) algo: MatmulAlgo,
}

impl Matmuls {
    /// Allocates a workspace. No plans exist yet.
    pub fn new(handle: Handle) -> Result<Self> {
        let workspace = Workspace::new(handle.gpu())?;
        Ok(Self { plans: HashMap::new(), chosen: HashMap::new(), workspace, handle })
    }

    /// Queues a matmul. All matmuls of `self` must use the same `stream`, because they share a workspace.
    ///
    /// # Safety
    /// The addresses must be device memory of the sizes that `problem` implies. D and the outputs of the epilogue must not
    /// overlap other operands. Nothing else may access the operands until the stream has completed the matmul.
    pub unsafe fn run(&mut self, stream: &Stream, problem: &Problem, operands: &Operands) -> Result<()> {
        operands.validate(problem)?;
        let key = (*problem, operands.alignments());
        let plan_key = (key, operands.batch);
        if !self.plans.contains_key(&plan_key) {
            let plan = Plan::new(&self.handle, problem, operands, self.chosen.get(&key))?;
            self.plans.insert(plan_key, plan);
        }
        let plan = self.plans.get_mut(&plan_key).expect("inserted above");
        // SAFETY: the caller's promise.
        unsafe { plan.run(&self.handle, &self.workspace, stream, problem, operands) }
    }

    /// Queues a matmul with `plan`, which need not be one of the plans of `self`.
    ///
    /// # Safety
    /// See [`run`](Self::run).
    pub(crate) unsafe fn run_plan(
        &self,
        plan: &mut Plan,
        stream: &Stream,
        problem: &Problem,
        operands: &Operands,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { plan.run(&self.handle, &self.workspace, stream, problem, operands) }
    }
}

fn device(address: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(address as usize)
}

impl Error {
    /// Adds the matmul to the description of a failed call.
    fn of(self, problem: &Problem) -> Self {
        match self {
            Self::Call { call, status } => Self::Call { call: format!("{call} of {problem}"), status },
            other => other,
        }
    }
}

impl Owned {
    fn set_pointers(&mut self, operands: &Operands) -> Result<()> {
        if let Some(bias) = operands.bias {
            self.set(sys::DESC_BIAS_POINTER, bias)?;
        }
        if let Some(aux) = operands.aux {
            self.set(sys::DESC_EPILOGUE_AUX_POINTER, aux)?;
        }
        if let Some([a, b]) = operands.fp8_scales {
            self.set(sys::DESC_A_SCALE_POINTER, a)?;
            self.set(sys::DESC_B_SCALE_POINTER, b)?;
        }
        Ok(())
    }
}

impl Plan {
    /// Creates a plan with the `chosen` algorithm if cuBLASLt supports it, otherwise with the first choice of its heuristic.
    fn new(handle: &Handle, problem: &Problem, operands: &Operands, chosen: Option<&MatmulAlgo>) -> Result<Self> {
        if let Some(algo) = chosen {
            let plan = Self::with(handle, problem, operands, *algo)?;
            if plan.is_possible(handle) {
                return Ok(plan);
            }
        }
        let best = candidates(handle, problem, operands, 1)?;
        Self::with(handle, problem, operands, best[0])
    }

    pub(crate) fn with(handle: &Handle, problem: &Problem, operands: &Operands, algo: MatmulAlgo) -> Result<Self> {
        let (desc, [a, b, d]) = describe(handle.lt, problem, operands).map_err(|error| error.of(problem))?;
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
        status == 0 && result.state == 0 && result.workspace_bytes <= Workspace::BYTES
    }

    /// Queues the matmul.
    ///
    /// # Safety
    /// See [`Matmuls::run`]. `problem` must be the one that the plan was created for.
    unsafe fn run(
        &mut self,
        handle: &Handle,
        workspace: &Workspace,
        stream: &Stream,
        problem: &Problem,
        operands: &Operands,
    ) -> Result<()> {
        self.desc.set_pointers(operands)?;
        let unscaled = Scale { alpha: 1.0, beta: f32::from(u8::from(problem.accumulate)) };
        let Scale { alpha, beta } = operands.scale.unwrap_or(unscaled);
        // SAFETY: the descriptors are live and describe the operands, which are the caller's promise. The workspace has the
        // size that the algorithm was selected for. The call reads alpha and beta before it returns.
        let status = unsafe {
            (handle.lt.matmul)(
                handle.raw,
                self.desc.raw(),
                (&raw const alpha).cast(),
                device(operands.a),
                self.a.raw(),
                device(operands.b),
                self.b.raw(),
                (&raw const beta).cast(),
                device(operands.c.unwrap_or(operands.d)),
                self.d.raw(),
                device(operands.d),
                self.d.raw(),
                &raw const self.algo,
                device(workspace.address()),
                Workspace::BYTES,
                stream.as_raw(),
            )
        };
        check(status, "cublasLtMatmul").map_err(|error| error.of(problem))
    }
}

/// Returns up to `most` algorithms, in the order of cuBLASLt's heuristic, best first.
pub(crate) fn candidates(
    handle: &Handle,
    problem: &Problem,
    operands: &Operands,
    most: usize,
) -> Result<Vec<MatmulAlgo>> {
    let (desc, [a, b, d]) = describe(handle.lt, problem, operands).map_err(|error| error.of(problem))?;
    let preference = prefer(handle.lt, problem, operands)?;
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
        return Err(Error::NoAlgorithm { problem: problem.to_string() });
    }
    check(status, "cublasLtMatmulAlgoGetHeuristic").map_err(|error| error.of(problem))?;
    Ok(results.iter().map(|result| result.algo).collect())
}

/// Creates the descriptors of the matmul and of A, B and D.
fn describe(lt: &Functions, problem: &Problem, operands: &Operands) -> Result<(Owned, [Owned; 3])> {
    let Problem { m, n, k, transpose_a, transpose_b, element, epilogue, .. } = *problem;
    let mut desc = Owned::matmul(lt, element == Element::Tf32)?;
    let op = |transposed| if transposed { sys::OP_T } else { sys::OP_N };
    desc.set(sys::DESC_TRANSA, op(transpose_a))?;
    desc.set(sys::DESC_TRANSB, op(transpose_b))?;
    let raw = epilogue.raw();
    desc.set(sys::DESC_EPILOGUE, raw)?;
    if let Element::Fp8(fp8) = element {
        desc.set(sys::DESC_FAST_ACCUM, i8::from(fp8.fast_accumulation))?;
    }
    if epilogue.uses_bias() {
        desc.set(sys::DESC_BIAS_DATA_TYPE, element.raw())?;
    }
    if epilogue.uses_aux() {
        desc.set(sys::DESC_EPILOGUE_AUX_DATA_TYPE, element.raw())?;
        desc.set(sys::DESC_EPILOGUE_AUX_LD, m as i64)?;
    }
    // The heuristic reads the pointers' alignment.
    desc.set_pointers(operands)?;

    let swap_if = |swap, (rows, columns)| if swap { (columns, rows) } else { (rows, columns) };
    let layout = |raw, (rows, columns), stride: fn(Batch) -> usize| -> Result<Owned> {
        let mut layout = Owned::layout(lt, raw, rows, columns)?;
        if let Some(batch) = operands.batch {
            layout.set(sys::LAYOUT_BATCH_COUNT, batch.count as i32)?;
            layout.set(sys::LAYOUT_STRIDED_BATCH_OFFSET, stride(batch) as i64)?;
        }
        Ok(layout)
    };
    let [a_type, b_type] = element.raw_operands();
    let (a, b) = (swap_if(transpose_a, (m, k)), swap_if(transpose_b, (k, n)));
    let layouts = [
        layout(a_type, a, |batch| batch.a)?,
        layout(b_type, b, |batch| batch.b)?,
        layout(problem.stored().raw(), (m, n), |batch| batch.d)?,
    ];
    Ok((desc, layouts))
}

/// Creates the preferences of the heuristic: the size of the workspace, the alignments of the operands, and split-K only for
/// matmuls that accumulate into D.
///
/// A weight gradient has few tiles and a long K, and would leave most of the GPU idle without split-K. Its partial sums are
/// in f32 and are added in a fixed order. Other matmuls are not split: with split-K and a DGELU epilogue, cuBLASLt 13.1 reads
/// the output although beta is 0, so that a NaN in it remains.
fn prefer(lt: &Functions, problem: &Problem, operands: &Operands) -> Result<Owned> {
    let accumulates = problem.accumulate && operands.c.is_none();
    let schemes = if accumulates { sys::REDUCTION_SCHEME_COMPUTE_TYPE } else { sys::REDUCTION_SCHEME_NONE };
    let mut preference = Owned::preference(lt)?;
    preference.set(sys::PREF_MAX_WORKSPACE_BYTES, Workspace::BYTES)?;
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
    use crate::Epilogue::{Bias, DGelu, GeluAuxBias, None as Plain};
    use crate::Fp8;
    use crate::{Epilogue, handle};

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
        let fp8 = Element::Fp8(Fp8 { a_e5m2: false, b_e5m2: true, fast_accumulation: true });
        for element in [Element::Bf16, Element::F32, Element::Tf32, fp8] {
            for epilogue in [Plain, Bias, GeluAuxBias, DGelu] {
                for (transpose_a, transpose_b) in [(true, false), (false, true)] {
                    if transpose_b && element == fp8 {
                        continue;
                    }
                    let problem = Problem {
                        m: 3072,
                        n: 256,
                        k: 768,
                        transpose_a,
                        transpose_b,
                        element,
                        epilogue,
                        accumulate: false,
                        output: (transpose_b && epilogue == Plain).then_some(Element::F32),
                        batched: epilogue == Plain && !transpose_b,
                    };
                    let address_if = |used: bool| used.then_some(0x1000);
                    let operands = Operands {
                        a: 0x100,
                        b: 0x210,
                        d: 0x320,
                        c: None,
                        bias: address_if(epilogue.uses_bias()),
                        aux: address_if(epilogue.uses_aux()),
                        scale: None,
                        batch: problem.batched.then_some(Batch {
                            count: 5,
                            a: 3072 * 768,
                            b: 768 * 256,
                            d: 3072 * 256,
                        }),
                        fp8_scales: None,
                    };
                    operands.validate(&problem).unwrap();
                    describe(lt, &problem, &operands).unwrap_or_else(|error| panic!("{problem}: {error}"));
                    prefer(lt, &problem, &operands).unwrap();
                }
            }
        }
    }

    #[test]
    fn each_part_of_the_key_selects_another_plan() {
        let problem = Problem {
            m: 64,
            n: 32,
            k: 16,
            transpose_a: true,
            transpose_b: false,
            element: Element::Bf16,
            epilogue: Epilogue::None,
            accumulate: false,
            output: None,
            batched: false,
        };
        let at = Operands { a: 0x100, b: 0x200, d: 0x300, ..Operands::default() };
        let fp8 = |fast_accumulation| Element::Fp8(Fp8 { a_e5m2: false, b_e5m2: false, fast_accumulation });
        let keys = [
            (problem, at),
            (Problem { m: 128, ..problem }, at),
            (Problem { n: 64, ..problem }, at),
            (Problem { k: 32, ..problem }, at),
            (Problem { transpose_a: false, ..problem }, at),
            (Problem { transpose_b: true, ..problem }, at),
            (Problem { element: Element::F32, ..problem }, at),
            (Problem { element: Element::Tf32, ..problem }, at),
            (Problem { element: fp8(true), ..problem }, at),
            (Problem { element: fp8(false), ..problem }, at),
            (Problem { epilogue: Epilogue::Bias, ..problem }, at),
            (Problem { accumulate: true, ..problem }, at),
            (Problem { accumulate: true, ..problem }, Operands { c: Some(0x410), ..at }),
            (Problem { output: Some(Element::F32), ..problem }, at),
            (Problem { batched: true, ..problem }, at),
            (problem, Operands { b: 0x210, ..at }),
        ];
        let distinct: std::collections::HashSet<_> = keys.iter().map(|(p, o)| (*p, o.alignments())).collect();
        assert_eq!(distinct.len(), keys.len());
        // Other addresses of the same alignment share a plan.
        assert!(distinct.contains(&(problem, Operands { a: 0x1100, ..at }.alignments())));
    }
}
