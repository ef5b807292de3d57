//! The autotuner: times the backends of each GEMM once and keeps the fastest.

use super::executor::{Executor, GemmTimer};
use super::gemm_dispatch::{GemmDispatch, unsupported};
use super::wgmma::WgmmaGemm;
use crate::gemm::{Choice, GemmCall, KernelConfig, Timing, Tuning};
use crate::{COOLDOWN, Result};
use anyhow::Context;
use cublaslt::sys::MatmulAlgo;
use gpu::launch::KernelLaunch;
use std::thread::sleep;
use std::time::Instant;

impl GemmDispatch {
    /// Begins a tuning pass: GEMMs are collected and no work runs until [`finish_tuning`](Self::finish_tuning).
    pub fn begin_tuning(&mut self) {
        self.collected = Some(Vec::new());
    }

    /// Times the collected GEMMs, or, unless `retune`, those of them without a choice. The allocated memory is zeroed.
    pub fn finish_tuning(&mut self, retune: bool, executor: &mut dyn Executor) -> Result<Tuning> {
        let start = Instant::now();
        executor.invalidate_graphs();
        let mut pending: Vec<GemmCall> = Vec::new();
        for call in self.collected.take().unwrap_or_default() {
            let listed = pending.iter().any(|other| other.key() == call.key());
            if !listed && (retune || !self.choices.contains_key(&call.key())) {
                pending.push(call);
            }
        }
        let Some(first) = pending.first() else { return Ok(Tuning::default()) };
        let Some(timer) = executor.gemm_timer() else { return Ok(Tuning::default()) };
        timer.fill_with_noise(&first.gemm)?;
        let mut timings = Vec::new();
        for call in &pending {
            timings.push(self.tune(call, retune, executor)?);
        }
        timer_of(executor)?.zero_memory()?;
        let choices: Vec<Choice> = self.choices.values().copied().collect();
        let cache_error = self.cache.as_ref().and_then(|cache| cache.save(&choices).err());
        let cache_error = cache_error.map(|error| format!("{error:#}"));
        Ok(Tuning { timings, seconds: start.elapsed().as_secs_f64(), cache_error })
    }

    fn tune(&mut self, call: &GemmCall, retune: bool, executor: &mut dyn Executor) -> Result<Timing> {
        // Times that are reported must begin with the same clock. Where only the choice matters, startup time matters more.
        let cool_down = || {
            if retune {
                sleep(COOLDOWN);
            }
        };
        cool_down();
        let (algo, timing) = self.time_library(call, executor)?;
        cool_down();
        let kernel = self.time_kernels(call, executor)?;
        let unfused = self.time_unfused(call, &cool_down, executor)?;
        let timing = Timing { kernel, unfused, ..timing };
        let (gemm, alignments) = call.key();
        let (kernel, kernel_wins) = (kernel.map(|(config, _)| config), timing.kernel_wins());
        self.choices.insert(call.key(), Choice { gemm, alignments, algo, kernel, kernel_wins });
        Ok(timing)
    }

    /// Times cuBLASLt's algorithms for the library part, plus the kernels for the rest.
    fn time_library(&mut self, call: &GemmCall, executor: &mut dyn Executor) -> Result<(MatmulAlgo, Timing)> {
        let part = call.library_part();
        let never = || {
            let (library_first, library) = (f32::INFINITY, f32::INFINITY);
            let timing = Timing { gemm: call.gemm, candidates: 0, library_first, library, kernel: None, unfused: None };
            Ok((MatmulAlgo([0; 8]), timing))
        };
        if !self.may_use_library(&part) {
            return never();
        }
        let (key, timer) = (part.key(), timer_of(executor)?);
        let previous = timer.library_algorithm(&key).filter(|_| part.gemm != call.gemm);
        // SAFETY: the operations have checked the operands against the arena; nothing else is running.
        let library = match unsafe { timer.time_library(&part.gemm, &part.operands) } {
            Err(error) if self.falls_back(&part, &error) => return never(),
            library => library.map_err(|error| unsupported(&part.gemm, error))?,
        };
        if let Some(algo) = previous {
            // The part was already tuned as a GEMM of its own.
            timer.set_library_algorithm(&key, algo);
        }
        let algo = timer.library_algorithm(&key);
        let algo = algo.with_context(|| format!("cuBLASLt has no algorithm for {}", part.gemm))?;
        let others: Vec<_> = call.fallback.iter().chain(&call.after).cloned().collect();
        // SAFETY: as above.
        let added = if others.is_empty() { 0.0 } else { unsafe { timer.time_kernels(&others) }? };
        let timing = Timing {
            gemm: call.gemm,
            candidates: library.candidates,
            library_first: library.first + added,
            library: library.best + added,
            kernel: None,
            unfused: None,
        };
        Ok((algo, timing))
    }

    /// Returns the fastest kernel and its time.
    fn time_kernels(&self, call: &GemmCall, executor: &mut dyn Executor) -> Result<Option<(KernelConfig, f32)>> {
        let Some(gemm) = WgmmaGemm::new(&call.gemm, &call.operands) else { return Ok(None) };
        let mut fastest: Option<(KernelConfig, f32)> = None;
        for config in gemm.configs(executor.sm_count(), self.scratch) {
            let kernels = gemm.launches(config, self.scratch, executor)?;
            if kernels.is_empty() {
                return Ok(None);
            }
            // SAFETY: the operations have checked the operands against the arena; nothing else is running.
            let milliseconds = unsafe { timer_of(executor)?.time_kernels(&kernels) }?;
            if fastest.is_none_or(|(_, least)| milliseconds < least) {
                fastest = Some((config, milliseconds));
            }
        }
        Ok(fastest)
    }

    /// Times a wgmma kernel for a part of the GEMM, with the kernels for the rest, if that kernel beats cuBLASLt.
    fn time_unfused(&self, call: &GemmCall, cool_down: &dyn Fn(), executor: &mut dyn Executor) -> Result<Option<f32>> {
        let Some(kernels) = self.unfused_kernels(call, executor)? else { return Ok(None) };
        cool_down();
        // SAFETY: the operations have checked the operands against the arena; nothing else is running.
        Ok(Some(unsafe { timer_of(executor)?.time_kernels(&kernels) }?))
    }

    /// Returns the kernels that [`run`](Self::run) launches if no kernel computes the whole GEMM; `None` if cuBLASLt computes a
    /// part of it.
    pub(super) fn unfused_kernels(
        &self,
        call: &GemmCall,
        executor: &mut dyn Executor,
    ) -> Result<Option<Vec<KernelLaunch>>> {
        let part = call.part();
        if part.gemm == call.gemm {
            return Ok(None);
        }
        let of_part = match self.kernel_for(&part, executor.sm_count())? {
            Some((gemm, config)) => gemm.launches(config, self.scratch, executor)?,
            None => match self.unfused_kernels(&part, executor)? {
                Some(kernels) => kernels,
                None => return Ok(None),
            },
        };
        let after: &[KernelLaunch] = if part.after.is_empty() { &call.after } else { &[] };
        Ok(Some([&call.fallback, &of_part[..], after].concat()))
    }
}

fn timer_of(executor: &mut dyn Executor) -> Result<&mut dyn GemmTimer> {
    executor.gemm_timer().context("GEMMs cannot be timed in the emulator")
}
