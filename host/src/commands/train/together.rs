//! What the processes of a run settle between them before it begins.

use super::options::{Launch, Options};
use crate::console::Console;
use anyhow::{Context, Result, ensure};
use atomic_file::create_directory;
use checkpoint::config::Config;
use checkpoint::preflight::{self, RankInfo};
use checkpoint::resume::Checkpoint;
use checkpoint::sidecar::Identity;
use checkpoint::{Progress, RunState};
use data::Loader;
use distributed::launcher::{self, Flags};
use distributed::{Ranks, rendezvous};
use engine::open::{Device, GPU};
use engine::{BatchLayout, Engine};
use model::Gpt2;
use rng::XorShift;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// All processes of the run, and which GPU is this one's.
pub fn meet(launch: &Launch) -> Result<(Ranks, usize)> {
    let flags = Flags { rank: launch.rank, ranks: launch.world_size, local_rank: launch.local_rank };
    let world = launcher::of_this_process(flags)?;
    if world.ranks == 1 {
        return Ok((Ranks::Single, launch.local_rank.unwrap_or(GPU)));
    }
    let timeout = Duration::from_secs(launch.rendezvous_timeout as u64);
    let patience = Duration::from_secs(launch.step_timeout as u64);
    let met = rendezvous::meet(&world, launch.rendezvous.as_ref(), timeout, patience)?;
    met.star.begins_within(Duration::from_secs(launch.start_timeout as u64));
    Ok((Ranks::Connected(met.star), met.local_rank))
}

/// The GPU of a local rank: its own among those of the host, or the one that it has been given.
pub fn gpu_of(local_rank: usize, device: Device) -> Result<usize> {
    // That there is none, opening it will say.
    let gpus = if device == Device::Cpu { 0 } else { cuda_driver::device_count().unwrap_or(0) };
    match gpus {
        0 => Ok(local_rank),
        1 => Ok(GPU),
        _ => {
            ensure!(
                local_rank < gpus,
                "this is local rank {local_rank}, counted from 0, of a host with {gpus} GPUs: start at most {gpus} ranks there"
            );
            Ok(local_rank)
        }
    }
}

/// Finds out whether the ranks belong together; `gpu` is the one that this one computes on.
pub fn agree(ranks: &mut Ranks, identity: &Identity, gpu: Option<usize>) -> Result<()> {
    let Some(group) = ranks.tcp_group() else { return Ok(()) };
    let gpu = gpu.map(cuda_driver::device_uuid).transpose()?;
    preflight::check_ranks(group, &RankInfo::new(identity, gpu)?)
}

/// A person watches rank 0; the others write into files beside its logs.
pub fn console(ranks: &Ranks, args: &Options, steps: usize) -> Result<Console> {
    if ranks.is_first() {
        return Ok(Console::new(steps));
    }
    let out = args.out.as_deref().filter(|_| !args.dry_run);
    out.map(create_directory).transpose()?;
    let path = out.map(|out| out.join(format!("rank-{}.log", ranks.rank())));
    Console::aside(steps, path, args.resume)
}

/// Has rank 0 find out how to compute matrix products, and all do it so: the same kind of GPU computes the same bits.
pub fn tune_together(
    ranks: &mut Ranks,
    model: &Gpt2,
    engine: &mut dyn Engine,
    layout: BatchLayout,
) -> Result<Option<String>> {
    let told = if ranks.is_first() { model.tune(engine, layout)? } else { None };
    let algorithms = ranks.broadcast(engine.algorithms())?;
    if let Some(algorithms) = algorithms.filter(|_| !ranks.is_first()) {
        engine.adopt_algorithms(&algorithms);
        // What another kind of GPU has to find out itself.
        return model.tune(engine, layout);
    }
    Ok(told)
}

/// Where a run stands, but for the data.
#[derive(Serialize, Deserialize)]
struct Standing {
    step: usize,
    rounding: u64,
    rounding_before_update: u64,
    progress: Progress,
}

/// Where the run stands, on all ranks: rank 0 knows it as `state`; the tensors of the model and the optimizer are its, unless
/// each has its own part.
pub fn share(
    ranks: &mut Ranks,
    model: &Gpt2,
    engine: &mut dyn Engine,
    state: RunState,
    loader: &mut Loader,
) -> Result<RunState> {
    let tensors = [Some(model.params), model.training.map(|t| t.m), model.training.map(|t| t.v)];
    let master = model.training.and_then(|training| training.master);
    let tensors: Vec<_> = tensors.into_iter().chain([master]).flatten().collect();
    if !model.zero.shards_optimizer() {
        ranks.broadcast_tensors(engine, &tensors)?;
    }
    let RunState { step, rounding, rounding_before_update, progress, .. } = state;
    let standing =
        Standing { step, rounding: rounding.state, rounding_before_update: rounding_before_update.state, progress };
    let Standing { step, rounding, rounding_before_update, progress } = ranks.broadcast(standing)?;
    if !ranks.is_first() {
        loader.skip_tokens(progress.tokens);
    }
    Ok(RunState {
        step,
        rounding: XorShift { state: rounding },
        rounding_before_update: XorShift { state: rounding_before_update },
        data: loader.position(),
        progress,
    })
}

/// Fills what a rank other than the first keeps of the checkpoint of `step`, which the first has checked.
pub fn load_part(config: &Config, step: usize, model: &Gpt2, engine: &mut dyn Engine) -> Result<()> {
    let out = config.out.as_deref().context("there is no --out to go on from")?;
    let every = "each rank reads its part of the checkpoint: --out must be a directory that all hosts share";
    let mut checkpoint = Checkpoint::open_checked(out, step).context(every)?;
    checkpoint.load_tensors(model, engine, &mut Vec::new())
}
