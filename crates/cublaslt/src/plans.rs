//! Products prepared once and run many times.

use crate::handle::{Handle, Workspace};
use crate::matmul::{Element, Operands, Problem};
use crate::result::{Error, Owned, Result, check};
use crate::sys::{self, Functions, HeuristicResult, MatmulAlgo};
use cuda_driver::Stream;
use std::collections::HashMap;
use std::ffi::c_void;

/// What decides on an algorithm: the product, and what its operands' addresses are multiples of.
pub(crate) type Key = (Problem, [u32; 5]);

/// The products of one stream: descriptors and algorithm of each are made when it is first seen, and kept.
pub struct Matmuls {
    pub(crate) plans: HashMap<Key, Plan>,
    /// Algorithms for products that have no plan yet.
    pub(crate) chosen: HashMap<Key, MatmulAlgo>,
    workspace: Workspace,
    pub(crate) handle: Handle,
}

/// What a product needs beyond its addresses.
pub(crate) struct Plan {
    product: Owned,
    a: Owned,
    b: Owned,
    d: Owned,
    pub(crate) algo: MatmulAlgo,
}

impl Matmuls {
    pub fn new(handle: Handle) -> Result<Self> {
        let workspace = Workspace::new(handle.gpu())?;
        Ok(Self { plans: HashMap::new(), chosen: HashMap::new(), workspace, handle })
    }

    /// How many products are prepared.
    pub fn len(&self) -> usize {
        self.plans.len()
    }

    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// Queues a product. All of an object's products go to one `stream`, because they share a workspace.
    ///
    /// # Safety
    /// The addresses are device memory of the sizes that `problem` implies, D and what the epilogue writes overlap
    /// nothing else, and nothing else uses them until the stream has passed the product.
    pub unsafe fn run(&mut self, stream: &Stream, problem: &Problem, operands: &Operands) -> Result<()> {
        operands.validate(problem)?;
        let key = (*problem, operands.alignments());
        if !self.plans.contains_key(&key) {
            let plan = Plan::new(&self.handle, problem, operands, self.chosen.get(&key))?;
            self.plans.insert(key, plan);
        }
        let plan = self.plans.get_mut(&key).expect("inserted above");
        // SAFETY: the caller's promise.
        unsafe { plan.run(&self.handle, &self.workspace, stream, problem, operands) }
    }

    /// Runs `plan`, which is none of those kept.
    ///
    /// # Safety
    /// As [`run`](Self::run).
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
    /// Names the product in a failed call.
    fn of(self, problem: &Problem) -> Self {
        match self {
            Self::Call { call, status } => Self::Call { call: format!("{call} of {problem}"), status },
            other => other,
        }
    }
}

impl Owned {
    fn point_at(&mut self, operands: &Operands) -> Result<()> {
        if let Some(bias) = operands.bias {
            self.set(sys::DESC_BIAS_POINTER, bias)?;
        }
        if let Some(aux) = operands.aux {
            self.set(sys::DESC_EPILOGUE_AUX_POINTER, aux)?;
        }
        Ok(())
    }
}

