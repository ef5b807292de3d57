//! Selects the backend of each GEMM: a kernel of this project or the library.

use super::MatmulBackend;
use super::executor::{EmulatedGpu, Executor};
use super::gemm_cache::GemmCache;
use super::kernel_gemm::{KernelGemm, Scratch};
use crate::Result;
use crate::gemm::{Algorithms, Gemm, GemmCall, GemmChoice, GemmKey, KernelConfig, is_in_library, library_part};
use anyhow::Context;
use gpu::launch::KernelLaunch;
use std::collections::{HashMap, HashSet};

/// The GEMMs of an engine, and the algorithm of each.
pub struct GemmDispatch {
    gpu: EmulatedGpu,
    /// Whether kernels are used without timing them, as in the emulator.
    untimed: bool,
    pub(super) scratch: Scratch,
    pub(super) choices: HashMap<GemmKey, GemmChoice>,
    /// GEMMs that cuBLASLt has refused, and that kernels compute.
    refused: HashSet<GemmKey>,
    /// The calls of a tuning pass, in which nothing runs.
    pub(super) collected: Option<Vec<GemmCall>>,
    pub(super) cache: Option<GemmCache>,
}

impl GemmDispatch {
    /// Creates the dispatch for an executor. Without a `cache` algorithms are not timed.
    pub fn new(gpu: EmulatedGpu, cache: Option<GemmCache>, executor: &mut dyn Executor) -> Self {
        let mut dispatch = Self {
            gpu,
            untimed: cache.is_none(),
            scratch: Scratch::NONE,
            choices: HashMap::new(),
            refused: HashSet::new(),
            collected: None,
            cache,
        };
        if let Some(cache) = &dispatch.cache {
            let known = cache.load();
            dispatch.set_choices(&known, executor);
        }
        dispatch
    }

    /// Sets the memory for partial sums.
    pub fn set_scratch(&mut self, scratch: Scratch) {
        self.scratch = scratch;
    }

    /// Reports whether a tuning pass is collecting GEMMs. No work may run meanwhile.
    pub fn is_collecting(&self) -> bool {
        self.collected.is_some()
    }

    /// Uses these choices from now on. Captured graphs become invalid.
    pub fn set_choices(&mut self, choices: &[GemmChoice], executor: &mut dyn Executor) {
        executor.invalidate_graphs();
        self.choices.extend(choices.iter().map(|choice| (choice.key(), *choice)));
        let Some(timer) = executor.gemm_timer() else { return };
        for choice in choices.iter().filter(|choice| is_in_library(&choice.gemm)) {
            timer.set_library_algorithm(&library_key(&choice.key()), choice.algo);
        }
        // A choice for the library part itself takes precedence over one derived from a larger GEMM.
        for choice in choices.iter().filter(|choice| library_key(&choice.key()) == choice.key()) {
            timer.set_library_algorithm(&choice.key(), choice.algo);
        }
    }

    /// Returns the algorithms of all GEMMs, or `None` where none are timed.
    pub fn algorithms(&self) -> Option<Algorithms> {
        let machine = self.cache.as_ref()?.machine().to_owned();
        Some(Algorithms { machine, choices: self.choices.values().copied().collect() })
    }

    /// Uses the algorithms of another run if they are of the same machine; reports whether they are.
    pub fn adopt(&mut self, algorithms: &Algorithms, executor: &mut dyn Executor) -> bool {
        let valid = self.cache.as_ref().is_some_and(|cache| cache.machine() == algorithms.machine);
        if valid {
            self.set_choices(&algorithms.choices, executor);
        }
        valid
    }

    /// Reports whether wgmma kernels compute GEMMs, where they are the fastest.
    pub fn uses_wgmma(&self) -> bool {
        self.gpu.hopper && self.gpu.matmul != MatmulBackend::Cublaslt
    }

    /// Returns the kernel that can compute a GEMM, whether or not it is the fastest.
    pub(super) fn kernel(&self, call: &GemmCall) -> Option<KernelGemm> {
        KernelGemm::new(self.gpu, &call.gemm, &call.operands)
    }

