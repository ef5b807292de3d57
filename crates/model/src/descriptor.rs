//! The shape of a model, and the names of known shapes.

mod adapters;
mod additions;
mod experts;
mod overrides;
mod presets;
mod rotary;
mod windows;

pub use adapters::{AdapterBase, AdapterTarget, AdapterTargets, Adapters};
pub use additions::{Addition, Additions};
pub use experts::{Experts, RouterOverrides};
pub use overrides::Overrides;
pub use rotary::{Llama3Scaling, Rotary, RotaryScaling, YarnScaling};
pub use windows::{WindowPattern, Windows};

use crate::Param;
use engine::ops::{Activation, AttentionShape, QkNormScope};
use serde::{Deserialize, Serialize};
use std::fmt;
use thiserror::Error;

/// The hyperparameters that determine a decoder: the sizes of its parameters, and the operations between them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Descriptor {
    /// Number of layers.
    pub layers: usize,
    /// Number of query heads (NH).
    pub heads: usize,
    /// Number of key-value heads (KV), a divisor of `heads`.
    pub kv_heads: usize,
    /// Channels of a head (HS).
    pub head_size: usize,
    /// Number of channels (C).
    pub channels: usize,
    /// Channels between the two linear layers of the MLP, or of one expert (F).
    pub mlp_channels: usize,
    /// Maximum sequence length.
    pub max_seq_len: usize,
    /// Size of the vocabulary without padding (V).
    pub vocab: usize,
    /// Normalization before attention, MLP and head.
    pub norm: Normalization,
    /// How attention knows the positions of tokens.
    pub positions: Positions,
    /// Normalization of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Activation of the MLP.
    pub activation: Activation,
    /// Linear layers with a bias.
    pub biases: Biases,
    /// Whether the head is the token embedding.
    pub tied: bool,
    /// Whether token embeddings are normalized.
    pub embedding_norm: bool,
    /// Bound of the logits: they become softcap · tanh(logit / softcap).
    pub softcap: Option<f32>,
    /// Distribution of the initial weights.
    pub init: Init,
    /// Layers in which a token attends only to the tokens before it that are near.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<Windows>,
    /// Additions of nanochat.
    #[serde(default, skip_serializing_if = "Additions::is_empty")]
    pub additions: Additions,
    /// The experts of each layer, if they replace the MLP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// Low-rank adapters. The parameters of the descriptor are those of the adapters then, and the model is [`base`](Self::base).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Adapters>,
}

/// A normalization.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Normalization {
    /// LayerNorm with weight and bias, eps 1e-5
    LayerNorm,
    /// RMSNorm
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
        /// Whether it has weights.
        weights: bool,
    },
}

/// How attention knows the positions of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Positions {
    /// An embedding of each position is added to that of the token (wpe).
    Learned,
    /// Queries and keys are rotated (RoPE).
    Rotary(Rotary),
}

/// A normalization of queries and keys (RMSNorm), before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct QkNorm {
    /// Added to the mean square.
    pub eps: f32,
    /// Whether it has weights.
    pub weights: bool,
    /// Factor of the normalized values.
    pub gain: f32,
    /// The values that are normalized together.
    #[serde(default, skip_serializing_if = "QkNormScope::is_default")]
    pub scope: QkNormScope,
}

/// Linear layers with a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Biases {
    /// All except the head.
    All,
    /// The layer that computes queries, keys and values.
    Qkv,
    /// None.
    None,
}

/// A distribution of the initial weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Init {
    /// Standard deviation 0.02; projections onto the residual stream are scaled by 1 / √(2 L) (Radford et al., 2019).
    Gpt2,
    /// Standard deviation 0.02, as in transformers' Llama and Qwen.
    Normal,
    /// Standard deviation C^-1/2; projections onto the residual stream are 0, token embeddings have 0.8 and the head 0.001, as in
    /// nanochat of January 2026.
    DepthScaled,
    /// Normal distributions of standard deviation 0.8 for token embeddings and 0.001 for the head; uniform distributions of standard
    /// deviation C^-1/2 for other matrices, and 0.4 C^-1/2 for the first layer of the MLP; projections onto the residual stream are 0
    /// (nanochat at 92d63d4).
    Nanochat,
}

/// Size of the vocabulary of the GPT-2 encoding.
pub const GPT2_VOCAB: usize = 50257;

