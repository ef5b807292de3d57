//! Checkpoints of nanochat: `model_STEP.pt` with the tensors, and `meta_STEP.json` with the shape of the model.
//!
//! The tensors have the names of [`NANOCHAT_FULL`](crate::architecture::NANOCHAT_FULL), except that a vector has the factors of all
//! layers. The rows of the vocabulary are padded.

use crate::keys::Keys;
use crate::tensor_file::{TensorFile, TensorInfo};
use crate::torch_file;
use anyhow::{Context, Result, bail, ensure};
use engine::ops::RotaryPairs;
use model::Descriptor;
use model::descriptor::{Addition, Additions, Positions, QkNorm, Rotary, WindowPattern, Windows};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The beginnings and ends of the names of both files. The step is between them.
const MODEL: (&str, &str) = ("model_", ".pt");
const META: (&str, &str) = ("meta_", ".json");

/// The beginning of names of a compiled model.
const COMPILED: &str = "_orig_mod.";

/// Vectors with an element for each layer, and the name of the element.
const LAYER_VECTORS: [(&str, &str); 2] =
    [("resid_lambdas", "transformer.h.{}.resid_lambda"), ("x0_lambdas", "transformer.h.{}.x0_lambda")];

/// Tensors that the models with an addition have.
const ADDITIONS: [(Addition, &str); 4] = [
    (Addition::ResidualScales, "resid_lambdas"),
    (Addition::ValueEmbeddings, "value_embeds."),
    (Addition::Smear, "smear_lambda"),
    (Addition::Backout, "backout_lambda"),
];

/// A shape with what all models of nanochat share.
const BASE: &str = "nanochat:d12";

/// The factor of queries and keys, and the base of the rotation: today, and in 2025.
const GAIN: f32 = 1.2;
const THETA: f32 = 100_000.0;
const FIRST_THETA: f32 = 10_000.0;

/// Returns the model file of the last step in a directory.
pub fn newest(directory: &Path) -> Option<PathBuf> {
    let step = |path: &PathBuf| step(path)?.parse::<u64>().ok();
    let files = fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path());
    files.filter(|path| step(path).is_some()).max_by_key(step)
}

/// Returns the step in the name of a model file, as it is written there.
fn step(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()?.strip_prefix(MODEL.0)?.strip_suffix(MODEL.1)
}

/// Returns the name of the description of a model file.
pub fn meta(path: &Path) -> Option<String> {
    Some(format!("{}{}{}", META.0, step(path)?, META.1))
}

/// Opens a model file and the description beside it.
pub fn open(path: &Path) -> Result<(Descriptor, TensorFile)> {
    let meta = meta(path).with_context(|| {
        format!(
            "{}: expected a checkpoint of nanochat, which is named model_STEP.pt, found another name",
            path.display()
        )
    })?;
    let mut file = torch_file::open(path)?;
    let meta = path.with_file_name(meta);
    let text = bounded_file::read(&meta, bounded_file::DESCRIPTION).with_context(|| {
        format!(
            "cannot read {}, which nanochat saves with the model; copy it beside {}",
            meta.display(),
            path.display()
        )
    })?;
    let tensors = std::mem::take(&mut file.tensors);
    let tensors = tensors.into_iter().map(|(name, info)| (name.trim_start_matches(COMPILED).to_owned(), info));
    file.tensors = tensors.collect();
    let descriptor = parse_meta(&text, &file).with_context(|| meta.display().to_string())?;
    split_layers(&mut file, descriptor.layers)?;
    cut_padding(&mut file, descriptor.vocab);
    Ok((descriptor, file))
}

/// Returns the shape of a model from `meta_STEP.json` and the tensors that exist.
fn parse_meta(text: &[u8], file: &TensorFile) -> Result<Descriptor> {
    let meta: Value = serde_json::from_slice(text).context("not valid JSON")?;
    let found = &meta["model_config"];
    let config = found.as_object().with_context(|| format!("model_config: expected an object, found {found}"))?;
    let keys = Keys(config);
    let base: Descriptor = BASE.parse()?;
    let (layers, channels, heads) = (keys.size("n_layer")?, keys.size("n_embd")?, keys.size("n_head")?);
    ensure!(
        heads > 0 && channels.is_multiple_of(heads),
        "n_head: expected a divisor of n_embd = {channels}, found {heads}"
    );
    let max_seq_len = keys.size("sequence_len")?;
    let has = |prefix: &str| file.tensors.keys().any(|name| name.starts_with(prefix));
    let additions: Additions =
        ADDITIONS.into_iter().filter(|(_, prefix)| has(prefix)).map(|(addition, _)| addition).collect();
    let windows = windows(keys, layers, max_seq_len)?;
    // The first version had no additions and no windows, did not multiply queries and keys, and had another base of the rotation.
    let is_first = additions.is_empty() && windows.is_none();
    ensure!(
        is_first || additions == Additions::ALL,
        "expected a model of nanochat from March 2026 on (a825e63), or of 2025 without window_pattern, found one with the additions \
         {additions}, whose formulas differ; use it with its version of nanochat"
    );
    let (gain, theta) = if is_first { (1.0, FIRST_THETA) } else { (GAIN, THETA) };
    let descriptor = Descriptor {
        layers,
        heads,
        kv_heads: keys.optional_size("n_kv_head")?.unwrap_or(heads),
        head_size: channels / heads,
        channels,
        mlp_channels: channels.saturating_mul(4),
        max_seq_len,
        vocab: keys.size("vocab_size")?,
        qk_norm: base.qk_norm.map(|norm| QkNorm { gain, ..norm }),
        positions: Positions::Rotary(Rotary { theta, scaling: None, pairs: RotaryPairs::HalfSplit }),
        windows,
        additions,
        ..base
    };
    descriptor.checked().context("not a supported shape")
}

