//! Selects the backend of each GEMM: a wgmma kernel or the library.

use super::MatmulBackend;
use super::executor::{EmulatedGpu, Executor};
use super::gemm_cache::Cache;
use super::wgmma::{Scratch, WgmmaGemm};
use crate::Result;
use crate::gemm::{Algorithms, Choice, GemmCall, GemmKey, KernelConfig};
use anyhow::Context;
use gpu::launch::KernelLaunch;
use std::collections::HashMap;

/// The GEMMs of an engine, and the algorithm of each.
pub struct GemmDispatch {
    backend: MatmulBackend,
    /// See [`Options::kernel_config`](super::Options::kernel_config).
    kernel_config: Option<usize>,
    /// Whether the executor runs kernels for sm_90a.
    hopper: bool,
    /// Whether kernels are used without timing them, as in the emulator.
    untimed: bool,
    pub(super) scratch: Scratch,
    pub(super) choices: HashMap<GemmKey, Choice>,
    /// The calls of a tuning pass, in which nothing runs.
    pub(super) collected: Option<Vec<GemmCall>>,
    pub(super) cache: Option<Cache>,
}

impl GemmDispatch {
    /// Creates the dispatch for an executor. Without a `cache` algorithms are not timed.
    pub fn new(gpu: EmulatedGpu, cache: Option<Cache>, executor: &mut dyn Executor) -> Self {
        let mut dispatch = Self {
            backend: gpu.matmul,
            kernel_config: gpu.kernel_config,
            hopper: gpu.hopper,
            untimed: cache.is_none(),
            scratch: Scratch::NONE,
            choices: HashMap::new(),
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
    pub fn set_choices(&mut self, choices: &[Choice], executor: &mut dyn Executor) {
        executor.invalidate_graphs();
        self.choices.extend(choices.iter().map(|choice| (choice.key(), *choice)));
        let Some(timer) = executor.gemm_timer() else { return };
        for choice in choices {
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

    /// Returns the kernel that computes a GEMM, or `None` if the library does.
    pub fn kernel_for(&self, call: &GemmCall, sm_count: usize) -> Result<Option<(WgmmaGemm, KernelConfig)>> {
        if !self.hopper || self.backend == MatmulBackend::Cublaslt {
            return Ok(None);
        }
        let gemm = WgmmaGemm::new(&call.gemm, &call.operands);
        let required =
            || gemm.with_context(|| format!("--matmul rust: no kernel computes {}; expected --matmul auto", call.gemm));
        let nth = |gemm: &WgmmaGemm, n: usize| {
            let configs = gemm.configs(sm_count, self.scratch);
            configs[n % configs.len()]
        };
        let config = self.kernel_config.unwrap_or(0);
        if self.untimed {
            let gemm = if self.backend == MatmulBackend::Rust { Some(required()?) } else { gemm };
            return Ok(gemm.map(|gemm| (gemm, nth(&gemm, config))));
        }
        let known = self.choices.get(&call.key()).filter(|_| self.kernel_config.is_none());
        if self.backend == MatmulBackend::Auto && !known.is_some_and(|choice| choice.kernel_wins) {
            return Ok(None);
        }
        let gemm = required()?;
        let tuned = known.and_then(|choice| choice.kernel).filter(|config| gemm.supports(*config, self.scratch));
        Ok(match (tuned, self.backend) {
            (Some(config), _) => Some((gemm, config)),
            (None, MatmulBackend::Rust) => Some((gemm, nth(&gemm, config))),
            (None, _) => None,
        })
    }

    /// Runs a GEMM, or collects it during a tuning pass.
    ///
    /// # Safety
    /// As [`Executor::library_gemm`] for the operands and [`Executor::launch`] for the fallback.
    pub unsafe fn run(&mut self, call: GemmCall, executor: &mut dyn Executor) -> Result<()> {
        if let Some(collected) = &mut self.collected {
            collected.push(call);
            return Ok(());
        }
        call.gemm.validate(&call.operands)?;
        if let Some((gemm, config)) = self.kernel_for(&call, executor.sm_count())? {
            let kernels = gemm.launches(config, self.scratch, executor)?;
            // SAFETY: the caller's promise.
            return unsafe { executor.launch_group(&|| format!("{} wgmma {config}", call.gemm), &kernels) };
        }
        for KernelLaunch { launch, grid, shared_bytes } in &call.fallback {
            // SAFETY: the caller's promise.
            unsafe { executor.launch(launch, *grid, *shared_bytes) }?;
        }
        let part = call.library_part();
        if part.gemm != call.gemm {
            // SAFETY: the caller's promise.
            return unsafe { self.run(part, executor) };
        }
        // SAFETY: the caller's promise.
        unsafe { executor.library_gemm(&part.gemm, &part.operands) }
    }
}

/// Returns the key of the library part of a GEMM.
pub(super) fn library_key(&(gemm, alignments): &GemmKey) -> GemmKey {
    let part = gemm.library_part();
    let [b, a, out, bias, pre_gelu] = alignments;
    (part, [b, a, out, if part.epilogue.uses_bias() { bias } else { 0 }, pre_gelu])
}