    /// Reports whether a kernel could compute a GEMM, whether or not it is the fastest.
    pub fn may_use_kernel(&self, call: &GemmCall) -> bool {
        self.gpu.matmul != MatmulBackend::Cublaslt && self.kernel(call).is_some()
    }

    /// Reports whether cuBLASLt may compute the library part of a GEMM.
    pub(super) fn may_use_library(&self, call: &GemmCall) -> bool {
        is_in_library(&call.gemm) && !self.refused.contains(&call.key())
    }

    /// Remembers that cuBLASLt has refused a GEMM, and returns true, if that is the error and a kernel can compute the GEMM.
    /// cuBLASLt's support of FP8 depends on shapes, and shows only when the matmul runs.
    pub(super) fn falls_back(&mut self, call: &GemmCall, error: &anyhow::Error) -> bool {
        let refused = error.downcast_ref::<cublaslt::Error>().is_some_and(cublaslt::Error::is_unsupported);
        let falls_back = refused && self.kernel(call).is_some();
        if falls_back {
            self.refused.insert(call.key());
        }
        falls_back
    }

    /// Returns the kernel that computes a GEMM, or `None` if the library does.
    pub fn kernel_for(&self, call: &GemmCall, sm_count: usize) -> Result<Option<(KernelGemm, KernelConfig)>> {
        let has_alternative = self.may_use_library(call) || call.has_part();
        let backend = if has_alternative { self.gpu.matmul } else { MatmulBackend::Rust };
        let gemm = self.kernel(call);
        // Without wgmma, there are kernels for few GEMMs.
        if backend == MatmulBackend::Cublaslt || (!self.gpu.hopper && gemm.is_none()) {
            return Ok(None);
        }
        let required =
            || gemm.with_context(|| format!("--matmul rust: no kernel computes {}; use --matmul auto", call.gemm));
        let nth = |gemm: &KernelGemm, n: usize| {
            let configs = gemm.configs(sm_count, self.scratch);
            configs[n % configs.len()]
        };
        let config = self.gpu.kernel_config.unwrap_or(0);
        if self.untimed {
            let gemm = if backend == MatmulBackend::Rust { Some(required()?) } else { gemm };
            return Ok(gemm.map(|gemm| (gemm, nth(&gemm, config))));
        }
        let known = self.choices.get(&call.key()).filter(|_| self.gpu.kernel_config.is_none());
        if backend == MatmulBackend::Auto && !known.is_some_and(|choice| choice.kernel_wins) {
            return Ok(None);
        }
        let gemm = required()?;
        let tuned = known.and_then(|choice| choice.kernel).filter(|config| gemm.supports(*config, self.scratch));
        Ok(match (tuned, backend) {
            (Some(config), _) => Some((gemm, config)),
            (None, MatmulBackend::Rust) => Some((gemm, nth(&gemm, config))),
            (None, _) => None,
        })
    }

    /// Runs a GEMM, or collects it during a tuning pass.
    ///
    /// # Safety
    /// Same as [`Executor::library_gemm`] for the operands and [`Executor::launch`] for the fallback.
    pub unsafe fn run(&mut self, call: GemmCall, executor: &mut dyn Executor) -> Result<()> {
        if let Some(collected) = &mut self.collected {
            collect(call, collected);
            return Ok(());
        }
        call.operands.validate(&call.gemm)?;
        if let Some((gemm, config)) = self.kernel_for(&call, executor.sm_count())? {
            let kernels = gemm.launches(config, self.scratch, executor)?;
            // SAFETY: the caller's promise.
            return unsafe {
                executor.launch_group(&|| format!("{} {} {config}", call.gemm, gemm.instruction()), &kernels)
            };
        }
        let part = call.part();
        if part.gemm == call.gemm {
            // SAFETY: the caller's promise.
            return match unsafe { executor.library_gemm(&call.gemm, &call.operands) } {
                // SAFETY: the caller's promise. A refused matmul has launched nothing.
                Err(error) if self.falls_back(&call, &error) => unsafe { self.run(call, executor) },
                result => result.map_err(|error| unsupported(&call.gemm, error)),
            };
        }
        // If the part has kernels that run after it, they are those of this GEMM.
        let after = if part.after.is_empty() { call.after } else { Vec::new() };
        // SAFETY: the caller's promise, also for the operands of a part.
        unsafe {
            launch_all(&call.fallback, executor)?;
            self.run(part, executor)?;
            launch_all(&after, executor)
        }
    }
}

