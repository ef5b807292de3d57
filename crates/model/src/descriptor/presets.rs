//! The names of known shapes: `FAMILY:SIZE`, where GPT-2 is the default family.

use super::{
    Activation, Additions, Biases, Descriptor, DescriptorError, Experts, GPT2_VOCAB, Init, Normalization, Positions,
    QkNorm, Rotary,
};
use super::{Llama3Scaling, RotaryScaling, WindowPattern, Windows};
use engine::ops::{QkNormScope, RotaryPairs};
use std::str::FromStr;

/// Size of the vocabulary of Llama 3.
const LLAMA3_VOCAB: usize = 128_256;
/// Rows of the embedding of Qwen 2.5 and 3.
const QWEN_VOCAB: usize = 151_936;
/// Size of the vocabulary of OLMoE.
const OLMOE_VOCAB: usize = 50_304;
/// nanochat's vocabulary.
const MODERN_VOCAB: usize = 32_768;
const MODERN_HEAD_SIZE: usize = 128;
/// The machine epsilon of f32, which is PyTorch's default.
const MODERN_EPS: f32 = f32::EPSILON;

/// The sizes in which the models of a family differ.
#[derive(Clone, Copy)]
struct Sizes {
    layers: usize,
    channels: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    mlp_channels: usize,
}

impl FromStr for Descriptor {
    type Err = DescriptorError;

    fn from_str(text: &str) -> Result<Self, DescriptorError> {
        let unknown = || DescriptorError::Unknown(text.to_owned());
        let name = match text {
            "gpt2" => "d12",
            "gpt2-medium" => "d24",
            "gpt2-large" => "d36",
            "gpt2-xl" => "d48",
            "llama3.1:8b" => "llama3:8b",
            "llama3.2:1b" => "llama3:1b",
            "llama3.2:3b" => "llama3:3b",
            other => other,
        };
        let (family, size) = name.split_once(':').unwrap_or(("gpt2", name));
        let number = |prefix| size.strip_prefix(prefix).and_then(|n: &str| n.parse::<usize>().ok());
        match family {
            "gpt2" => number('d').and_then(gpt2).ok_or_else(unknown)?,
            "gpt3" => number('c').and_then(gpt3).ok_or_else(unknown)?,
            "llama3" => llama3(size).ok_or_else(unknown)?.checked(),
            "qwen2.5" => qwen2_5(size).ok_or_else(unknown)?.checked(),
            "qwen3" => qwen3(size).ok_or_else(unknown)?.checked(),
            "olmoe" => olmoe(size).ok_or_else(unknown)?.checked(),
            "modern-moe" => number('d').and_then(modern_moe).ok_or_else(unknown)?.checked(),
            "modern" => number('d').and_then(modern).ok_or_else(unknown)?.checked(),
            "nanochat" => number('d').and_then(nanochat).ok_or_else(unknown)?.checked(),
            _ => Err(unknown()),
        }
    }
}

fn gpt2(layers: usize) -> Option<Result<Descriptor, DescriptorError>> {
    let (channels, heads) = match layers {
        6 => (384, 6),
        12 => (768, 12),
        24 => (1024, 16),
        36 => (1280, 20),
        48 => (1600, 25),
        60 => (1920, 30),
        72 => (2880, 30),
        84 => (3456, 36),
        _ => return None,
    };
    Some(Descriptor::gpt2(layers, heads, channels, 1024, GPT2_VOCAB))
}

fn gpt3(channels: usize) -> Option<Result<Descriptor, DescriptorError>> {
    let (layers, head_size) = match channels {
        384 => (6, 64),
        768 => (12, 64),
        1024 => (24, 64),
        1536 => (24, 96),
        2048 => (24, 128),
        2560 => (32, 80),
        4096 => (32, 128),
        12288 => (96, 128),
        _ => return None,
    };
    Some(Descriptor::gpt2(layers, channels / head_size, channels, 2048, GPT2_VOCAB))
}

impl Descriptor {
    /// The layers of Llama: RMSNorm, rotary positions, SwiGLU and no biases.
    fn llama(sizes: Sizes, rotary: Rotary, eps: f32) -> Self {
        let Sizes { layers, channels, heads, kv_heads, head_size, mlp_channels } = sizes;
        Self {
            layers,
            heads,
            kv_heads,
            head_size,
            channels,
            mlp_channels,
            max_seq_len: 131_072,
            vocab: LLAMA3_VOCAB,
            norm: Normalization::RmsNorm { eps, weights: true },
            positions: Positions::Rotary(rotary),
            qk_norm: None,
            activation: Activation::SwiGlu,
            biases: Biases::None,
            tied: true,
            embedding_norm: false,
            softcap: None,
            init: Init::Normal,
            windows: None,
            additions: Additions::NONE,
            experts: None,
            adapters: None,
        }
    }
}

