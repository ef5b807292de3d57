//! GPT-2, and GPT-3 models with its layers.

use super::{Architecture, Part, Setting, TensorNames, tensor};
use crate::keys::Keys;
use anyhow::{Context, Result, ensure};
use engine::ops::RotaryPairs;
use model::{Descriptor, Param};
use serde_json::{Map, Value, json};

const fn conv1d(param: Param, hugging_face: &'static str, gguf: &'static str) -> TensorNames {
    TensorNames { param, part: Part::All, hugging_face, gguf, transposed: true }
}

/// GPT-2.
pub static GPT2: Architecture = Architecture {
    model_type: "gpt2",
    class: "GPT2LMHeadModel",
    prefix: "transformer.",
    head: "lm_head.weight",
    ignored: &["h.{}.attn.bias", "h.{}.attn.masked_bias"],
    tensors: &[
        tensor(Param::Wte, "wte.weight", "token_embd.weight"),
        tensor(Param::Wpe, "wpe.weight", "position_embd.weight"),
        tensor(Param::Ln1w, "h.{}.ln_1.weight", "blk.{}.attn_norm.weight"),
        tensor(Param::Ln1b, "h.{}.ln_1.bias", "blk.{}.attn_norm.bias"),
        conv1d(Param::Qkvw, "h.{}.attn.c_attn.weight", "blk.{}.attn_qkv.weight"),
        tensor(Param::Qkvb, "h.{}.attn.c_attn.bias", "blk.{}.attn_qkv.bias"),
        conv1d(Param::Attprojw, "h.{}.attn.c_proj.weight", "blk.{}.attn_output.weight"),
        tensor(Param::Attprojb, "h.{}.attn.c_proj.bias", "blk.{}.attn_output.bias"),
        tensor(Param::Ln2w, "h.{}.ln_2.weight", "blk.{}.ffn_norm.weight"),
        tensor(Param::Ln2b, "h.{}.ln_2.bias", "blk.{}.ffn_norm.bias"),
        conv1d(Param::Fcw, "h.{}.mlp.c_fc.weight", "blk.{}.ffn_up.weight"),
        tensor(Param::Fcb, "h.{}.mlp.c_fc.bias", "blk.{}.ffn_up.bias"),
        conv1d(Param::Fcprojw, "h.{}.mlp.c_proj.weight", "blk.{}.ffn_down.weight"),
        tensor(Param::Fcprojb, "h.{}.mlp.c_proj.bias", "blk.{}.ffn_down.bias"),
        tensor(Param::Lnfw, "ln_f.weight", "output_norm.weight"),
        tensor(Param::Lnfb, "ln_f.bias", "output_norm.bias"),
    ],
    settings: &[
        // Both are the tanh approximation.
        Setting { key: "activation_function", accepted: &["gelu_new", "gelu_pytorch_tanh"] },
        Setting { key: "layer_norm_epsilon", accepted: &["0.00001"] },
        Setting { key: "scale_attn_weights", accepted: &["true"] },
        Setting { key: "scale_attn_by_inverse_layer_idx", accepted: &["false"] },
        // Changes the precision of the attention scores, but not their formula.
        Setting { key: "reorder_and_upcast_attn", accepted: &["false", "true"] },
        Setting { key: "add_cross_attention", accepted: &["false"] },
        Setting { key: "is_encoder_decoder", accepted: &["false"] },
        // Untied heads are accepted if their values are equal.
        Setting { key: "tie_word_embeddings", accepted: &["true", "false"] },
        Setting { key: "quantization_config", accepted: &["null"] },
        Setting { key: "pruned_heads", accepted: &["null", "{}"] },
    ],
    gguf_pairs: Some(RotaryPairs::HalfSplit),
    reverses_rotation: false,
    code: None,
    descriptor,
    keys,
};

fn descriptor(keys: Keys) -> Result<Descriptor> {
    let [layers, heads, channels] = [keys.size("n_layer")?, keys.size("n_head")?, keys.size("n_embd")?];
    let [max_seq_len, vocab] = [keys.size("n_positions")?, keys.size("vocab_size")?];
    let descriptor = Descriptor::gpt2(layers, heads, channels, max_seq_len, vocab)
        .context("n_layer, n_head, n_embd, n_positions, vocab_size: not a supported shape")?;
    let mlp = keys.get("n_inner");
    ensure!(
        mlp.is_null() || mlp.as_u64() == Some(4 * channels as u64),
        "n_inner: expected null or 4 x n_embd = {}, found {mlp}; llm-rs supports no other MLP width",
        4 * channels
    );
    Ok(descriptor)
}

fn keys(descriptor: &Descriptor) -> Map<String, Value> {
    let Descriptor { layers, heads, channels, max_seq_len, vocab, .. } = *descriptor;
    let keys = json!({
        "n_layer": layers,
        "n_head": heads,
        "n_embd": channels,
        "n_positions": max_seq_len,
        "vocab_size": vocab,
        "n_inner": null,
        "activation_function": "gelu_new",
        // llm.rs trains without dropout.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5,
    });
    let Value::Object(keys) = keys else { unreachable!("written as an object above") };
    keys
}
