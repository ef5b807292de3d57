//! The angles of rotary position embeddings.

use super::{DescriptorError, positive};
use engine::ops::RotaryPairs;
use serde::{Deserialize, Serialize};
use std::f32::consts::PI;
use std::sync::Arc;

/// A rotary position embedding (RoPE; Su et al., 2021, arXiv:2104.09864): pair i of a head of HS channels is rotated by
/// t · theta^(-2i / HS) at position t.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rotary {
    /// Base of the frequencies.
    pub theta: f32,
    /// Change of the frequencies for sequences longer than those of the pretraining.
    pub scaling: Option<RotaryScaling>,
    /// The channels of a pair.
    pub pairs: RotaryPairs,
}

/// A change of the frequencies, in the notation of transformers (`rope_type`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RotaryScaling {
    /// The scaling of Llama 3.1 ("llama3").
    Llama3(Llama3Scaling),
    /// YaRN ("yarn"; Peng et al., 2023, arXiv:2309.00071), as in Qwen2.5.
    Yarn(YarnScaling),
    /// All waves become longer ("linear"; Chen et al., 2023, arXiv:2306.15595).
    Linear {
        /// By this factor.
        factor: f32,
    },
}

/// Waves longer than a sequence of the pretraining become `factor` times longer, short ones stay, and those between are interpolated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Llama3Scaling {
    /// Factor of the longest waves.
    pub factor: f32,
    /// Waves longer than `original_max_seq_len / low_freq_factor` are stretched by `factor`.
    pub low_freq_factor: f32,
    /// Waves shorter than `original_max_seq_len / high_freq_factor` stay.
    pub high_freq_factor: f32,
    /// Maximum sequence length of the pretraining.
    pub original_max_seq_len: usize,
}

/// Pairs that turn often in a sequence of the pretraining keep their frequency, pairs that turn seldom become `factor` times slower,
/// and those between are interpolated by their index. Queries and keys become larger, which sharpens attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct YarnScaling {
    /// Factor of the longest waves.
    pub factor: f32,
    /// Pairs with more turns keep their frequency.
    pub beta_fast: f32,
    /// Pairs with fewer turns are stretched by `factor`.
    pub beta_slow: f32,
    /// Factor of rotated queries and keys.
    pub attention_factor: f32,
    /// Whether the indices of the first and the last interpolated pair are rounded to whole numbers.
    pub truncate: bool,
    /// Maximum sequence length of the pretraining.
    pub original_max_seq_len: usize,
}

impl Rotary {
    /// Checks that all numbers are positive.
    pub(super) fn check(&self) -> Result<(), DescriptorError> {
        positive("rope theta", self.theta)?;
        if let Some(RotaryScaling::Yarn(_)) = self.scaling {
            positive("rope theta - 1 with YaRN", self.theta - 1.0)?;
        }
        self.scaling.map_or(Ok(()), RotaryScaling::check)
    }

    /// Returns the angle per position of each pair of a head.
    ///
    /// Powers, reciprocals and scaling are rounded to f32 one by one, as in transformers and in Meta's Llama. A power that is rounded
    /// only once would change a third of the frequencies in their last bit, and with them the angles at position 32,768 by up to 3e-3.
    pub fn frequencies(&self, head_size: usize) -> Vec<f32> {
        let wavelength = |i: usize| f64::from(self.theta).powf(f64::from((2 * i) as f32 / head_size as f32)) as f32;
        let plain = (0..head_size / 2).map(wavelength);
        match self.scaling {
            None => plain.map(f32::recip).collect(),
            Some(RotaryScaling::Llama3(scaling)) => plain.map(|length| scaling.apply(length.recip())).collect(),
            Some(RotaryScaling::Yarn(scaling)) => scaling.frequencies(plain.collect(), self.theta),
            Some(RotaryScaling::Linear { factor }) => plain.map(|length| length.recip() / factor).collect(),
        }
    }

    /// Returns the cosine and sine of each angle, times YaRN's factor: (positions, HS/2, 2).
    pub fn table(&self, positions: usize, head_size: usize) -> Arc<[f32]> {
        let frequencies = self.frequencies(head_size);
        let factor = match self.scaling {
            Some(RotaryScaling::Yarn(scaling)) => scaling.attention_factor,
            _ => 1.0,
        };
        let pairs = (0..positions).flat_map(|t| {
            frequencies.iter().flat_map(move |frequency| {
                // transformers computes the angle in f32.
                let angle = f64::from(t as f32 * frequency);
                [angle.cos() as f32 * factor, angle.sin() as f32 * factor]
            })
        });
        pairs.collect()
    }
}