/// Returns the error of a GEMM. If cuBLASLt does not support it in FP8, the error says what to do.
pub(super) fn unsupported(gemm: &Gemm, error: anyhow::Error) -> anyhow::Error {
    let refused = error.downcast_ref::<cublaslt::Error>().is_some_and(cublaslt::Error::is_unsupported);
    if refused && gemm.is_fp8() {
        error.context(format!(
            "--precision fp8: GEMM {gemm}: expected an algorithm of cuBLASLt for this GPU, found none; use --precision bf16"
        ))
    } else {
        error
    }
}

/// Launches kernels in order.
///
/// # Safety
/// Same as [`Executor::launch`], for each kernel.
unsafe fn launch_all(kernels: &[KernelLaunch], executor: &mut dyn Executor) -> Result<()> {
    // SAFETY: the caller's promise.
    kernels.iter().try_for_each(|kernel| unsafe { executor.launch(kernel) })
}

/// Adds a GEMM to those of a tuning pass. If its alternative is a GEMM and a kernel after it, or a GEMM that cuBLASLt lacks, that GEMM is
/// tuned before, on its own.
fn collect(call: GemmCall, collected: &mut Vec<GemmCall>) {
    if !call.after.is_empty() || call.has_part() && !is_in_library(&call.gemm) {
        collect(call.part(), collected);
    }
    collected.push(call);
}

/// Returns the key of the library part of a GEMM.
pub(super) fn library_key(&(gemm, alignments): &GemmKey) -> GemmKey {
    let part = library_part(&gemm);
    let [b, a, out, bias, preactivation] = alignments;
    // If the part writes the preactivation instead of the output, it is tuned before this GEMM and has a separate choice.
    let keeps_preactivation = part.epilogue.activation.is_some();
    let out = if !keeps_preactivation && gemm.epilogue.writes_preactivation() { preactivation } else { out };
    let bias = if part.epilogue.bias.is_some() { bias } else { 0 };
    (part, [b, a, out, bias, if keeps_preactivation { preactivation } else { 0 }])
}

#[cfg(test)]
mod tests {
    use super::super::arena::Arena;
    use super::super::emulated::{Emulated, Times};
    use super::*;
    use crate::gemm::{Batching, Fp8Output, GemmEpilogue, GemmLayout, GemmOperands, GemmOutput, GemmPrecision, Pass};
    use crate::plan::{Group, Plan};
    use crate::tensor::{DType, Tensor};
    use cublaslt::sys::MatmulAlgo;
    use cuda_std::fp8::Fp8Format;
    use cuda_std::{Element, Global, GlobalMut, bf16};
    use gpu::activation::{Activation, Gelu, SwiGlu, activation_backward, activation_forward, grid};
    use gpu::launch::shared_bytes;
    use gpu::quantize::{tile_and_maxima, transpose_grid};
    use gpu::quantize_activation::quantize_activation;

    const ROWS: usize = 130;
    const F: usize = 104;
    const C: usize = 24;

    /// An emulated GPU with the tensors of an MLP with SwiGLU: names and elements.
    struct Mlp {
        executor: Emulated,
        arena: Arena,
        tensors: Vec<Tensor>,
    }

    const TENSORS: [(&str, usize); 8] = [
        ("inp", ROWS * C),
        ("fc", 2 * F * C),
        ("preactivation", ROWS * 2 * F),
        ("activation", ROWS * F),
        ("dout", ROWS * C),
        ("proj", C * F),
        ("dinp", ROWS * 2 * F),
        ("sums", ROWS * F),
    ];

