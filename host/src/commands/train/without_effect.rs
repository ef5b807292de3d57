//! Flags of `train` that do not change the run, for notes to the user.

use super::{Config, TrainOptions};
use engine::GeluFusion;
use engine::open::{Device, MatmulBackend, Opened, Precision};
use model::MasterWeights;
use model::guards::WINDOW;
use model::schedule::ScheduleKind;

/// Returns a note for each flag that has no effect, with the reason.
pub fn notes(options: &TrainOptions, config: &Config, opened: &Opened, ranks: usize) -> Vec<String> {
    let hardware = &options.hardware;
    let launch = &options.launch;
    let flags = &config.flags;
    let cpu = opened.device == Device::Cpu;
    let single = ranks == 1;
    let unvalidated = !flags.names_validation() && options.reads_files();
    let on_cpu = "the run uses the CPU";
    let one_rank = "the run has one rank";
    let grouped = options.shard_size.filter(|_| !single);
    let constant = "--schedule constant has no learning rate other than the peak";
    let warmup = format!("the run ends after {} steps, during the warmup", config.steps);
    let ends = format!("the run ends after {} steps", config.steps);
    let short = format!("{ends}, and the first z-score is that of step {}", WINDOW + 1);
    let (unsaved, out_none) = (options.saves_nothing(), "--out is none");
    let unevaluated = "--val-every is 0";
    let f32 = opened.precision == Precision::Fp32;
    let frozen = [flags.embedding_lr, flags.head_lr, flags.muon_lr].iter().all(|lr| lr.unwrap_or(config.lr) == 0.0);
    let frozen = frozen && config.router_bias_rate.unwrap_or(0.0) == 0.0;
    let fusion = hardware.gelu_fusion.is_some_and(|fusion| fusion != GeluFusion::None);
    [
        ("--matmul", cpu && hardware.matmul != MatmulBackend::default(), on_cpu),
        ("--kernels", cpu && hardware.kernels.is_some(), on_cpu),
        ("--gelu-fusion", cpu && fusion, on_cpu),
        ("--gpu-info-every", cpu && flags.gpu_info_every > 0, on_cpu),
        ("--local-rank", cpu && single && launch.local_rank.is_some(), on_cpu),
        ("--tf32", hardware.tf32 && cpu, on_cpu),
        ("--tf32", hardware.tf32 && opened.precision != Precision::Fp32, "the precision is not fp32"),
        ("--warmup", config.warmup > config.steps && flags.schedule() != ScheduleKind::Constant, &warmup),
        ("--warmup", options.warmup.is_some_and(|n| n > 0) && flags.schedule() == ScheduleKind::Constant, constant),
        ("--final-fraction", options.final_fraction.is_some() && flags.schedule() == ScheduleKind::Constant, constant),
        ("--zero-stage", single && flags.zero_stage > 0, one_rank),
        ("--zero-stage", grouped == Some(1) && flags.zero_stage > 0, "--shard-size is 1"),
        ("--shard-size", single && options.shard_size.is_some(), one_rank),
        ("--expert-parallel", single && flags.expert_parallel, one_rank),
        ("--shard-size", grouped.is_some() && flags.zero_stage == 0, "--zero-stage is 0"),
        ("--check-ranks", single && flags.check_ranks > 0, one_rank),
        ("--check-ranks", !single && flags.check_ranks > config.steps, &ends),
        ("--hash-every", flags.hash_every > config.steps, &ends),
        ("--rendezvous", single && launch.rendezvous.is_some(), one_rank),
        ("--rendezvous-secret", single && launch.rendezvous_secret.is_some(), one_rank),
        ("--val-batches", unvalidated && options.val_batches.is_some(), "there is no --val"),
        (
            "--val-every",
            unvalidated && flags.hellaswag.is_none() && options.val_every.is_some_and(|n| n > 0),
            "there is no --val and no --hellaswag",
        ),
        ("--val", config.val_every == 0 && flags.names_validation() && !flags.overfit_one_batch, unevaluated),
        ("--val-batches", config.val_every == 0 && !unvalidated && options.val_batches.is_some(), unevaluated),
        ("--hellaswag", config.val_every == 0 && flags.hellaswag.is_some(), unevaluated),
        ("--lr 0", config.lr == 0.0 && frozen, "it leaves the weights unchanged"),
        ("--master-weights", flags.master_weights == MasterWeights::None && f32, "parameters are f32"),
        (
            "--offload",
            !flags.offload.is_none() && flags.hardware.device == Device::Cpu,
            "the memory of a CPU is that of the host",
        ),
        ("--skip-loss-z", flags.skip_loss_z > 0.0 && config.steps <= WINDOW, &short),
        ("--skip-norm-z", flags.skip_norm_z > 0.0 && config.steps <= WINDOW, &short),
        ("--tensorboard", unsaved && options.tensorboard, out_none),
        ("--checkpoint-every", unsaved && options.checkpoint_every.is_some_and(|n| n > 0), out_none),
        ("--checkpoint-minutes", unsaved && config.checkpoint_minutes > 0.0, out_none),
        ("--keep", unsaved && flags.keep > 0, out_none),
        (
            "--major-every",
            flags.major_every > 0 && flags.keep == 0 && config.checkpoint_minutes == 0.0,
            "--keep is 0, so that all checkpoints are kept",
        ),
        ("--sample-length", flags.sample_every == Some(0) && options.sample_length.is_some(), "--sample-every is 0"),
    ]
    .into_iter()
    .filter(|(_, without_effect, _)| *without_effect)
    .map(|(flag, _, reason)| {
        // A warmup that is too long has an effect, but not the one that its value says.
        let verb = if reason == warmup { "never reaches the peak learning rate" } else { "has no effect" };
        format!("{flag} {verb}: {reason}")
    })
    .collect()
}
