//! nanochat, as in `NanoChatForCausalLM` of transformers 5: norms without weights, ReLU², and a bound of the logits.
//!
//! The class rotates queries and keys in the other direction than Llama and normalizes them afterwards. A rotation keeps the norm, and
//! exchanging the two halves of each head reverses its direction, so both are the operations of this program. The class has no factor of
//! normalized queries and keys.

use super::llama::{self, IGNORED};
use super::{Architecture, Code, LLAMA, Part, Setting, part, tensor};
use crate::keys::Keys;
use anyhow::{Context, Result, anyhow, ensure};
use engine::ops::{Activation, QkNormScope};
use model::descriptor::{Biases, Init, Normalization, Positions, QkNorm, Rotary, RotaryScaling, Windows};
use model::{Descriptor, Param};
use serde_json::{Map, Value, json};

/// llama.cpp has no such architecture.
const NO_GGUF: &str = "";

/// Key of the bound of the logits, and its default.
const SOFTCAP: &str = "final_logit_softcapping";
const DEFAULT_SOFTCAP: f32 = 15.0;

/// nanochat.
pub static NANOCHAT: Architecture = Architecture {
    model_type: "nanochat",
    class: "NanoChatForCausalLM",
    ignored: IGNORED,
    tensors: &[
        tensor(Param::Wte, "embed_tokens.weight", NO_GGUF),
        tensor(Param::LmHead, "lm_head.weight", NO_GGUF),
        part(Param::Qkvw, Part::Query, "layers.{}.self_attn.q_proj.weight", NO_GGUF),
        part(Param::Qkvw, Part::Key, "layers.{}.self_attn.k_proj.weight", NO_GGUF),
        part(Param::Qkvw, Part::Value, "layers.{}.self_attn.v_proj.weight", NO_GGUF),
        tensor(Param::Attprojw, "layers.{}.self_attn.o_proj.weight", NO_GGUF),
        tensor(Param::Fcw, "layers.{}.mlp.fc1.weight", NO_GGUF),
        tensor(Param::Fcprojw, "layers.{}.mlp.fc2.weight", NO_GGUF),
    ],
    settings: &[
        Setting { key: "hidden_act", accepted: &["relu2"] },
        Setting { key: "attention_bias", accepted: &["false"] },
        Setting { key: "is_encoder_decoder", accepted: &["false"] },
        Setting { key: "quantization_config", accepted: &["null"] },
    ],
    gguf_pairs: None,
    reverses_rotation: true,
    descriptor,
    keys,
    ..LLAMA
};

/// nanochat with what transformers' class lacks: a factor of normalized queries and keys, windows and additions. The tensors have the names
/// of nanochat's checkpoints, but each layer has its own factors of the residual stream. An export contains the class.
pub static NANOCHAT_FULL: Architecture = Architecture {
    model_type: "nanochat_full",
    class: "NanoChatFullForCausalLM",
    prefix: "",
    ignored: &[],
    tensors: &[
        tensor(Param::Wte, "transformer.wte.weight", NO_GGUF),
        tensor(Param::LmHead, "lm_head.weight", NO_GGUF),
        part(Param::Qkvw, Part::Query, "transformer.h.{}.attn.c_q.weight", NO_GGUF),
        part(Param::Qkvw, Part::Key, "transformer.h.{}.attn.c_k.weight", NO_GGUF),
        part(Param::Qkvw, Part::Value, "transformer.h.{}.attn.c_v.weight", NO_GGUF),
        tensor(Param::Attprojw, "transformer.h.{}.attn.c_proj.weight", NO_GGUF),
        tensor(Param::Fcw, "transformer.h.{}.mlp.c_fc.weight", NO_GGUF),
        tensor(Param::Fcprojw, "transformer.h.{}.mlp.c_proj.weight", NO_GGUF),
        tensor(Param::ValueTable, "value_embeds.{}.weight", NO_GGUF),
        tensor(Param::ValueGate, "transformer.h.{}.attn.ve_gate.weight", NO_GGUF),
        tensor(Param::SmearGate, "smear_gate.weight", NO_GGUF),
        tensor(Param::SmearScale, "smear_lambda", NO_GGUF),
        tensor(Param::BackoutScale, "backout_lambda", NO_GGUF),
        tensor(Param::ResidualScale, "transformer.h.{}.resid_lambda", NO_GGUF),
        tensor(Param::EmbeddingScale, "transformer.h.{}.x0_lambda", NO_GGUF),
    ],
    code: Some(Code { module: "modeling_nanochat_full", text: include_str!("modeling_nanochat_full.py") }),
    descriptor: full_descriptor,
    keys: full_keys,
    ..NANOCHAT
};

/// Keys of what transformers' class lacks.
const GAIN: &str = "qk_gain";
const WINDOW: &str = "window";
const WINDOW_PATTERN: &str = "window_pattern";
const ADDITIONS: &str = "additions";

