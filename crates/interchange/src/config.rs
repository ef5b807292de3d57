//! `config.json` of a Hugging Face directory: the architecture, its sizes, and settings that the engine must support.

use crate::architecture::{ARCHITECTURES, Architecture};
use crate::keys::Keys;
use anyhow::{Context, Result, bail, ensure};
use engine::tensor::DType;
use model::Descriptor;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Name of the file.
pub const FILE: &str = "config.json";

/// Key that states whether the head is the token embedding.
const TIED: &str = "tie_word_embeddings";

/// Keys of the ids of the tokens before (BOS) and after (EOS) a document.
const BOS_EOS_KEYS: [&str; 2] = ["bos_token_id", "eos_token_id"];

/// A configuration that the engine supports.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// The architecture.
    pub architecture: &'static Architecture,
    /// Shape of the model.
    pub descriptor: Descriptor,
    /// All keys of the file.
    pub keys: Map<String, Value>,
}

impl ModelConfig {
    /// Reads the file in `directory`.
    pub fn read(directory: &Path) -> Result<Self> {
        let path = directory.join(FILE);
        let text = bounded_file::read(&path, bounded_file::DESCRIPTION)
            .with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    /// Parses the contents of the file.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let keys: Value = serde_json::from_slice(text).context("not valid JSON")?;
        let Value::Object(keys) = keys else { bail!("expected a JSON object, found {}", text_of(&keys)) };
        let found = keys.get("model_type").map_or("none".to_owned(), text_of);
        let known = || ARCHITECTURES.iter().map(|known| known.model_type).collect::<Vec<_>>().join(" or ");
        let architecture = ARCHITECTURES.iter().copied().find(|known| known.model_type == found);
        let architecture = architecture.with_context(|| {
            format!("model_type: expected {}, found {found}; llm-rs supports no other architecture", known())
        })?;
        let descriptor = (architecture.descriptor)(Keys(&keys))?;
        for setting in architecture.settings {
            let Some(value) = keys.get(setting.key) else { continue };
            let found = text_of(value);
            ensure!(
                setting.accepted.contains(&found.as_str()),
                "{}: expected {}, found {found}; llm-rs supports no other value",
                setting.key,
                setting.accepted.join(" or ")
            );
        }
        Ok(Self { architecture, descriptor, keys })
    }

    /// Returns the configuration of a model of this program.
    pub fn new(architecture: &'static Architecture, descriptor: Descriptor, [bos, eos]: [Option<u32>; 2]) -> Self {
        let mut keys = (architecture.keys)(&descriptor);
        let common = [
            ("model_type", architecture.model_type.into()),
            ("bos_token_id", bos.into()),
            ("eos_token_id", eos.into()),
            ("initializer_range", json!(0.02)),
            ("use_cache", true.into()),
        ];
        keys.extend(common.map(|(key, value)| (key.to_owned(), value)));
        Self { architecture, descriptor, keys }
    }

    /// Returns the file of an export with parameters of type `dtype`: the class, whether the head is tied, and the type under the keys of
    /// transformers 4 (`torch_dtype`) and 5 (`dtype`).
    pub fn exported(&self, dtype: DType) -> Map<String, Value> {
        let mut keys = self.keys.clone();
        let name = match dtype {
            DType::Bf16 => "bfloat16",
            DType::F32 | DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => "float32",
        };
        let changed = [
            ("architectures", json!([self.architecture.class])),
            ("dtype", name.into()),
            ("torch_dtype", name.into()),
            (TIED, self.descriptor.tied.into()),
        ];
        keys.extend(changed.map(|(key, value)| (key.to_owned(), value)));
        if let Some(code) = &self.architecture.code {
            let class = self.architecture.class;
            let config = class.replace("ForCausalLM", "Config");
            let map = json!({
                "AutoConfig": format!("{}.{config}", code.module),
                "AutoModelForCausalLM": format!("{}.{class}", code.module),
            });
            keys.insert("auto_map".to_owned(), map);
        }
        keys
    }

    /// Checks that the head is tied to the token embedding. A file without a head then has all parameters of the model.
    pub fn check_tied(&self) -> Result<()> {
        ensure!(
            self.keys.get(TIED) != Some(&Value::Bool(false)) || !self.descriptor.tied,
            "{TIED}: expected true, because the files have no {}, found false; if the model was trained with tied embeddings, set \
             it to true",
            self.architecture.head
        );
        Ok(())
    }

