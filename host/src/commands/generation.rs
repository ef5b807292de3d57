//! Flags and functions that the commands which generate text share.

use super::chat::template::ChatTemplate;
use super::resources::Hardware;
use crate::hints::Invocation;
use crate::values::{non_negative, positive, probability, seed, whole_number};
use anyhow::{Context, Result, ensure};
use engine::Engine;
use engine::ops::SlotSampling;
use interchange::ModelSource;
use model::Generator;
use std::path::Path;
use tokenizer::Tokenizer;

const SAMPLING: &str = "Sampling";

/// Texts of special tokens that end a text or a turn of a conversation.
const END_TOKENS: [&str; 8] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|assistant_end|>",
    "</s>",
];

/// Files of a Hugging Face directory that state the tokens which end a text.
const END_FILES: [&str; 2] = ["generation_config.json", "config.json"];

/// Maximum context unless --context is given.
const DEFAULT_CONTEXT: usize = 8192;

/// Maximum number of rows for the kernels for few sequences. For more rows, GEMMs are timed and the fastest is chosen.
const FEW_SEQUENCES: usize = gpu::decode::launch::MAX_ROWS;

/// Returns the command that tries a model: `chat` if it has a chat template, else `sample`.
pub fn trial_command(model: &Path) -> String {
    let directory = if model.is_dir() { model } else { atomic_file::parent(model) };
    let has_template = ChatTemplate::in_directory(directory).is_ok_and(|template| template.is_some());
    let (command, prompt) =
        if has_template { ("chat", &[][..]) } else { ("sample", &["--prompt", "Once upon a time"][..]) };
    let path = model.to_string_lossy();
    Invocation::current().command([command, "--model", &path].into_iter().chain(prompt.iter().copied()))
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct SamplingFlags {
    /// Divides the logits: values below 1 favor likely tokens; 0 always takes the most likely token
    #[arg(long, value_name = "X", default_value = "1.0", value_parser = non_negative, help_heading = SAMPLING)]
    temperature: f32,

    /// Sample from the N most likely tokens; 0: from all
    #[arg(long, value_name = "N", default_value = "0", value_parser = whole_number, help_heading = SAMPLING)]
    top_k: usize,

    /// Sample from the smallest set of most likely tokens whose probabilities sum to at least X
    #[arg(long, value_name = "X", default_value = "1.0", value_parser = probability, help_heading = SAMPLING)]
    top_p: f32,

    /// Sample from tokens with at least X times the probability of the most likely one
    #[arg(long, value_name = "X", default_value = "0.0", value_parser = probability, help_heading = SAMPLING)]
    min_p: f32,

    /// Divides positive logits of tokens that the text contains, and multiplies negative ones; 1: no effect
    #[arg(long, value_name = "X", default_value = "1.0", value_parser = positive, help_heading = SAMPLING)]
    repetition_penalty: f32,

    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value = "1337", value_parser = seed, help_heading = SAMPLING)]
    pub seed: u32,
}

impl SamplingFlags {
    /// Returns the settings of a slot.
    pub fn sampling(&self) -> SlotSampling {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty, .. } = *self;
        let top_k = i32::try_from(top_k).unwrap_or(i32::MAX);
        SlotSampling { repetition_penalty, temperature: divisor(temperature), top_k, top_p, min_p }
    }
}

/// Returns the temperature, or 0 (greedy) if it is so small that logits divided by it would overflow.
pub fn divisor(temperature: f32) -> f32 {
    if temperature < 1e-30 { 0.0 } else { temperature }
}

/// A model that is ready to generate.
pub struct Loaded {
    /// The model and its cache.
    pub generator: Generator,
    /// The engine that holds them.
    pub engine: Box<dyn Engine>,
    /// Whether steps should be queued before the tokens of previous ones are known.
    pub run_ahead: bool,
}

/// Returns the number of tokens that a model reads with this `--context`, and a note if it cannot read as many.
pub fn context(source: &ModelSource, wanted: Option<usize>) -> (usize, Option<String>) {
    let longest = source.descriptor().max_seq_len;
    let note = wanted.filter(|&wanted| wanted > longest).map(|wanted| {
        format!(
            "note: --context {wanted} is longer than the longest sequence of the model; the context is {longest} tokens"
        )
    });
    (longest.min(wanted.unwrap_or(DEFAULT_CONTEXT)), note)
}

/// Returns the tokenizer of a model, or an error that names the flag `--tokenizer`.
pub fn tokenizer_of(source: &ModelSource, named: Option<&str>) -> Result<Tokenizer> {
    source.tokenizer(named)?.with_context(|| {
        format!(
            "{}: expected a tokenizer.json or tokenizer.model next to the model, or a vocabulary of 50257 (GPT-2) or 256 (bytes), \
             found a vocabulary of {}; pass the model's tokenizer with --tokenizer FILE",
            source.path().display(),
            source.descriptor().vocab
        )
    })
}

/// Loads a model with a cache for `slots` sequences of up to `capacity` tokens.
pub fn load(source: ModelSource, hardware: &Hardware, slots: usize, capacity: usize) -> Result<Loaded> {
    let mut engine = hardware.open_quietly()?;
    let (generator, plan) = Generator::plan(source.descriptor(), slots, capacity, &mut *engine)?;
    engine.allocate(&plan)?;
    if slots > FEW_SEQUENCES {
        generator.tune(&mut *engine)?;
    }
    source.load(&generator.decoder, &mut *engine)?;
    let run_ahead = engine.device_tensor(generator.decoder.params)?.is_some();
    Ok(Loaded { generator, engine, run_ahead })
}

/// Returns the tokens that end a text: special tokens of the tokenizer with a well-known text, and those that the files of a Hugging
/// Face directory, or of the one from which a run started, name.
pub fn end_tokens(tokenizer: &Tokenizer, source: &ModelSource) -> Result<Vec<u32>> {
    let special = tokenizer.special().iter().filter(|token| END_TOKENS.contains(&token.text.as_str()));
    let mut ends: Vec<u32> = special.map(|token| token.id).collect();
    let files = source.settings().into_iter().flat_map(|directory| END_FILES.map(|name| directory.join(name)));
    for path in files {
        let Ok(text) = bounded_file::read_to_string(&path, bounded_file::DESCRIPTION) else { continue };
        let json: serde_json::Value =
            serde_json::from_str(&text).with_context(|| format!("{}: not valid JSON", path.display()))?;
        let ids = match &json["eos_token_id"] {
            serde_json::Value::Array(ids) => ids.clone(),
            id => vec![id.clone()],
        };
        ends.extend(ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()));
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

/// Checks that a prompt has tokens of the model.
pub fn check_prompt(prompt: &[u32], vocab: usize) -> Result<()> {
    let outside = prompt.iter().find(|&&token| token as usize >= vocab);
    ensure!(
        outside.is_none(),
        "prompt: expected tokens below {vocab}, the vocabulary of the model, found {}; pass the model's tokenizer with --tokenizer",
        outside.copied().unwrap_or(0)
    );
    Ok(())
}