impl RotaryScaling {
    fn check(self) -> Result<(), DescriptorError> {
        let (factor, original) = match self {
            Self::Llama3(scaling) => {
                positive("rope low_freq_factor", scaling.low_freq_factor)?;
                let range = scaling.high_freq_factor - scaling.low_freq_factor;
                positive("rope high_freq_factor - low_freq_factor", range)?;
                (scaling.factor, scaling.original_max_seq_len)
            }
            Self::Yarn(scaling) => {
                positive("rope beta_slow", scaling.beta_slow)?;
                positive("rope beta_fast - beta_slow", scaling.beta_fast - scaling.beta_slow)?;
                positive("rope attention_factor", scaling.attention_factor)?;
                (scaling.factor, scaling.original_max_seq_len)
            }
            Self::Linear { factor } => (factor, 1),
        };
        positive("rope factor", factor)?;
        positive("rope original_max_position_embeddings", original as f32)
    }
}

impl YarnScaling {
    /// Returns the scaling with the paper's numbers.
    pub fn common(factor: f32, original_max_seq_len: usize) -> Self {
        let attention_factor = Self::magnitude(factor, 1.0) as f32;
        Self { factor, beta_fast: 32.0, beta_slow: 1.0, attention_factor, truncate: true, original_max_seq_len }
    }

    /// Returns 0.1 · scale · ln(factor) + 1. The factor of queries and keys is a quotient of two of them in some models.
    pub fn magnitude(factor: f32, scale: f32) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * f64::from(scale) * f64::from(factor).ln() + 1.0 }
    }

    /// Returns the index of the pair that turns `turns` times in a sequence of the pretraining.
    fn pair(&self, turns: f32, head_size: usize, theta: f32) -> f64 {
        let length = self.original_max_seq_len as f64 / (f64::from(turns) * 2.0 * f64::from(PI));
        head_size as f64 * length.ln() / (2.0 * f64::from(theta).ln())
    }

    /// Returns the frequencies of pairs with wavelengths of 2 π times `plain` positions. The indices are f64 and the interpolation is f32, as in
    /// transformers.
    fn frequencies(&self, plain: Vec<f32>, theta: f32) -> Vec<f32> {
        let head_size = 2 * plain.len();
        let [mut low, mut high] = [self.beta_fast, self.beta_slow].map(|turns| self.pair(turns, head_size, theta));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(head_size as f64 - 1.0));
        if (high - low).abs() < f64::EPSILON {
            high += 0.001;
        }
        let frequency = |(i, length): (usize, f32)| {
            let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let kept = 1.0 - ramp;
            1.0 / (self.factor * length) * (1.0 - kept) + length.recip() * kept
        };
        plain.into_iter().enumerate().map(frequency).collect()
    }
}