/// Llama 3.2 1B and 3B, and Llama 3.1 8B (`config.json` of meta-llama on Hugging Face).
fn llama3(size: &str) -> Option<Descriptor> {
    let (layers, channels, heads, head_size, mlp_channels, factor) = match size {
        "1b" => (16, 2048, 32, 64, 8192, 32.0),
        "3b" => (28, 3072, 24, 128, 8192, 32.0),
        "8b" => (32, 4096, 32, 128, 14_336, 8.0),
        _ => return None,
    };
    let sizes = Sizes { layers, channels, heads, kv_heads: 8, head_size, mlp_channels };
    let scaling = Llama3Scaling { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_seq_len: 8192 };
    let rotary =
        Rotary { theta: 500_000.0, scaling: Some(RotaryScaling::Llama3(scaling)), pairs: RotaryPairs::HalfSplit };
    Some(Descriptor { tied: size != "8b", ..Descriptor::llama(sizes, rotary, 1e-5) })
}

const QWEN_ROTARY: Rotary = Rotary { theta: 1e6, scaling: None, pairs: RotaryPairs::HalfSplit };

/// Qwen2.5 (`config.json` of Qwen on Hugging Face): Llama's layers with biases of queries, keys and values.
fn qwen2_5(size: &str) -> Option<Descriptor> {
    let (layers, channels, heads, kv_heads, mlp_channels, max_seq_len) = match size {
        "0.5b" => (24, 896, 14, 2, 4864, 32_768),
        "1.5b" => (28, 1536, 12, 2, 8960, 131_072),
        "3b" => (36, 2048, 16, 2, 11008, 32_768),
        "7b" => (28, 3584, 28, 4, 18944, 131_072),
        "14b" => (48, 5120, 40, 8, 13824, 131_072),
        _ => return None,
    };
    let sizes = Sizes { layers, channels, heads, kv_heads, head_size: channels / heads, mlp_channels };
    let llama = Descriptor::llama(sizes, QWEN_ROTARY, if size == "14b" { 1e-5 } else { 1e-6 });
    let tied = channels <= 2048;
    let vocab = if tied { QWEN_VOCAB } else { 152_064 };
    Some(Descriptor { vocab, tied, biases: Biases::Qkv, max_seq_len, ..llama })
}

/// Qwen3 (`config.json` of Qwen on Hugging Face): Llama's layers with QK-norm.
fn qwen3(size: &str) -> Option<Descriptor> {
    if size == "30b-a3b" {
        return qwen3_moe();
    }
    let (channels, mlp_channels) = match size {
        "0.6b" => (1024, 3072),
        "1.7b" => (2048, 6144),
        _ => return None,
    };
    let sizes = Sizes { layers: 28, channels, heads: 16, kv_heads: 8, head_size: 128, mlp_channels };
    let qk_norm = Some(QkNorm { eps: 1e-6, weights: true, gain: 1.0, scope: QkNormScope::Head });
    let llama = Descriptor::llama(sizes, QWEN_ROTARY, 1e-6);
    Some(Descriptor { vocab: QWEN_VOCAB, qk_norm, max_seq_len: 40_960, ..llama })
}

/// Qwen3-30B-A3B (`config.json` on Hugging Face): Qwen3 with 8 of 128 experts.
fn qwen3_moe() -> Option<Descriptor> {
    let experts = Experts { count: 128, active: 8, aux_loss: 0.001, z_loss: 0.0, ..Experts::OF_DENSE_SHAPE };
    let (layers, heads, kv_heads) = (48, 32, 4);
    Some(Descriptor {
        layers,
        heads,
        kv_heads,
        mlp_channels: 768,
        tied: false,
        experts: Some(experts),
        ..qwen3("1.7b")?
    })
}

/// OLMoE-1B-7B (Muennighoff et al., 2024, arXiv:2409.02060, and `config.json` on Hugging Face): 8 of 64 experts, and a norm of all heads'
/// queries and keys.
fn olmoe(size: &str) -> Option<Descriptor> {
    if size != "1b-7b" {
        return None;
    }
    let sizes = Sizes { layers: 16, channels: 2048, heads: 16, kv_heads: 16, head_size: 128, mlp_channels: 1024 };
    let experts = Experts { count: 64, active: 8, normalized: false, ..Experts::OF_DENSE_SHAPE };
    let rotary = Rotary { theta: 1e4, ..QWEN_ROTARY };
    let qk_norm = Some(QkNorm { eps: 1e-5, weights: true, gain: 1.0, scope: QkNormScope::AllHeads });
    let llama = Descriptor::llama(sizes, rotary, 1e-5);
    Some(Descriptor { vocab: OLMOE_VOCAB, max_seq_len: 4096, tied: false, qk_norm, experts: Some(experts), ..llama })
}

