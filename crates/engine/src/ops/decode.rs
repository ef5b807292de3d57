//! Operations of text generation with a KV cache: one new token for each of B sequences.
//!
//! A *slot* is a sequence of a batch. What changes from token to token is in device memory (`slots`), so that one CUDA graph serves
//! all tokens: see [`Slot`].

use super::{AttentionShape, MatmulForward, NormForward, Operation, Rotation};
use crate::tensor::Tensor;

/// The state of a slot: (8) i32 words of a `slots` tensor (B, 8). Floats are stored as their bits.
///
/// [`SampleTokens`] replaces `token` by the next one and increments `position` up to the last position of the cache. An *idle* slot has a
/// negative position: no operation changes its state or its cache, its attention is zero, and its token is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slot {
    /// The newest token, which is not in the cache yet.
    pub token: i32,
    /// Its position: the number of tokens in the cache. Negative if the slot is idle.
    pub position: i32,
    /// Seed of the random numbers.
    pub seed: u32,
    /// How the next token is chosen.
    pub sampling: SlotSampling,
}

/// Determines how a token is chosen from its logits. The filters apply in the order of the fields.
///
/// Tokens whose logits equal that of the last kept token are kept too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlotSampling {
    /// Divisor of positive logits, and factor of negative logits, of tokens that the text contains. 1 has no effect.
    pub repetition_penalty: f32,
    /// Divisor of all logits. 0 chooses the most likely token, without filters.
    pub temperature: f32,
    /// Keeps this number of most likely tokens. 0 keeps all.
    pub top_k: i32,
    /// Keeps the fewest most likely tokens whose probabilities sum to this fraction. 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens with at least this fraction of the probability of the most likely token. 0 keeps all.
    pub min_p: f32,
}

impl SlotSampling {
    /// Always chooses the most likely token.
    pub const GREEDY: Self = Self { repetition_penalty: 1.0, temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
}

impl Slot {
    /// Words of a slot.
    pub const WORDS: usize = 8;

    /// An idle slot.
    pub const IDLE: Self = Self { token: 0, position: -1, seed: 0, sampling: SlotSampling::GREEDY };

    /// Returns the words.
    pub fn words(self) -> [i32; Self::WORDS] {
        let Self { token, position, seed, sampling } = self;
        let SlotSampling { repetition_penalty, temperature, top_k, top_p, min_p } = sampling;
        let bits = |x: f32| x.to_bits().cast_signed();
        [
            token,
            position,
            seed.cast_signed(),
            bits(repetition_penalty),
            bits(temperature),
            top_k,
            bits(top_p),
            bits(min_p),
        ]
    }

    /// Creates a slot from its words.
    pub fn of_words(words: [i32; Self::WORDS]) -> Self {
        let [token, position, seed, repetition_penalty, temperature, top_k, top_p, min_p] = words;
        let float = |bits: i32| f32::from_bits(bits.cast_unsigned());
        let [repetition_penalty, temperature, top_p, min_p] =
            [repetition_penalty, temperature, top_p, min_p].map(float);
        let sampling = SlotSampling { repetition_penalty, temperature, top_k, top_p, min_p };
        Self { token, position, seed: seed.cast_unsigned(), sampling }
    }
}

/// Computes `out[b] = wte[token[b]] + wpe[position[b]]`, without the second term if there is no `wpe`. An idle slot has position 0.
#[derive(Clone, Copy, Debug)]
pub struct DecodeEmbed {
    /// (B, C) float
    pub out: Tensor,
    /// (B, 8) i32, see [`Slot`]
    pub slots: Tensor,
    /// (Vp, C) float
    pub wte: Tensor,
    /// (max T, C) float
    pub wpe: Option<Tensor>,
    /// Channels.
    pub c: usize,
}

/// Computes a linear layer of a few rows, after an optional norm of its input.
///
/// `matmul.inp` is the output of the norm. An engine may compute norm and activation in the matmul's kernel, so the norm's outputs and
/// the preactivation are undefined afterwards.
#[derive(Clone, Copy, Debug)]
pub struct DecodeMatmul {
    /// The norm.
    pub norm: Option<NormForward>,
    /// The linear layer. Its weight may be in E4M3.
    pub matmul: MatmulForward,
    /// (1) f32: set if the weight is in E4M3. [`Bf16Scale`](super::Bf16Scale) supports it.
    pub weight_scale: Option<Tensor>,
}

/// Rotates the query and key of each slot's newest token, stores key and value in the cache at its position, and computes
/// its attention over the cache. The cache is a ring: it holds the last T positions, position p at p mod T.
#[derive(Clone, Copy, Debug)]
pub struct DecodeAttention {
    /// (B, NH, HS) float
    pub out: Tensor,
    /// (B, NH + 2 KV, HS) float. Its contents are undefined afterwards.
    pub qkv: Tensor,
    /// (B, KV, T, HS) float
    pub keys: Tensor,
    /// (B, KV, T, HS) float
    pub values: Tensor,
    /// (B, 8) i32, see [`Slot`]
    pub slots: Tensor,
    /// (B, NH, [`decode_splits`], HS + 2) f32: undefined before and after.
    pub partials: Tensor,
    /// Set if positions are rotary.
    pub rotation: Option<Rotation>,
    /// B slots; T is the number of positions in the cache.
    pub shape: AttentionShape,
}

/// An operation of a [`DecodeStep`].
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "a step has few operations, and most are the largest")]
pub enum DecodeOperation {
    /// See [`DecodeEmbed`].
    Embed(DecodeEmbed),
    /// See [`DecodeMatmul`].
    Matmul(DecodeMatmul),
    /// See [`DecodeAttention`].
    Attention(DecodeAttention),
}

