//! Start of a run with several ranks: rendezvous, checks that the ranks agree, and the state that rank 0 broadcasts.

use super::{Config, Launch, TrainOptions};
use crate::console::Console;
use crate::terminal;
use crate::values::Resume;
use anyhow::{Context, Result, ensure};
use atomic_file::create_directory;
use checkpoint::preflight::{self, RankInfo};
use checkpoint::resume::Checkpoint;
use checkpoint::sidecar::Identity;
use checkpoint::{Progress, RunState};
use data::Batches;
use data::mixture::State;
use distributed::launcher::{self, Flags};
use distributed::rendezvous::{self, Secret};
use distributed::tcp_group::TcpGroup;
use distributed::{Ranks, Scope, ShardGroups};
use engine::open::{Device, GPU};
use engine::{BatchLayout, Engine};
use model::{Decoder, Shard, Training, Zero};
use rng::XorShift;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tokenizer::{Identity as TokenizerIdentity, Tokenizer};

/// File in the output directory for the output of rank 0 after its standard output was closed.
pub const CONSOLE_FILE: &str = "console.log";

/// Meets the other ranks of the run. Returns them, and the local rank of this process.
pub fn connect(launch: &Launch) -> Result<(Ranks, usize)> {
    let world = launcher::from_environment(launcher_flags(launch))?;
    if world.world_size == 1 {
        return Ok((Ranks::Single, launch.local_rank.unwrap_or(GPU)));
    }
    let connected = rendezvous::connect(&world, launch.rendezvous.as_ref(), secret(launch)?, timeouts(launch))?;
    Ok((self::connected(connected.group, launch), connected.local_rank))
}

/// Returns the flags that replace the launcher's variables.
pub fn launcher_flags(launch: &Launch) -> Flags {
    Flags { rank: launch.rank, world_size: launch.world_size, local_rank: launch.local_rank }
}

/// Returns the timeouts of the rendezvous and of the run.
pub fn timeouts(launch: &Launch) -> rendezvous::Timeouts {
    rendezvous::Timeouts {
        rendezvous: Duration::from_secs(launch.rendezvous_timeout as u64),
        step: Duration::from_secs(launch.step_timeout as u64),
    }
}

/// Returns the secret of the run, if there is one.
pub fn secret(launch: &Launch) -> Result<Option<Secret>> {
    match &launch.rendezvous_secret {
        Some(path) => Ok(Some(Secret::from_file(path).context("--rendezvous-secret")?)),
        None => Secret::from_environment(),
    }
}

/// Returns the ranks of a new group.
pub fn connected(group: TcpGroup, launch: &Launch) -> Ranks {
    group.set_startup_timeout(Duration::from_secs(launch.start_timeout as u64));
    let ranks = Ranks::Connected(group);
    if !ranks.is_first() {
        terminal::hide_bars();
    }
    ranks
}

/// Returns the GPU of a local rank. If only one GPU is visible, the launcher has selected it for this rank, unless the run consists
/// of this process (`alone`).
pub fn gpu_of(local_rank: usize, alone: bool, device: Device) -> Result<usize> {
    // Without a GPU, opening the engine reports the error.
    let gpus = if device == Device::Cpu { 0 } else { cuda_driver::device_count().unwrap_or(0) };
    match gpus {
        0 => Ok(local_rank),
        1 if !alone => Ok(GPU),
        _ => {
            ensure!(
                local_rank < gpus,
                "local rank {local_rank}: expected a number from 0 to {}, since this host has {gpus} GPUs; start at most {gpus} ranks on it",
                gpus - 1
            );
            Ok(local_rank)
        }
    }
}

/// Returns the most ranks of the run that can share this host: as many as it has GPUs.
pub fn local_ranks(ranks: &Ranks) -> usize {
    ranks.world_size().min(cuda_driver::device_count().unwrap_or(1).max(1))
}

/// Returns the place of this rank in its shard group, which has `size` ranks, or all. A single rank ignores the size.
pub fn shard(ranks: &Ranks, size: Option<usize>) -> Result<Shard> {
    let world_size = ranks.world_size();
    let groups = ShardGroups::new(world_size, size.filter(|_| world_size > 1).unwrap_or(world_size))?;
    Ok(Shard { rank: groups.index(Scope::ShardGroup, ranks.rank()), ranks: groups.shard_size() })
}

/// Checks that all ranks have the same program, settings and data, and that no two share a GPU; `gpu` is this rank's.
pub fn check_ranks(ranks: &mut Ranks, identity: &Identity, gpu: Option<usize>) -> Result<()> {
    let Some(group) = ranks.tcp_group() else { return Ok(()) };
    let gpu = gpu.map(cuda_driver::device_uuid).transpose()?;
    preflight::check_ranks(group, &RankInfo::new(identity, gpu)?)
}

/// Returns what the ranks of a shard group share. A single rank ignores the flags.
pub fn zero(stage: u8, shard: Shard, world_size: usize, expert_parallel: bool) -> Result<Zero> {
    let zero = Zero::new(stage, shard);
    ensure!(
        !expert_parallel || world_size == 1 || zero.is_sharded(),
        "--expert-parallel: expected --zero-stage 1, 2 or 3 and shard groups of several ranks, found --zero-stage {stage} and groups of {}; \
         use --zero-stage 1, or leave the flag out",
        shard.ranks
    );
    Ok(zero.share_experts(expert_parallel))
}

