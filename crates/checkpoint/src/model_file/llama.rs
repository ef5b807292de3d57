//! The model files of llm.c's branch `llama3` (`.bin`).
//!
//! Two headers of 1024 bytes: i32 words (magic 20240803, version, maxT, V, L, NH, KV, C, multiple_of, use_scaled_rope, major and
//! minor version of Llama), then f32 words (ffn_dim_multiplier, norm_eps, rope_theta). GPT-2's 16 tensors follow: the head is in
//! the place of wpe, fcw has the rows of up and then of gate, and all biases are zeros. Queries and keys have interleaved rotary
//! pairs. The head is never tied, and the vocabulary is not padded.

use super::{Header, dtype_of, version_of};
use crate::tensors::{FileShape, Order};
use anyhow::{Context, Result, ensure};
use engine::ops::{Activation, RotaryPairs};
use engine::tensor::DType;
use model::Descriptor;
use model::descriptor::{Additions, Biases, Init, Llama3Scaling, Normalization, Positions, Rotary, RotaryScaling};
use std::io::Write;
use system::fs::File;

/// First word of a file.
pub const MAGIC: i32 = 20240803;
/// Size of each header.
const HEADER_BYTES: usize = 1024;
const TENSORS_AT: u64 = 2 * HEADER_BYTES as u64;

/// The scaling that llm.c applies if `use_scaled_rope` is set, whatever the version of Llama.
const SCALING: RotaryScaling = RotaryScaling::Llama3(Llama3Scaling {
    factor: 8.0,
    low_freq_factor: 1.0,
    high_freq_factor: 4.0,
    original_max_seq_len: 8192,
});

pub(super) fn read_header(file: &File, name: &str) -> Result<Header> {
    let mut header = [0; 2 * HEADER_BYTES];
    file.read_exact_at(&mut header, 0)
        .with_context(|| format!("{name}: expected two headers of {HEADER_BYTES} bytes, found a shorter file"))?;
    let bytes = |i: usize| header[4 * i..4 * i + 4].try_into().expect("four bytes");
    let word = |i: usize| i32::from_le_bytes(bytes(i));
    let float = |i: usize| f32::from_le_bytes(bytes(HEADER_BYTES / 4 + i));
    let dtype = dtype_of(word(1), name)?;
    let [max_seq_len, vocab, layers, heads, kv_heads, channels, multiple_of, scaled] =
        [2, 3, 4, 5, 6, 7, 8, 9].map(|i| word(i).max(0) as usize);
    ensure!(
        scaled <= 1,
        "{name}: expected use_scaled_rope 0 or 1, found {scaled}; llm.c's main branch writes another format of this magic, \
         which llm-rs does not read: use the branch llama3"
    );
    ensure!(
        heads > 0 && channels.is_multiple_of(heads),
        "{name}: expected heads that divide {channels} channels, found {heads}"
    );
    let multiplier = float(0);
    ensure!(
        multiplier.is_finite() && multiplier > 0.0 && multiple_of > 0,
        "{name}: expected a positive ffn_dim_multiplier and multiple_of, found {multiplier} and {multiple_of}"
    );
    let rotary = Rotary { theta: float(2), scaling: (scaled == 1).then_some(SCALING), pairs: RotaryPairs::Interleaved };
    let descriptor = Descriptor {
        layers,
        heads,
        kv_heads,
        head_size: channels / heads,
        channels,
        mlp_channels: mlp_channels(channels, multiplier, multiple_of),
        max_seq_len,
        vocab,
        norm: Normalization::RmsNorm { eps: float(1), weights: true },
        positions: Positions::Rotary(rotary),
        qk_norm: None,
        activation: Activation::SwiGlu,
        biases: Biases::None,
        tied: false,
        embedding_norm: false,
        softcap: None,
        init: Init::Normal,
        windows: None,
        additions: Additions::NONE,
        experts: None,
        adapters: None,
    };
    let descriptor = descriptor.checked().with_context(|| format!("{name}: invalid header"))?;
    let shape = FileShape { descriptor, padded_vocab: vocab, order: Order::LlmCLlama };
    Ok(Header { shape, dtype, tensors_at: TENSORS_AT })
}

/// Returns llm.c's width of the MLP: 2/3 of 4 C, times the multiplier, rounded up to a multiple. Damaged headers lead to any width;
/// one that overflows becomes the largest, which is larger than that of any model.
fn mlp_channels(channels: usize, multiplier: f32, multiple_of: usize) -> usize {
    let hidden = (f64::from(multiplier) * (8 * channels / 3) as f64) as usize;
    hidden.checked_next_multiple_of(multiple_of).unwrap_or(usize::MAX)
}