/// An invalid shape or an unknown name.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DescriptorError {
    /// The name is unknown.
    #[error(
        "unknown model '{0}': expected gpt2, gpt2-medium, gpt2-large, gpt2-xl, dN (d6, d12, d24, d36, d48, d60, d72, d84), \
         gpt3:cN (c384, c768, c1024, c1536, c2048, c2560, c4096, c12288), llama3:N (1b, 3b, 8b), qwen2.5:N (0.5b, 1.5b, 3b, 7b, 14b), \
         qwen3:N (0.6b, 1.7b, 30b-a3b), olmoe:1b-7b, modern:dN (d2 to d64), modern-moe:dN (d2 to d64) or nanochat:dN (d2 to d64)"
    )]
    Unknown(String),
    /// The number of channels is not a multiple of the number of heads.
    #[error(
        "heads: expected a divisor of the {channels} channels, found {heads}; choose other heads or channels, or set the head size"
    )]
    HeadsDoNotDivide {
        /// Number of heads found.
        heads: usize,
        /// Number of channels found.
        channels: usize,
    },
    /// The number of query heads is not a multiple of the number of key-value heads.
    #[error(
        "key-value heads: expected a divisor of the {heads} heads, found {kv_heads}; choose another number of either"
    )]
    KvHeadsDoNotDivide {
        /// Number of query heads found.
        heads: usize,
        /// Number of key-value heads found.
        kv_heads: usize,
    },
    /// Rotary embeddings rotate pairs of channels.
    #[error("head size: expected an even number for rotary embeddings, found {0}; choose another head size")]
    OddHeadSize(usize),
    /// A number is not positive and finite.
    #[error("{name}: expected a positive number, found {found}")]
    NotPositive {
        /// Name of the number.
        name: &'static str,
        /// Value found.
        found: String,
    },
    /// A size is 0.
    #[error("{0}: expected at least 1, found 0")]
    Zero(&'static str),
    /// A size is above its limit.
    #[error("{name}: expected at most {most}, found {found}")]
    TooMany {
        /// Name of the size.
        name: &'static str,
        /// Its limit.
        most: usize,
        /// Value found.
        found: usize,
    },
    /// Value embeddings read the output of an RMSNorm.
    #[error(
        "value embeddings: expected a model with RMSNorm, found LayerNorm; leave them out, or choose another model"
    )]
    ValueEmbeddingsWithLayerNorm,
    /// An expert is an MLP with a gated activation and without biases.
    #[error(
        "experts: expected a gated activation and no biases in the MLP, found {0}; choose a model with SwiGLU, such as llama3:1b"
    )]
    NotForExperts(String),
    /// Experts of a shape without experts have no default number.
    #[error(
        "experts: expected both --experts and --active-experts for a shape without experts, found one of them; add the other"
    )]
    IncompleteExperts,
    /// A model without experts has no router.
    #[error(
        "router: expected a model with experts for --router-scores, --router-aux-loss, --router-z-loss and --router-bias-rate, found {0}; \
         add --experts and --active-experts, or omit these flags"
    )]
    WithoutRouter(String),
    /// Experts have no adapters.
    #[error(
        "LoRA targets: expected matrices of attention in a model with experts, found {0}; use --lora-targets qkv,attproj"
    )]
    AdaptersOfExperts(String),
    /// A window has no layer.
    #[error("window pattern: expected a layer with a window (S), found none; leave the window out")]
    NoWindow,
    /// A pattern has no size.
    #[error("window pattern: expected the size of the window too, found none; add --window")]
    PatternWithoutWindow,
    /// A pattern is not that of the model.
    #[error("window pattern: expected one letter for each of the {layers} layers, found {pattern}")]
    PatternLength {
        /// Layers of the model.
        layers: usize,
        /// The pattern.
        pattern: String,
    },
    /// A pattern is not a sequence of S and L.
    #[error("window pattern: expected 1 to {MAX_WINDOW_LAYERS} letters S (window) and L (all tokens), found '{0}'")]
    Pattern(String),
    /// The number of parameters is above the limit.
    #[error(
        "parameters: expected at most {MAX_PARAMETERS}, found {0}, which is larger than any address space; choose smaller sizes"
    )]
    TooLarge(u128),
}

/// Limits within which planning cannot overflow, for batches of less than 2^31 tokens.
const MAX_LAYERS: usize = 8192;
const MAX_PARAMETERS: u128 = 1 << 41;
const MAX_VOCAB: usize = 1 << 20;
/// Most layers of a model with windows.
const MAX_WINDOW_LAYERS: usize = u128::BITS as usize;

