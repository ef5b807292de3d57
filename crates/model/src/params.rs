//! The parameter tensors and their layout in memory.
//!
//! One contiguous block per unit, so that its gradients can be reduced, or its parameters gathered, in one call:
//! `[wte wpe lm_head smear] [value embedding of layer l] … [layer 0] … [layer L-1, lnfw lnfb]`. Tensors that a model lacks take no memory.
//! In a layer's block the matrices (weight-decayed) come first. If ranks share the experts, `[fcw of layer l] … [fcprojw of layer l] …`
//! follow instead of being in the layers. llm.c's files hold the tensors in [`Param::ALL`] order with all layers of one tensor together;
//! [`Params::file_order`] translates.

use super::descriptor::{Addition, Biases, Descriptor, Normalization, Positions};
use engine::ops::UpdateRange;
use engine::tensor::Tensor;
use gpu::noise;
use std::fmt;
use std::ops::Range;

/// The kind of a parameter, which determines its initialization, weight decay, optimizer, FP8 use and layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamKind {
    /// One row for each token of the padded vocabulary.
    TokenEmbedding,
    /// One row for each position.
    PositionEmbedding,
    /// The head: one row for each token of the padded vocabulary.
    Head,
    /// The weight (OC, C) of a layer's linear layer. FP8 multiplies it, and Muon updates it.
    Linear(Input, Output),
    /// A bias, initially 0.
    Bias,
    /// The weight of a norm, initially 1.
    NormWeight,
    /// The first matrix (R, C) of the adapters of a linear layer.
    AdapterA,
    /// The second matrix (OC, R) of the adapters of a linear layer, initially 0.
    AdapterB,
    /// An embedding of values: one row for each token of the padded vocabulary.
    ValueEmbedding,
    /// The weight of a gate.
    Gate,
    /// The weight of a router.
    Router,
    /// A factor.
    Factor,
}

/// Parameters that an optimizer treats alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum ParamGroup {
    /// wte and wpe.
    Embeddings,
    /// A head of its own.
    Head,
    /// The tables of value embeddings.
    ValueEmbeddings,
    /// The gate and the factor of the smear, and the factor of the backout.
    Smear,
    /// The matrices of the layers, which Muon updates.
    Matrices,
    /// Biases, and weights of norms.
    Vectors,
    /// The biases by which routers choose experts, which are updated by
    /// [`GroupSettings::sign_descent`](crate::GroupSettings::sign_descent).
    RouterBiases,
    /// The factors of the residual stream before each layer.
    ResidualScales,
    /// The factors of the first residual stream before each layer.
    EmbeddingScales,
}

impl ParamGroup {
    /// All groups, in the order of [`Self`].
    pub const ALL: [Self; 9] = [
        Self::Embeddings,
        Self::Head,
        Self::ValueEmbeddings,
        Self::Smear,
        Self::Matrices,
        Self::Vectors,
        Self::RouterBiases,
        Self::ResidualScales,
        Self::EmbeddingScales,
    ];

    /// Reports whether weight decay applies: to matrices and embeddings, and as in nanochat to the factors of the residual stream.
    pub const fn decayed(self) -> bool {
        !matches!(self, Self::Smear | Self::Vectors | Self::RouterBiases | Self::EmbeddingScales)
    }
}

/// The operation that computes the input of a linear layer. In FP8 it also quantizes that input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// A norm.
    Norm,
    /// Attention.
    Attention,
    /// The activation function of an MLP.
    Activation,
}

/// The operation that reads the output of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Attention, as queries, keys and values.
    Heads,
    /// The activation function of an MLP.
    Activation,
    /// The addition to the residual stream.
    Residual,
}