fn full_descriptor(keys: Keys) -> Result<Descriptor> {
    let plain = descriptor(keys)?;
    ensure!(
        matches!(plain.positions, Positions::Rotary(Rotary { scaling: None, .. })),
        "rope_parameters: expected rotary positions without scaling, found others"
    );
    let text = |key: &str| {
        let value = keys.get(key);
        value.as_str().with_context(|| format!("{key}: expected text, found {value}"))
    };
    let windows = match keys.optional_size(WINDOW)? {
        Some(size) => Some(Windows { size, pattern: text(WINDOW_PATTERN)?.parse().context(WINDOW_PATTERN)? }),
        None => None,
    };
    let gain = keys.float(GAIN, 1.0)?;
    let additions = text(ADDITIONS)?.parse().map_err(|error: String| anyhow!("{ADDITIONS}: {error}"))?;
    let qk_norm = plain.qk_norm.map(|norm| QkNorm { gain, ..norm });
    Descriptor { qk_norm, windows, additions, init: Init::Nanochat, ..plain }.checked().context("not a supported shape")
}

fn full_keys(descriptor: &Descriptor) -> Map<String, Value> {
    let own = json!({
        GAIN: descriptor.qk_norm.map(|norm| llama::shortest(norm.gain)),
        WINDOW: descriptor.windows.map(|windows| windows.size),
        WINDOW_PATTERN: descriptor.windows.map(|windows| windows.pattern.to_string()),
        ADDITIONS: descriptor.additions,
    });
    let mut keys = keys(descriptor);
    keys.extend(own.as_object().cloned().unwrap_or_default());
    keys
}

fn descriptor(keys: Keys) -> Result<Descriptor> {
    llama::no_windows(keys)?;
    let llama = llama::descriptor(keys, Biases::None, None, None)?;
    // The norm that follows the rotation would remove the factor, and that of this program precedes it.
    if let Positions::Rotary(Rotary { scaling: Some(RotaryScaling::Yarn(yarn)), .. }) = llama.positions {
        ensure!(
            (yarn.attention_factor - 1.0).abs() < f32::EPSILON,
            "attention_factor: expected 1, because NanoChatForCausalLM normalizes rotated queries and keys, found {}",
            yarn.attention_factor
        );
    }
    let eps = llama.norm.eps().unwrap_or(llama::EPS);
    // Unlike an absent key, null disables it.
    let softcap = match keys.0.get(SOFTCAP) {
        Some(Value::Null) => None,
        _ => Some(keys.float(SOFTCAP, DEFAULT_SOFTCAP)?),
    };
    let descriptor = Descriptor {
        norm: Normalization::RmsNorm { eps, weights: false },
        qk_norm: Some(QkNorm { eps, weights: false, gain: 1.0, scope: QkNormScope::Head }),
        activation: Activation::ReluSquared,
        embedding_norm: true,
        softcap,
        init: Init::DepthScaled,
        ..llama
    };
    descriptor.checked().context("not a supported shape")
}

fn keys(descriptor: &Descriptor) -> Map<String, Value> {
    let own = json!({
        "attention_bias": false,
        "hidden_act": "relu2",
        SOFTCAP: descriptor.softcap,
        // By default, it is token 1.
        "pad_token_id": null,
    });
    llama::keys(descriptor, own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_keys_have_the_defaults_of_transformers() {
        let parse = |changes: Value| {
            let mut all = json!({
                "hidden_size": 768, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 6,
                "max_position_embeddings": 2048, "vocab_size": 50304,
            });
            all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            descriptor(Keys(all.as_object().unwrap()))
        };
        let found = parse(json!({})).unwrap();
        assert_eq!((found.kv_heads, found.head_size, found.tied, found.softcap), (6, 128, false, Some(15.0)));
        assert_eq!(found.qk_norm, Some(QkNorm { eps: 1e-6, weights: false, gain: 1.0, scope: QkNormScope::Head }));
        assert_eq!(parse(json!({ SOFTCAP: null })).unwrap().softcap, None);
        assert_eq!(parse(json!({ SOFTCAP: 30.0 })).unwrap().softcap, Some(30.0));
        let message = format!("{:#}", parse(json!({ SOFTCAP: -1.0 })).unwrap_err());
        assert!(message.contains("softcap: expected a positive number, found -1"), "{message}");
    }

    #[test]
    fn shapes_that_transformers_lacks_are_exported_with_their_class() {
        let modern: Descriptor = "modern:d12".parse().unwrap();
        assert!(std::ptr::eq(Architecture::of(&modern).unwrap(), &raw const NANOCHAT_FULL));
        let plain = Descriptor { qk_norm: modern.qk_norm.map(|norm| QkNorm { gain: 1.0, ..norm }), ..modern };
        for model in [plain, Descriptor { softcap: None, ..plain }, Descriptor { tied: true, ..plain }] {
            assert!(std::ptr::eq(Architecture::of(&model).unwrap(), &raw const NANOCHAT));
            assert_eq!(descriptor(Keys(&keys(&model))).unwrap(), model);
        }
        let full: Descriptor = "nanochat:d5".parse().unwrap();
        let tied = Descriptor { tied: true, windows: None, additions: "smear".parse().unwrap(), ..full };
        for model in [full, tied, modern, Descriptor { softcap: None, ..modern }] {
            assert!(std::ptr::eq(Architecture::of(&model).unwrap(), &raw const NANOCHAT_FULL));
            let again = full_descriptor(Keys(&full_keys(&model))).unwrap();
            assert_eq!(Descriptor { init: model.init, ..again }, model);
        }
        let message = Architecture::of(&Descriptor { embedding_norm: false, ..plain }).unwrap_err().to_string();
        assert!(message.contains("transformers has no class for it"), "{message}");
    }
}