impl From<DecodeOperation> for Operation<'_> {
    fn from(operation: DecodeOperation) -> Self {
        match operation {
            DecodeOperation::Embed(operation) => operation.into(),
            DecodeOperation::Matmul(operation) => operation.into(),
            DecodeOperation::Attention(operation) => operation.into(),
        }
    }
}

/// Computes operations in order. An engine may compute them in one kernel, which leaves the outputs that one of them reads undefined.
#[derive(Clone, Copy, Debug)]
pub struct DecodeStep<'a> {
    /// The operations. All have the same slots.
    pub operations: &'a [DecodeOperation],
    /// i32 memory of the engine, of the lengths that [`decode_step_memory`](crate::Engine::decode_step_memory) returns. Nothing else may
    /// write it.
    pub memory: [Tensor; 2],
}

/// Sizes from which an engine plans the memory of a [`DecodeStep`].
#[derive(Clone, Debug)]
pub struct DecodeStepShape {
    /// B slots.
    pub rows: usize,
    /// Columns of the output of each operation.
    pub columns: Vec<usize>,
    /// Number of attention operations.
    pub attentions: usize,
    /// NH, KV and HS.
    pub heads: [usize; 3],
}

/// Returns the most parts into which a kernel may split the positions of a cache of `t` positions. Few sequences are split into many
/// parts, so that they fill a GPU.
pub const fn decode_splits(b: usize, kv_heads: usize, t: usize) -> usize {
    /// Minimum number of positions in a part.
    const MIN_POSITIONS: usize = 64;
    /// Blocks that fill every GPU.
    const BLOCKS: usize = 1024;
    /// Maximum number of parts: the second stage reads them one after another.
    const MAX_PARTS: usize = 32;
    let (by_length, by_blocks) = (t.div_ceil(MIN_POSITIONS), BLOCKS.div_ceil(b * kv_heads));
    let few = if by_length < by_blocks { by_length } else { by_blocks };
    if few < MAX_PARTS { few } else { MAX_PARTS }
}

/// Copies keys and values of one sequence, computed by a forward pass, to a slot's cache: the last `capacity` positions, position p
/// to p mod `capacity`.
#[derive(Clone, Copy, Debug)]
pub struct CacheFill {
    /// (KV, capacity, HS) float
    pub keys: Tensor,
    /// (KV, capacity, HS) float
    pub values: Tensor,
    /// (T, NH + 2 KV, HS) float, after the rotation
    pub qkv: Tensor,
    /// Sizes of `qkv`, with B = 1.
    pub shape: AttentionShape,
    /// Position of the first row of `qkv`.
    pub first: usize,
    /// Positions of the cache.
    pub capacity: usize,
}

/// Copies keys and values of the first T positions of a sequence from a slot's cache to the rows of a forward pass, the reverse of
/// [`CacheFill`]. The queries become 0, and so do keys and values of all but the last `capacity` positions.
#[derive(Clone, Copy, Debug)]
pub struct CacheRead {
    /// (T, NH + 2 KV, HS) float, after the rotation
    pub qkv: Tensor,
    /// (KV, capacity, HS) float
    pub keys: Tensor,
    /// (KV, capacity, HS) float
    pub values: Tensor,
    /// Sizes of `qkv`, with B = 1.
    pub shape: AttentionShape,
    /// Positions of the cache.
    pub capacity: usize,
}

/// Chooses each slot's next token from its logits and advances the slot.
///
/// The token is argmax(logit - ln E) over the tokens that the filters keep, where E is an exponential random number, a hash of seed,
/// position and token (Gumbel-max). That is a sample from the softmax, and independent of other slots.
#[derive(Clone, Copy, Debug)]
pub struct SampleTokens {
    /// (B) f32: the chosen tokens. Every id is an integer below 2^24, which f32 represents.
    pub sampled: Tensor,
    /// (B, 8) i32, see [`Slot`]: token and position are replaced.
    pub slots: Tensor,
    /// (B, Vp) i32: 1 for tokens of the text so far, else 0. The chosen token is added.
    pub seen: Tensor,
    /// (B, Vp) f32: undefined before and after.
    pub scratch: Tensor,
    /// ([`exchange_len`](Self::exchange_len)) i32: zero before the first step, then only used by these operations.
    pub exchange: Tensor,
    /// (B, Vp) float
    pub logits: Tensor,
    /// Vocabulary size V.
    pub v: usize,
    /// Padded vocabulary size Vp.
    pub vp: usize,
    /// Positions of the cache.
    pub capacity: usize,
    /// Bounds the logits: they are softcap · tanh(logit / softcap).
    pub softcap: Option<f32>,
}

impl SampleTokens {
    /// Returns the words that the thread blocks of B slots exchange: two results of 8 bytes for each group of tokens, and a counter.
    pub fn exchange_len(slots: usize, vp: usize) -> usize {
        slots * (4 * gpu::decode::sample::groups(vp) + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_survive_the_conversion_to_words() {
        let sampling = SlotSampling { repetition_penalty: 1.1, temperature: 0.7, top_k: 40, top_p: 0.9, min_p: 0.05 };
        let slot = Slot { token: 50256, position: 17, seed: u32::MAX - 3, sampling };
        assert_eq!(Slot::of_words(slot.words()), slot);
    }

    #[test]
    fn few_sequences_are_split_into_many_parts() {
        assert_eq!(decode_splits(1, 12, 1024), 16);
        assert_eq!(decode_splits(1, 8, 131_072), 32);
        assert_eq!(decode_splits(64, 12, 1024), 2);
        assert_eq!(decode_splits(128, 12, 1024), 1);
        assert_eq!(decode_splits(1, 1, 1), 1);
    }
}