/// Declares the parameters in the order of llm.c's files: the variant, the name in files, what it is, whether a model has it, and
/// for one layer (rows, columns) of a matrix or (1, length) of a vector.
macro_rules! params {
    ($d:ident; $($(#[$doc:meta])* $param:ident = $name:literal, $kind:expr, $is_in:expr, $shape:expr;)*) => {
        /// A parameter tensor of a decoder, by llm.c's name where it has one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "the names are llm.c's; the table states their sizes")]
        pub enum Param {
            $($(#[$doc])* $param,)*
        }

        impl Param {
            /// All tensors in the order of llm.c's files.
            pub const ALL: [Self; [$(Self::$param),*].len()] = [$(Self::$param),*];

            /// Returns llm.c's name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$param => $name,)*
                }
            }

            /// Returns what the parameter is.
            pub const fn kind(self) -> ParamKind {
                use ParamKind::{
                    AdapterA, AdapterB, Bias, Factor, Gate, Head, Linear, NormWeight, PositionEmbedding, Router,
                    TokenEmbedding, ValueEmbedding,
                };
                match self {
                    $(Self::$param => $kind,)*
                }
            }

            /// Reports whether the model or its adapters have this tensor.
            pub fn is_in(self, $d: &Descriptor) -> bool {
                match self {
                    $(Self::$param => $is_in,)*
                }
            }

            /// Returns (rows, columns) of a matrix or (1, length) of a vector, for one layer.
            pub fn shape(self, $d: &Descriptor) -> (usize, usize) {
                match self {
                    $(Self::$param => $shape,)*
                }
            }
        }
    };
}

params! { d;
    Wte = "wte", TokenEmbedding, true, (d.padded_vocab(), d.channels);
    Wpe = "wpe", PositionEmbedding, d.positions == Positions::Learned, (d.max_seq_len, d.channels);
    /// The head, if it is not `Wte`.
    LmHead = "lm_head", Head, !d.tied, (d.padded_vocab(), d.channels);
    Ln1w = "ln1w", NormWeight, d.norm.has_weights(), (1, d.channels);
    Ln1b = "ln1b", Bias, d.norm == Normalization::LayerNorm, (1, d.channels);
    /// Rows of queries, keys and values.
    Qkvw = "qkvw", Linear(Input::Norm, Output::Heads), true, (d.qkv_channels(), d.channels);
    Qkvb = "qkvb", Bias, d.biases != Biases::None, (1, d.qkv_channels());
    /// Weight of the norm of queries.
    QNormw = "qnormw", NormWeight, d.qk_norm.is_some_and(|norm| norm.weights), (1, d.qk_norm_widths()[0]);
    /// Weight of the norm of keys.
    KNormw = "knormw", NormWeight, d.qk_norm.is_some_and(|norm| norm.weights), (1, d.qk_norm_widths()[1]);
    Attprojw = "attprojw", Linear(Input::Attention, Output::Residual), true, (d.channels, d.attention_channels());
    Attprojb = "attprojb", Bias, d.biases == Biases::All, (1, d.channels);
    Ln2w = "ln2w", NormWeight, d.norm.has_weights(), (1, d.channels);
    Ln2b = "ln2b", Bias, d.norm == Normalization::LayerNorm, (1, d.channels);
    /// The router: one row for each expert.
    Router = "router", Router, d.experts.is_some(), (d.expert_count(), d.channels);
    /// With a gated activation: rows of up, then of gate. With experts, those of each expert.
    Fcw = "fcw", Linear(Input::Norm, Output::Activation), true, (d.expert_count() * d.fc_channels(), d.channels);
    Fcb = "fcb", Bias, d.biases == Biases::All, (1, d.fc_channels());
    /// With experts, the rows of each expert.
    Fcprojw = "fcprojw", Linear(Input::Activation, Output::Residual), true,
        (d.expert_count() * d.channels, d.mlp_channels);
    Fcprojb = "fcprojb", Bias, d.biases == Biases::All, (1, d.channels);
    /// The MLP beside the experts: rows of up, then of gate.
    SharedFcw = "sharedfcw", Linear(Input::Norm, Output::Activation), d.shared_channels() > 0,
        (d.activation.inputs() * d.shared_channels(), d.channels);
    SharedFcprojw = "sharedfcprojw", Linear(Input::Activation, Output::Residual), d.shared_channels() > 0,
        (d.channels, d.shared_channels());
    Lnfw = "lnfw", NormWeight, d.norm.has_weights(), (1, d.channels);
    Lnfb = "lnfb", Bias, d.norm == Normalization::LayerNorm, (1, d.channels);
    /// Rows of the adapters of queries, keys and values.
    QkvA = "qkvw.lora_a", AdapterA, Param::Qkvw.has_adapters(d), Param::Qkvw.adapter_a(d);
    /// Rows of queries, keys and values, each with the columns of its adapter.
    QkvB = "qkvw.lora_b", AdapterB, Param::Qkvw.has_adapters(d), Param::Qkvw.adapter_b(d);
    AttprojA = "attprojw.lora_a", AdapterA, Param::Attprojw.has_adapters(d), Param::Attprojw.adapter_a(d);
    AttprojB = "attprojw.lora_b", AdapterB, Param::Attprojw.has_adapters(d), Param::Attprojw.adapter_b(d);
    FcA = "fcw.lora_a", AdapterA, Param::Fcw.has_adapters(d), Param::Fcw.adapter_a(d);
    FcB = "fcw.lora_b", AdapterB, Param::Fcw.has_adapters(d), Param::Fcw.adapter_b(d);
    FcprojA = "fcprojw.lora_a", AdapterA, Param::Fcprojw.has_adapters(d), Param::Fcprojw.adapter_a(d);
    FcprojB = "fcprojw.lora_b", AdapterB, Param::Fcprojw.has_adapters(d), Param::Fcprojw.adapter_b(d);
    /// The value embedding of a layer that has one.
    ValueTable = "ve", ValueEmbedding, d.adds(Addition::ValueEmbeddings), (d.padded_vocab(), d.kv_heads * d.head_size);
    /// The gate of the value embedding, for each key-value head.
    ValueGate = "vegatew", Gate, d.adds(Addition::ValueEmbeddings), (d.kv_heads, d.value_gate_channels());
    SmearGate = "smeargatew", Gate, d.adds(Addition::Smear), (1, d.smear_gate_channels());
    SmearScale = "smear", Factor, d.adds(Addition::Smear), (1, 1);
    BackoutScale = "backout", Factor, d.adds(Addition::Backout), (1, 1);
    /// The factor of the residual stream before a layer.
    ResidualScale = "resid", Factor, d.adds(Addition::ResidualScales), (1, 1);
    /// The factor of the first residual stream before a layer.
    EmbeddingScale = "x0", Factor, d.adds(Addition::ResidualScales), (1, 1);
    /// Added to the scores of experts for their choice.
    RouterBias = "routerb", Bias, d.experts.is_some_and(|experts| experts.bias), (1, d.expert_count());
}

/// The contiguous part of the parameter block that holds a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Embeddings,
    Smear,
    ValueTable,
    LayerMatrices,
    LayerVectors,
    RouterBiases,
    ResidualScales,
    EmbeddingScales,
    LastNorm,
    ExpertsFc,
    ExpertsFcproj,
}

impl Part {
    /// The parts of the embeddings, in order.
    const EMBEDDINGS: [Self; 2] = [Self::Embeddings, Self::Smear];
    /// The parts of a layer, in order.
    const LAYER: [Self; 5] =
        [Self::LayerMatrices, Self::LayerVectors, Self::RouterBiases, Self::ResidualScales, Self::EmbeddingScales];

    /// Returns the group of the part's parameters. The head is a group of its own.
    const fn group(self) -> ParamGroup {
        match self {
            Self::Embeddings => ParamGroup::Embeddings,
            Self::ValueTable => ParamGroup::ValueEmbeddings,
            Self::Smear => ParamGroup::Smear,
            Self::LayerMatrices | Self::ExpertsFc | Self::ExpertsFcproj => ParamGroup::Matrices,
            Self::LayerVectors | Self::LastNorm => ParamGroup::Vectors,
            Self::RouterBiases => ParamGroup::RouterBiases,
            Self::ResidualScales => ParamGroup::ResidualScales,
            Self::EmbeddingScales => ParamGroup::EmbeddingScales,
        }
    }
}

impl ParamKind {
    /// Reports whether the parameter is the weight of a layer's linear layer.
    pub const fn is_linear(self) -> bool {
        matches!(self, Self::Linear(..))
    }

    /// Reports whether a GEMM computes the gradient of each layer's tensor.
    pub const fn is_gemm(self) -> bool {
        matches!(self, Self::Linear(..) | Self::Router | Self::AdapterA | Self::AdapterB)
    }

    /// Reports whether the tensor has two dimensions.
    const fn is_matrix(self) -> bool {
        !matches!(self, Self::Bias | Self::NormWeight | Self::Factor)
    }
}

impl Param {
    const fn part(self) -> Part {
        match (self, self.kind()) {
            (Self::Lnfw | Self::Lnfb, _) => Part::LastNorm,
            (Self::SmearGate | Self::SmearScale | Self::BackoutScale, _) => Part::Smear,
            (Self::RouterBias, _) => Part::RouterBiases,
            (Self::ResidualScale, _) => Part::ResidualScales,
            (_, ParamKind::Factor) => Part::EmbeddingScales,
            (_, ParamKind::ValueEmbedding) => Part::ValueTable,
            (_, ParamKind::TokenEmbedding | ParamKind::PositionEmbedding | ParamKind::Head) => Part::Embeddings,
            (
                _,
                ParamKind::Linear(..) | ParamKind::Gate | ParamKind::Router | ParamKind::AdapterA | ParamKind::AdapterB,
            ) => Part::LayerMatrices,
            (_, ParamKind::Bias | ParamKind::NormWeight) => Part::LayerVectors,
        }
    }

    /// Reports whether the tensor belongs to adapters.
    pub const fn is_adapter(self) -> bool {
        matches!(self.kind(), ParamKind::AdapterA | ParamKind::AdapterB)
    }

    /// Returns the matrices of the adapters of a linear layer's weight.
    pub const fn adapters(self) -> Option<[Self; 2]> {
        match self {
            Self::Qkvw => Some([Self::QkvA, Self::QkvB]),
            Self::Attprojw => Some([Self::AttprojA, Self::AttprojB]),
            Self::Fcw => Some([Self::FcA, Self::FcB]),
            Self::Fcprojw => Some([Self::FcprojA, Self::FcprojB]),
            _ => None,
        }
    }

    /// Reports whether a matrix of this linear layer's weight has an adapter.
    fn has_adapters(self, d: &Descriptor) -> bool {
        d.adapters.is_some_and(|adapters| d.targets(self).into_iter().any(|target| adapters.targets.contains(target)))
    }

    /// Returns the rows of the A matrices of all adapters of this linear layer's weight.
    fn adapter_rows(self, d: &Descriptor) -> usize {
        d.adapters.map_or(0, |adapters| adapters.padded_rank() * d.targets(self).len())
    }

    fn adapter_a(self, d: &Descriptor) -> (usize, usize) {
        (self.adapter_rows(d), self.shape(d).1)
    }

    fn adapter_b(self, d: &Descriptor) -> (usize, usize) {
        (self.shape(d).0, self.adapter_rows(d))
    }

    /// Returns the weights of the linear layers in a layer.
    pub fn linear(d: &Descriptor) -> impl Iterator<Item = Self> + Clone {
        Self::ALL.into_iter().filter(|param| param.kind().is_linear() && param.is_in(d))
    }

    /// Returns the weight of the head, which may be the token embedding.
    pub const fn head(d: &Descriptor) -> Self {
        if d.tied { Self::Wte } else { Self::LmHead }
    }

    /// Reports whether the tensor has one row for each token of the padded vocabulary.
    pub const fn has_vocab_rows(self) -> bool {
        matches!(self.kind(), ParamKind::TokenEmbedding | ParamKind::Head | ParamKind::ValueEmbedding)
    }

    /// Reports whether each layer, or each with a value embedding, has such a tensor.
    pub const fn layered(self) -> bool {
        !matches!(self.part(), Part::Embeddings | Part::Smear | Part::LastNorm)
    }

    /// Returns the layers with this tensor, or 0 if it does not belong to layers.
    pub fn layers(self, d: &Descriptor) -> impl Iterator<Item = usize> + Clone + use<> {
        let descriptor = *d;
        let layers = if self.layered() { d.layers } else { 1 };
        (0..layers).filter(move |&layer| self.is_in_layer(&descriptor, layer))
    }

    /// Reports whether a layer has the tensor, if it belongs to layers and the model has it.
    pub(crate) fn is_in_layer(self, d: &Descriptor, layer: usize) -> bool {
        !matches!(self, Self::ValueTable | Self::ValueGate) || d.has_value_embedding(layer)
    }

    /// Reports whether the tensor has two dimensions. A matrix may have one row.
    pub const fn is_matrix(self) -> bool {
        self.kind().is_matrix()
    }

    /// Returns the number of elements, for one layer.
    pub fn len(self, d: &Descriptor) -> usize {
        let (rows, cols) = self.shape(d);
        rows * cols
    }

    /// Returns the number of matrices of one shape, one for each expert, that the tensor has.
    pub fn experts(self, d: &Descriptor) -> usize {
        if self.is_of_experts() { d.expert_count() } else { 1 }
    }

    /// Returns the sizes (OC, C) of the linear layer that has this weight, or of that of one expert.
    pub fn linear_shape(self, d: &Descriptor) -> (usize, usize) {
        let (rows, cols) = self.shape(d);
        (rows / self.experts(d), cols)
    }

    /// Returns the rows of the linear layer's input for `tokens` tokens. Those of experts are in expert order.
    pub fn rows(self, d: &Descriptor, tokens: usize) -> usize {
        let experts = d.experts.filter(|_| self.is_of_experts());
        experts.map_or(tokens, |experts| experts.router().rows(tokens))
    }

    /// Reports whether each expert has a matrix of its own, in a model with experts.
    const fn is_of_experts(self) -> bool {
        matches!(self, Self::Fcw | Self::Fcprojw)
    }

    /// Returns the number of elements that compute a token, for one layer: without the experts that are not active.
    pub fn active_len(self, d: &Descriptor) -> usize {
        let experts = d.experts.filter(|_| self.experts(d) > 1);
        experts.map_or(self.len(d), |experts| self.len(d) / experts.count as usize * experts.active as usize)
    }

    /// Returns the number of rows of each matrix in a linear layer's weight: queries, keys and values, or up and gate, of each expert.
    pub fn matrices(self, d: &Descriptor) -> Vec<usize> {
        match self.kind() {
            ParamKind::Linear(_, Output::Heads) => {
                [d.heads, d.kv_heads, d.kv_heads].map(|heads| heads * d.head_size).to_vec()
            }
            ParamKind::Linear(_, Output::Activation) => {
                let (inputs, experts) = (d.activation.inputs(), self.experts(d));
                vec![self.linear_shape(d).0 / inputs; inputs * experts]
            }
            _ => vec![self.linear_shape(d).0; self.experts(d)],
        }
    }
}

/// Parameters begin at multiples of this many elements, because vector loads and cuBLASLt require aligned rows.
pub(super) const ALIGNMENT: usize = 64;

/// One of several equal shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Index of this shard.
    pub rank: usize,
    /// Number of shards.
    pub ranks: usize,
}