impl Descriptor {
    /// Creates the shape of a GPT-2 model.
    pub fn gpt2(
        layers: usize,
        heads: usize,
        channels: usize,
        max_seq_len: usize,
        vocab: usize,
    ) -> Result<Self, DescriptorError> {
        if heads > 0 && !channels.is_multiple_of(heads) {
            return Err(DescriptorError::HeadsDoNotDivide { heads, channels });
        }
        Self {
            layers,
            heads,
            kv_heads: heads,
            head_size: channels.checked_div(heads).unwrap_or(0),
            channels,
            mlp_channels: channels.saturating_mul(4),
            max_seq_len,
            vocab,
            norm: Normalization::LayerNorm,
            positions: Positions::Learned,
            qk_norm: None,
            activation: Activation::Gelu,
            biases: Biases::All,
            tied: true,
            embedding_norm: false,
            softcap: None,
            init: Init::Gpt2,
            windows: None,
            additions: Additions::NONE,
            experts: None,
            adapters: None,
        }
        .checked()
    }

    /// Returns the descriptor if a model of its sizes is possible.
    pub fn checked(self) -> Result<Self, DescriptorError> {
        let Self { layers, heads, kv_heads, channels, max_seq_len, vocab, .. } = self;
        let sizes = [
            (layers, "layers"),
            (heads, "heads"),
            (kv_heads, "key-value heads"),
            (channels, "channels"),
            (self.head_size, "head size"),
            (self.mlp_channels, "MLP channels"),
            (max_seq_len, "seq"),
            (vocab, "vocab"),
        ];
        if let Some((_, name)) = sizes.iter().find(|(size, _)| *size == 0) {
            return Err(DescriptorError::Zero(name));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(DescriptorError::KvHeadsDoNotDivide { heads, kv_heads });
        }
        for (name, found, most) in [("layers", layers, MAX_LAYERS), ("vocab", vocab, MAX_VOCAB)] {
            if found > most {
                return Err(DescriptorError::TooMany { name, most, found });
            }
        }
        let parameters = self.parameters_or_overflow().unwrap_or(u128::MAX);
        if parameters > MAX_PARAMETERS {
            return Err(DescriptorError::TooLarge(parameters));
        }
        if let Positions::Rotary(rotary) = self.positions {
            if !self.head_size.is_multiple_of(2) {
                return Err(DescriptorError::OddHeadSize(self.head_size));
            }
            rotary.check()?;
        }
        if let Some(windows) = self.windows {
            windows.check(layers)?;
        }
        if self.adds(Addition::ValueEmbeddings) && self.norm == Normalization::LayerNorm {
            return Err(DescriptorError::ValueEmbeddingsWithLayerNorm);
        }
        if let Some(experts) = self.experts {
            experts.check()?;
            if !self.activation.is_gated() || self.biases == Biases::All {
                let biases = if self.biases == Biases::All { " with biases" } else { "" };
                return Err(DescriptorError::NotForExperts(format!("{}{biases}", self.activation.name())));
            }
            if let Some(adapters) = self.adapters.filter(|adapters| adapters.targets.has_mlp()) {
                return Err(DescriptorError::AdaptersOfExperts(adapters.targets.to_string()));
            }
        }
        if let Some(adapters) = self.adapters {
            adapters.check(self.smallest_target().unwrap_or(0))?;
        }
        let numbers = [("norm eps", self.norm.eps()), ("QK-norm eps", self.qk_norm.map(|norm| norm.eps))];
        let numbers = numbers
            .into_iter()
            .chain([("QK-norm gain", self.qk_norm.map(|norm| norm.gain)), ("softcap", self.softcap)]);
        numbers.filter_map(|(name, number)| Some((name, number?))).try_for_each(|(name, x)| positive(name, x))?;
        Ok(self)
    }

    /// Reports whether the model is a GPT-2. Checkpoints of a GPT-2 have llm.c's format.
    pub fn is_gpt2(&self) -> bool {
        let Self { layers, heads, channels, max_seq_len, vocab, .. } = *self;
        Self::gpt2(layers, heads, channels, max_seq_len, vocab) == Ok(*self)
    }

