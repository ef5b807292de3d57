//! Llama 2 and 3, Mistral, Ministral, Qwen2 (with Qwen2.5) and Qwen3: one table of tensors.

use super::{Architecture, Part, Setting, TensorNames, part, tensor};
use crate::keys::Keys;
use anyhow::{Context, Result, bail, ensure};
use engine::ops::{Activation, QkNormScope, RotaryPairs};
use model::descriptor::{
    Additions, Biases, Init, Llama3Scaling, Normalization, Positions, QkNorm, Rotary, RotaryScaling, WindowPattern,
    Windows, YarnScaling,
};
use model::{Descriptor, Param};
use serde_json::{Map, Value, json};

/// All tensors. Those that a model lacks are not in its files.
const TENSORS: &[TensorNames] = &[
    tensor(Param::Wte, "embed_tokens.weight", "token_embd.weight"),
    tensor(Param::LmHead, "lm_head.weight", "output.weight"),
    tensor(Param::Ln1w, "layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    part(Param::Qkvw, Part::Query, "layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"),
    part(Param::Qkvw, Part::Key, "layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"),
    part(Param::Qkvw, Part::Value, "layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"),
    part(Param::Qkvb, Part::Query, "layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias"),
    part(Param::Qkvb, Part::Key, "layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias"),
    part(Param::Qkvb, Part::Value, "layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias"),
    tensor(Param::QNormw, "layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"),
    tensor(Param::KNormw, "layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"),
    tensor(Param::Attprojw, "layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"),
    tensor(Param::Ln2w, "layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    part(Param::Fcw, Part::Up, "layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"),
    part(Param::Fcw, Part::Gate, "layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"),
    tensor(Param::Fcprojw, "layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"),
    tensor(Param::Lnfw, "norm.weight", "output_norm.weight"),
];

/// Frequencies of the rotary embedding and tables of their cosines, which old versions of transformers saved.
pub const IGNORED: &[&str] = &[
    "layers.{}.self_attn.rotary_emb.inv_freq",
    "layers.{}.self_attn.rotary_emb.cos_cached",
    "layers.{}.self_attn.rotary_emb.sin_cached",
    "rotary_emb.inv_freq",
];

/// The values of `hidden_act`. All of these models have a gated MLP.
pub const HIDDEN_ACT: [&str; 4] = ["silu", "swish", "gelu_pytorch_tanh", "gelu_new"];

/// Llama.
pub static LLAMA: Architecture = Architecture {
    model_type: "llama",
    class: "LlamaForCausalLM",
    prefix: "model.",
    head: "lm_head.weight",
    ignored: IGNORED,
    tensors: TENSORS,
    settings: &[
        Setting { key: "hidden_act", accepted: &HIDDEN_ACT },
        Setting { key: "attention_bias", accepted: &["false"] },
        Setting { key: "mlp_bias", accepted: &["false"] },
        // Changes how the GEMMs are split, but not their formula.
        Setting { key: "pretraining_tp", accepted: &["1"] },
        Setting { key: "is_encoder_decoder", accepted: &["false"] },
        Setting { key: "quantization_config", accepted: &["null"] },
    ],
    gguf_pairs: Some(RotaryPairs::Interleaved),
    reverses_rotation: false,
    code: None,
    descriptor: |keys| {
        no_windows(keys)?;
        descriptor(keys, Biases::None, None, None)
    },
    keys: |descriptor| keys(descriptor, json!({ "attention_bias": false, "mlp_bias": false })),
};

/// Mistral: Llama with a window in all layers. Without a window it is a Llama.
pub static MISTRAL: Architecture = Architecture {
    model_type: "mistral",
    class: "MistralForCausalLM",
    settings: &[
        Setting { key: "hidden_act", accepted: &HIDDEN_ACT },
        Setting { key: "is_encoder_decoder", accepted: &["false"] },
        Setting { key: "quantization_config", accepted: &["null"] },
    ],
    descriptor: |keys| {
        let types = keys.get(LAYER_TYPES);
        ensure!(
            types.is_null(),
            "{LAYER_TYPES}: expected none, because {} ignores it, found {types}; set model_type to ministral, or remove it",
            MISTRAL.class
        );
        (MINISTRAL.descriptor)(keys)
    },
    keys: |descriptor| {
        let size = descriptor.windows.map(|windows| windows.size);
        keys(descriptor, json!({ WINDOW: size }))
    },
    ..LLAMA
};

/// Ministral: Llama with a window in some layers.
pub static MINISTRAL: Architecture = Architecture {
    model_type: "ministral",
    class: "MinistralForCausalLM",
    settings: MISTRAL.settings,
    descriptor: |keys| with_windows(keys, descriptor(keys, Biases::None, None, None)?, window_size(keys)?, |_| true),
    keys: |descriptor| keys(descriptor, window_keys(descriptor)),
    ..LLAMA
};

/// Qwen2 and Qwen2.5.
pub static QWEN2: Architecture = Architecture {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    settings: &[
        Setting { key: "hidden_act", accepted: &HIDDEN_ACT },
        Setting { key: "is_encoder_decoder", accepted: &["false"] },
        Setting { key: "quantization_config", accepted: &["null"] },
    ],
    gguf_pairs: Some(RotaryPairs::HalfSplit),
    descriptor: |keys| qwen_windows(keys, descriptor(keys, Biases::Qkv, None, None)?),
    keys: |descriptor| keys(descriptor, qwen_keys(descriptor)),
    ..LLAMA
};

/// Qwen3.
pub static QWEN3: Architecture = Architecture {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    settings: &[
        Setting { key: "hidden_act", accepted: &HIDDEN_ACT },
        Setting { key: "attention_bias", accepted: &["false"] },
        Setting { key: "is_encoder_decoder", accepted: &["false"] },
        Setting { key: "quantization_config", accepted: &["null"] },
    ],
    gguf_pairs: Some(RotaryPairs::HalfSplit),
    descriptor: |keys| {
        let eps = keys.float("rms_norm_eps", EPS)?;
        let qk_norm = Some(QkNorm { eps, weights: true, gain: 1.0, scope: QkNormScope::Head });
        qwen_windows(keys, descriptor(keys, Biases::None, qk_norm, Some(QWEN3_HEAD_SIZE))?)
    },
    keys: |descriptor| {
        let mut own = qwen_keys(descriptor);
        own["attention_bias"] = false.into();
        keys(descriptor, own)
    },
    ..LLAMA
};

/// The defaults of transformers.
pub const EPS: f32 = 1e-6;
const THETA: f32 = 10_000.0;
const QWEN3_HEAD_SIZE: usize = 128;
const WINDOW_SIZE: usize = 4096;
const MAX_WINDOW_LAYERS: usize = 28;

/// Keys of the windows. `use_sliding_window` is Qwen's.
const WINDOW: &str = "sliding_window";
const USE_WINDOW: &str = "use_sliding_window";
const LAYER_TYPES: &str = "layer_types";
/// Values of `layer_types`.
const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// Returns the model of a configuration. `head_size` is that of configurations without `head_dim`; by default, the heads share the
/// channels.
pub fn descriptor(keys: Keys, biases: Biases, qk_norm: Option<QkNorm>, head_size: Option<usize>) -> Result<Descriptor> {
    let [layers, heads] = [keys.size("num_hidden_layers")?, keys.size("num_attention_heads")?];
    let [channels, mlp_channels] = [keys.size("hidden_size")?, keys.size("intermediate_size")?];
    let head_size = if let Some(head_size) = keys.optional_size("head_dim")?.or(head_size) {
        head_size
    } else {
        ensure!(
            heads > 0 && channels.is_multiple_of(heads),
            "num_attention_heads: expected a divisor of hidden_size = {channels}, found {heads}"
        );
        channels / heads
    };
    let rotary = rotary(keys)?;
    // The longest sequence of files that state only that of the pretraining.
    let extended = match rotary.scaling {
        Some(RotaryScaling::Yarn(yarn)) => (yarn.factor * yarn.original_max_seq_len as f32) as usize,
        _ => 0,
    };
    let descriptor = Descriptor {
        layers,
        heads,
        kv_heads: keys.optional_size("num_key_value_heads")?.unwrap_or(heads),
        head_size,
        channels,
        mlp_channels,
        max_seq_len: keys.size("max_position_embeddings")?.max(extended),
        vocab: keys.size("vocab_size")?,
        norm: Normalization::RmsNorm { eps: keys.float("rms_norm_eps", EPS)?, weights: true },
        positions: Positions::Rotary(rotary),
        qk_norm,
        activation: match keys.get("hidden_act").as_str() {
            Some("gelu_pytorch_tanh" | "gelu_new") => Activation::GeGlu,
            _ => Activation::SwiGlu,
        },
        biases,
        tied: keys.flag("tie_word_embeddings", false)?,
        embedding_norm: false,
        softcap: None,
        init: Init::Normal,
        windows: None,
        additions: Additions::NONE,
        experts: None,
        adapters: None,
    };
    descriptor.checked().context("not a supported shape")
}

/// Checks that no layer has a window. transformers ignores `sliding_window` for Llama, and other programs do not.
pub fn no_windows(keys: Keys) -> Result<()> {
    let is_other = |kind: &&Value| *kind != FULL;
    if let Some(other) = keys.get(LAYER_TYPES).as_array().and_then(|types| types.iter().find(is_other)) {
        bail!("{LAYER_TYPES}: expected {FULL}, found {other}; transformers ignores it for this model_type");
    }
    let Some(window) = keys.optional_size(WINDOW)? else { return Ok(()) };
    let longest = keys.size("max_position_embeddings")?;
    ensure!(
        window >= longest || !keys.flag(USE_WINDOW, true)?,
        "{WINDOW}: expected null or at least max_position_embeddings = {longest}, found {window}; set model_type to mistral if the \
         model was trained with the window, or {WINDOW} to null"
    );
    Ok(())
}

/// Returns the window of a configuration without the key `use_sliding_window`. Unlike an absent key, null disables it.
fn window_size(keys: Keys) -> Result<Option<usize>> {
    match keys.0.get(WINDOW) {
        None => Ok(Some(WINDOW_SIZE)),
        Some(_) => keys.optional_size(WINDOW),
    }
}

/// Returns the model with the windows of Qwen: by default, only the layers from `max_window_layers` on have them.
fn qwen_windows(keys: Keys, model: Descriptor) -> Result<Descriptor> {
    let first = keys.optional_size("max_window_layers")?.unwrap_or(MAX_WINDOW_LAYERS);
    let size = if keys.flag(USE_WINDOW, false)? { window_size(keys)? } else { None };
    with_windows(keys, model, size, |layer| layer >= first)
}

/// Returns the model with windows of `size` in the layers of `layer_types`, or without this key in those of `default`.
fn with_windows(
    keys: Keys,
    model: Descriptor,
    size: Option<usize>,
    default: impl Fn(usize) -> bool,
) -> Result<Descriptor> {
    let layers = model.layers;
    let windowed: Vec<bool> = match keys.get(LAYER_TYPES) {
        Value::Null => (0..layers).map(|layer| size.is_some() && default(layer)).collect(),
        Value::Array(types) if types.len() == layers => {
            let has_window = |kind: &Value| match kind.as_str() {
                Some(SLIDING) => Ok(true),
                Some(FULL) => Ok(false),
                _ => bail!(
                    "{LAYER_TYPES}: expected {FULL} or {SLIDING}, found {kind}; llm-rs supports no other attention"
                ),
            };
            types.iter().map(has_window).collect::<Result<_>>()?
        }
        Value::Array(types) => {
            bail!("{LAYER_TYPES}: expected one for each of the {layers} layers, found {}", types.len())
        }
        other => bail!("{LAYER_TYPES}: expected a list or null, found {other}"),
    };
    if !windowed.contains(&true) {
        return Ok(model);
    }
    let size = size.with_context(|| {
        format!(
            "{WINDOW}: expected the size of the windows in {LAYER_TYPES}, found {}; add it, with {USE_WINDOW} in a Qwen model",
            keys.get(WINDOW)
        )
    })?;
    let pattern = WindowPattern::of_layers(windowed)
        .with_context(|| format!("num_hidden_layers: expected at most 128 with windows, found {layers}"))?;
    Descriptor { windows: Some(Windows { size, pattern }), ..model }.checked().context("not a supported shape")
}

/// Returns the keys of windows that some layers have.
fn window_keys(descriptor: &Descriptor) -> Value {
    let Some(Windows { size, pattern }) = descriptor.windows else { return json!({ WINDOW: null }) };
    let kind = |layer| if pattern.has_window(layer) { SLIDING } else { FULL };
    json!({ WINDOW: size, LAYER_TYPES: (0..descriptor.layers).map(kind).collect::<Vec<_>>() })
}

/// Returns Qwen's keys of windows.
fn qwen_keys(descriptor: &Descriptor) -> Value {
    if descriptor.windows.is_none() {
        return json!({ USE_WINDOW: false });
    }
    let mut keys = window_keys(descriptor);
    keys[USE_WINDOW] = true.into();
    let first =
        (0..descriptor.layers).find(|&layer| descriptor.windows.is_some_and(|windows| windows.of(layer).is_some()));
    keys["max_window_layers"] = first.into();
    keys
}

/// Key of the rotary embedding in files of transformers 5.
const PARAMETERS: &str = "rope_parameters";
/// Key of its scaling in files of transformers 4.
const SCALING: &str = "rope_scaling";

/// Returns the rotary embedding: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of transformers 4. A file that
/// has both must have the same values, because each version reads its own.
fn rotary(keys: Keys) -> Result<Rotary> {
    if keys.get(PARAMETERS).is_null() {
        return rotary_of(keys, SCALING);
    }
    let rotary = rotary_of(keys, PARAMETERS)?;
    if !keys.get(SCALING).is_null() {
        ensure!(
            rotary_of(keys, SCALING)?.scaling == rotary.scaling,
            "{SCALING}: expected the scaling of {PARAMETERS}, found another one; remove the wrong one of the two"
        );
    }
    let theta = keys.float("rope_theta", rotary.theta)?;
    ensure!(
        theta.to_bits() == rotary.theta.to_bits(),
        "rope_theta: expected {} as in {PARAMETERS}, found {theta}; remove the wrong one of the two",
        rotary.theta
    );
    Ok(rotary)
}

/// Returns the rotary embedding with the scaling under the key `name`.
fn rotary_of(keys: Keys, name: &str) -> Result<Rotary> {
    let empty = Map::new();
    let scaling = match keys.get(name) {
        Value::Null => &empty,
        Value::Object(scaling) => scaling,
        other => bail!("{name}: expected an object or null, found {other}"),
    };
    let scaling = Keys(scaling);
    let theta = match scaling.get("rope_theta") {
        Value::Null => keys.float("rope_theta", THETA)?,
        _ => scaling.float("rope_theta", THETA).context(name.to_owned())?,
    };
    // Vision models rotate sections of the channels by other positions; some models have other angles in some layers.
    let other = scaling.0.iter().find(|(key, value)| *key == "mrope_section" || value.is_object());
    if let Some((key, value)) = other.filter(|(_, value)| !value.is_null()) {
        bail!("{name}: {key}: expected none, found {value}; llm-rs rotates all layers and channels by one position")
    }
    let partial = scaling.float("partial_rotary_factor", 1.0)? * keys.float("partial_rotary_factor", 1.0)?;
    ensure!(
        (partial - 1.0).abs() < f32::EPSILON,
        "partial_rotary_factor: expected 1, found {partial}; llm-rs rotates all channels"
    );
    let scaling = rotary_scaling(keys, scaling).context(name.to_owned())?;
    Ok(Rotary { theta, scaling, pairs: RotaryPairs::HalfSplit })
}

/// Key of the maximum sequence length of the pretraining.
const ORIGINAL: &str = "original_max_position_embeddings";

/// Returns the scaling of the frequencies. Old versions of transformers call its kind `type`.
fn rotary_scaling(keys: Keys, scaling: Keys) -> Result<Option<RotaryScaling>> {
    let [new, old] = ["rope_type", "type"].map(|key| scaling.get(key));
    ensure!(
        new.is_null() || old.is_null() || new == old,
        "type: expected {new} as rope_type, found {old}; remove the wrong one of the two"
    );
    let kind = if new.is_null() { old } else { new };
    let required = |key: &str| {
        ensure!(!scaling.get(key).is_null(), "{key}: expected a number, found none");
        scaling.float(key, 0.0)
    };
    match kind.as_str() {
        Some("default") => {
            let factor = scaling.float("factor", 1.0)?;
            ensure!(
                (factor - 1.0).abs() < f32::EPSILON,
                "factor: expected none with rope_type default, found {factor}; state the rope_type of the factor, or remove it"
            );
            Ok(None)
        }
        Some("llama3") => Ok(Some(RotaryScaling::Llama3(Llama3Scaling {
            factor: required("factor")?,
            low_freq_factor: required("low_freq_factor")?,
            high_freq_factor: required("high_freq_factor")?,
            original_max_seq_len: scaling.size(ORIGINAL)?,
        }))),
        Some("yarn") => {
            // transformers prefers the key beside that of the scaling.
            let original = match keys.optional_size(ORIGINAL)? {
                None => scaling.optional_size(ORIGINAL)?,
                original => original,
            };
            let original = original.map_or_else(|| keys.size("max_position_embeddings"), Ok)?;
            let common = YarnScaling::common(required("factor")?, original);
            let [scale, scale_all] = [scaling.float("mscale", 0.0)?, scaling.float("mscale_all_dim", 0.0)?];
            let magnitude = |scale| YarnScaling::magnitude(common.factor, scale);
            let given = if scale == 0.0 || scale_all == 0.0 {
                common.attention_factor
            } else {
                (magnitude(scale) / magnitude(scale_all)) as f32
            };
            Ok(Some(RotaryScaling::Yarn(YarnScaling {
                beta_fast: scaling.float("beta_fast", common.beta_fast)?,
                beta_slow: scaling.float("beta_slow", common.beta_slow)?,
                attention_factor: scaling.float("attention_factor", given)?,
                truncate: scaling.flag("truncate", common.truncate)?,
                ..common
            })))
        }
        Some("linear") => Ok(Some(RotaryScaling::Linear { factor: required("factor")? })),
        None if kind.is_null() && scaling.get("factor").is_null() => Ok(None),
        found => bail!(
            "rope_type: expected default, llama3, yarn or linear, found {}; llm-rs supports no other scaling",
            found.map_or_else(|| if kind.is_null() { "none".to_owned() } else { kind.to_string() }, str::to_owned)
        ),
    }
}

/// Returns the shortest decimal number that rounds to `x`.
pub fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// Returns the keys of a scaling of the frequencies.
fn scaling_keys(scaling: RotaryScaling) -> Value {
    match scaling {
        RotaryScaling::Llama3(scaling) => {
            let Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_max_seq_len } = scaling;
            json!({
                "rope_type": "llama3",
                "factor": shortest(factor),
                "low_freq_factor": shortest(low_freq_factor),
                "high_freq_factor": shortest(high_freq_factor),
                ORIGINAL: original_max_seq_len,
            })
        }
        RotaryScaling::Yarn(scaling) => {
            let YarnScaling { factor, beta_fast, beta_slow, attention_factor, truncate, original_max_seq_len } =
                scaling;
            json!({
                "rope_type": "yarn",
                "factor": shortest(factor),
                "beta_fast": shortest(beta_fast),
                "beta_slow": shortest(beta_slow),
                "attention_factor": shortest(attention_factor),
                "truncate": truncate,
                ORIGINAL: original_max_seq_len,
            })
        }
        RotaryScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": shortest(factor) }),
    }
}

/// Returns the keys of transformers 4 and 5, with those of one architecture.
pub fn keys(d: &Descriptor, own: Value) -> Map<String, Value> {
    let mut keys = Map::new();
    let mut insert = |key: &str, value: Value| drop(keys.insert(key.to_owned(), value));
    insert("num_hidden_layers", d.layers.into());
    insert("num_attention_heads", d.heads.into());
    insert("num_key_value_heads", d.kv_heads.into());
    insert("head_dim", d.head_size.into());
    insert("hidden_size", d.channels.into());
    insert("intermediate_size", d.mlp_channels.into());
    insert("max_position_embeddings", d.max_seq_len.into());
    insert("vocab_size", d.vocab.into());
    let geglu = d.activation == Activation::GeGlu;
    insert("hidden_act", if geglu { "gelu_pytorch_tanh" } else { "silu" }.into());
    insert("attention_dropout", 0.0.into());
    insert("tie_word_embeddings", d.tied.into());
    if let Some(eps) = d.norm.eps() {
        insert("rms_norm_eps", shortest(eps).into());
    }
    if let Positions::Rotary(Rotary { theta, scaling, .. }) = d.positions {
        insert("rope_theta", shortest(theta).into());
        let scaling = scaling.map(scaling_keys);
        let mut parameters = scaling.clone().unwrap_or_else(|| json!({ "rope_type": "default" }));
        parameters["rope_theta"] = shortest(theta).into();
        insert("rope_parameters", parameters);
        insert("rope_scaling", scaling.unwrap_or(Value::Null));
    }
    if let Value::Object(own) = own {
        keys.extend(own);
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Llama 3.2 1B's keys as transformers 4 writes them.
    const LLAMA_1B: &str = r#"{
        "attention_bias": false, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": true, "vocab_size": 128256}"#;

    fn parse(text: &str) -> Map<String, Value> {
        let Value::Object(keys) = serde_json::from_str(text).unwrap() else { unreachable!() };
        keys
    }

    /// Returns the keys of Llama 3.2 1B with others in their place.
    fn with(changes: &str) -> Map<String, Value> {
        let mut keys = parse(LLAMA_1B);
        keys.extend(parse(changes));
        keys
    }

    fn llama(keys: &Map<String, Value>) -> Result<Descriptor> {
        (LLAMA.descriptor)(Keys(keys))
    }

    #[test]
    fn keys_of_transformers_4_and_5_describe_the_same_model() {
        let expected: Descriptor = "llama3:1b".parse().unwrap();
        assert_eq!(llama(&parse(LLAMA_1B)).unwrap(), expected);
        let new = with(
            r#"{"rope_scaling": null, "rope_theta": null, "rope_parameters": {"rope_theta": 500000.0, "factor": 32.0,
            "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}}"#,
        );
        assert_eq!(llama(&new).unwrap(), expected);
    }

    #[test]
    fn the_gate_of_the_mlp_survives_an_export() {
        for (name, activation, exported) in [
            ("silu", Activation::SwiGlu, "silu"),
            ("swish", Activation::SwiGlu, "silu"),
            ("gelu_pytorch_tanh", Activation::GeGlu, "gelu_pytorch_tanh"),
            ("gelu_new", Activation::GeGlu, "gelu_pytorch_tanh"),
        ] {
            let found = llama(&with(&format!(r#"{{"hidden_act": "{name}"}}"#))).unwrap();
            assert_eq!((found.activation, &(LLAMA.keys)(&found)["hidden_act"]), (activation, &json!(exported)));
        }
    }

    #[test]
    fn yarn_and_linear_scaling_survive_an_export() {
        let scaling = |text: &str| {
            let found =
                llama(&with(&format!(r#"{{"max_position_embeddings": 4096, "rope_scaling": {text}}}"#))).unwrap();
            let again = llama(&(LLAMA.keys)(&found)).unwrap();
            assert_eq!((again.positions, again.max_seq_len), (found.positions, found.max_seq_len), "{text}");
            let Positions::Rotary(rotary) = found.positions else { unreachable!() };
            (rotary.scaling.unwrap(), found.max_seq_len)
        };
        let yarn = YarnScaling::common(4.0, 4096);
        let expect = |text: &str, expected: YarnScaling, longest: usize| {
            assert_eq!(scaling(text), (RotaryScaling::Yarn(expected), longest), "{text}");
        };
        // The model reads as many tokens as the factor states.
        expect(r#"{"type": "yarn", "factor": 4.0}"#, yarn, 16_384);
        let given = r#"{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1024}"#;
        expect(given, YarnScaling { original_max_seq_len: 1024, ..yarn }, 4096);
        let given = r#"{"rope_type": "yarn", "factor": 4, "beta_fast": 16, "beta_slow": 2.5, "attention_factor": 1.5, "truncate": false}"#;
        let other = YarnScaling { beta_fast: 16.0, beta_slow: 2.5, attention_factor: 1.5, truncate: false, ..yarn };
        expect(given, other, 16_384);
        // DeepSeek's keys.
        let magnitude = (0.1 * 4f64.ln() + 1.0) / (0.2 * 4f64.ln() + 1.0);
        let given = r#"{"rope_type": "yarn", "factor": 4, "mscale": 1.0, "mscale_all_dim": 2.0}"#;
        expect(given, YarnScaling { attention_factor: magnitude as f32, ..yarn }, 16_384);
        let linear = r#"{"type": "linear", "factor": 2.5}"#;
        assert_eq!(scaling(linear), (RotaryScaling::Linear { factor: 2.5 }, 4096));
    }

    #[test]
    fn windows_are_those_of_transformers() {
        let windows = |architecture: &Architecture, changes: &str| {
            let found = (architecture.descriptor)(Keys(&with(changes))).unwrap();
            // An export has the same windows.
            let again = (architecture.descriptor)(Keys(&(architecture.keys)(&found))).unwrap();
            assert_eq!(again.windows, found.windows);
            found.windows.map(|Windows { size, pattern }| (size, pattern.to_string()))
        };
        let all = "S".repeat(16);
        assert_eq!(windows(&MISTRAL, "{}"), Some((4096, all.clone())));
        assert_eq!(windows(&MISTRAL, r#"{"sliding_window": null}"#), None);
        assert_eq!(windows(&MINISTRAL, r#"{"sliding_window": 7}"#), Some((7, all.clone())));
        let types = |pattern: &str| {
            let kinds = pattern.chars().map(|kind| if kind == 'S' { SLIDING } else { FULL });
            serde_json::to_string(&kinds.collect::<Vec<_>>()).unwrap()
        };
        let gemma = "SSSSSLSSSSSLSSSS";
        let changes = format!(r#"{{"sliding_window": 512, "layer_types": {}}}"#, types(gemma));
        assert_eq!(windows(&MINISTRAL, &changes), Some((512, gemma.to_owned())));
        // Qwen has windows only with use_sliding_window, in the last layers.
        let last = r#""max_window_layers": 13, "sliding_window": 512"#;
        assert_eq!(windows(&QWEN2, &format!("{{{last}}}")), None);
        let used = format!(r#"{{"use_sliding_window": true, {last}}}"#);
        assert_eq!(windows(&QWEN2, &used), Some((512, "LLLLLLLLLLLLLSSS".to_owned())));
        assert_eq!(windows(&QWEN2, r#"{"use_sliding_window": true, "max_window_layers": 0}"#), Some((4096, all)));
        assert_eq!(windows(&QWEN2, r#"{"use_sliding_window": true}"#), None);
        let changes = format!(r#"{{"use_sliding_window": true, {last}, "layer_types": {}}}"#, types(gemma));
        assert_eq!(windows(&QWEN3, &changes), Some((512, gemma.to_owned())));
    }

    #[test]
    fn settings_without_effect_are_accepted() {
        let expected: Descriptor = "llama3:1b".parse().unwrap();
        for changes in [
            r#"{"sliding_window": null}"#,
            r#"{"sliding_window": 131072}"#,
            r#"{"sliding_window": 4096, "use_sliding_window": false}"#,
        ] {
            assert_eq!(llama(&with(changes)).unwrap(), expected, "{changes}");
        }
        for scaling in
            ["null", "{}", r#"{"rope_type": "default"}"#, r#"{"type": "default", "rope_type": "default", "factor": 1}"#]
        {
            let found = llama(&with(&format!(r#"{{"rope_scaling": {scaling}}}"#))).unwrap();
            assert!(matches!(found.positions, Positions::Rotary(Rotary { scaling: None, .. })), "{scaling}");
        }
        // Qwen has a window only if this is set.
        assert!((QWEN2.descriptor)(Keys(&with(r#"{"sliding_window": 4096}"#))).is_ok());
    }

    #[test]
    fn tables_of_rotary_embeddings_are_ignored() {
        for name in [
            "rotary_emb.inv_freq",
            "layers.3.self_attn.rotary_emb.inv_freq",
            "layers.0.self_attn.rotary_emb.cos_cached",
        ] {
            assert!(LLAMA.ignores(name), "{name}");
        }
        assert!(!LLAMA.ignores("rotary_emb.inv_freq.0") && !LLAMA.ignores("layers.x.self_attn.rotary_emb.inv_freq"));
    }

    #[test]
    fn written_keys_describe_the_same_model() {
        for (name, architecture) in [
            ("llama3:1b", &LLAMA),
            ("llama3:8b", &LLAMA),
            ("qwen2.5:0.5b", &QWEN2),
            ("qwen2.5:1.5b", &QWEN2),
            ("qwen3:0.6b", &QWEN3),
        ] {
            let descriptor: Descriptor = name.parse().unwrap();
            assert!(std::ptr::eq(Architecture::of(&descriptor).unwrap(), architecture), "{name}");
            let keys = (architecture.keys)(&descriptor);
            assert_eq!((architecture.descriptor)(Keys(&keys)).unwrap(), descriptor, "{name}");
        }
    }

    #[test]
    fn absent_keys_have_the_defaults_of_transformers() {
        let absent = with(
            r#"{"head_dim": null, "num_key_value_heads": null, "rms_norm_eps": null, "rope_theta": null,
            "rope_scaling": null, "tie_word_embeddings": null}"#,
        );
        let descriptor = llama(&absent).unwrap();
        assert_eq!((descriptor.head_size, descriptor.kv_heads, descriptor.tied), (64, 32, false));
        assert_eq!(descriptor.norm, Normalization::RmsNorm { eps: 1e-6, weights: true });
        let rotary = Rotary { theta: 10_000.0, scaling: None, pairs: RotaryPairs::HalfSplit };
        assert_eq!(descriptor.positions, Positions::Rotary(rotary));
    }

    #[test]
    fn unsupported_values_name_the_key() {
        for (changes, expected) in [
            (r#"{"num_key_value_heads": 5}"#, "key-value heads: expected a divisor of the 32 heads, found 5"),
            (r#"{"hidden_size": "2048"}"#, r#"hidden_size: expected a whole number, found "2048""#),
            (r#"{"num_hidden_layers": null}"#, "num_hidden_layers: expected a whole number, found null"),
            (r#"{"rope_scaling": {"rope_type": "yarn"}}"#, "rope_scaling: factor: expected a number, found none"),
            (
                r#"{"rope_scaling": {"rope_type": "yarn", "factor": 0}}"#,
                "rope factor: expected a positive number, found 0",
            ),
            (
                r#"{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}}"#,
                "rope beta_fast - beta_slow: expected a positive number, found -1",
            ),
            (
                r#"{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}}"#,
                "rope original_max_position_embeddings: expected a positive number, found 0",
            ),
            (r#"{"rope_scaling": {"rope_type": "linear", "factor": -2}}"#, "expected a positive number, found -2"),
            (r#"{"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}"#, "low_freq_factor: expected a number"),
            (r#"{"rope_scaling": [1]}"#, "rope_scaling: expected an object or null, found [1]"),
            (
                r#"{"rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}}"#,
                "mrope_section: expected none, found [2,3]",
            ),
            (
                r#"{"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}}"#,
                r#"rope_parameters: full_attention: expected none, found {"rope_theta":10000.0}"#,
            ),
            (r#"{"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}"#, "found dynamic"),
            (
                r#"{"rope_scaling": {"factor": 2.0}}"#,
                "rope_scaling: rope_type: expected default, llama3, yarn or linear, found none;",
            ),
            (r#"{"rope_scaling": {"rope_type": null, "factor": 2.0}}"#, "found none;"),
            (r#"{"rope_scaling": {"rope_type": 5}}"#, "rope_type: expected default, llama3, yarn or linear, found 5;"),
            (
                r#"{"rope_scaling": {"rope_type": "default", "factor": 2.0}}"#,
                "factor: expected none with rope_type default, found 2;",
            ),
            (
                r#"{"rope_scaling": {"rope_type": "default", "type": "linear", "factor": 2.0}}"#,
                r#"type: expected "default" as rope_type, found "linear";"#,
            ),
            (
                r#"{"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}"#,
                "rope_scaling: expected the scaling of rope_parameters, found another one;",
            ),
            (
                r#"{"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", "factor": 4.0}}"#,
                "rope_scaling: expected the scaling of rope_parameters, found another one;",
            ),
            (
                r#"{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": null}"#,
                "rope_theta: expected 1000000 as in rope_parameters, found 500000;",
            ),
            (
                r#"{"sliding_window": 4096}"#,
                "sliding_window: expected null or at least max_position_embeddings = 131072, found 4096; set model_type to mistral",
            ),
            (r#"{"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}"#, "found longrope"),
            (r#"{"head_dim": 63}"#, "head size: expected an even number for rotary embeddings, found 63"),
            (r#"{"head_dim": 0}"#, "head size: expected at least 1, found 0"),
            (
                r#"{"head_dim": null, "num_attention_heads": 48}"#,
                "num_attention_heads: expected a divisor of hidden_size = 2048",
            ),
            (r#"{"intermediate_size": 0}"#, "MLP channels: expected at least 1, found 0"),
            (r#"{"num_key_value_heads": 0}"#, "key-value heads: expected at least 1, found 0"),
            (r#"{"hidden_size": 18446744073709551615}"#, "larger than any address space"),
            (r#"{"max_position_embeddings": 0}"#, "seq: expected at least 1, found 0"),
            (r#"{"rms_norm_eps": 0.0}"#, "norm eps: expected a positive number, found 0"),
            (r#"{"rms_norm_eps": "1e-5"}"#, "rms_norm_eps: expected a number, found"),
            (r#"{"partial_rotary_factor": 0.5}"#, "partial_rotary_factor: expected 1, found 0.5"),
            (r#"{"layer_types": ["full_attention", "sliding_attention"]}"#, r#"found "sliding_attention""#),
            (r#"{"rope_theta": -1.0}"#, "rope theta: expected a positive number, found -1"),
            (r#"{"tie_word_embeddings": 1}"#, "tie_word_embeddings: expected true or false, found 1"),
        ] {
            let message = format!("{:#}", llama(&with(changes)).unwrap_err());
            assert!(message.contains(expected), "{changes}: {message}");
        }
    }
}