impl Shard {
    /// The only shard of unsharded values.
    pub const UNSHARDED: Self = Self { rank: 0, ranks: 1 };

    /// Returns this shard's range of `n` elements. If they do not divide evenly, the last shards are shorter.
    pub fn of(self, n: usize) -> Range<usize> {
        let part = n.div_ceil(self.ranks);
        n.min(self.rank * part)..n.min((self.rank + 1) * part)
    }
}

/// A group of tensors that is reduced, gathered and sharded as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// wte, wpe, lm_head and the smear.
    Embeddings,
    /// The value embedding of a layer. It is kept like the embeddings, and its gradients are complete when those of the layer are.
    ValueEmbedding(usize),
    /// All tensors of a layer, without the experts if ranks share them. The last layer includes lnfw and lnfb.
    Layer(usize),
    /// The experts' fcw of a layer, if ranks share the experts. A shard has the matrices of consecutive experts.
    ExpertsFc(usize),
    /// The experts' fcprojw of a layer, likewise.
    ExpertsFcproj(usize),
}

impl Unit {
    /// Reports whether no rank ever has the whole unit, because ranks share the experts.
    pub const fn is_of_experts(self) -> bool {
        matches!(self, Self::ExpertsFc(_) | Self::ExpertsFcproj(_))
    }