    impl Mlp {
        /// Creates the tensors. The inputs of the GEMMs hold values, the others are uninitialized.
        fn new(gpu: EmulatedGpu) -> Self {
            let (mut plan, mut executor) = (Plan::new(), Emulated::new(gpu, true));
            let tensors = TENSORS.map(|(name, len)| plan.add(Group::Activations, name, &[len], DType::Bf16)).to_vec();
            let arena = executor.allocate(&plan).unwrap();
            let mut mlp = Self { executor, arena, tensors };
            for (i, (name, len)) in TENSORS.into_iter().enumerate() {
                if ["inp", "fc", "dout", "proj"].contains(&name) {
                    let value = |j: usize| ((j * 37 + i * 11) % 64) as f32 / 64.0 - 0.5;
                    let values: Vec<_> = (0..len).map(|j| bf16::from_f32(value(j))).collect();
                    let to = mlp.pointer(name).cast();
                    // SAFETY: the tensor has that many elements.
                    unsafe { mlp.executor.upload(to, bytemuck::cast_slice(&values)) }.unwrap();
                }
            }
            mlp
        }

        fn pointer(&self, name: &str) -> *mut bf16 {
            let i = TENSORS.iter().position(|tensor| tensor.0 == name).unwrap();
            self.arena.address(name, self.tensors[i], TENSORS[i].1).unwrap()
        }

        fn address(&self, name: &str) -> u64 {
            self.pointer(name).addr() as u64
        }

        /// Returns the GEMM of dinp in FP8, which recomputes the activation.
        fn backward_in_fp8(&self) -> GemmCall {
            let epilogue = GemmEpilogue::NONE.with(Activation::Gelu, Pass::BackwardAndValue);
            let gemm = Gemm {
                m: 64,
                n: 48,
                k: 16,
                layout: GemmLayout::Nt,
                precision: GemmPrecision::Fp8 { a: Fp8Format::E5m2, columns: None },
                batching: Batching::One,
                epilogue: GemmEpilogue { output: GemmOutput::Fp8, ..epilogue },
            };
            let sums = self.address("sums");
            let operands = GemmOperands {
                a: self.address("dout"),
                b: self.address("proj"),
                out: self.address("dinp"),
                preactivation: Some(self.address("preactivation")),
                activation: Some(self.address("activation")),
                fp8_scales: Some([sums; 2]),
                fp8_output: Some(Fp8Output { scale: sums, amax: sums, transposed: None, activation_scale: Some(sums) }),
                ..GemmOperands::default()
            };
            let kernel = quantize_activation::<Gelu, false, true>(
                GlobalMut::null(),
                GlobalMut::from_address(self.address("activation")),
                GlobalMut::null(),
                GlobalMut::new(self.pointer("preactivation")).reader(),
                Global::from_address(sums),
                64,
                48,
                Global::null(),
            );
            let (grid, shared_bytes) = (transpose_grid(64, 48), shared_bytes(tile_and_maxima));
            let fallback = vec![KernelLaunch { launch: kernel, grid, shared_bytes }];
            GemmCall { gemm, operands, fallback, after: Vec::new() }
        }

        fn read(&mut self, name: &str) -> Vec<f32> {
            let len = TENSORS.iter().find(|tensor| tensor.0 == name).unwrap().1;
            let (mut values, from) = (vec![bf16::default(); len], self.pointer(name).cast());
            // SAFETY: the tensor has that many elements.
            unsafe { self.executor.download(bytemuck::cast_slice_mut(&mut values), from) }.unwrap();
            values.iter().map(|value| value.to_f32()).collect()
        }

        fn forward_kernel(&self) -> KernelLaunch {
            let (out, inp) =
                (GlobalMut::new(self.pointer("activation")), GlobalMut::new(self.pointer("preactivation")));
            let launch = activation_forward::<bf16, SwiGlu>(out, inp.reader(), (ROWS * F) as u64, F as u32);
            KernelLaunch { launch, grid: [grid::<bf16>(ROWS * F), 1, 1], shared_bytes: 0 }
        }

