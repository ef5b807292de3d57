//! One table per architecture: the names of its tensors in other programs, and the keys of its `config.json`.

mod gpt2;
mod llama;
mod mixture;
mod nanochat;

pub use gpt2::GPT2;
pub use llama::{LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3};
pub use mixture::{OLMOE, QWEN3_MOE};
pub use nanochat::{NANOCHAT, NANOCHAT_FULL};

use crate::keys::Keys;
use anyhow::{Context, Result};
use engine::ops::RotaryPairs;
use model::descriptor::{Additions, Experts, Init, Positions, Rotary};
use model::{Descriptor, Param};
use serde_json::{Map, Value};
use std::ops::Range;

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
    /// All parameter tensors. Parts of a tensor follow each other in the order of their rows.
    pub tensors: &'static [TensorNames],
    /// Settings that the engine supports only with some values.
    pub settings: &'static [Setting],
    /// Channels of a rotary pair in GGUF files. Hugging Face has the half-split pairs always. `None` if llama.cpp lacks the architecture.
    pub gguf_pairs: Option<RotaryPairs>,
    /// Whether Hugging Face's class rotates in the other direction. Its files have the halves of each query and key exchanged.
    pub reverses_rotation: bool,
    /// The class, if transformers lacks it.
    pub code: Option<Code>,
    /// Returns the model that the keys of a `config.json` describe.
    pub descriptor: fn(Keys) -> Result<Descriptor>,
    /// Returns the keys of the `config.json` of a model.
    pub keys: fn(&Descriptor) -> Map<String, Value>,
}

/// A Python module that an export contains, with the class of an architecture and that of its configuration.
#[derive(Clone, Copy, Debug)]
pub struct Code {
    /// Name of the module.
    pub module: &'static str,
    /// Contents.
    pub text: &'static str,
}

impl Code {
    /// Returns the name of the file.
    pub fn file(&self) -> String {
        format!("{}.py", self.module)
    }
}

/// A parameter tensor, or a part of its rows, in other programs. The first `{}` in a name is the layer, the second one the expert.
#[derive(Debug)]
pub struct TensorNames {
    /// The tensor.
    pub param: Param,
    /// The rows.
    pub part: Part,
    /// Name in safetensors files, without the prefix of the class.
    pub hugging_face: &'static str,
    /// Name in GGUF files.
    pub gguf: &'static str,
    /// Whether Hugging Face stores the transposed matrix. Its `Conv1D` has one row per input.
    pub transposed: bool,
}

/// Rows of a parameter matrix, or elements of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All.
    All,
    /// Queries of [`Param::Qkvw`] or [`Param::Qkvb`].
    Query,
    /// Keys.
    Key,
    /// Values.
    Value,
    /// Up of [`Param::Fcw`] with a gated activation, of each expert.
    Up,
    /// Gate.
    Gate,
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
pub static ARCHITECTURES: &[&Architecture] =
    &[&GPT2, &LLAMA, &MISTRAL, &MINISTRAL, &QWEN2, &QWEN3, &QWEN3_MOE, &OLMOE, &NANOCHAT, &NANOCHAT_FULL];

const fn tensor(param: Param, hugging_face: &'static str, gguf: &'static str) -> TensorNames {
    TensorNames { param, part: Part::All, hugging_face, gguf, transposed: false }
}

const fn part(param: Param, part: Part, hugging_face: &'static str, gguf: &'static str) -> TensorNames {
    TensorNames { param, part, hugging_face, gguf, transposed: false }
}

/// Exchanges the two halves of each head, which has `head` elements.
pub fn exchange_halves<T>(heads: &mut [T], head: usize) {
    heads.chunks_mut(head).for_each(|head| head.rotate_left(head.len() / 2));
}

/// Returns a name with the layer in place of `{}`.
pub fn of_layer(name: &str, layer: usize) -> String {
    name.replacen("{}", &layer.to_string(), 1)
}

/// The layer and the expert of a tensor. Each is 0 if the tensor belongs to none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Instance {
    /// Layer.
    pub layer: usize,
    /// Expert.
    pub expert: usize,
}

impl Instance {
    /// Returns a name with the layer and the expert in place of the first and the second `{}`.
    pub fn name(self, name: &str) -> String {
        of_layer(&of_layer(name, self.layer), self.expert)
    }
}