    /// Returns the layer to which the unit belongs.
    pub const fn layer(self) -> Option<usize> {
        match self {
            Self::Embeddings => None,
            Self::ValueEmbedding(layer) | Self::Layer(layer) | Self::ExpertsFc(layer) | Self::ExpertsFcproj(layer) => {
                Some(layer)
            }
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embeddings => f.write_str("the embeddings"),
            Self::ValueEmbedding(layer) => write!(f, "the value embedding of layer {layer}"),
            Self::Layer(layer) => write!(f, "layer {layer}"),
            Self::ExpertsFc(layer) => write!(f, "fc of the experts of layer {layer}"),
            Self::ExpertsFcproj(layer) => write!(f, "fcproj of the experts of layer {layer}"),
        }
    }
}

/// The parameters in a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParamSet {
    /// Those of the descriptor.
    All,
    /// Those of the descriptor except the weights of the layers' linear layers.
    WithoutLinear,
    /// The same without a head of its own.
    WithoutLinearAndHead,
}

impl ParamSet {
    fn has(self, d: &Descriptor, param: Param) -> bool {
        let is_excluded = match self {
            Self::All => false,
            Self::WithoutLinear => param.kind().is_linear(),
            Self::WithoutLinearAndHead => param.kind().is_linear() || param.kind() == ParamKind::Head,
        };
        d.has(param) && !is_excluded
    }
}

