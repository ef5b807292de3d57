//! The autotuner: times the backends of each GEMM once and keeps the fastest.

use super::executor::{Executor, GemmTimer};
use super::gemm_dispatch::{GemmDispatch, unsupported};
use crate::gemm::{Batching, Gemm, GemmCall, GemmChoice, GemmTiming, GroupOperands, KernelConfig, Tuning};
use crate::{COOLDOWN, Result};
use anyhow::Context;
use cublaslt::Finalists;
use cublaslt::sys::MatmulAlgo;
use cuda_std::GlobalMut;
use gpu::experts::{GROUP_BLOCK, Groups};
use gpu::launch::KernelLaunch;
use gpu::matmul::launch::TileShape;
use std::thread::sleep;
use std::time::Instant;
use system::progress::{self, Unit};

/// Rows from which on a kernel competes with cuBLASLt: those of its smallest tile. GEMMs of fewer rows, as in generation, take about as
/// long as the host needs to launch them, and a race does not tell them apart.
const FEWEST_ROWS: usize = TileShape::T128x128.dims()[0] as usize;

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
        let progress = progress::start("tuning GEMMs", Unit::Count, pending.len() as u64);
        let mut timings = Vec::new();
        for call in &pending {
            timings.push(self.tune(call, retune, executor)?);
            progress.add(1);
        }
        timer_of(executor)?.zero_memory()?;
        let choices: Vec<GemmChoice> = self.choices.values().copied().collect();
        let cache_error = self.cache.as_ref().and_then(|cache| cache.save(&choices).err());
        let cache_error = cache_error.map(|error| format!("{error:#}"));
        Ok(Tuning { timings, seconds: start.elapsed().as_secs_f64(), cache_error, step_seconds: Vec::new() })
    }

    /// Races the finalists of both libraries in one list, and the kernels around the library part.
    fn tune(&mut self, call: &GemmCall, retune: bool, executor: &mut dyn Executor) -> Result<GemmTiming> {
        // Times that are reported must begin with the same clock. Where only the choice matters, startup time matters more.
        if retune {
            sleep(COOLDOWN);
        }
        if let Some(groups) = call.operands.groups {
            describe_groups(&call.gemm, groups, executor)?;
        }
        let part = call.library_part();
        let Finalists { candidates, algos } = self.library_finalists(&part, executor)?;
        let is_raced = algos.is_empty() || call.gemm.m >= FEWEST_ROWS;
        let kernels = if is_raced { self.kernel_finalists(call, executor)? } else { Vec::new() };
        let unfused = self.unfused_kernels(call, executor)?;
        let others: Vec<_> = call.fallback.iter().chain(&call.after).cloned().collect();
        let others = (!algos.is_empty() && !others.is_empty()).then_some(others);

        let launches: Vec<&[KernelLaunch]> = kernels
            .iter()
            .map(|(_, launches)| &launches[..])
            .chain(unfused.as_deref())
            .chain(others.as_deref())
            .collect();
        let times = cublaslt::race(algos.len() + launches.len(), |i, runs| {
            let timer = timer_of(executor)?;
            // SAFETY: the operations have checked the operands against the arena; nothing else is running.
            match algos.get(i) {
                Some(algo) => unsafe { timer.time_library(&part.gemm, &part.operands, *algo, runs) },
                None => unsafe { timer.time_kernels(launches[i - algos.len()], runs) },
            }
        })?;

        let (of_algos, of_launches) = times.split_at(algos.len());
        let (of_kernels, mut rest) = (&of_launches[..kernels.len()], of_launches[kernels.len()..].iter().copied());
        let unfused = unfused.and_then(|_| rest.next());
        let added = rest.next().unwrap_or(0.0);
        let best = cublaslt::fastest(of_algos);
        let kernel = kernels.iter().zip(of_kernels).min_by(|a, b| a.1.total_cmp(b.1));
        let kernel = kernel.map(|((config, _), milliseconds)| (*config, *milliseconds));
        let milliseconds =
            |i: Option<usize>| i.and_then(|i| of_algos.get(i)).map_or(f32::INFINITY, |time| time + added);
        let timing = GemmTiming {
            gemm: call.gemm,
            candidates,
            library_first: milliseconds(Some(0)),
            library: milliseconds(best),
            kernel,
            unfused,
        };
        let algo = match best {
            Some(best) => keep_algorithm(call, &part, algos[best], executor)?,
            None => MatmulAlgo([0; 8]),
        };
        let (gemm, alignments) = call.key();
        let (kernel, kernel_wins) = (kernel.map(|(config, _)| config), timing.kernel_wins());
        self.choices.insert(call.key(), GemmChoice { gemm, alignments, algo, kernel, kernel_wins });
        Ok(timing)
    }

    /// Returns the algorithms of cuBLASLt that are worth a race; none if it cannot compute the library part of a GEMM.
    fn library_finalists(&mut self, part: &GemmCall, executor: &mut dyn Executor) -> Result<Finalists> {
        let none = || Finalists { candidates: 0, algos: Vec::new() };
        if !self.may_use_library(part) {
            return Ok(none());
        }
        // SAFETY: the operations have checked the operands against the arena; nothing else is running.
        match unsafe { timer_of(executor)?.library_finalists(&part.gemm, &part.operands) } {
            Err(error) if self.falls_back(part, &error) => Ok(none()),
            finalists => finalists.map_err(|error| unsupported(&part.gemm, error)),
        }
    }

    /// Returns the configurations of the kernels that are worth a race, and their launches.
    fn kernel_finalists(
        &self,
        call: &GemmCall,
        executor: &mut dyn Executor,
    ) -> Result<Vec<(KernelConfig, Vec<KernelLaunch>)>> {
        let Some(gemm) = self.kernel(call) else { return Ok(Vec::new()) };
        let mut timed = Vec::new();
        for config in gemm.configs(executor.sm_count(), self.scratch) {
            let launches = gemm.launches(config, self.scratch, executor)?;
            if launches.is_empty() {
                return Ok(Vec::new());
            }
            // SAFETY: the operations have checked the operands against the arena; nothing else is running.
            let milliseconds = unsafe { timer_of(executor)?.time_kernels(&launches, cublaslt::SCREENING_RUNS) }?;
            timed.push((milliseconds, config, launches));
        }
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(timed.into_iter().take(cublaslt::FINALISTS).map(|(_, config, launches)| (config, launches)).collect())
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

/// Writes the description of groups to measure with. Their sizes rise linearly, so the largest is about three times the smallest.
fn describe_groups(
    gemm: &Gemm,
    GroupOperands { description, count }: GroupOperands,
    executor: &mut dyn Executor,
) -> Result<()> {
    let layout = Groups { count, rows: if gemm.batching == Batching::GroupedSum { gemm.k } else { gemm.m } };
    let blocks = layout.rows / GROUP_BLOCK;
    // Each group has a block, and a part of the others.
    let end = |group: usize| group + (blocks - count) * group * (count + group) / (2 * count * count);
    let starts: Vec<_> = (0..=count).map(end).collect();
    let sizes = starts.windows(2).map(|ends| (ends[1] - ends[0]) * GROUP_BLOCK);
    let of_blocks = (0..blocks).map(|block| starts.partition_point(|&start| start <= block) - 1);
    let words =
        starts.iter().map(|start| start * GROUP_BLOCK).chain(sizes).chain(of_blocks.map(|group| group.min(count - 1)));
    let words: Vec<_> = words.map(|word| word as u32).collect();
    // SAFETY: the operation has checked that the tensor has these words.
    unsafe { executor.upload(GlobalMut::<u8>::from_address(description).pointer(), bytemuck::cast_slice(&words)) }
}

fn timer_of(executor: &mut dyn Executor) -> Result<&mut dyn GemmTimer> {
    executor.gemm_timer().context("GEMMs cannot be timed in the emulator")
}

/// Selects cuBLASLt's algorithm for the library part of a GEMM, unless the part was already tuned as a GEMM of its own. Returns
/// the algorithm that is selected then.
fn keep_algorithm(
    call: &GemmCall,
    part: &GemmCall,
    algo: MatmulAlgo,
    executor: &mut dyn Executor,
) -> Result<MatmulAlgo> {
    let (key, timer) = (part.key(), timer_of(executor)?);
    if let Some(previous) = timer.library_algorithm(&key).filter(|_| part.gemm != call.gemm) {
        return Ok(previous);
    }
    timer.set_library_algorithm(&key, algo);
    Ok(algo)
}