    /// Returns the number of parameters, or `None` if it overflows.
    fn parameters_or_overflow(&self) -> Option<u128> {
        let wide = |n: usize| n as u128;
        let attention = wide(self.heads).checked_mul(wide(self.head_size))?;
        let packed = attention.checked_add(wide(self.kv_heads).checked_mul(2 * wide(self.head_size))?)?;
        let (count, router, shared) = self.experts.map_or((1, 0, 0), |e| (e.count, e.count, e.shared_channels));
        let [count, router, shared] = [count, router, shared].map(u128::from);
        let mlp = count.checked_mul(wide(self.mlp_channels))?.checked_add(shared)?;
        let inputs = wide(self.activation.inputs() + 1).checked_mul(mlp)?.checked_add(router)?;
        let layer = packed.checked_add(attention)?.checked_add(inputs)?.checked_mul(wide(self.channels))?;
        let positions = if self.positions == Positions::Learned { wide(self.max_seq_len) } else { 0 };
        let (heads, rows) = (if self.tied { 1 } else { 2 }, wide(self.vocab.next_multiple_of(128)));
        let embeddings = (heads * rows + positions).checked_mul(wide(self.channels))?;
        let value_embeddings = if self.adds(Addition::ValueEmbeddings) { wide(self.layers.div_ceil(2)) } else { 0 };
        let value_embeddings =
            rows.checked_mul(wide(self.kv_heads) * wide(self.head_size))?.checked_mul(value_embeddings)?;
        layer.checked_mul(wide(self.layers))?.checked_add(embeddings)?.checked_add(value_embeddings)
    }

    /// Returns the vocabulary size rounded up to a multiple of 128, the number of rows of wte and of columns of the logits.
    pub const fn padded_vocab(&self) -> usize {
        self.vocab.next_multiple_of(128)
    }

    /// Applies the softcap, if there is one, to a logit.
    pub fn softcapped(&self, logit: f32) -> f32 {
        self.softcap.map_or(logit, |cap| cap * (logit / cap).tanh())
    }

    /// Returns the sizes of attention for batches of (b, t) tokens.
    pub const fn attention(&self, b: usize, t: usize) -> AttentionShape {
        AttentionShape { b, t, heads: self.heads, kv_heads: self.kv_heads, head_size: self.head_size }
    }

    /// Returns the channels of attention's output, NH · HS.
    pub const fn attention_channels(&self) -> usize {
        self.heads * self.head_size
    }