/// The layout of the parameter block, in elements. Gradients, moments and master weights have the same layout.
///
/// Units are contiguous. If ranks shard them, padding at the end of each unit makes its shards equal, and each shard begins at a
/// multiple of 64 elements.
#[derive(Clone, Debug)]
pub struct Params {
    descriptor: Descriptor,
    set: ParamSet,
    shard: Shard,
    /// Whether the experts are units of their own, which ranks share.
    shares_experts: bool,
    /// Start of the value embedding of each layer, and the end of the last one.
    values_at: Vec<usize>,
    /// Start of each layer, and the end of the last one.
    layers_at: Vec<usize>,
    /// Start of the fcw and fcprojw of each layer's experts, and the end of the last ones.
    experts_at: [Vec<usize>; 2],
}

/// A range of the parameter block that an optimizer treats alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRange {
    /// The unit that contains the range.
    pub unit: Unit,
    /// The group of the parameters.
    pub group: ParamGroup,
    /// Elements of the block.
    pub elements: Range<usize>,
    /// Start of the range in an unsharded block. It makes the range's random numbers distinct and independent of sharding.
    pub unsharded_start: usize,
    /// Elements that precede this part of a whole range, see [`part`](Self::part).
    pub first: usize,
}

impl GroupRange {
    /// Returns the part of the range that lies in `elements`. An element draws the same random number as in the whole range.
    pub fn part(&self, elements: &Range<usize>) -> Self {
        let start = self.elements.start.max(elements.start);
        let elements = start..self.elements.end.min(elements.end);
        Self { elements, first: self.first + start - self.elements.start, ..*self }
    }

    /// Returns the intersection with `shard`, relative to its start. An element draws the same random number in any shard.
    pub fn within(&self, shard: &Range<usize>) -> Option<UpdateRange> {
        let (start, end) = (self.elements.start.max(shard.start), self.elements.end.min(shard.end));
        // Each range has its own seed; otherwise elements of equal index would be rounded alike.
        let seed =
            |start: usize| noise::seed_from(self.unsharded_start as u32, self.first + start - self.elements.start);
        (start < end).then(|| UpdateRange {
            elements: start - shard.start..end - shard.start,
            decayed: self.group.decayed(),
            seed: seed(start),
        })
    }
}

impl Params {
    /// Returns the layout of an unsharded model.
    pub fn new(descriptor: Descriptor) -> Self {
        Self::sharded(descriptor, Shard::UNSHARDED)
    }

    /// Returns the layout for ranks that shard each unit.
    pub fn sharded(descriptor: Descriptor, shard: Shard) -> Self {
        Self::of_set(descriptor, ParamSet::All, shard, false)
    }

    /// Returns the layout for ranks that shard each unit and share the experts: each has those of consecutive experts.
    pub fn with_shared_experts(descriptor: Descriptor, shard: Shard) -> Self {
        Self::of_set(descriptor, ParamSet::All, shard, true)
    }

    /// Returns the layout of the parameters that a model with adapters keeps in the type of activations.
    pub(super) fn frozen(descriptor: &Descriptor) -> Self {
        let set = if descriptor.is_fp8_base() { ParamSet::WithoutLinear } else { ParamSet::All };
        Self::of_set(descriptor.base(), set, Shard::UNSHARDED, false)
    }

    /// Returns the layout of the parameters that a model with weights in FP8 keeps in the engine's type.
    pub(super) fn beside_fp8(descriptor: Descriptor) -> Self {
        Self::of_set(descriptor, ParamSet::WithoutLinearAndHead, Shard::UNSHARDED, false)
    }