    /// Sets the ids of the BOS and EOS tokens.
    pub fn set_bos_eos(&mut self, ids: [Option<u32>; 2]) {
        for (key, id) in BOS_EOS_KEYS.into_iter().zip(ids) {
            self.keys.insert(key.to_owned(), id.into());
        }
    }

    /// Returns the ids of the BOS and EOS tokens, or the first id if the file has a list. An id beyond the vocabulary counts as none.
    pub fn bos_eos(&self) -> [Option<u32>; 2] {
        BOS_EOS_KEYS.map(|key| {
            let value = self.keys.get(key)?;
            let id = value.as_array().map_or(Some(value), |list| list.first())?.as_u64()?;
            u32::try_from(id).ok().filter(|&id| (id as usize) < self.descriptor.vocab)
        })
    }
}

/// Returns a value as in [`Setting::accepted`](crate::architecture::Setting::accepted): text without quotes, and numbers as the
/// shortest f32.
pub fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => (number.as_f64().unwrap_or(f64::NAN) as f32).to_string(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::architecture::GPT2;
    use std::fs;

    /// The file of GPT-2 124M as transformers 4 writes it.
    const GPT2_124M: &str = r#"{
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
        "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_inner": null, "n_layer": 12,
        "n_positions": 1024, "reorder_and_upcast_attn": false, "resid_pdrop": 0.1,
        "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true, "torch_dtype": "float32",
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        "transformers_version": "4.40.0", "use_cache": true, "vocab_size": 50257}"#;

    fn with(key: &str, value: Option<&str>) -> Result<ModelConfig> {
        let Value::Object(mut keys) = serde_json::from_str(GPT2_124M).unwrap() else { unreachable!() };
        match value {
            Some(value) => drop(keys.insert(key.to_owned(), serde_json::from_str(value).unwrap())),
            None => drop(keys.remove(key).unwrap()),
        }
        ModelConfig::parse(&serde_json::to_vec(&keys).unwrap())
    }

    #[test]
    fn configurations_of_transformers_are_read() {
        let config = ModelConfig::parse(GPT2_124M.as_bytes()).unwrap();
        assert_eq!(config.descriptor, "d12".parse().unwrap());
        assert_eq!(config.bos_eos(), [Some(50256); 2]);
        for (key, value) in [
            ("activation_function", Some(r#""gelu_pytorch_tanh""#)),
            ("activation_function", None),
            ("layer_norm_epsilon", Some("0.00001")),
            // 1e-5 in single precision, widened.
            ("layer_norm_epsilon", Some("9.999999747378752e-06")),
            ("layer_norm_epsilon", None),
            ("n_inner", Some("3072")),
            ("n_inner", None),
            ("reorder_and_upcast_attn", Some("true")),
            ("torch_dtype", None),
            // transformers 5
            ("dtype", Some(r#""bfloat16""#)),
            ("tie_word_embeddings", Some("true")),
            ("pruned_heads", Some("{}")),
            ("rope_parameters", Some("null")),
        ] {
            assert_eq!(with(key, value).unwrap().descriptor, config.descriptor, "{key} {value:?}");
        }
        for (value, id) in [(Some("[7, 8]"), Some(7)), (Some("50257"), None), (Some("null"), None), (None, None)] {
            assert_eq!(with("eos_token_id", value).unwrap().bos_eos(), [Some(50256), id]);
        }
    }

    #[test]
    fn unsupported_settings_name_the_key_and_both_values() {
        for (key, value, expected) in [
            (
                "model_type",
                Some(r#""opt""#),
                "model_type: expected gpt2 or llama or mistral or ministral or qwen2 or qwen3 or qwen3_moe or olmoe or nanochat or nanochat_full, found opt; llm-rs supports no other architecture",
            ),
            (
                "model_type",
                None,
                "model_type: expected gpt2 or llama or mistral or ministral or qwen2 or qwen3 or qwen3_moe or olmoe or nanochat or nanochat_full, found none",
            ),
            (
                "activation_function",
                Some(r#""relu""#),
                "activation_function: expected gelu_new or gelu_pytorch_tanh, found relu; llm-rs supports no other value",
            ),
            ("activation_function", Some(r#""gelu""#), "found gelu;"),
            ("layer_norm_epsilon", Some("1e-6"), "layer_norm_epsilon: expected 0.00001, found 0.000001;"),
            ("layer_norm_epsilon", Some(r#"{"a": 1}"#), r#"layer_norm_epsilon: expected 0.00001, found {"a":1};"#),
            ("scale_attn_weights", Some("false"), "scale_attn_weights: expected true, found false"),
            (
                "scale_attn_by_inverse_layer_idx",
                Some("true"),
                "scale_attn_by_inverse_layer_idx: expected false, found true",
            ),
            ("add_cross_attention", Some("true"), "add_cross_attention: expected false, found true"),
            ("is_encoder_decoder", Some("true"), "is_encoder_decoder: expected false, found true"),
            ("pruned_heads", Some(r#"{"0": [1]}"#), r#"pruned_heads: expected null or {}, found {"0":[1]}"#),
            ("quantization_config", Some(r#"{"bits": 4}"#), "quantization_config: expected null, found"),
            ("n_inner", Some("3000"), "n_inner: expected null or 4 x n_embd = 3072, found 3000"),
            ("n_layer", None, "n_layer: expected a whole number, found none"),
            ("n_head", Some("-1"), "n_head: expected a whole number, found -1"),
            ("n_embd", Some("1.5"), "n_embd: expected a whole number, found 1.5"),
            ("n_positions", Some(r#""many""#), r#"n_positions: expected a whole number, found "many""#),
            ("n_head", Some(r#""12""#), r#"n_head: expected a whole number, found "12""#),
            ("n_embd", Some("768.0"), "n_embd: expected a whole number, found 768.0"),
            ("n_inner", Some(r#""3072""#), r#"n_inner: expected null or 4 x n_embd = 3072, found "3072""#),
            ("vocab_size", Some("null"), "vocab_size: expected a whole number, found null"),
            ("n_head", Some("7"), "not a supported shape: heads: expected a divisor of the 768 channels, found 7"),
            ("n_layer", Some("0"), "not a supported shape: layers: expected at least 1, found 0"),
            ("vocab_size", Some("1048577"), "not a supported shape: vocab: expected at most 1048576, found 1048577"),
            ("n_embd", Some("18446744073709551615"), "not a supported shape"),
        ] {
            let message = format!("{:#}", with(key, value).unwrap_err());
            assert!(message.contains(expected), "{key} {value:?}: {message}");
        }
        for (text, expected) in
            [("", "not valid JSON"), ("{", "not valid JSON"), ("[1]", "expected a JSON object, found [1]")]
        {
            let message = format!("{:#}", ModelConfig::parse(text.as_bytes()).unwrap_err());
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let message = format!("{:#}", ModelConfig::read(directory.path()).unwrap_err());
        assert!(message.starts_with("cannot read ") && message.contains("config.json: No such file"), "{message}");
        fs::write(directory.path().join(FILE), "{}").unwrap();
        let message = format!("{:#}", ModelConfig::read(directory.path()).unwrap_err());
        assert!(
            message
                .contains("config.json: model_type: expected gpt2 or llama or mistral or ministral or qwen2 or qwen3 or qwen3_moe or olmoe or nanochat or nanochat_full, found none"),
            "{message}"
        );
    }

    #[test]
    fn exported_configurations_are_accepted_again() {
        let descriptor = Descriptor::gpt2(2, 3, 12, 16, 256).unwrap();
        let config = ModelConfig::new(&GPT2, descriptor, [Some(10), None]);
        for (dtype, name) in [(DType::F32, "float32"), (DType::Bf16, "bfloat16")] {
            let keys = config.exported(dtype);
            let again = ModelConfig::parse(&serde_json::to_vec(&keys).unwrap()).unwrap();
            assert_eq!((again.descriptor, again.bos_eos()), (descriptor, [Some(10), None]));
            assert_eq!((&keys["dtype"], &keys["torch_dtype"]), (&json!(name), &json!(name)));
            assert_eq!(keys["architectures"], json!(["GPT2LMHeadModel"]));
            assert_eq!(keys["eos_token_id"], Value::Null);
        }
        // Keys that the program does not know are kept.
        let kept = ModelConfig::parse(GPT2_124M.as_bytes()).unwrap().exported(DType::F32);
        assert_eq!((&kept["n_ctx"], &kept["attn_pdrop"]), (&json!(1024), &json!(0.1)));
        assert_eq!(kept["task_specific_params"]["text-generation"]["max_length"], json!(50));
    }
}
