//! Flags and functions that the commands which generate text share.

use super::resources::Hardware;
use crate::chat_template::ChatTemplate;
use crate::hints::Invocation;
use crate::values::{non_negative, positive, probability, seed, whole_number};
use anyhow::{Context, Result, bail, ensure};
use engine::Engine;
use engine::ops::SlotSampling;
use interchange::{ModelSource, companions};
use model::Generator;
use serde_json::Value;
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
    /// Divides the logits: values below 1 favor likely tokens; 0 always takes the most likely token [default: 1, and for chat that of the
    /// model]
    #[arg(long, value_name = "X", value_parser = non_negative, help_heading = SAMPLING)]
    temperature: Option<f32>,

    /// Sample from the N most likely tokens; 0: from all [default: 0, and for chat that of the model]
    #[arg(long, value_name = "N", value_parser = whole_number, help_heading = SAMPLING)]
    top_k: Option<usize>,

    /// Sample from the smallest set of most likely tokens whose probabilities sum to at least X [default: 1, and for chat that of the model]
    #[arg(long, value_name = "X", value_parser = probability, help_heading = SAMPLING)]
    top_p: Option<f32>,

    /// Sample from tokens with at least X times the probability of the most likely one [default: 0, and for chat that of the model]
    #[arg(long, value_name = "X", value_parser = probability, help_heading = SAMPLING)]
    min_p: Option<f32>,

    /// Divides positive logits of tokens that the text contains, and multiplies negative ones; 1: no effect [default: 1, and for chat that of
    /// the model]
    #[arg(long, value_name = "X", value_parser = positive, help_heading = SAMPLING)]
    repetition_penalty: Option<f32>,

    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value = "1337", value_parser = seed, help_heading = SAMPLING)]
    pub seed: u32,
}

impl SamplingFlags {
    /// Returns the settings that the user has given.
    pub fn settings(&self) -> SamplingSettings {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty, .. } = *self;
        let top_k = top_k.map(|top_k| i32::try_from(top_k).unwrap_or(i32::MAX));
        SamplingSettings { temperature, top_k, top_p, min_p, repetition_penalty }
    }
}

/// Settings of [`SlotSampling`], some of which may be absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingSettings {
    pub temperature: Option<f32>,
    pub top_k: Option<i32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// Draws from the full distribution of the model.