impl Plan {
    /// With the `chosen` algorithm if the library takes it, else with the one that it thinks best.
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
        let (product, [a, b, d]) = describe(handle.lt, problem, operands).map_err(|error| error.of(problem))?;
        Ok(Self { product, a, b, d, algo })
    }

    /// Whether this version of the library has the algorithm, for this product, with the workspace at hand.
    fn is_possible(&self, handle: &Handle) -> bool {
        // SAFETY: all zeros are a value of this plain structure.
        let mut result: HeuristicResult = unsafe { std::mem::zeroed() };
        // SAFETY: descriptors are live; the library reads the algorithm and writes one result.
        let status = unsafe {
            (handle.lt.check)(
                handle.raw,
                self.product.raw(),
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

    /// # Safety
    /// As [`Matmuls::run`]; `problem` is what the plan was made for.
    unsafe fn run(
        &mut self,
        handle: &Handle,
        workspace: &Workspace,
        stream: &Stream,
        problem: &Problem,
        operands: &Operands,
    ) -> Result<()> {
        self.product.point_at(operands)?;
        let (one, beta) = (1_f32, f32::from(u8::from(problem.accumulate)));
        // SAFETY: descriptors are live and describe the operands, which are the caller's promise; the workspace is as
        // large as the algorithm was told it may be; alpha and beta are read on the host before the call returns.
        let status = unsafe {
            (handle.lt.matmul)(
                handle.raw,
                self.product.raw(),
                (&raw const one).cast(),
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

/// Up to `most` algorithms, the one that the library thinks best first.
pub(crate) fn candidates(
    handle: &Handle,
    problem: &Problem,
    operands: &Operands,
    most: usize,
) -> Result<Vec<MatmulAlgo>> {
    let (product, [a, b, d]) = describe(handle.lt, problem, operands).map_err(|error| error.of(problem))?;
    let preference = prefer(handle.lt, problem, operands)?;
    // SAFETY: all zeros are a value of this plain structure.
    let mut results = vec![unsafe { std::mem::zeroed::<HeuristicResult>() }; most];
    let mut count = 0;
    // SAFETY: descriptors are live; there is room for the results asked for.
    let status = unsafe {
        (handle.lt.heuristic)(
            handle.raw,
            product.raw(),
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
    // 15, not supported, is how the library says that it found none.
    if status == 15 || (status == 0 && results.is_empty()) {
        return Err(Error::NoAlgorithm { problem: problem.to_string() });
    }
    check(status, "cublasLtMatmulAlgoGetHeuristic").map_err(|error| error.of(problem))?;
    Ok(results.iter().map(|result| result.algo).collect())
}

/// Descriptors of the product and of A, B and D.
fn describe(lt: &Functions, problem: &Problem, operands: &Operands) -> Result<(Owned, [Owned; 3])> {
    let Problem { m, n, k, transpose_a, transpose_b, element, epilogue, batch, .. } = *problem;
    let mut product = Owned::product(lt, element == Element::Tf32)?;
    let op = |transposed| if transposed { sys::OP_T } else { sys::OP_N };
    product.set(sys::DESC_TRANSA, op(transpose_a))?;
    product.set(sys::DESC_TRANSB, op(transpose_b))?;
    let raw = epilogue.raw().ok_or_else(|| Error::NoAlgorithm { problem: problem.to_string() })?;
    product.set(sys::DESC_EPILOGUE, raw)?;
    if epilogue.uses_bias() {
        product.set(sys::DESC_BIAS_DATA_TYPE, element.raw())?;
    }
    if epilogue.uses_aux() {
        product.set(sys::DESC_EPILOGUE_AUX_DATA_TYPE, element.raw())?;
        product.set(sys::DESC_EPILOGUE_AUX_LD, m as i64)?;
    }
    // The heuristic reads the pointers' alignment.
    product.point_at(operands)?;

    let swap_if = |swap, (rows, columns)| if swap { (columns, rows) } else { (rows, columns) };
    let layout = |element: Element, (rows, columns)| -> Result<Owned> {
        let mut layout = Owned::layout(lt, element.raw(), rows, columns)?;
        if batch != 1 {
            layout.set(sys::LAYOUT_BATCH_COUNT, batch as i32)?;
            layout.set(sys::LAYOUT_STRIDED_BATCH_OFFSET, (rows * columns) as i64)?;
        }
        Ok(layout)
    };
    let (a, b) = (swap_if(transpose_a, (m, k)), swap_if(transpose_b, (k, n)));
    let layouts = [layout(element, a)?, layout(element, b)?, layout(problem.stored(), (m, n))?];
    Ok((product, layouts))
}

/// The workspace at hand, the alignment at hand, and K split only in sums that D accumulates, with partial sums in f32 and added
/// in a fixed order: a weight gradient has few tiles and a long K, and would leave most of the GPU idle otherwise. Other
/// products are not split: with a DGELU epilogue, cuBLASLt 13.1 then reads an output it is told to ignore (NaN stays NaN).
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
    use crate::Epilogue::{Bias, BiasGradA, BiasGradB, DGelu, DGeluBiasGrad, GeluAuxBias, None as Plain};
    use crate::{Epilogue, handle};

    /// Descriptors are host memory, so they can be made without a GPU wherever the library is. Where it is not, the
    /// error is what a user would see.
    #[test]
    fn the_library_accepts_every_descriptor_or_its_absence_is_explained() {
        let lt = match handle::library() {
            Ok(lt) => lt,
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("libcublasLt.so.1") && text.contains("pip install nvidia-cublas"), "{text}");
                assert!(text.contains("looked in the dynamic linker's path, /"), "{text}");
                return;
            }
        };
        for element in [Element::Bf16, Element::F32, Element::Tf32] {
            for epilogue in [Plain, Bias, GeluAuxBias, DGelu, DGeluBiasGrad, BiasGradA, BiasGradB] {
                for (transpose_a, transpose_b, batch) in [(true, false, 1), (false, true, 12)] {
                    let problem = Problem {
                        m: 3072,
                        n: 256,
                        k: 768,
                        transpose_a,
                        transpose_b,
                        element,
                        epilogue,
                        accumulate: false,
                        batch,
                        output: (transpose_b && epilogue == Plain).then_some(Element::F32),
                    };
                    let at = |used: bool| used.then_some(0x1000);
                    let operands = Operands {
                        a: 0x100,
                        b: 0x210,
                        d: 0x320,
                        c: None,
                        bias: at(epilogue.uses_bias()),
                        aux: at(epilogue.uses_aux()),
                        gelu: None,
                    };
                    operands.validate(&problem).unwrap();
                    describe(lt, &problem, &operands).unwrap_or_else(|error| panic!("{problem}: {error}"));
                    prefer(lt, &problem, &operands).unwrap();
                }
            }
        }
    }

    #[test]
    fn plans_differ_by_every_part_of_the_key() {
        let problem = Problem {
            m: 64,
            n: 32,
            k: 16,
            transpose_a: true,
            transpose_b: false,
            element: Element::Bf16,
            epilogue: Epilogue::None,
            accumulate: false,
            batch: 1,
            output: None,
        };
        let at = Operands { a: 0x100, b: 0x200, d: 0x300, ..Operands::default() };
        let keys = [
            (problem, at),
            (Problem { m: 128, ..problem }, at),
            (Problem { n: 64, ..problem }, at),
            (Problem { k: 32, ..problem }, at),
            (Problem { transpose_a: false, ..problem }, at),
            (Problem { transpose_b: true, ..problem }, at),
            (Problem { element: Element::F32, ..problem }, at),
            (Problem { element: Element::Tf32, ..problem }, at),
            (Problem { epilogue: Epilogue::Bias, ..problem }, at),
            (Problem { accumulate: true, ..problem }, at),
            (Problem { accumulate: true, ..problem }, Operands { c: Some(0x410), ..at }),
            (Problem { batch: 2, ..problem }, at),
            (Problem { output: Some(Element::F32), ..problem }, at),
            (problem, Operands { b: 0x210, ..at }),
        ];
        let distinct: std::collections::HashSet<_> = keys.iter().map(|(p, o)| (*p, o.alignments())).collect();
        assert_eq!(distinct.len(), keys.len());
        // Other addresses of the same alignment share a plan.
        assert!(distinct.contains(&(problem, Operands { a: 0x1100, ..at }.alignments())));
    }
}
