//! One table per architecture: the names of its tensors in other programs, and the keys of its `config.json`.
//!
//! A further architecture is a further static in this file.

use model::{Descriptor, Param};

/// The names of an architecture in other programs.
#[derive(Debug)]
pub struct Architecture {
    /// `model_type` in `config.json`, which is also `general.architecture` in GGUF.
    pub model_type: &'static str,
    /// Class of transformers that loads the model with its language-modeling head.
    pub class: &'static str,
    /// Prefix of the tensor names of that class. Files of the class without a head do not have it.
    pub prefix: &'static str,
    /// The head of a file that does not tie it to the token embedding.
    pub head: &'static str,
    /// Buffers that old versions of transformers saved. `{}` is the layer.
    pub ignored: &'static [&'static str],
    /// All parameter tensors.
    pub tensors: &'static [TensorNames],
    /// Keys of the model's sizes.
    pub sizes: SizeKeys,
    /// Settings that the engine supports only with some values.
    pub settings: &'static [Setting],
}

/// A parameter tensor in other programs. `{}` in a name is the layer.
#[derive(Debug)]
pub struct TensorNames {
    /// The tensor.
    pub param: Param,
    /// Name in safetensors files, without the prefix of the class.
    pub hugging_face: &'static str,
    /// Name in GGUF files.
    pub gguf: &'static str,
    /// Whether Hugging Face stores the transposed matrix. Its `Conv1D` has one row per input.
    pub transposed: bool,
}

/// Keys of `config.json` that hold the sizes of the model.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names are those of `Descriptor`")]
pub struct SizeKeys {
    pub layers: &'static str,
    pub heads: &'static str,
    pub channels: &'static str,
    pub max_seq_len: &'static str,
    pub vocab: &'static str,
    /// Width of the MLP: null or 4 times the channels.
    pub mlp: &'static str,
}

/// A setting that the engine supports only with some values. If the key is absent, transformers uses the first one.
#[derive(Debug)]
pub struct Setting {
    /// Key in `config.json`.
    pub key: &'static str,
    /// Accepted values in the notation of [`config::text_of`](crate::config::text_of).
    pub accepted: &'static [&'static str],
}

/// All known architectures.
pub static ARCHITECTURES: &[&Architecture] = &[&GPT2];

const fn vector(param: Param, hugging_face: &'static str, gguf: &'static str) -> TensorNames {
    TensorNames { param, hugging_face, gguf, transposed: false }
}

const fn matrix(param: Param, hugging_face: &'static str, gguf: &'static str, transposed: bool) -> TensorNames {
    TensorNames { param, hugging_face, gguf, transposed }
}

/// GPT-2, and GPT-3 models with its layers.
pub static GPT2: Architecture = Architecture {
    model_type: "gpt2",
    class: "GPT2LMHeadModel",
    prefix: "transformer.",
    head: "lm_head.weight",
    ignored: &["h.{}.attn.bias", "h.{}.attn.masked_bias"],
    tensors: &[
        matrix(Param::Wte, "wte.weight", "token_embd.weight", false),
        matrix(Param::Wpe, "wpe.weight", "position_embd.weight", false),
        vector(Param::Ln1w, "h.{}.ln_1.weight", "blk.{}.attn_norm.weight"),
        vector(Param::Ln1b, "h.{}.ln_1.bias", "blk.{}.attn_norm.bias"),
        matrix(Param::Qkvw, "h.{}.attn.c_attn.weight", "blk.{}.attn_qkv.weight", true),
        vector(Param::Qkvb, "h.{}.attn.c_attn.bias", "blk.{}.attn_qkv.bias"),
        matrix(Param::Attprojw, "h.{}.attn.c_proj.weight", "blk.{}.attn_output.weight", true),
        vector(Param::Attprojb, "h.{}.attn.c_proj.bias", "blk.{}.attn_output.bias"),
        vector(Param::Ln2w, "h.{}.ln_2.weight", "blk.{}.ffn_norm.weight"),
        vector(Param::Ln2b, "h.{}.ln_2.bias", "blk.{}.ffn_norm.bias"),
        matrix(Param::Fcw, "h.{}.mlp.c_fc.weight", "blk.{}.ffn_up.weight", true),
        vector(Param::Fcb, "h.{}.mlp.c_fc.bias", "blk.{}.ffn_up.bias"),
        matrix(Param::Fcprojw, "h.{}.mlp.c_proj.weight", "blk.{}.ffn_down.weight", true),
        vector(Param::Fcprojb, "h.{}.mlp.c_proj.bias", "blk.{}.ffn_down.bias"),
        vector(Param::Lnfw, "ln_f.weight", "output_norm.weight"),
        vector(Param::Lnfb, "ln_f.bias", "output_norm.bias"),
    ],
    sizes: SizeKeys {
        layers: "n_layer",
        heads: "n_head",
        channels: "n_embd",
        max_seq_len: "n_positions",
        vocab: "vocab_size",
        mlp: "n_inner",
    },
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
};