/// Returns the windows: a token attends to itself and to a quarter of the sequence before it, rounded up to 128 tokens. The last layer has
/// none.
fn windows(keys: Keys, layers: usize, max_seq_len: usize) -> Result<Option<Windows>> {
    let Some(text) = keys.get("window_pattern").as_str() else { return Ok(None) };
    let pattern: WindowPattern = text.to_uppercase().parse().context("window_pattern")?;
    let all = pattern.repeated(layers);
    let windowed = |layer| layer + 1 < layers && all.has_window(layer);
    if !(0..layers).any(windowed) {
        return Ok(None);
    }
    let pattern = WindowPattern::of_layers((0..layers).map(windowed)).context("n_layer: too many for windows")?;
    Ok(Some(Windows { size: (max_seq_len.div_ceil(4)).next_multiple_of(128) + 1, pattern }))
}

/// Gives the elements of vectors over all layers names of their own.
fn split_layers(file: &mut TensorFile, layers: usize) -> Result<()> {
    for (vector, name) in LAYER_VECTORS {
        let Some(info) = file.tensors.remove(vector) else { continue };
        if info.shape != [layers as u64] {
            bail!("{}: tensor {vector}: expected [{layers}], found {}", file.path.display(), info.describe());
        }
        let (start, end) = info.data_offsets;
        let bytes = (end - start) / layers as u64;
        for layer in 0..layers {
            let start = start + layer as u64 * bytes;
            let element =
                TensorInfo { dtype: info.dtype.clone(), shape: vec![1], data_offsets: (start, start + bytes) };
            file.tensors.insert(crate::architecture::of_layer(name, layer), element);
        }
    }
    Ok(())
}

/// Removes the rows that pad the vocabulary from the embeddings and the head.
fn cut_padding(file: &mut TensorFile, vocab: usize) {
    let vocab = vocab as u64;
    let has_vocab_rows =
        |name: &str| ["transformer.wte.", "lm_head.", "value_embeds."].iter().any(|prefix| name.starts_with(prefix));
    for (_, info) in file.tensors.iter_mut().filter(|(name, _)| has_vocab_rows(name)) {
        let (start, end) = info.data_offsets;
        let Some(rows) =
            info.shape.first_mut().filter(|rows| **rows > vocab && rows.div_ceil(64) == vocab.div_ceil(64))
        else {
            continue;
        };
        info.data_offsets.1 = start + (end - start) / *rows * vocab;
        *rows = vocab;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    /// Returns a model of the tensors `names`, described by `model_config` with `changes`.
    fn parse(changes: &str, names: &[&str]) -> Result<Descriptor> {
        let mut config: Value = serde_json::from_str(
            r#"{"sequence_len": 2048, "vocab_size": 32768, "n_layer": 12, "n_head": 6, "n_kv_head": 6, "n_embd": 768}"#,
        )
        .unwrap();
        let changes: Value = serde_json::from_str(changes).unwrap();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let info = TensorInfo { dtype: "F32".to_owned(), shape: vec![12], data_offsets: (0, 48) };
        let tensors = names.iter().map(|name| ((*name).to_owned(), info.clone())).collect();
        let file = TensorFile { path: PathBuf::new(), file: File::open("/dev/null").unwrap(), data_at: 0, tensors };
        parse_meta(&serde_json::to_vec(&serde_json::json!({ "model_config": config })).unwrap(), &file)
    }

    const ALL: [&str; 5] = ["resid_lambdas", "x0_lambdas", "value_embeds.1.weight", "smear_lambda", "backout_lambda"];

    #[test]
    fn models_of_today_and_of_2025_are_known() {
        assert_eq!(parse(r#"{"window_pattern": "SSSL"}"#, &ALL).unwrap(), "nanochat:d12".parse().unwrap());
        let long = parse(r#"{"window_pattern": "l"}"#, &ALL).unwrap();
        assert_eq!((long.windows, long.additions), (None, Additions::ALL));
        let first = parse("{}", &[]).unwrap();
        assert_eq!((first.additions, first.qk_norm.unwrap().gain), (Additions::NONE, 1.0));
        let Positions::Rotary(rotary) = first.positions else { panic!("rotary positions") };
        assert!((rotary.theta - 10_000.0).abs() < 1.0);
        assert_eq!(crate::architecture::Architecture::of(&first).unwrap().class, "NanoChatForCausalLM");
    }

    #[test]
    fn models_between_them_and_damaged_descriptions_are_errors() {
        for (changes, names, expected) in [
            (
                r#"{"window_pattern": "SSSL"}"#,
                &ALL[..2],
                "found one with the additions residual-scales, whose formulas differ",
            ),
            (r#"{"window_pattern": "SSSL"}"#, &[], "found one with the additions none, whose formulas differ"),
            (r#"{"window_pattern": "SXL"}"#, &ALL, "window_pattern"),
            (r#"{"n_head": 7}"#, &ALL, "n_head: expected a divisor of n_embd = 768, found 7"),
            (r#"{"n_layer": null}"#, &ALL, "n_layer: expected a whole number"),
        ] {
            let message = format!("{:#}", parse(changes, names).unwrap_err());
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }

    #[test]
    fn the_last_step_of_a_directory_is_its_model() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(newest(directory.path()), None);
        for name in ["model_000900.pt", "model_001000.pt", "model_x.pt", "optim_002000_rank0.pt", "meta_001000.json"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        assert_eq!(newest(directory.path()), Some(directory.path().join("model_001000.pt")));
    }
}