    fn of_set(descriptor: Descriptor, set: ParamSet, shard: Shard, shares_experts: bool) -> Self {
        let (values_at, layers_at, experts_at) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
        let mut layout = Self { descriptor, set, shard, shares_experts, values_at, layers_at, experts_at };
        let padded = |n: usize| n.div_ceil(shard.ranks).next_multiple_of(ALIGNMENT) * shard.ranks;
        let mut end = padded(layout.unit_len(Unit::Embeddings));
        let units: [fn(usize) -> Unit; 4] = [Unit::ValueEmbedding, Unit::Layer, Unit::ExpertsFc, Unit::ExpertsFcproj];
        let [values_at, layers_at, fc_at, fcproj_at] = units.map(|unit| {
            let mut starts = vec![end];
            for layer in 0..descriptor.layers {
                end += padded(layout.unit_len(unit(layer)));
                starts.push(end);
            }
            starts
        });
        (layout.values_at, layout.layers_at, layout.experts_at) = (values_at, layers_at, [fc_at, fcproj_at]);
        layout
    }

    /// Returns the part that contains a parameter.
    const fn part_of(&self, param: Param) -> Part {
        match param {
            Param::Fcw if self.shares_experts => Part::ExpertsFc,
            Param::Fcprojw if self.shares_experts => Part::ExpertsFcproj,
            _ => param.part(),
        }
    }

    /// Returns the elements that the tensors of a part in `layer` take before `end`, without those that the layout lacks.
    fn part_elements(&self, part: Part, layer: usize, end: Option<Param>) -> usize {
        let descriptor = &self.descriptor;
        let before = Param::ALL.into_iter().take_while(|param| Some(*param) != end);
        let present = before.filter(|param| {
            self.part_of(*param) == part && self.set.has(descriptor, *param) && param.is_in_layer(descriptor, layer)
        });
        present.map(|param| param.len(descriptor).next_multiple_of(ALIGNMENT)).sum()
    }

    /// Returns the elements of a part, in `layer` if the part belongs to layers, without padding at its end.
    fn part_len(&self, part: Part, layer: usize) -> usize {
        self.part_elements(part, layer, None)
    }

    /// Returns the parts of a unit, in order, and the layer to which they belong.
    fn parts(&self, unit: Unit) -> (impl Iterator<Item = Part> + use<>, usize) {
        let (parts, layer) = match unit {
            Unit::Embeddings => (&Part::EMBEDDINGS[..], 0),
            Unit::ValueEmbedding(layer) => (&[Part::ValueTable][..], layer),
            Unit::Layer(layer) => (&Part::LAYER[..], layer),
            Unit::ExpertsFc(layer) => (&[Part::ExpertsFc][..], layer),
            Unit::ExpertsFcproj(layer) => (&[Part::ExpertsFcproj][..], layer),
        };
        let last = unit == Unit::Layer(self.descriptor.layers - 1);
        (parts.iter().copied().chain(last.then_some(Part::LastNorm)), layer)
    }

    /// Returns the elements of a unit, without padding.
    fn unit_len(&self, unit: Unit) -> usize {
        let (parts, layer) = self.parts(unit);
        parts.map(|part| self.part_len(part, layer)).sum()
    }

    /// Returns the unit that contains a part.
    fn unit_of_part(&self, part: Part, layer: usize) -> Unit {
        match part {
            Part::Embeddings | Part::Smear => Unit::Embeddings,
            Part::ValueTable => Unit::ValueEmbedding(layer),
            Part::LastNorm => Unit::Layer(self.descriptor.layers - 1),
            Part::ExpertsFc => Unit::ExpertsFc(layer),
            Part::ExpertsFcproj => Unit::ExpertsFcproj(layer),
            Part::LayerMatrices
            | Part::LayerVectors
            | Part::RouterBiases
            | Part::ResidualScales
            | Part::EmbeddingScales => Unit::Layer(layer),
        }
    }

    /// Returns the start of a part.
    fn part_at(&self, part: Part, layer: usize) -> usize {
        let unit = self.unit_of_part(part, layer);
        let (parts, layer) = self.parts(unit);
        let before = parts.take_while(|before| *before != part).map(|part| self.part_len(part, layer));
        self.unit(unit).start + before.sum::<usize>()
    }

    /// Reports whether the block contains a parameter.
    pub fn holds(&self, param: Param) -> bool {
        self.set.has(&self.descriptor, param)
    }

    /// Returns the sizes of the model.
    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Returns this rank's shard.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// Returns the elements of the whole block, padding included.
    pub fn elements(&self) -> usize {
        self.experts_at[1][self.descriptor.layers]
    }

    /// Returns the start of the experts that ranks share, which are the last units: the end of the block if there are none.
    pub fn experts(&self) -> usize {
        self.layers_at[self.descriptor.layers]
    }

    /// Returns the elements of the units before the layers, which are the first ones.
    pub fn embeddings(&self) -> usize {
        self.layers_at[0]
    }

    /// Returns the range of `param`, which the layout has, in `layer` (0 for tensors that are not layered).
    pub fn range(&self, param: Param, layer: usize) -> Range<usize> {
        let part = self.part_of(param);
        let in_part = self.part_elements(part, layer, Some(param));
        let start = self.part_at(part, layer) + in_part;
        start..start + param.len(&self.descriptor)
    }

    /// Returns the start of lm_head, which follows the other embeddings, or `None` if the model has no head of its own.
    pub fn head(&self) -> Option<usize> {
        let head = Param::LmHead;
        self.descriptor.has(head).then(|| self.range(head, 0).start)
    }