/// Checks that all ranks have the tokenizer of rank 0 if they generate text `together`, because their forward passes communicate.
pub fn check_tokenizer(ranks: &mut Ranks, tokenizer: Option<&Tokenizer>, together: bool) -> Result<()> {
    if !together {
        return Ok(());
    }
    let first = ranks.broadcast(tokenizer.map(Tokenizer::identity))?;
    let found = tokenizer.map(Tokenizer::identity);
    let same = match (&first, &found) {
        (Some(first), Some(found)) => found.has_vocabulary_of(first),
        (first, found) => first.is_none() && found.is_none(),
    };
    let describe =
        |identity: Option<TokenizerIdentity>| identity.map_or_else(|| "none".to_owned(), |found| found.to_string());
    ensure!(
        same,
        "rank {}: expected the tokenizer of rank 0, {}, found {}; copy dataset.json and the tokenizer to all hosts",
        ranks.rank(),
        describe(first),
        describe(found)
    );
    Ok(())
}

/// Returns the console of this rank: rank 0 prints to standard output, the other ranks to files in the output directory.
pub fn console(ranks: &Ranks, args: &TrainOptions, config: &Config) -> Result<Console> {
    let (out, steps) = (config.flags.out.as_deref().filter(|_| !args.dry_run), config.steps);
    if ranks.is_first() {
        let mut console = Console::with_verbosity(steps, out.map(|out| out.join(CONSOLE_FILE)), args.verbosity());
        console.log_every(args.log_every);
        return Ok(console);
    }
    out.map(create_directory).transpose()?;
    let path = out.map(|out| out.join(format!("rank-{}.log", ranks.rank())));
    Console::to_file(steps, path, args.resume != Resume::No)
}

/// Tunes the GEMMs on rank 0 and broadcasts the result, so that equal GPUs compute equal bits.
pub fn tune(
    ranks: &mut Ranks,
    model: &Decoder,
    engine: &mut dyn Engine,
    layout: BatchLayout,
) -> Result<Option<String>> {
    let report = if ranks.is_first() { model.tune(engine, layout)? } else { None };
    let algorithms = ranks.broadcast(engine.algorithms())?;
    if let Some(algorithms) = algorithms.filter(|_| !ranks.is_first()) {
        engine.adopt_algorithms(&algorithms);
        // Tunes only shapes for which the broadcast algorithms do not run on this GPU.
        return model.tune(engine, layout);
    }
    Ok(report)
}

/// The state of a run without the position in a single data source, which each rank computes.
#[derive(Serialize, Deserialize)]
struct SharedState {
    step: usize,
    rounding: u64,
    rounding_before_update: u64,
    progress: Progress,
    /// The state of a mixture, which is the same on all ranks.
    mixture: Option<State>,
}

/// Broadcasts the state of rank 0, and the tensors of model and optimizer unless the ranks shard them.
pub fn broadcast_start(
    ranks: &mut Ranks,
    model: &Decoder,
    engine: &mut dyn Engine,
    state: RunState,
    train: &mut Batches,
) -> Result<RunState> {
    let kept = model.training.iter().flat_map(Training::state).map(|(_, tensor)| tensor);
    let tensors: Vec<_> = [model.params].into_iter().chain(kept).collect();
    if !model.zero.shards_optimizer() {
        ranks.broadcast_tensors(engine, &tensors)?;
    }
    let RunState { step, rounding, rounding_before_update, progress, data } = state;
    let shared = SharedState {
        step,
        rounding: rounding.state,
        rounding_before_update: rounding_before_update.state,
        progress,
        mixture: data.mixture.as_deref().cloned(),
    };
    let SharedState { step, rounding, rounding_before_update, progress, mixture } = ranks.broadcast(shared)?;
    match (&mut *train, &mixture) {
        _ if ranks.is_first() => {}
        (Batches::Shards(loader), _) => loader.skip_tokens(progress.tokens),
        (Batches::Mixture(loader), Some(state)) => loader.seek(state)?,
        (Batches::Mixture(_), None) => {}
    }
    Ok(RunState {
        step,
        rounding: XorShift { state: rounding },
        rounding_before_update: XorShift { state: rounding_before_update },
        data: train.position(),
        progress,
    })
}

/// Opens the checkpoint of `step`, which rank 0 has checked.
pub fn open_checkpoint(config: &Config, step: usize) -> Result<Checkpoint> {
    let out = config.flags.out.as_deref().context("--out: expected a directory to resume from")?;
    let shared = "--out: expected a directory that all hosts share, since each rank reads the checkpoint";
    Checkpoint::open_verified(out, step).context(shared)
}

/// Loads this rank's shard of the checkpoint of `step`, which rank 0 has checked.
pub fn load_shard(config: &Config, step: usize, model: &Decoder, engine: &mut dyn Engine) -> Result<()> {
    open_checkpoint(config, step)?.load_tensors(model, engine, &mut Vec::new())
}