pub const PLAIN_SAMPLING: SlotSampling =
    SlotSampling { repetition_penalty: 1.0, temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

impl SamplingSettings {
    /// Returns all settings: those that are absent are the defaults.
    pub fn over(self, defaults: SlotSampling) -> SlotSampling {
        SlotSampling {
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            temperature: divisor(self.temperature.unwrap_or(defaults.temperature)),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
        }
    }
}

/// Returns how a model's tokens are chosen unless the user says otherwise, as `generate` of transformers does: by the settings of
/// `generation_config.json` if its `do_sample` is true, with a top-k of 50 if it has none, and greedily if `do_sample` is false. A file
/// without `do_sample` states no preference. A repetition penalty counts in any case.
pub fn default_sampling(source: &ModelSource) -> Result<SlotSampling> {
    let path = source.settings().into_iter().map(|directory| directory.join(companions::GENERATION));
    let Some(path) = path.into_iter().find(|path| path.is_file()) else { return Ok(PLAIN_SAMPLING) };
    let text = bounded_file::read_to_string(&path, bounded_file::DESCRIPTION)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let json = serde_json::from_str(&text).with_context(|| format!("{}: not valid JSON", path.display()))?;
    stated_sampling(&json).with_context(|| path.display().to_string())
}

fn stated_sampling(json: &Value) -> Result<SlotSampling> {
    let number = |name: &str, most: f32| match &json[name] {
        Value::Null => Ok(None),
        value => {
            let number = value.as_f64().map(|number| number as f32).filter(|number| (0.0..=most).contains(number));
            let number =
                number.with_context(|| format!("{name}: expected a number from 0 to {most}, found {value}"))?;
            anyhow::Ok(Some(number))
        }
    };
    let top_k = match &json["top_k"] {
        Value::Null => None,
        value => {
            let top_k = value.as_u64().with_context(|| format!("top_k: expected a whole number, found {value}"))?;
            Some(i32::try_from(top_k).unwrap_or(i32::MAX))
        }
    };
    let repetition_penalty = number("repetition_penalty", 1000.0)?.filter(|penalty| *penalty > 0.0);
    let temperature = number("temperature", 100.0)?;
    let (top_p, min_p) = (number("top_p", 1.0)?, number("min_p", 1.0)?);
    let chosen = match &json["do_sample"] {
        Value::Bool(true) => {
            SamplingSettings { temperature, top_k: top_k.or(Some(50)), top_p, min_p, repetition_penalty }
        }
        Value::Bool(false) => {
            SamplingSettings { temperature: Some(0.0), repetition_penalty, ..SamplingSettings::default() }
        }
        Value::Null => SamplingSettings { repetition_penalty, ..SamplingSettings::default() },
        value => bail!("do_sample: expected true or false, found {value}"),
    };
    Ok(chosen.over(PLAIN_SAMPLING))
}

/// Returns the settings of [`default_sampling`] in words, or `None` if they are the usual ones.
pub fn describe_sampling(sampling: SlotSampling) -> Option<String> {
    let SlotSampling { repetition_penalty, temperature, top_k, top_p, min_p } = sampling;
    let named = [
        ("temperature", temperature.to_string(), "1"),
        ("top-k", top_k.to_string(), "0"),
        ("top-p", top_p.to_string(), "1"),
        ("min-p", min_p.to_string(), "0"),
        ("repetition penalty", repetition_penalty.to_string(), "1"),
    ];
    let others = named.into_iter().filter(|(_, value, usual)| value != usual);
    let others: Vec<String> = others.map(|(name, value, _)| format!("{name} {value}")).collect();
    (!others.is_empty()).then(|| others.join(", "))
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
    let mut engine = hardware.open_for_inference()?;
    let (generator, plan) = Generator::plan(source.descriptor(), slots, capacity, hardware.weights(), &mut *engine)?;
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
        let json: Value = serde_json::from_str(&text).with_context(|| format!("{}: not valid JSON", path.display()))?;
        let ids = match &json["eos_token_id"] {
            Value::Array(ids) => ids.clone(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_settings_of_a_model_are_those_of_transformers() {
        let stated = |json: Value| stated_sampling(&json).unwrap();
        let sampled = json!({ "do_sample": true, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1 });
        let expected = SlotSampling { repetition_penalty: 1.1, temperature: 0.6, top_k: 50, top_p: 0.9, min_p: 0.0 };
        assert_eq!(stated(sampled), expected);
        assert_eq!(stated(json!({ "do_sample": true, "top_k": 0, "top_p": null })), PLAIN_SAMPLING);
        assert_eq!(stated(json!({ "do_sample": false, "temperature": 0.6, "top_k": 5 })), SlotSampling::GREEDY);
        assert_eq!(stated(json!({ "temperature": 0.6 })), PLAIN_SAMPLING);
        let penalty = SlotSampling { repetition_penalty: 1.2, ..PLAIN_SAMPLING };
        assert_eq!(stated(json!({ "repetition_penalty": 1.2 })), penalty);
        for (name, value) in
            [("temperature", json!(-1)), ("top_p", json!("x")), ("top_k", json!(1.5)), ("do_sample", json!(1))]
        {
            let error = stated_sampling(&json!({ name: value })).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name}: expected ")), "{error}");
        }
        let flags = SamplingSettings { temperature: Some(0.0), ..SamplingSettings::default() };
        assert_eq!(flags.over(expected), SlotSampling { temperature: 0.0, ..expected });
        assert_eq!(
            describe_sampling(expected).unwrap(),
            "temperature 0.6, top-k 50, top-p 0.9, repetition penalty 1.1"
        );
        assert_eq!(describe_sampling(PLAIN_SAMPLING), None);
    }
}