impl Part {
    /// Returns the rows of `param`, or of one expert, without padding of the vocabulary; the elements of a vector.
    pub fn rows(self, param: Param, d: &Descriptor) -> Range<usize> {
        let (queries, keys) = (d.attention_channels(), d.kv_heads * d.head_size);
        let of = |start: usize, len: usize| start..start + len;
        match self {
            Self::All if param.has_vocab_rows() => 0..d.vocab,
            Self::All if param.is_matrix() => 0..param.linear_shape(d).0,
            Self::All => 0..param.len(d),
            Self::Query => of(0, queries),
            Self::Key => of(queries, keys),
            Self::Value => of(queries + keys, keys),
            Self::Up => of(0, d.mlp_channels),
            Self::Gate => of(d.mlp_channels, d.mlp_channels),
        }
    }
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
        let rows = self.part.rows(self.param, descriptor).len();
        if self.param.is_matrix() { vec![rows, self.param.shape(descriptor).1] } else { vec![rows] }
    }

    /// Returns the elements of the part in the whole tensor, or in that of one expert.
    pub fn elements(&self, descriptor: &Descriptor) -> Range<usize> {
        let columns = if self.param.is_matrix() { self.param.shape(descriptor).1 } else { 1 };
        let rows = self.part.rows(self.param, descriptor);
        rows.start * columns..rows.end * columns
    }

    /// Returns the elements of the part of an expert in the whole tensor.
    pub fn elements_of(&self, descriptor: &Descriptor, expert: usize) -> Range<usize> {
        let elements = self.elements(descriptor);
        let start = expert * (self.param.len(descriptor) / self.param.experts(descriptor));
        start + elements.start..start + elements.end
    }

    /// Reports whether the rotary embedding changes the meaning of the order of rows.
    pub fn is_rotated(&self) -> bool {
        matches!(self.part, Part::Query | Part::Key) || matches!(self.param, Param::QNormw | Param::KNormw)
    }
}

impl Architecture {
    /// Returns the architecture that represents a model.
    pub fn of(descriptor: &Descriptor) -> Result<&'static Self> {
        Self::find(descriptor).with_context(|| {
            format!(
                "the model: expected the operations of GPT-2, Llama, Mistral, Ministral, Qwen2, Qwen3, Qwen3-MoE, OLMoE or nanochat, \
                 found {}",
                unknown(descriptor)
            )
        })
    }

    fn find(descriptor: &Descriptor) -> Option<&'static Self> {
        let represents = |architecture: &&Self| {
            let keys = (architecture.keys)(descriptor);
            let again = (architecture.descriptor)(Keys(&keys));
            again.is_ok_and(|again| same_model(&again, descriptor))
        };
        ARCHITECTURES.iter().copied().find(represents)
    }

    /// Returns the name of a tensor in a safetensors file of the class.
    pub fn full_name(&self, names: &TensorNames, instance: Instance) -> String {
        // The head is not part of the model that the prefix names.
        let prefix = if names.param == Param::LmHead { "" } else { self.prefix };
        format!("{prefix}{}", instance.name(names.hugging_face))
    }

    /// Returns the parts of a tensor.
    pub fn parts_of(&self, param: Param) -> impl Iterator<Item = (usize, &'static TensorNames)> + use<> {
        self.tensors.iter().enumerate().filter(move |(_, names)| names.param == param)
    }

    /// Returns the row of the table, with its index, and the layer and the expert of every tensor that the model has.
    pub fn all_tensors(
        &self,
        descriptor: &Descriptor,
    ) -> impl Iterator<Item = (usize, &'static TensorNames, Instance)> + use<> {
        let (tensors, descriptor) = (self.tensors, *descriptor);
        let present = tensors.iter().enumerate().filter(move |(_, names)| names.param.is_in(&descriptor));
        present.flat_map(move |(row, names)| {
            let experts = 0..names.param.experts(&descriptor);
            let instances = names.param.layers(&descriptor);
            let instances =
                instances.flat_map(move |layer| experts.clone().map(move |expert| Instance { layer, expert }));
            instances.map(move |instance| (row, names, instance))
        })
    }

    /// Converts elements of `size` bytes of a tensor between the class of Hugging Face and this program, if they rotate in different
    /// directions.
    pub fn convert_rotation(&self, names: &TensorNames, descriptor: &Descriptor, size: usize, bytes: &mut [u8]) {
        if self.reverses_rotation && names.is_rotated() {
            exchange_halves(bytes, descriptor.head_size * names.param.shape(descriptor).1 * size);
        }
    }

    /// Returns whether `name`, without the prefix, is a buffer of any layer that holds no parameters.
    pub fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|pattern| {
            let Some((before, after)) = pattern.split_once("{}") else { return name == *pattern };
            let layer = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
            layer.is_some_and(|layer| !layer.is_empty() && layer.bytes().all(|byte| byte.is_ascii_digit()))
        })
    }
}

/// Returns why transformers cannot represent a model.
fn unknown(descriptor: &Descriptor) -> String {
    let plain = Descriptor { additions: Additions::NONE, ..*descriptor };
    let unbiased = descriptor.experts.map(|experts| Experts { bias: false, ..experts });
    if unbiased != descriptor.experts
        && let Some(architecture) = Architecture::find(&Descriptor { experts: unbiased, ..*descriptor })
    {
        let class = architecture.class;
        return format!(
            "biases of routers, which {class} lacks; use llm-rs's model file, or train with --router-bias-rate 0"
        );
    }
    match (Architecture::find(&plain), Architecture::find(&Descriptor { windows: None, ..plain })) {
        (Some(architecture), _) => {
            format!("{} with the additions {}, for which no class exists", architecture.class, descriptor.additions)
        }
        (None, Some(architecture)) => format!("windows; {} of transformers has none", architecture.class),
        (None, None) => "others; transformers has no class for it".to_owned(),
    }
}