/// Writes both headers. The tensors must follow as [`Order::LlmCLlama`] states.
pub fn write_header(out: &mut impl Write, descriptor: &Descriptor, dtype: DType) -> Result<()> {
    let Descriptor { layers, heads, kv_heads, channels, max_seq_len, vocab, .. } = *descriptor;
    let (rotary, eps) = representable(descriptor)?;
    let (multiplier, multiple_of) = ffn_numbers(descriptor)?;
    ensure!(
        i32::try_from(max_seq_len).is_ok(),
        "max_position_embeddings: expected at most {}, which the format can hold, found {max_seq_len}; reduce it in config.json",
        i32::MAX
    );
    let words = [max_seq_len, vocab, layers, heads, kv_heads, channels, multiple_of].map(|word| word as i32);
    let words = [MAGIC, version_of(dtype)].into_iter().chain(words).chain([i32::from(rotary.scaling.is_some()), 3, 1]);
    let mut header = [0; 2 * HEADER_BYTES];
    for (slot, word) in header.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *slot = word.to_le_bytes();
    }
    for (slot, float) in header[HEADER_BYTES..].as_chunks_mut::<4>().0.iter_mut().zip([multiplier, eps, rotary.theta]) {
        *slot = float.to_le_bytes();
    }
    Ok(out.write_all(&header)?)
}

/// Returns the rotary embedding and eps of a model that the format can represent.
fn representable(d: &Descriptor) -> Result<(Rotary, f32)> {
    let (Positions::Rotary(rotary), Normalization::RmsNorm { eps, weights: true }) = (d.positions, d.norm) else {
        anyhow::bail!("llm.c: expected a Llama or GPT-2 model, found one with {d}; export it with --format hf");
    };
    let plain = d.qk_norm.is_none() && d.biases == Biases::None && d.softcap.is_none() && !d.embedding_norm;
    let plain = plain && d.experts.is_none();
    ensure!(
        plain && d.windows.is_none() && d.activation == Activation::SwiGlu && d.attention_channels() == d.channels,
        "llm.c: expected a model with Llama's operations, found other operations; export it with --format hf"
    );
    ensure!(
        rotary.scaling.is_none_or(|scaling| scaling == SCALING),
        "llm.c: expected the rotary scaling of Llama 3.1 (factor 8, 1 to 4, 8192 tokens) or none, found {:?}; llm.c supports no \
         other, so export it with --format hf",
        rotary.scaling
    );
    Ok((rotary, eps))
}

/// Returns the ffn_dim_multiplier and multiple_of that give the width of the MLP.
fn ffn_numbers(d: &Descriptor) -> Result<(f32, usize)> {
    // Meta's numbers are 1024 with 1.0, 1.3 or 1.4. Other widths are multiples of themselves, rounded up from their half.
    let half = 0.5 * d.mlp_channels as f32 / (8 * d.channels / 3).max(1) as f32;
    let candidates = [(1.0, 1024), (1.3, 1024), (1.4, 1024), (half, d.mlp_channels)];
    let fits =
        |&(multiplier, multiple_of): &(f32, usize)| mlp_channels(d.channels, multiplier, multiple_of) == d.mlp_channels;
    candidates.into_iter().find(fits).with_context(|| {
        format!("llm.c: expected an MLP of at least 2 channels, found {}; export it with --format hf", d.mlp_channels)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_those_of_llama() {
        assert_eq!(
            [mlp_channels(4096, 1.3, 1024), mlp_channels(3072, 1.0, 1024), mlp_channels(2048, 1.4, 1024)],
            [14_336, 8192, 8192]
        );
        for name in ["llama3:1b", "llama3:3b", "llama3:8b"] {
            let descriptor: Descriptor = name.parse().unwrap();
            assert_eq!(ffn_numbers(&descriptor).unwrap().1, 1024, "{name}");
        }
        let small = Descriptor { mlp_channels: 97, .."llama3:1b".parse().unwrap() };
        assert_eq!(ffn_numbers(&small).unwrap().1, 97);
        assert_eq!(mlp_channels(2, 1e30, 1 << 17), usize::MAX);
    }

    #[test]
    fn models_that_llm_c_cannot_represent_are_rejected() {
        for (name, expected) in [
            ("llama3:1b", "expected the rotary scaling of Llama 3.1"),
            ("qwen2.5:0.5b", "expected a model with Llama's operations"),
            ("qwen3:0.6b", "expected a model with Llama's operations"),
            ("modern:d4", "expected a Llama or GPT-2 model"),
        ] {
            let message = write_header(&mut Vec::new(), &name.parse().unwrap(), DType::F32).unwrap_err().to_string();
            assert!(message.contains(expected), "{name}: {message}");
        }
        write_header(&mut Vec::new(), &"llama3:8b".parse().unwrap(), DType::Bf16).unwrap();
    }
}