    /// Returns all units in block order.
    pub fn units(&self) -> impl Iterator<Item = Unit> + use<> {
        let of_layers = |unit: fn(usize) -> Unit| (0..self.descriptor.layers).map(unit);
        let [values, layers] = [Unit::ValueEmbedding, Unit::Layer].map(of_layers);
        let [fc, fcproj] = [Unit::ExpertsFc, Unit::ExpertsFcproj].map(of_layers);
        let all = std::iter::once(Unit::Embeddings).chain(values).chain(layers).chain(fc).chain(fcproj);
        all.filter(|unit| !self.unit(*unit).is_empty()).collect::<Vec<_>>().into_iter()
    }

    /// Returns the units of a layer.
    pub fn units_of(&self, layer: usize) -> impl Iterator<Item = Unit> + use<> {
        self.units().filter(move |unit| unit.layer() == Some(layer))
    }

    /// Returns the unit that contains a tensor.
    pub fn unit_of(&self, param: Param, layer: usize) -> Unit {
        self.unit_of_part(self.part_of(param), layer)
    }

    /// Returns the range of a unit, padding included.
    pub fn unit(&self, unit: Unit) -> Range<usize> {
        match unit {
            Unit::Embeddings => 0..self.values_at[0],
            Unit::ValueEmbedding(layer) => self.values_at[layer]..self.values_at[layer + 1],
            Unit::Layer(layer) => self.layers_at[layer]..self.layers_at[layer + 1],
            Unit::ExpertsFc(layer) => self.experts_at[0][layer]..self.experts_at[0][layer + 1],
            Unit::ExpertsFcproj(layer) => self.experts_at[1][layer]..self.experts_at[1][layer + 1],
        }
    }

    /// Returns the range of this rank's shard of a unit.
    pub fn own(&self, unit: Unit) -> Range<usize> {
        let unit = self.unit(unit);
        let part = unit.len() / self.shard.ranks;
        let start = unit.start + self.shard.rank * part;
        start..start + part
    }

    /// Returns the elements of the largest layer.
    pub fn largest_layer(&self) -> usize {
        (0..self.descriptor.layers).map(|layer| self.unit(Unit::Layer(layer)).len()).max().unwrap_or(0)
    }

    /// Returns `param` of `layer` in a tensor with this layout.
    pub fn of(&self, block: Tensor, param: Param, layer: usize) -> Tensor {
        let range = self.range(param, layer);
        block.slice(range.start, range.len())
    }

    /// Returns every (tensor, layer) in the order of llm.c's files.
    pub fn file_order(&self) -> impl Iterator<Item = (Param, usize)> {
        let (descriptor, set) = (self.descriptor, self.set);
        let params = descriptor.params().filter(move |param| set.has(&descriptor, *param));
        params.flat_map(move |p| p.layers(&descriptor).map(move |l| (p, l)))
    }

    /// Returns the ranges of the block by unit and group. Padding belongs to none. If ranks share the experts, a range of the layout in
    /// which they do not is in up to four parts, so that each element draws the same random number.
    pub fn group_ranges(&self) -> Vec<GroupRange> {
        if !self.shares_experts {
            return self.whole_group_ranges();
        }
        let whole = Self::of_set(self.descriptor, self.set, self.shard, false);
        let mut ranges = Vec::new();
        for range in whole.whole_group_ranges() {
            let Unit::Layer(layer) = range.unit else {
                ranges.push(range);
                continue;
            };
            let [fc, fcproj] = [Param::Fcw, Param::Fcprojw].map(|param| whole.range(param, layer));
            let (layer_at, whole_layer) = (self.unit(range.unit).start, whole.unit(range.unit));
            let after = layer_at + fc.start - whole_layer.start;
            let (fc_unit, fcproj_unit) = (Unit::ExpertsFc(layer), Unit::ExpertsFcproj(layer));
            for (elements, unit, at) in [
                (whole_layer.start..fc.start, range.unit, layer_at),
                (fc.clone(), fc_unit, self.unit(fc_unit).start),
                (fcproj.clone(), fcproj_unit, self.unit(fcproj_unit).start),
                (fcproj.end..whole_layer.end, range.unit, after),
            ] {
                let part = range.part(&elements);
                if !part.elements.is_empty() {
                    let moved = at + part.elements.start - elements.start;
                    ranges.push(GroupRange { unit, elements: moved..moved + part.elements.len(), ..part });
                }
            }
        }
        ranges
    }

