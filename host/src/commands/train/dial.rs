//! The depth dial: nanochat's formulas, which set the length of a run, its batch, its learning rates and its weight decay from the sizes of
//! the model (`scripts/base_train.py` and `GPT.setup_optimizer` of <https://github.com/karpathy/nanochat> at 92d63d4).

use super::TrainOptions;
use crate::train::GroupFlag;
use crate::values::Count;
use anyhow::{Result, ensure};
use model::schedule::{ScheduleKind, WeightDecaySchedule};
use model::{Descriptor, Optimizer, Param, ParamGroup};

/// Models with the dial.
const FAMILY: &str = "nanochat:";
/// The model for which nanochat's hyperparameters were tuned, its batch in tokens, and its channels.
const REFERENCE: &str = "nanochat:d12";
const REFERENCE_BATCH: f64 = 524_288.0;
const REFERENCE_CHANNELS: f64 = 768.0;
/// Tokens for each parameter.
const TOKENS_PER_PARAMETER: f32 = 12.0;
/// The best batch grows with this power of the tokens of the run (Bergsma et al., 2025, arXiv:2505.13738).
const BATCH_POWER: f64 = 0.383;
/// Weight decay of Muon at the reference.
const WEIGHT_DECAY: f64 = 0.28;
/// Sequences of a micro-batch and tokens of a sequence.
const BATCH: usize = 16;
const SEQ: usize = 2048;

/// The peak learning rates of nanochat at the reference.
const MATRIX_LR: f64 = 0.02;
const EMBEDDING_LR: f64 = 0.3;
const HEAD_LR: f64 = 0.008;
const SCALAR_LR: f64 = 0.5;
const SMEAR_LR: f64 = 0.2;
const EPS: f32 = 1e-10;

/// Returns the parameters that nanochat's scaling laws count: the matrices of the layers, and the head.
fn scaling_parameters(d: &Descriptor) -> f64 {
    let counted =
        |param: &Param| *param == Param::LmHead || param.layered() && param.is_matrix() && !param.has_vocab_rows();
    // nanochat pads the vocabulary to a multiple of 64.
    let len = |param: Param| match param {
        Param::LmHead => d.vocab.next_multiple_of(64) * d.channels,
        _ => param.active_len(d) * param.layers(d).count(),
    };
    d.params().filter(counted).map(len).sum::<usize>() as f64
}

/// Returns the flags with those that are not given, if the model has the dial and the run reads token files, and a description.
pub fn complete(options: &TrainOptions, descriptor: Descriptor) -> Result<(TrainOptions, Option<String>)> {
    let mut flags = options.clone();
    let dial =
        options.model.as_ref().is_some_and(|name| name.starts_with(FAMILY) && name.parse::<Descriptor>().is_ok());
    if !dial || !(options.reads_files() || options.dry_run) {
        ensure!(
            options.tokens_per_parameter.is_none(),
            "--tokens-per-parameter: expected --model nanochat:dN and --train, found another run; set --steps"
        );
        return Ok((flags, None));
    }
    let reference = Descriptor { vocab: descriptor.vocab, ..REFERENCE.parse()? };
    let ratio = f64::from(options.tokens_per_parameter.unwrap_or(TOKENS_PER_PARAMETER));
    let (parameters, reference_parameters) = (scaling_parameters(&descriptor), scaling_parameters(&reference));
    let (tokens, reference_tokens) = ((ratio * parameters).floor(), ratio * reference_parameters);
    let best = REFERENCE_BATCH * (tokens / reference_tokens).powf(BATCH_POWER);
    let batch = options.total_batch.unwrap_or_else(|| 2f64.powf(best.log2().round_ties_even()) as usize);
    let of_batch = (batch as f64 / REFERENCE_BATCH).sqrt();
    let of_channels = (descriptor.channels as f64 / REFERENCE_CHANNELS).powf(-0.5);
    let weight_decay = WEIGHT_DECAY * of_batch * (reference_tokens / tokens);

    flags.batch.get_or_insert(BATCH);
    flags.seq.get_or_insert(SEQ.min(descriptor.max_seq_len));
    flags.total_batch = Some(batch);
    flags.steps.get_or_insert(Count::Some((tokens as usize / batch).max(1)));
    flags.schedule.get_or_insert(ScheduleKind::Trapezoidal);
    if flags.schedule() == ScheduleKind::Trapezoidal {
        flags.warmdown.get_or_insert(0.65);
        flags.final_fraction.get_or_insert(0.05);
    }
    flags.warmup.get_or_insert(40);
    flags.clip.get_or_insert(0.0);
    flags.weight_decay.get_or_insert(weight_decay as f32);
    flags.optimizer.get_or_insert(Optimizer::Muon);
    if flags.optimizer() == Optimizer::Muon {
        flags.muon_lr.get_or_insert((MATRIX_LR * of_batch) as f32);
        flags.muon_momentum.get_or_insert(0.97);
        flags.muon_momentum_warmup.get_or_insert(400);
        if flags.schedule() == ScheduleKind::Trapezoidal {
            flags.muon_momentum_final.get_or_insert(0.9);
        }
        flags.weight_decay_schedule.get_or_insert(WeightDecaySchedule::Cosine);
        flags.muon_additions.add_all();
    }
    let head_lr = options.head_lr.map_or(HEAD_LR * of_batch * of_channels, f64::from);
    let embedding_lr = options.embedding_lr.map_or(EMBEDDING_LR * of_batch * of_channels, f64::from);
    let scalar_lr = SCALAR_LR * of_batch;
    let group = |group, lr: f64, [beta1, beta2]: [f32; 2], decay: f32| {
        GroupFlag::new(group, [lr as f32, beta1, beta2, EPS, decay].map(Some))
    };
    let groups = [
        group(ParamGroup::Head, head_lr, [0.8, 0.96], 0.01),
        group(ParamGroup::Embeddings, embedding_lr, [0.8, 0.995], 0.001),
        group(ParamGroup::ValueEmbeddings, embedding_lr * 0.5, [0.8, 0.995], 0.01),
        group(ParamGroup::ResidualScales, scalar_lr * 0.01, [0.8, 0.95], 0.05),
        group(ParamGroup::EmbeddingScales, scalar_lr, [0.96, 0.95], 0.0),
        group(ParamGroup::Smear, SMEAR_LR, [0.8, 0.95], 0.0),
    ];
    // A resumed run has these groups already. The user's groups come last, because later ones take precedence.
    if !options.group.starts_with(&groups) {
        flags.group.splice(..0, groups);
    }
    let description = format!(
        "depth dial: {:.1} M parameters of layers and head, {ratio} tokens each: {:.3} G tokens; nanochat's formulas set the flags that are \
         not given",
        parameters / 1e6,
        tokens / 1e9
    );
    Ok((flags, Some(description)))
}