impl Llama3Scaling {
    fn apply(self, frequency: f32) -> f32 {
        let Self { factor, low_freq_factor: low, high_freq_factor: high, original_max_seq_len } = self;
        let (wavelength, original) = (2.0 * PI / frequency, original_max_seq_len as f32);
        if wavelength < original / high {
            frequency
        } else if wavelength > original / low {
            frequency / factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            (1.0 - smooth) * frequency / factor + smooth * frequency
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: Rotary = Rotary { theta: 500_000.0, scaling: None, pairs: RotaryPairs::HalfSplit };

    /// The bits of the frequencies that transformers 5 computes for heads of 64 channels with theta 500,000.
    const PLAIN: [u32; 32] = [
        0x3f80_0000,
        0x3f29_e1c6,
        0x3ee1_77bc,
        0x3e95_9ee3,
        0x3e46_93b0,
        0x3e03_c6a0,
        0x3dae_e4ad,
        0x3d68_1e67,
        0x3d1a_08c8,
        0x3ccc_6f49,
        0x3c87_a9c3,
        0x3c34_0d6d,
        0x3bee_f74f,
        0x3b9e_9402,
        0x3b52_7720,
        0x3b0b_aa41,
        0x3ab9_5d21,
        0x3a76_03ea,
        0x3a23_418d,
        0x39d8_ac81,
        0x398f_c8f8,
        0x393e_d4f4,
        0x38fd_45c3,
        0x38a8_126b,
        0x385f_10c4,
        0x3814_06cb,
        0x37c4_7610,
        0x3782_5f34,
        0x372d_07a7,
        0x36e5_a54d,
        0x3698_64a7,
        0x364a_41b0,
    ];
    /// The same for pairs 15 to 17 of Llama 3.2, where the scaling interpolates.
    const INTERPOLATED: [u32; 3] = [0x3aa9_279b, 0x39e1_3620, 0x38cb_98f7];

    /// The same with theta 1e6 and Qwen2.5's YaRN.
    const YARN: [u32; 32] = [
        0x3f80_0000,
        0x3f26_3de0,
        0x3ed7_e89b,
        0x3e8c_3504,
        0x3e36_1887,
        0x3dec_7fd6,
        0x3d99_940d,
        0x3d47_763f,
        0x3d01_86e3,
        0x3ca8_398b,
        0x3c5a_7bf2,
        0x3c0d_e12d,
        0x3ba8_e98f,
        0x3b47_6f0b,
        0x3ae9_1d93,
        0x3a86_8f93,
        0x3a18_ead7,
        0x39aa_3b44,
        0x3938_3df4,
        0x38bf_6ded,
        0x383a_7753,
        0x37f2_2ce2,
        0x379d_43a4,
        0x374c_3fbe,
        0x3704_a2b2,
        0x36ac_431d,
        0x365f_ba4f,
        0x3611_48e3,
        0x35bc_b0c1,
        0x3575_1070,
        0x351f_23e4,
        0x34ce_af79,
    ];
    /// The same with other numbers, from pair 9 on. The pairs before it are equal.
    const OTHER_YARN: [u32; 23] = [
        0x3c9f_91d3,
        0x3c34_06af,
        0x3bc6_7675,
        0x3b53_d8c3,
        0x3ad7_836a,
        0x3a78_a815,
        0x3a21_7916,
        0x39d1_b717,
        0x3988_2f69,
        0x3930_df51,
        0x38e5_b71d,
        0x3895_2c42,
        0x3841_bd81,
        0x37fb_9f6c,
        0x37a3_6631,
        0x3754_3784,
        0x3709_cf4a,
        0x36b2_fb72,
        0x3668_749d,
        0x3616_f3cd,
        0x35c4_0d26,
        0x357e_9fd3,
        0x3525_592e,
    ];

    #[test]
    fn frequencies_have_the_bits_of_transformers() {
        let scaling =
            Llama3Scaling { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_seq_len: 8192 };
        let scaled = Rotary { scaling: Some(RotaryScaling::Llama3(scaling)), ..LLAMA };
        assert_eq!(LLAMA.frequencies(64), PLAIN.map(f32::from_bits));
        // Higher frequencies are unchanged, lower ones divided by 32.
        let expected: Vec<f32> = (0..32)
            .map(|i| match i {
                0..15 => f32::from_bits(PLAIN[i]),
                15..18 => f32::from_bits(INTERPOLATED[i - 15]),
                _ => f32::from_bits(PLAIN[i]) / 32.0,
            })
            .collect();
        assert_eq!(scaled.frequencies(64), expected);
        assert_eq!(LLAMA.frequencies(4), [1.0, 1.0 / 500_000f32.sqrt()]);
    }

    #[test]
    fn yarn_has_the_frequencies_of_transformers() {
        let yarn = YarnScaling::common(4.0, 32_768);
        let of = |yarn| Rotary { theta: 1e6, scaling: Some(RotaryScaling::Yarn(yarn)), ..LLAMA }.frequencies(64);
        assert_eq!(of(yarn), YARN.map(f32::from_bits));
        let other = YarnScaling {
            factor: 2.5,
            beta_fast: 16.0,
            beta_slow: 2.0,
            truncate: false,
            original_max_seq_len: 4096,
            ..yarn
        };
        let found = of(other);
        assert_eq!(found[..9], of(yarn)[..9]);
        assert_eq!(found[9..], OTHER_YARN.map(f32::from_bits));
        assert_eq!(yarn.attention_factor.to_bits(), 0x3f91_be9c);
    }

    #[test]
    fn scalings_survive_their_text() {
        // Checkpoints of earlier versions have this text.
        let llama = r#"{"factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_seq_len":8192}"#;
        let scaling: RotaryScaling = serde_json::from_str(llama).unwrap();
        assert!(matches!(scaling, RotaryScaling::Llama3(Llama3Scaling { factor: 8.0, .. })), "{scaling:?}");
        assert_eq!(serde_json::to_string(&scaling).unwrap(), llama);
        for scaling in [RotaryScaling::Yarn(YarnScaling::common(4.0, 32_768)), RotaryScaling::Linear { factor: 2.0 }] {
            let text = serde_json::to_string(&scaling).unwrap();
            assert_eq!(serde_json::from_str::<RotaryScaling>(&text).unwrap(), scaling, "{text}");
        }
    }

    #[test]
    fn the_table_has_a_cosine_and_a_sine_for_each_pair() {
        let table = LLAMA.table(3, 4);
        assert_eq!((table.len(), &table[..4]), (12, &[1.0, 0.0, 1.0, 0.0][..]));
        assert_eq!(table[8..10], [2f32.cos(), 2f32.sin()]);
    }

    #[test]
    fn impossible_numbers_are_rejected() {
        let scaling =
            Llama3Scaling { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 4.0, original_max_seq_len: 8192 };
        let error = Rotary { scaling: Some(RotaryScaling::Llama3(scaling)), ..LLAMA }.check().unwrap_err().to_string();
        assert_eq!(error, "rope high_freq_factor - low_freq_factor: expected a positive number, found 0");
        let error = Rotary { theta: f32::NAN, ..LLAMA }.check().unwrap_err().to_string();
        assert_eq!(error, "rope theta: expected a positive number, found NaN");
        let yarn = Some(RotaryScaling::Yarn(YarnScaling::common(4.0, 32_768)));
        let error = Rotary { theta: 1.0, scaling: yarn, ..LLAMA }.check().unwrap_err().to_string();
        assert_eq!(error, "rope theta - 1 with YaRN: expected a positive number, found 0");
    }
}
