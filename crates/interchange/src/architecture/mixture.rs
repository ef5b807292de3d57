//! Qwen3-MoE and OLMoE: mixtures of experts, with one table of tensors.

use super::llama::{EPS, HIDDEN_ACT, LLAMA, descriptor, keys, no_windows, shortest};
use super::{Architecture, Part, Setting, TensorNames, part, tensor};
use crate::keys::Keys;
use anyhow::{Context, Result, ensure};
use engine::ops::{QkNormScope, RouterScores};
use model::descriptor::{Biases, Experts, Normalization, QkNorm};
use model::{Descriptor, Param};
use serde_json::json;

/// All tensors. Those that a model lacks are not in its files.
const TENSORS: &[TensorNames] = &[
    tensor(Param::Wte, "embed_tokens.weight", ""),
    tensor(Param::LmHead, "lm_head.weight", ""),
    tensor(Param::Ln1w, "layers.{}.input_layernorm.weight", ""),
    part(Param::Qkvw, Part::Query, "layers.{}.self_attn.q_proj.weight", ""),
    part(Param::Qkvw, Part::Key, "layers.{}.self_attn.k_proj.weight", ""),
    part(Param::Qkvw, Part::Value, "layers.{}.self_attn.v_proj.weight", ""),
    tensor(Param::QNormw, "layers.{}.self_attn.q_norm.weight", ""),
    tensor(Param::KNormw, "layers.{}.self_attn.k_norm.weight", ""),
    tensor(Param::Attprojw, "layers.{}.self_attn.o_proj.weight", ""),
    tensor(Param::Ln2w, "layers.{}.post_attention_layernorm.weight", ""),
    tensor(Param::Router, "layers.{}.mlp.gate.weight", ""),
    part(Param::Fcw, Part::Up, "layers.{}.mlp.experts.{}.up_proj.weight", ""),
    part(Param::Fcw, Part::Gate, "layers.{}.mlp.experts.{}.gate_proj.weight", ""),
    tensor(Param::Fcprojw, "layers.{}.mlp.experts.{}.down_proj.weight", ""),
    tensor(Param::Lnfw, "norm.weight", ""),
];

/// Qwen3-MoE. All layers have experts.
pub static QWEN3_MOE: Architecture = Architecture {
    model_type: "qwen3_moe",
    class: "Qwen3MoeForCausalLM",
    tensors: TENSORS,
    settings: &[
        Setting { key: "hidden_act", accepted: &HIDDEN_ACT },
        Setting { key: "attention_bias", accepted: &["false"] },
        // Layers without experts.
        Setting { key: "decoder_sparse_step", accepted: &["1"] },
        Setting { key: "mlp_only_layers", accepted: &["[]", "null"] },
        Setting { key: "use_sliding_window", accepted: &["false"] },
        Setting { key: "is_encoder_decoder", accepted: &["false"] },
        Setting { key: "quantization_config", accepted: &["null"] },
    ],
    gguf_pairs: None,
    descriptor: |keys| {
        let eps = keys.float("rms_norm_eps", EPS)?;
        let qk_norm = Some(QkNorm { eps, weights: true, gain: 1.0, scope: QkNormScope::Head });
        let mlp_channels = keys.size("moe_intermediate_size")?;
        let dense = descriptor(keys, Biases::None, qk_norm, None)?;
        // transformers 5 has another name.
        let count = keys.optional_size("num_local_experts")?.map_or_else(|| keys.size(EXPERTS), Ok)?;
        with_experts(keys, Descriptor { mlp_channels, ..dense }, count, 0.001)
    },
    keys: |descriptor| {
        let active = descriptor.experts.map_or(1, |experts| experts.router().active);
        let mut all = keys_of(descriptor);
        all.extend([
            ("moe_intermediate_size".to_owned(), descriptor.mlp_channels.into()),
            // The size of dense layers. There are none, but transformers reads the key.
            ("intermediate_size".to_owned(), (active * descriptor.mlp_channels).into()),
            ("decoder_sparse_step".to_owned(), 1.into()),
            ("mlp_only_layers".to_owned(), json!([])),
            ("use_sliding_window".to_owned(), false.into()),
        ]);
        all
    },
    ..LLAMA
};

/// OLMoE. Queries and keys are normalized over all heads.
pub static OLMOE: Architecture = Architecture {
    model_type: "olmoe",
    class: "OlmoeForCausalLM",
    tensors: TENSORS,
    settings: &[
        Setting { key: "hidden_act", accepted: &HIDDEN_ACT },
        Setting { key: "attention_bias", accepted: &["false"] },
        Setting { key: "clip_qkv", accepted: &["null"] },
        Setting { key: "is_encoder_decoder", accepted: &["false"] },
        Setting { key: "quantization_config", accepted: &["null"] },
    ],
    gguf_pairs: None,
    descriptor: |keys| {
        no_windows(keys)?;
        let eps = keys.float("rms_norm_eps", OLMOE_EPS)?;
        let qk_norm = Some(QkNorm { eps, weights: true, gain: 1.0, scope: QkNormScope::AllHeads });
        let dense = descriptor(keys, Biases::None, qk_norm, None)?;
        let (channels, attention) = (dense.channels, dense.attention_channels());
        ensure!(
            attention == channels,
            "head_dim: expected hidden_size / num_attention_heads, because {} normalizes hidden_size queries, found {}",
            OLMOE.class,
            dense.head_size
        );
        let norm = Normalization::RmsNorm { eps, weights: true };
        with_experts(keys, Descriptor { norm, ..dense }, keys.size(EXPERTS)?, 0.01)
    },
    keys: |descriptor| {
        let mut all = keys_of(descriptor);
        all.insert("clip_qkv".to_owned(), json!(null));
        all
    },
    ..LLAMA
};

/// The default of transformers for OLMoE.
const OLMOE_EPS: f32 = 1e-5;

/// Keys of the experts.
const EXPERTS: &str = "num_experts";
const ACTIVE: &str = "num_experts_per_tok";
const NORMALIZED: &str = "norm_topk_prob";
const AUX_LOSS: &str = "router_aux_loss_coef";
/// Whether transformers computes the load-balancing loss, and adds it to the loss of training. Generation requires that it does not.
const WITH_AUX_LOSS: &str = "output_router_logits";

/// Returns the model with the experts of a configuration. `aux_loss` is the default of transformers.
fn with_experts(keys: Keys, dense: Descriptor, count: usize, aux_loss: f32) -> Result<Descriptor> {
    // Numbers beyond 32 bits exceed the limits, too.
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let experts = Experts {
        count: narrow(count),
        active: narrow(keys.size(ACTIVE)?),
        scores: RouterScores::Softmax,
        normalized: keys.flag(NORMALIZED, false)?,
        bias: false,
        shared_channels: 0,
        aux_loss: if keys.flag(WITH_AUX_LOSS, false)? { keys.float(AUX_LOSS, aux_loss)? } else { 0.0 },
        z_loss: 0.0,
    };
    Descriptor { experts: Some(experts), ..dense }.checked().context("not a supported shape")
}

/// Returns the keys that both classes have.
fn keys_of(descriptor: &Descriptor) -> serde_json::Map<String, serde_json::Value> {
    let own = descriptor.experts.map_or_else(
        || json!({}),
        |experts| {
            json!({
                EXPERTS: experts.count,
                ACTIVE: experts.active,
                NORMALIZED: experts.normalized,
                AUX_LOSS: shortest(experts.aux_loss),
                "attention_bias": false,
                WITH_AUX_LOSS: false,
            })
        },
    );
    keys(descriptor, own)
}