/// Returns a name with the layer in place of `{}`.
pub fn of_layer(name: &str, layer: usize) -> String {
    name.replacen("{}", &layer.to_string(), 1)
}

impl TensorNames {
    /// Returns the shape in a safetensors file. The vocabulary is not padded.
    pub fn hugging_face_shape(&self, descriptor: &Descriptor) -> Vec<usize> {
        let shape = self.shape(descriptor);
        match shape[..] {
            [rows, columns] if self.transposed => vec![columns, rows],
            _ => shape,
        }
    }

    /// Returns the shape without padding of the vocabulary, with one row per output. A vector has one dimension.
    pub fn shape(&self, descriptor: &Descriptor) -> Vec<usize> {
        let (rows, columns) = self.param.shape(descriptor);
        match self.param {
            Param::Wte => vec![descriptor.vocab, columns],
            _ if rows == 1 && !self.is_matrix() => vec![columns],
            _ => vec![rows, columns],
        }
    }

    /// Returns whether the tensor has two dimensions. A matrix may have one row.
    pub fn is_matrix(&self) -> bool {
        self.transposed || matches!(self.param, Param::Wte | Param::Wpe)
    }

    /// Returns the number of elements without padding of the vocabulary.
    pub fn elements(&self, descriptor: &Descriptor) -> usize {
        self.shape(descriptor).iter().product()
    }
}

impl Architecture {
    /// Returns the row of a tensor.
    ///
    /// # Panics
    /// If the architecture does not have the tensor.
    pub fn names_of(&self, param: Param) -> &'static TensorNames {
        self.tensors.iter().find(|names| names.param == param).expect("the table has all tensors")
    }

    /// Returns every tensor of every layer.
    pub fn all_tensors(&self, layers: usize) -> impl Iterator<Item = (&'static TensorNames, usize)> + use<> {
        let tensors = self.tensors;
        tensors.iter().flat_map(move |names| {
            let count = if names.param.layered() { layers } else { 1 };
            (0..count).map(move |layer| (names, layer))
        })
    }

    /// Returns whether `name`, without the prefix, is a buffer of any layer that holds no parameters.
    pub fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|pattern| {
            let (before, after) = pattern.split_once("{}").unwrap_or((pattern, ""));
            let layer = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
            layer.is_some_and(|layer| !layer.is_empty() && layer.bytes().all(|byte| byte.is_ascii_digit()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_table_has_every_parameter_once() {
        let descriptor = Descriptor::new(3, 2, 8, 16, 200).unwrap();
        for architecture in ARCHITECTURES {
            let params: Vec<Param> = architecture.tensors.iter().map(|names| names.param).collect();
            assert_eq!(params, Param::ALL, "{}", architecture.model_type);
            let all: Vec<_> = architecture.all_tensors(3).collect();
            for name in [|names: &TensorNames| names.hugging_face, |names: &TensorNames| names.gguf] {
                let distinct: BTreeSet<String> =
                    all.iter().map(|(names, layer)| of_layer(name(names), *layer)).collect();
                assert_eq!(distinct.len(), 4 + 3 * 12);
            }
            let elements: usize = all.iter().map(|(names, _)| names.elements(&descriptor)).sum();
            assert_eq!(elements, descriptor.parameters() - (256 - 200) * 8);
        }
    }

    #[test]
    fn shapes_are_those_of_transformers() {
        let descriptor = Descriptor::new(1, 1, 1, 1, 5).unwrap();
        let shape = |param| GPT2.names_of(param).hugging_face_shape(&descriptor);
        assert_eq!([shape(Param::Wte), shape(Param::Wpe), shape(Param::Qkvw)], [vec![5, 1], vec![1, 1], vec![1, 3]]);
        assert_eq!([shape(Param::Attprojw), shape(Param::Fcprojw)], [vec![1, 1], vec![4, 1]]);
        assert_eq!([shape(Param::Ln1w), shape(Param::Fcb)], [vec![1], vec![4]]);
    }

    #[test]
    fn buffers_are_ignored_in_any_layer() {
        for (name, ignored) in [
            ("h.0.attn.bias", true),
            ("h.11.attn.masked_bias", true),
            ("h.x.attn.bias", false),
            ("h..attn.bias", false),
            ("h.0.attn.c_attn.bias", false),
            ("attn.bias", false),
        ] {
            assert_eq!(GPT2.ignores(name), ignored, "{name}");
        }
    }
}