/// Returns whether both describe the same model, apart from what another program does not store.
pub(crate) fn same_model(one: &Descriptor, other: &Descriptor) -> bool {
    comparable(one) == comparable(other)
}

/// Returns the model without what another program does not store: the initialization, the coefficients of the router's losses, and the
/// pairs, to which weights are converted.
fn comparable(descriptor: &Descriptor) -> Descriptor {
    let positions = match descriptor.positions {
        Positions::Rotary(rotary) => Positions::Rotary(Rotary { pairs: RotaryPairs::HalfSplit, ..rotary }),
        Positions::Learned => Positions::Learned,
    };
    let experts = descriptor.experts.map(|experts| Experts { aux_loss: 0.0, z_loss: 0.0, ..experts });
    Descriptor { init: Init::Normal, positions, experts, ..*descriptor }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::descriptor::{QkNorm, Windows};
    use std::collections::BTreeSet;

    #[test]
    fn the_table_has_every_parameter_once() {
        let gpt2 = Descriptor::gpt2(3, 2, 8, 16, 200).unwrap();
        let small = |name: &str| Descriptor { layers: 3, vocab: 200, ..name.parse().unwrap() };
        let with = |name: &str, pattern: &str| {
            let windows = Windows { size: 64, pattern: pattern.parse().unwrap() };
            Descriptor { windows: Some(windows), ..small(name) }
        };
        let models = [
            (&GPT2, gpt2),
            (&LLAMA, small("llama3:1b")),
            (&LLAMA, small("llama3:8b")),
            (&MISTRAL, with("llama3:8b", "SSS")),
            (&MINISTRAL, with("llama3:8b", "SSL")),
            (&QWEN2, with("qwen2.5:0.5b", "LSL")),
            (&QWEN3, with("qwen3:0.6b", "LSS")),
            (&QWEN2, small("qwen2.5:0.5b")),
            (&QWEN3, small("qwen3:0.6b")),
            (&QWEN3_MOE, small("qwen3:30b-a3b")),
            (&OLMOE, small("olmoe:1b-7b")),
            (&NANOCHAT_FULL, small("nanochat:d3")),
            (&NANOCHAT, {
                let modern = small("modern:d4");
                Descriptor { qk_norm: modern.qk_norm.map(|norm| QkNorm { gain: 1.0, ..norm }), ..modern }
            }),
        ];
        for (architecture, descriptor) in models {
            assert!(std::ptr::eq(Architecture::of(&descriptor).unwrap(), architecture), "{}", architecture.model_type);
            let name = architecture.model_type;
            let mut params: Vec<Param> =
                architecture.all_tensors(&descriptor).map(|(_, names, _)| names.param).collect();
            params.dedup();
            assert_eq!(params, descriptor.params().collect::<Vec<_>>(), "{name}");
            let all: Vec<_> = architecture.all_tensors(&descriptor).collect();
            let names = [|names: &TensorNames| names.hugging_face, |names: &TensorNames| names.gguf];
            for name in &names[..if architecture.gguf_pairs.is_some() { 2 } else { 1 }] {
                let distinct: BTreeSet<String> =
                    all.iter().map(|(_, names, instance)| instance.name(name(names))).collect();
                assert_eq!(distinct.len(), all.len());
            }
            let elements: usize = all.iter().map(|(_, names, _)| names.elements(&descriptor).len()).sum();
            let padding = descriptor.padded_vocab() - descriptor.vocab;
            let padded = |param: Param| param.layers(&descriptor).count() * padding * param.shape(&descriptor).1;
            let padded: usize = descriptor.params().filter(|param| param.has_vocab_rows()).map(padded).sum();
            assert_eq!(elements, descriptor.parameters() - padded);
        }
    }

    #[test]
    fn biases_of_routers_are_refused() {
        let known: Descriptor = "qwen3:30b-a3b".parse().unwrap();
        let experts = known.experts.map(|experts| Experts { bias: true, ..experts });
        let error = Architecture::of(&Descriptor { experts, ..known }).unwrap_err().to_string();
        assert!(error.contains("found biases of routers, which Qwen3MoeForCausalLM lacks; use llm-rs's"), "{error}");
    }

    /// transformers trains with the load-balancing loss only if the routers' logits are outputs.
    #[test]
    fn the_load_balancing_loss_depends_on_its_switch() {
        let known: Descriptor = "qwen3:30b-a3b".parse().unwrap();
        let mut keys = (QWEN3_MOE.keys)(&known);
        let of = |keys: &_| (QWEN3_MOE.descriptor)(Keys(keys)).unwrap().experts;
        let with = |aux_loss| known.experts.map(|experts| Experts { aux_loss, ..experts });
        assert_eq!((known.experts, of(&keys)), (with(0.001), with(0.0)));
        keys.insert("output_router_logits".to_owned(), true.into());
        assert_eq!(of(&keys), known.experts);
    }

    #[test]
    fn shapes_are_those_of_transformers() {
        let descriptor = Descriptor::gpt2(1, 1, 1, 1, 5).unwrap();
        let shape = |param| GPT2.parts_of(param).next().unwrap().1.hugging_face_shape(&descriptor);
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