        fn forward(&self) -> GemmCall {
            let gemm = Gemm {
                m: ROWS,
                n: 2 * F,
                k: C,
                layout: GemmLayout::Nt,
                precision: GemmPrecision::Bf16,
                batching: Batching::One,
                epilogue: GemmEpilogue::NONE.with(Activation::SwiGlu, Pass::Forward),
            };
            let operands = GemmOperands {
                a: self.address("inp"),
                b: self.address("fc"),
                out: self.address("activation"),
                preactivation: Some(self.address("preactivation")),
                ..GemmOperands::default()
            };
            GemmCall { gemm, operands, fallback: Vec::new(), after: vec![self.forward_kernel()] }
        }

        /// Returns the GEMM of dinp, which recomputes the activation.
        fn backward(&self) -> GemmCall {
            let forward = self.forward();
            let epilogue = GemmEpilogue::NONE.with(Activation::SwiGlu, Pass::BackwardAndValue);
            let gemm = Gemm { n: F, layout: GemmLayout::Nn, epilogue, ..forward.gemm };
            let operands = GemmOperands {
                a: self.address("dout"),
                b: self.address("proj"),
                out: self.address("dinp"),
                activation: Some(forward.operands.out),
                sums: Some(self.address("sums")),
                ..forward.operands
            };
            let global = |name| GlobalMut::new(self.pointer(name));
            let launch = activation_backward::<bf16, SwiGlu>(
                global("dinp"),
                global("sums").reader(),
                global("preactivation").reader(),
                (ROWS * F) as u64,
                F as u32,
            );
            let after = KernelLaunch { launch, grid: [grid::<bf16>(ROWS * F), 1, 1], shared_bytes: 0 };
            GemmCall { gemm, operands, fallback: vec![self.forward_kernel()], after: vec![after] }
        }

        fn run(&mut self, dispatch: &mut GemmDispatch, call: GemmCall) {
            // SAFETY: the tensors have the sizes that the GEMM implies.
            unsafe { dispatch.run(call, &mut self.executor) }.unwrap();
        }
    }

    fn gpu(matmul: MatmulBackend) -> EmulatedGpu {
        EmulatedGpu { hopper: true, matmul, ..EmulatedGpu::default() }
    }

    /// Returns the dispatch that a tuner would leave, with the choices of these GEMMs.
    fn tuned(mlp: &mut Mlp, choices: &[(&GemmCall, bool)]) -> GemmDispatch {
        let mut dispatch = GemmDispatch::new(gpu(MatmulBackend::Auto), None, &mut mlp.executor);
        dispatch.untimed = false;
        let choices: Vec<_> = choices
            .iter()
            .map(|&(call, kernel_wins)| {
                let (gemm, alignments) = call.key();
                let kernel = KernelGemm::new(gpu(MatmulBackend::Auto), &gemm, &call.operands)
                    .map(|gemm| gemm.configs(4, Scratch::NONE)[0]);
                GemmChoice { gemm, alignments, algo: MatmulAlgo([0; 8]), kernel, kernel_wins }
            })
            .collect();
        dispatch.set_choices(&choices, &mut mlp.executor);
        dispatch
    }

    /// Runs both passes and returns the tensors that they write, but not those that only unfused GEMMs use.
    fn results(mut mlp: Mlp, mut dispatch: GemmDispatch) -> Vec<Vec<f32>> {
        let (forward, backward) = (mlp.forward(), mlp.backward());
        mlp.run(&mut dispatch, forward);
        let activation = mlp.read("activation");
        mlp.run(&mut dispatch, backward);
        [activation].into_iter().chain(["preactivation", "activation", "dinp"].map(|name| mlp.read(name))).collect()
    }