/// nanochat's shape of a depth with 8 of 64 experts and SwiGLU. The active experts have about the FLOPs of nanochat's MLP: 3 · 8 F C for
/// 8 C², with F rounded up to a multiple of 64.
fn modern_moe(layers: usize) -> Option<Descriptor> {
    let dense = modern(layers)?;
    let mlp_channels = dense.channels.div_ceil(3).next_multiple_of(64);
    let experts = Some(Experts { count: 64, active: 8, ..Experts::OF_DENSE_SHAPE });
    Some(Descriptor { mlp_channels, activation: Activation::SwiGlu, experts, ..dense })
}

/// nanochat's shape of a depth: 64 channels for each layer, heads of 128 channels, ReLU², QK-norm, logits within ±15, and norms
/// without weights.
fn modern(layers: usize) -> Option<Descriptor> {
    if !(2..=64).contains(&layers) {
        return None;
    }
    let channels = (64 * layers).next_multiple_of(MODERN_HEAD_SIZE);
    let heads = channels / MODERN_HEAD_SIZE;
    let sizes =
        Sizes { layers, channels, heads, kv_heads: heads, head_size: MODERN_HEAD_SIZE, mlp_channels: 4 * channels };
    let rotary = Rotary { theta: 1e5, scaling: None, pairs: RotaryPairs::HalfSplit };
    Some(Descriptor {
        max_seq_len: 2048,
        vocab: MODERN_VOCAB,
        norm: Normalization::RmsNorm { eps: MODERN_EPS, weights: false },
        qk_norm: Some(QkNorm { eps: MODERN_EPS, weights: false, gain: 1.2, scope: QkNormScope::Head }),
        activation: Activation::ReluSquared,
        tied: false,
        embedding_norm: true,
        softcap: Some(15.0),
        init: Init::DepthScaled,
        ..Descriptor::llama(sizes, rotary, MODERN_EPS)
    })
}

/// nanochat's model at 92d63d4. In three of four layers, but not in the last, a token attends to itself and the tokens before it, a quarter
/// of the longest sequence. nanochat normalizes queries and keys after their rotation, which gives the same: a rotation keeps norms.
fn nanochat(layers: usize) -> Option<Descriptor> {
    let modern = modern(layers)?;
    let pattern = WindowPattern::of_layers((0..layers).map(|layer| layer % 4 != 3 && layer + 1 < layers))?;
    Some(Descriptor {
        init: Init::Nanochat,
        windows: Some(Windows { size: modern.max_seq_len / 4 + 1, pattern }),
        additions: Additions::ALL,
        ..modern
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters of the checkpoints on Hugging Face, and those that compute a token.
    #[test]
    fn sizes_of_mixtures_have_their_parameters() {
        let of = |name: &str| {
            let d: Descriptor = name.parse().unwrap();
            let padding = 2 * (d.padded_vocab() - d.vocab) * d.channels;
            [d.parameters(), d.active_parameters()].map(|n| n - padding)
        };
        assert_eq!(of("qwen3:30b-a3b"), [30_532_122_624, 3_353_032_704]);
        assert_eq!(of("olmoe:1b-7b"), [6_919_161_856, 1_282_017_280]);
        // The active experts have about the FLOPs of the dense shape.
        for layers in [12, 20, 26] {
            let [moe, dense] = ["modern-moe", "modern"].map(|family| {
                format!("{family}:d{layers}").parse::<Descriptor>().unwrap().flops_per_token(2048) as f64
            });
            assert!((moe / dense - 1.0).abs() < 0.05, "d{layers}: {}", moe / dense);
        }
    }

    /// Parameters, without the padding of the vocabulary: those of the checkpoints of Qwen on Hugging Face.
    #[test]
    fn sizes_of_qwen2_5_have_their_parameters() {
        let sizes = [
            ("0.5b", 494_032_768),
            ("1.5b", 1_543_714_304),
            ("3b", 3_085_938_688),
            ("7b", 7_615_616_512),
            ("14b", 14_770_033_664),
        ];
        for (size, parameters) in sizes {
            let d = qwen2_5(size).unwrap();
            let padding = (d.padded_vocab() - d.vocab) * d.channels * if d.tied { 1 } else { 2 };
            assert_eq!(d.parameters() - padding, parameters, "{size}");
        }
    }
}