    /// Returns the channels of queries, keys and values, (NH + 2 KV) · HS.
    pub const fn qkv_channels(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    /// Returns the output channels of the first layer of the MLP, or of one expert: F, or 2 F for a gated activation.
    pub const fn fc_channels(&self) -> usize {
        self.activation.inputs() * self.mlp_channels
    }

    /// Returns the number of experts of a layer, or 1 if it has an MLP.
    pub(crate) fn expert_count(&self) -> usize {
        self.experts.map_or(1, |experts| experts.count as usize)
    }

    /// Returns the channels of the MLP beside the experts, or 0 if there is none.
    pub(crate) fn shared_channels(&self) -> usize {
        self.experts.map_or(0, |experts| experts.shared_channels as usize)
    }

    /// Returns the number of query channels and of key channels that QK-norm normalizes together.
    pub(crate) fn qk_norm_widths(&self) -> [usize; 2] {
        self.qk_norm.map_or(QkNormScope::Head, |norm| norm.scope).widths(self.heads, self.kv_heads, self.head_size)
    }

    /// Returns the model without adapters.
    pub const fn base(&self) -> Self {
        Self { adapters: None, ..*self }
    }

    /// Returns the parameter tensors in file order: those of the model, or those of its adapters if it has any.
    pub fn params(&self) -> impl Iterator<Item = Param> + Clone + use<> {
        let descriptor = *self;
        Param::ALL.into_iter().filter(move |&param| descriptor.has(param))
    }

    /// Reports whether the weights of the linear layers are in FP8 only.
    pub fn is_fp8_base(&self) -> bool {
        self.adapters.is_some_and(|adapters| adapters.base == AdapterBase::Fp8)
    }

    /// Reports whether a tensor is one of [`params`](Self::params).
    pub fn has(&self, param: Param) -> bool {
        param.is_in(self) && param.is_adapter() == self.adapters.is_some()
    }

    /// Returns the targets of adapters in a linear layer, one for each matrix. GPT-2 has one matrix for queries, keys and values, as in
    /// transformers.
    pub fn targets(&self, weight: Param) -> Vec<AdapterTarget> {
        use AdapterTarget::{Attproj, Fcproj, Gate, K, Q, Up, V};
        match weight {
            Param::Qkvw if self.base().is_gpt2() => vec![Q],
            Param::Qkvw => vec![Q, K, V],
            Param::Attprojw => vec![Attproj],
            Param::Fcw | Param::Fcprojw if self.experts.is_some() => Vec::new(),
            Param::Fcw if self.activation.is_gated() => vec![Up, Gate],
            Param::Fcw => vec![Up],
            Param::Fcprojw => vec![Fcproj],
            _ => Vec::new(),
        }
    }

    /// Returns the rows of each matrix of [`targets`](Self::targets).
    pub fn target_rows(&self, weight: Param) -> Vec<usize> {
        if self.targets(weight).len() == 1 { vec![weight.shape(self).0] } else { weight.matrices(self) }
    }

    /// Returns the smaller dimension of the smallest matrix with an adapter, or `None` if there is no such matrix.
    fn smallest_target(&self) -> Option<usize> {
        let targets = self.adapters?.targets;
        let of_layer = |weight: Param| {
            let matrices = self.targets(weight).into_iter().zip(self.target_rows(weight));
            let matrices = matrices.filter(move |(target, _)| targets.contains(*target));
            matrices.map(|(_, rows)| rows.min(weight.shape(self).1)).collect::<Vec<_>>()
        };
        Param::linear(self).flat_map(of_layer).min()
    }

    /// Returns the number of parameters with the padded vocabulary (llm.c's N).
    pub fn parameters(&self) -> usize {
        self.params().map(|param| param.len(self) * param.layers(self).count()).sum()
    }

    /// Returns the number of parameters that compute a token: those of [`parameters`](Self::parameters) without the experts that are not active.
    pub fn active_parameters(&self) -> usize {
        self.params().map(|param| param.active_len(self) * param.layers(self).count()).sum()
    }

    /// Returns the window of a layer, if it hides a token of sequences of `t` tokens.
    pub fn window(&self, layer: usize, t: usize) -> Option<usize> {
        self.windows.and_then(|windows| windows.of(layer)).filter(|&window| window < t)
    }

    /// Returns llm.c's estimate of the training FLOPs per token, 6N + 12 NH HS times the mean number of keys that a query attends to, in
    /// all layers. Of T tokens that is T / 2, or W - W² / 2T with a window W. Embeddings that are not the head are not counted, because
    /// they take no FLOPs, nor are experts that are not active. Frozen parameters take 4 instead of 6.
    pub fn flops_per_token(&self, t: usize) -> usize {
        let lookup = if self.tied { 0 } else { Param::Wte.len(self) };
        let values = Param::ValueTable;
        let lookup = lookup + if values.is_in(self) { values.len(self) * values.layers(self).count() } else { 0 };
        let attention = 6 * self.attention_channels() * self.doubled_keys(t);
        match self.adapters {
            // Frozen weights have no gradient.
            Some(_) => 4 * (self.base().active_parameters() - lookup) + 6 * self.parameters() + attention,
            None => 6 * (self.active_parameters() - lookup) + attention,
        }
    }

    /// Returns the same estimate for documents of these lengths, to which attention is limited.
    pub fn flops_of_documents(&self, lengths: &[usize]) -> usize {
        let flops = lengths.iter().map(|&len| (self.flops_per_token(len) * len) as u128).sum::<u128>();
        (flops / lengths.iter().sum::<usize>().max(1) as u128) as usize
    }

    /// Returns twice the mean number of keys of a query, summed over layers.
    pub fn doubled_keys(&self, t: usize) -> usize {
        let of_layer = |layer| self.window(layer, t).map_or(t, |window| 2 * window - window * window / t);
        (0..self.layers).map(of_layer).sum()
    }
}

impl Normalization {
    /// Returns the number that is added to the mean square, or `None` for LayerNorm, where it is fixed.
    pub const fn eps(self) -> Option<f32> {
        match self {
            Self::LayerNorm => None,
            Self::RmsNorm { eps, .. } => Some(eps),
        }
    }

