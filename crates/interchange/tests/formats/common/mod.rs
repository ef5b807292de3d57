//! Small models in the files of other programs, written with the `safetensors` crate.

use anyhow::Result;
use interchange::ModelSource;
use model::{Descriptor, Param};
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Layers, heads, channels, positions and vocabulary of the models.
pub const SHAPE: (usize, usize, usize, usize, usize) = (2, 2, 6, 10, 33);

pub fn descriptor() -> Descriptor {
    let (layers, heads, channels, positions, vocab) = SHAPE;
    Descriptor::gpt2(layers, heads, channels, positions, vocab).unwrap()
}

/// A tensor: shape and values.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
    pub dtype: Dtype,
}

impl Tensor {
    pub fn bytes(&self) -> Vec<u8> {
        let bytes = |value: &f32| match self.dtype {
            Dtype::F32 => value.to_le_bytes().to_vec(),
            Dtype::BF16 => half::bf16::from_f32(*value).to_le_bytes().to_vec(),
            Dtype::F16 => half::f16::from_f32(*value).to_le_bytes().to_vec(),
            Dtype::U8 => vec![*value as u8],
            other => panic!("{other:?}"),
        };
        self.values.iter().flat_map(bytes).collect()
    }
}

pub type Tensors = BTreeMap<String, Tensor>;

/// Returns distinct values that bf16 and f16 cannot represent, except that tensors of another type are rounded when written.
fn values(tensor: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| (tensor as f32 + 1.0) * 0.01 + i as f32 * 1.37e-3).collect()
}

/// Returns the tensors of a model with a head, as transformers names them.
pub fn tensors(dtype: Dtype) -> Tensors {
    let (layers, _, c, positions, vocab) = SHAPE;
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("transformer.wte.weight".into(), vec![vocab, c]),
        ("transformer.wpe.weight".into(), vec![positions, c]),
        ("transformer.ln_f.weight".into(), vec![c]),
        ("transformer.ln_f.bias".into(), vec![c]),
    ];
    for layer in 0..layers {
        let of_layer: [(&str, Vec<usize>); 12] = [
            ("ln_1.weight", vec![c]),
            ("ln_1.bias", vec![c]),
            ("attn.c_attn.weight", vec![c, 3 * c]),
            ("attn.c_attn.bias", vec![3 * c]),
            ("attn.c_proj.weight", vec![c, c]),
            ("attn.c_proj.bias", vec![c]),
            ("ln_2.weight", vec![c]),
            ("ln_2.bias", vec![c]),
            ("mlp.c_fc.weight", vec![c, 4 * c]),
            ("mlp.c_fc.bias", vec![4 * c]),
            ("mlp.c_proj.weight", vec![4 * c, c]),
            ("mlp.c_proj.bias", vec![c]),
        ];
        shapes.extend(of_layer.map(|(name, shape)| (format!("transformer.h.{layer}.{name}"), shape)));
    }
    let tensor = |(i, (name, shape)): (usize, (String, Vec<usize>))| {
        let values = values(i, shape.iter().product());
        (name, Tensor { shape, values, dtype })
    };
    shapes.into_iter().enumerate().map(tensor).collect()
}

/// Returns a configuration as transformers 5 writes it.
pub fn config() -> Value {
    let (layers, heads, channels, positions, vocab) = SHAPE;
    json!({
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "bos_token_id": 3, "dtype": "float32",
        "eos_token_id": 4, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_embd": channels, "n_head": heads,
        "n_inner": null, "n_layer": layers, "n_positions": positions, "tie_word_embeddings": true,
        "transformers_version": "5.0.0", "use_cache": true, "vocab_size": vocab,
    })
}

/// Returns the bytes of a file with these tensors.
pub fn file(tensors: &Tensors) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> = tensors.values().map(Tensor::bytes).collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, tensor), bytes)| (name, TensorView::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap()));
    serialize(views, Some(HashMap::from([("format".to_owned(), "pt".to_owned())]))).unwrap()
}

/// Writes a directory with the configuration of GPT-2 and one safetensors file.
pub fn directory(tensors: &Tensors) -> TempDir {
    directory_of(&config(), tensors)
}

/// Writes a directory with a configuration and one safetensors file.
pub fn directory_of(config: &Value, tensors: &Tensors) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    fs::write(directory.path().join("model.safetensors"), file(tensors)).unwrap();
    directory
}