    /// Returns the ranges of the block if ranks do not share the experts.
    fn whole_group_ranges(&self) -> Vec<GroupRange> {
        let mut ranges = Vec::new();
        let mut number = 0;
        for unit in self.units() {
            let (parts, layer) = self.parts(unit);
            for part in parts {
                let (start, len) = (self.part_at(part, layer), self.part_len(part, layer));
                let range = GroupRange {
                    unit,
                    group: part.group(),
                    elements: start..start + len,
                    unsharded_start: number,
                    first: 0,
                };
                number += len;
                match self.head().filter(|_| part == Part::Embeddings) {
                    Some(at) => ranges.extend([
                        range.part(&(start..at)),
                        GroupRange { group: ParamGroup::Head, ..range.part(&(at..start + len)) },
                    ]),
                    None => ranges.push(range),
                }
            }
        }
        ranges.retain(|range| !range.elements.is_empty());
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_equal_except_for_shorter_ones_at_the_end() {
        let shards = |n, ranks| (0..ranks).map(|rank| Shard { rank, ranks }.of(n)).collect::<Vec<_>>();
        assert_eq!(shards(12, 3), [0..4, 4..8, 8..12]);
        assert_eq!(shards(10, 4), [0..3, 3..6, 6..9, 9..10]);
        assert_eq!(shards(4, 3), [0..2, 2..4, 4..4]);
    }

    #[test]
    fn parts_of_a_range_draw_the_random_numbers_of_the_whole() {
        let layout = Params::new(Descriptor::gpt2(3, 2, 24, 10, 60).unwrap());
        let range = &layout.group_ranges()[3];
        let start = range.elements.start;
        let part = range.part(&(start + 64..start + 320));
        assert_eq!((part.elements.clone(), part.first), (start + 64..start + 320, 64));
        let shard = start + 128..start + 1000;
        let expected = range.within(&(start + 128..start + 320)).unwrap();
        assert_eq!(part.within(&shard).unwrap(), expected);
        assert_eq!(part.part(&shard).within(&shard).unwrap(), expected);
        assert_eq!(expected.seed, noise::seed_from(range.unsharded_start as u32, 128));
    }

    #[test]
    fn shards_of_all_ranks_cover_every_tensor_once() {
        let descriptor = Descriptor::gpt2(3, 2, 24, 10, 60).unwrap();
        for ranks in 1..6 {
            let layouts = (0..ranks).map(|rank| Params::sharded(descriptor, Shard { rank, ranks }));
            let layouts: Vec<Params> = layouts.collect();
            let mut seen = vec![0; layouts[0].elements()];
            for layout in &layouts {
                for unit in layout.units() {
                    let own = layout.own(unit);
                    assert!(own.start.is_multiple_of(ALIGNMENT) && own.len().is_multiple_of(ALIGNMENT));
                    seen[own].iter_mut().for_each(|n| *n += 1);
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{ranks} ranks");
            let mut used = vec![0; seen.len()];
            for (param, layer) in layouts[0].file_order() {
                let (range, unit) = (layouts[0].range(param, layer), layouts[0].unit(layouts[0].unit_of(param, layer)));
                assert!(unit.start <= range.start && range.end <= unit.end, "{} of layer {layer}", param.name());
                used[range].iter_mut().for_each(|n| *n += 1);
            }
            assert!(used.iter().all(|&n| n <= 1));
            assert_eq!(used.iter().sum::<usize>(), descriptor.parameters());
            // Decay and random numbers do not depend on sharding.
            let alone = Params::new(descriptor);
            for (range, whole) in layouts[0].group_ranges().into_iter().zip(alone.group_ranges()) {
                assert_eq!((range.unsharded_start, range.elements.len()), (whole.elements.start, whole.elements.len()));
                assert_eq!((range.unit, range.group), (whole.unit, whole.group));
            }
        }
    }

    #[test]
    fn shared_experts_are_units_whose_shards_are_whole_experts() {
        let overrides = crate::descriptor::Overrides { layers: Some(3), ..crate::descriptor::Overrides::default() };
        let descriptor = "qwen3:30b-a3b".parse::<Descriptor>().unwrap().with(overrides).unwrap();
        let alone = Params::new(descriptor);
        for ranks in [2, 4] {
            let layouts = (0..ranks).map(|rank| Params::with_shared_experts(descriptor, Shard { rank, ranks }));
            let layouts: Vec<Params> = layouts.collect();
            let units: Vec<Unit> = layouts[0].units_of(1).collect();
            assert_eq!(units, [Unit::Layer(1), Unit::ExpertsFc(1), Unit::ExpertsFcproj(1)]);
            assert_eq!(layouts[0].elements() - layouts[0].experts(), 3 * 3 * 128 * 2048 * 768);
            for param in [Param::Fcw, Param::Fcprojw] {
                let (range, unit) = (layouts[0].range(param, 2), layouts[0].unit_of(param, 2));
                assert_eq!(range, layouts[0].unit(unit));
                let matrix = param.len(&descriptor) / 128;
                for (rank, layout) in layouts.iter().enumerate() {
                    let first = range.start + rank * (128 / ranks) * matrix;
                    assert_eq!(layout.own(unit), first..first + 128 / ranks * matrix);
                }
            }
            // Each element of each tensor has the group and the random number that it has without sharing.
            let find = |layout: &Params, element: usize| {
                let ranges = layout.group_ranges().into_iter().filter(|range| range.elements.contains(&element));
                let found: Vec<_> = ranges.collect();
                assert_eq!(found.len(), 1, "element {element}");
                let seed = found[0].within(&(element..element + 1)).unwrap().seed;
                assert!(layout.unit(found[0].unit).contains(&element), "element {element}");
                (found[0].group, seed)
            };
            for (param, layer) in alone.file_order() {
                let [shared, whole] = [&layouts[1], &alone].map(|layout| layout.range(param, layer));
                assert_eq!(shared.len(), whole.len());
                for i in [0, 64, shared.len() - 1] {
                    let i = i.min(shared.len() - 1);
                    assert_eq!(find(&layouts[1], shared.start + i), find(&alone, whole.start + i), "{}", param.name());
                }
            }
        }
    }
}