    /// Reports whether the norm has weights.
    pub const fn has_weights(self) -> bool {
        matches!(self, Self::LayerNorm | Self::RmsNorm { weights: true, .. })
    }
}

/// Checks that a number is positive and finite.
pub(crate) fn positive(name: &'static str, found: f32) -> Result<(), DescriptorError> {
    if found > 0.0 && found.is_finite() {
        Ok(())
    } else {
        Err(DescriptorError::NotPositive { name, found: found.to_string() })
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layers, heads, kv_heads, channels, max_seq_len, vocab, .. } = self;
        write!(f, "{layers} layers, {heads} heads")?;
        if kv_heads != heads {
            write!(f, " ({kv_heads} key-value)")?;
        }
        if self.attention_channels() != *channels {
            write!(f, " of {}", self.head_size)?;
        }
        write!(f, ", {channels} channels")?;
        if let Some(Experts { count, active, shared_channels, bias, .. }) = self.experts {
            write!(f, ", {active} of {count} experts of {} channels", self.mlp_channels)?;
            if shared_channels > 0 {
                write!(f, " beside one of {shared_channels}")?;
            }
            if bias {
                write!(f, " with biases for their choice")?;
            }
        } else if self.mlp_channels != 4 * channels {
            write!(f, " ({} in the MLP)", self.mlp_channels)?;
        }
        if let Some(Adapters { rank, alpha, targets, .. }) = self.adapters {
            write!(f, ", adapters of rank {rank} (alpha {alpha}, {targets})")?;
        }
        if let Some(Windows { size, pattern }) = self.windows {
            write!(f, ", windows of {size} tokens ({pattern})")?;
        }
        if !self.additions.is_empty() {
            write!(f, ", with {}", self.additions)?;
        }
        write!(f, ", up to {max_seq_len} tokens, vocabulary {vocab}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_match_llm_c() {
        let counts = [
            ("d6", 30_357_504),
            ("d12", 124_475_904),
            ("gpt2:d24", 354_871_296),
            ("d48", 1_557_686_400),
            ("gpt3:c768", 125_262_336),
            ("gpt3:c1536", 760_372_224),
            ("gpt3:c2560", 2_651_673_600),
            ("gpt3:c12288", 174_604_836_864),
        ];
        for (name, parameters) in counts {
            assert_eq!(name.parse::<Descriptor>().unwrap().parameters(), parameters, "{name}");
        }
        assert_eq!("d12".parse::<Descriptor>().unwrap().flops_per_token(1024), 803_478_528);
    }

    #[test]
    fn shapes_beyond_the_limits_are_rejected() {
        let error = |l, h, c, t, v| Descriptor::gpt2(l, h, c, t, v).unwrap_err().to_string();
        assert_eq!(error(8193, 1, 64, 8, 256), "layers: expected at most 8192, found 8193");
        assert_eq!(error(1, 1, 64, 8, 1_048_577), "vocab: expected at most 1048576, found 1048577");
        let many = usize::MAX;
        for (c, t) in [(1 << 20, 8), (64, 1 << 40), (many, 8), (64, many), (many, many)] {
            assert!(error(1, 1, c, t, 256).contains("which is larger than any address space"), "{c} {t}");
        }
        let text = error(1, 1, 1 << 20, 8, 256);
        assert!(text.starts_with("parameters: expected at most 2199023255552, found 13194416357376, which"), "{text}");
        let largest = Descriptor::gpt2(8192, 1, 4096, 1 << 20, 1 << 20).unwrap();
        assert!(largest.parameters() > 1 << 40);
    }

    #[test]
    fn other_names_of_shapes_are_aliases() {
        for (name, alias) in [
            ("gpt2", "d12"),
            ("gpt2-medium", "d24"),
            ("gpt2-large", "d36"),
            ("gpt2-xl", "d48"),
            ("llama3.1:8b", "llama3:8b"),
            ("llama3.2:1b", "llama3:1b"),
            ("llama3.2:3b", "llama3:3b"),
        ] {
            assert_eq!(name.parse::<Descriptor>().unwrap(), alias.parse().unwrap(), "{name}");
        }
    }

    #[test]
    fn unknown_names_are_rejected() {
        for name in [
            "",
            "d",
            "d13",
            "gpt3:c5140",
            "gpt4:d12",
            "dd12",
            "d12x",
            "gpt2-small",
            "gpt2:gpt2",
            "llama3.1:1b",
            "llama3.2:8b",
        ] {
            assert_eq!(name.parse::<Descriptor>(), Err(DescriptorError::Unknown(name.into())), "{name}");
        }
    }
}