/// Returns the configuration and the tensors of a small Qwen2 with a tied head: L = 1, C = 32, NH = 4, KV = 2, F = 40, V = 97.
pub fn qwen2() -> (Value, Tensors) {
    let config = json!({
        "model_type": "qwen2", "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
        "intermediate_size": 40, "max_position_embeddings": 64, "vocab_size": 97, "tie_word_embeddings": true,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu", "bos_token_id": 89, "eos_token_id": 89,
    });
    let shapes: [(&str, Vec<usize>); 14] = [
        ("model.embed_tokens.weight", vec![97, 32]),
        ("model.norm.weight", vec![32]),
        ("model.layers.0.input_layernorm.weight", vec![32]),
        ("model.layers.0.post_attention_layernorm.weight", vec![32]),
        ("model.layers.0.self_attn.q_proj.weight", vec![32, 32]),
        ("model.layers.0.self_attn.k_proj.weight", vec![16, 32]),
        ("model.layers.0.self_attn.v_proj.weight", vec![16, 32]),
        ("model.layers.0.self_attn.q_proj.bias", vec![32]),
        ("model.layers.0.self_attn.k_proj.bias", vec![16]),
        ("model.layers.0.self_attn.v_proj.bias", vec![16]),
        ("model.layers.0.self_attn.o_proj.weight", vec![32, 32]),
        ("model.layers.0.mlp.up_proj.weight", vec![40, 32]),
        ("model.layers.0.mlp.gate_proj.weight", vec![40, 32]),
        ("model.layers.0.mlp.down_proj.weight", vec![32, 40]),
    ];
    let tensor = |(i, (name, shape)): (usize, (&str, Vec<usize>))| {
        let values = values(i, shape.iter().product());
        (name.to_owned(), Tensor { shape, values, dtype: Dtype::F32 })
    };
    (config, shapes.into_iter().enumerate().map(tensor).collect())
}

/// Returns the values of a parameter of llm.rs (one row per output) by another route: the names are written out here.
pub fn expected(tensors: &Tensors, param: Param, layer: usize) -> Vec<f32> {
    let (name, transposed) = match param {
        Param::Wte => ("wte.weight", false),
        Param::Wpe => ("wpe.weight", false),
        Param::Ln1w => ("h.L.ln_1.weight", false),
        Param::Ln1b => ("h.L.ln_1.bias", false),
        Param::Qkvw => ("h.L.attn.c_attn.weight", true),
        Param::Qkvb => ("h.L.attn.c_attn.bias", false),
        Param::Attprojw => ("h.L.attn.c_proj.weight", true),
        Param::Attprojb => ("h.L.attn.c_proj.bias", false),
        Param::Ln2w => ("h.L.ln_2.weight", false),
        Param::Ln2b => ("h.L.ln_2.bias", false),
        Param::Fcw => ("h.L.mlp.c_fc.weight", true),
        Param::Fcb => ("h.L.mlp.c_fc.bias", false),
        Param::Fcprojw => ("h.L.mlp.c_proj.weight", true),
        Param::Fcprojb => ("h.L.mlp.c_proj.bias", false),
        Param::Lnfw => ("ln_f.weight", false),
        Param::Lnfb => ("ln_f.bias", false),
        _ => unreachable!("GPT-2 has no {}", param.name()),
    };
    let name = format!("transformer.{}", name.replace('L', &layer.to_string()));
    let Tensor { shape, values, dtype } = &tensors[&name];
    let rounded: Vec<f32> = match dtype {
        Dtype::BF16 => values.iter().map(|&value| half::bf16::from_f32(value).to_f32()).collect(),
        Dtype::F16 => values.iter().map(|&value| half::f16::from_f32(value).to_f32()).collect(),
        _ => values.clone(),
    };
    match shape[..] {
        [rows, columns] if transposed => {
            (0..columns).flat_map(|c| (0..rows).map(move |r| (r, c))).map(|(r, c)| rounded[r * columns + c]).collect()
        }
        _ => rounded,
    }
}

pub fn open(path: &Path) -> Result<ModelSource> {
    ModelSource::open(path)
}

/// Returns the names and contents of the files of a directory, or the contents of a file.
pub fn contents(path: &Path) -> BTreeMap<String, Vec<u8>> {
    if path.is_file() {
        return [(String::new(), fs::read(path).unwrap())].into();
    }
    let paths: Vec<PathBuf> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.iter().map(|path| (path.file_name().unwrap().to_str().unwrap().into(), fs::read(path).unwrap())).collect()
}