    /// However many steps of an epilogue a kernel computes, the results are the same within rounding. The kernels around the
    /// part run exactly if the part lacks their step: they read tensors that nothing else has written.
    #[test]
    fn kernels_around_a_part_compute_the_steps_that_it_lacks() {
        let whole = || {
            let mut mlp = Mlp::new(gpu(MatmulBackend::Rust));
            let dispatch = GemmDispatch::new(gpu(MatmulBackend::Rust), None, &mut mlp.executor);
            results(mlp, dispatch)
        };
        let library = || {
            let mut mlp = Mlp::new(gpu(MatmulBackend::Cublaslt));
            let dispatch = GemmDispatch::new(gpu(MatmulBackend::Cublaslt), None, &mut mlp.executor);
            results(mlp, dispatch)
        };
        let chosen = |part_wins: bool, plain_wins: bool| {
            let mut mlp = Mlp::new(gpu(MatmulBackend::Auto));
            let (forward, backward) = (mlp.forward(), mlp.backward());
            let (part, plain) = (backward.part(), backward.library_part());
            let choices = [
                (&forward, false),
                (&forward.part(), plain_wins),
                (&backward, false),
                (&part, part_wins),
                (&plain, plain_wins),
            ];
            let dispatch = tuned(&mut mlp, &choices);
            results(mlp, dispatch)
        };
        let want = whole();
        for (name, got) in [
            ("library", library()),
            ("part", chosen(true, false)),
            ("plain", chosen(false, true)),
            ("none", chosen(false, false)),
        ] {
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 0.02 * b.abs().max(0.05);
                assert!(got.iter().zip(want).all(near), "{name}, tensor {i}");
            }
        }
    }

    /// A GEMM that competes with a plain GEMM and kernels around it is timed after that plain GEMM.
    #[test]
    fn parts_are_tuned_before_the_gemm_that_uses_them() {
        let with = |pass| GemmEpilogue::NONE.with(Activation::SwiGlu, pass);
        let mut mlp = Mlp::new(gpu(MatmulBackend::Auto));
        let mut dispatch = tuned(&mut mlp, &[]);
        dispatch.begin_tuning();
        let (forward, backward) = (mlp.forward(), mlp.backward());
        mlp.run(&mut dispatch, forward);
        mlp.run(&mut dispatch, backward);
        let collected = dispatch.collected.take().unwrap();
        let epilogues: Vec<_> = collected.iter().map(|call| call.gemm.epilogue).collect();
        assert_eq!(
            epilogues,
            [
                GemmEpilogue::NONE,
                with(Pass::Forward),
                GemmEpilogue::NONE,
                with(Pass::Backward),
                with(Pass::BackwardAndValue)
            ]
        );
        for call in &collected {
            call.operands.validate(&call.gemm).unwrap();
        }
    }

    /// cuBLASLt may refuse a GEMM although its heuristic returned an algorithm.
    #[test]
    fn kernels_compute_what_the_library_refuses() {
        let want = {
            let mut mlp = Mlp::new(gpu(MatmulBackend::Rust));
            let dispatch = GemmDispatch::new(gpu(MatmulBackend::Rust), None, &mut mlp.executor);
            results(mlp, dispatch)
        };
        let mut mlp = Mlp::new(gpu(MatmulBackend::Auto));
        mlp.executor.library_refuses = true;
        let dispatch = tuned(&mut mlp, &[]);
        let got = results(mlp, dispatch);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 0.02 * b.abs().max(0.05);
            assert!(got.iter().zip(want).all(near), "tensor {i}");
        }
        // Without a kernel, the error remains.
        let mut mlp = Mlp::new(gpu(MatmulBackend::Auto));
        mlp.executor.library_refuses = true;
        let mut dispatch = tuned(&mut mlp, &[]);
        dispatch.gpu.hopper = false;
        let call = mlp.forward().library_part();
        let gemm = call.gemm;
        // SAFETY: the tensors have the sizes that the GEMM implies.
        let error = unsafe { dispatch.run(call, &mut mlp.executor) }.unwrap_err();
        assert!(error.to_string().contains("no algorithm"), "{error}");
        let precision = GemmPrecision::Fp8 { a: Fp8Format::E4m3, columns: None };
        let text = unsupported(&Gemm { precision, ..gemm }, error).to_string();
        assert!(text.starts_with("--precision fp8: GEMM ") && text.ends_with("use --precision bf16"), "{text}");
    }

    /// Tunes the GEMMs of the MLP, and returns the choice of the GEMM of the forward pass.
    fn tune(mlp: &mut Mlp, library: &[f32], kernel: f32) -> GemmChoice {
        mlp.executor.times = Some(Times { library: library.to_vec(), kernel, ..Times::default() });
        let mut dispatch = tuned(mlp, &[]);
        dispatch.begin_tuning();
        let (forward, backward) = (mlp.forward(), mlp.backward());
        let key = forward.key();
        mlp.run(&mut dispatch, forward);
        mlp.run(&mut dispatch, backward);
        let tuning = dispatch.finish_tuning(false, &mut mlp.executor).unwrap();
        assert_eq!(tuning.timings.len(), dispatch.choices.len());
        dispatch.choices[&key]
    }

    #[test]
    fn the_tuner_chooses_between_the_libraries() {
        let mut mlp = Mlp::new(gpu(MatmulBackend::Auto));
        // The kernel after cuBLASLt's GEMM takes as long as the one that computes both.
        let choice = tune(&mut mlp, &[1.0, 0.5, 0.7], 0.4);
        assert!(choice.kernel_wins && choice.algo == MatmulAlgo([1; 8]), "{choice:?}");
        let choice = tune(&mut mlp, &[1.0, 0.5, 0.7], 20.0);
        assert!(choice.kernel_wins && choice.algo == MatmulAlgo([1; 8]), "{choice:?}");
        let plain = mlp.forward().library_part();
        mlp.executor.times = Some(Times { library: vec![1.0, 0.999], kernel: 2.0, ..Times::default() });
        let mut dispatch = tuned(&mut mlp, &[]);
        dispatch.begin_tuning();
        let key = plain.key();
        mlp.run(&mut dispatch, plain);
        dispatch.finish_tuning(false, &mut mlp.executor).unwrap();
        let choice = dispatch.choices[&key];
        assert!(!choice.kernel_wins && choice.algo == MatmulAlgo([0; 8]) && choice.kernel.is_some(), "{choice:?}");
    }

    #[test]
    fn the_tuner_uses_kernels_for_what_the_library_refuses() {
        let mut mlp = Mlp::new(gpu(MatmulBackend::Auto));
        mlp.executor.library_refuses = true;
        let choice = tune(&mut mlp, &[], 1.0);
        assert!(choice.kernel_wins && choice.kernel.is_some(), "{choice:?}");
    }

    /// The alternative is a kernel before the GEMM that does not recompute the activation.
    #[test]
    fn the_tuner_decides_where_an_activation_in_fp8_is_recomputed() {
        let mut mlp = Mlp::new(gpu(MatmulBackend::Auto));
        let call = mlp.backward_in_fp8();
        let part = call.part();
        for wins in [true, false] {
            let dispatch = tuned(&mut mlp, &[(&call, wins), (&part, false)]);
            assert_eq!(dispatch.kernel_for(&call, 4).unwrap().is_some(), wins);
            // Only a kernel computes the part.
            assert!(dispatch.kernel_for(&part, 4).unwrap().is_some());
            let kernels = dispatch.unfused_kernels(&call, &mut mlp.executor).unwrap().unwrap();
            let names: Vec<_> = kernels.iter().map(|kernel| kernel.launch.name()).collect();
            assert!(names.len() == 2 && names[0] == call.fallback[0].launch.name(), "{names:?}");
            assert!(names[1].starts_with("matmul_e5m2_gelu_backward_to_fp8_t"), "{names:?}");
        }
        mlp.executor.times = Some(Times { library: Vec::new(), kernel: 1.0, ..Times::default() });
        let mut dispatch = tuned(&mut mlp, &[]);
        dispatch.begin_tuning();
        let gemms = [part.gemm, call.gemm];
        mlp.run(&mut dispatch, call.clone());
        assert_eq!(dispatch.collected.iter().flatten().map(|call| call.gemm).collect::<Vec<_>>(), gemms);
        dispatch.finish_tuning(false, &mut mlp.executor).unwrap();
        // Two kernels take longer than one.
        assert!(dispatch.choices[&call.key()].kernel_wins);
    }

    /// Without wgmma, kernels compute FP8 GEMMs only, and compete with cuBLASLt and kernels after it also where they quantize.
    #[test]
    fn kernels_without_wgmma_compute_fp8_gemms() {
        let gpu = EmulatedGpu { fp8: true, mma_fp8: true, ..EmulatedGpu::default() };
        let mut mlp = Mlp::new(gpu);
        let dispatch = |mlp: &mut Mlp, matmul| {
            let gpu = EmulatedGpu { matmul, ..gpu };
            let dispatch = GemmDispatch::new(gpu, None, &mut mlp.executor);
            GemmDispatch { untimed: false, ..dispatch }
        };
        let mut call = mlp.backward_in_fp8();
        // GEMMs of fewer rows than a tile are not timed.
        call.gemm.m = 128;
        call.operands.sums = Some(mlp.address("sums"));
        call.after = vec![mlp.forward_kernel()];
        let part = call.part();
        assert_eq!((part.gemm.epilogue, part.operands.out), (GemmEpilogue::NONE, mlp.address("sums")));
        call.operands.validate(&call.gemm).unwrap();
        part.operands.validate(&part.gemm).unwrap();
        let rust = dispatch(&mut mlp, MatmulBackend::Rust);
        let name = |call: &GemmCall, mlp: &mut Mlp| {
            let (gemm, config) = rust.kernel_for(call, 4).unwrap()?;
            Some(gemm.launches(config, Scratch::NONE, &mut mlp.executor).unwrap()[0].launch.name())
        };
        assert_eq!(name(&call, &mut mlp), Some("matmul_mma_e5m2_gelu_backward_and_value_to_fp8"));
        assert_eq!(name(&part, &mut mlp), Some("matmul_mma_e5m2"));
        let bf16 = mlp.forward();
        assert_eq!(name(&bf16, &mut mlp), None);
        for (kernel, part_wins) in [(0.4, true), (2.0, false)] {
            mlp.executor.times = Some(Times { library: vec![1.0], kernel, ..Times::default() });
            let mut auto = dispatch(&mut mlp, MatmulBackend::Auto);
            auto.begin_tuning();
            mlp.run(&mut auto, call.clone());
            assert_eq!(
                auto.collected.iter().flatten().map(|call| call.gemm).collect::<Vec<_>>(),
                [part.gemm, call.gemm]
            );
            auto.finish_tuning(false, &mut mlp.executor).unwrap();
            // The part of the library takes 1 ms, and the kernel after it as long as one that computes both.
            assert!(auto.kernel_for(&call, 4).unwrap().is_some());
            assert_eq!(auto.kernel_for(&part, 4).unwrap().is_some(), part_wins);
            auto.choices.entry(call.key()).and_modify(|choice| choice.kernel_wins = false);
            assert!(auto.kernel_for(&call, 4).unwrap().is_none());
            let unfused = auto.unfused_kernels(&call, &mut mlp.executor).unwrap();
            assert_eq!(unfused.map(|kernels| kernels.len()), part_wins.then_some(3));
        }
        let cublaslt = dispatch(&mut mlp, MatmulBackend::Cublaslt);
        assert!(cublaslt.kernel_for(&call, 4).unwrap().is_none());
    }

    #[test]
    fn the_unfused_competitor_includes_the_kernels_around_the_part() {
        let mut mlp = Mlp::new(gpu(MatmulBackend::Auto));
        let backward = mlp.backward();
        let (part, plain) = (backward.part(), backward.library_part());
        let mut names = |choices: &[(&GemmCall, bool)]| {
            let dispatch = tuned(&mut mlp, choices);
            let kernels = dispatch.unfused_kernels(&backward, &mut mlp.executor).unwrap();
            kernels.map(|kernels| kernels.iter().map(|kernel| kernel.launch.name()).collect::<Vec<_>>())
        };
        assert_eq!(names(&[]), None);
        assert_eq!(names(&[(&part, false), (&plain, false)]), None);
        let found = names(&[(&part, true), (&plain, true)]).unwrap();
        assert!(found.len() == 2 && found[0] == "activation_forward_bf16_swiglu", "{found:?}");
        assert!(found[1].starts_with("matmul_ab_swiglu_backward_t"), "{found:?}");
        let found = names(&[(&part, false), (&plain, true)]).unwrap();
        assert!(found.len() == 3 && found[0] == "activation_forward_bf16_swiglu", "{found:?}");
        assert!(found[1].starts_with("matmul_ab_t") && found[2] == "activation_backward_bf16_swiglu", "{found:?}");
    }
}
