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

/// The scaling of Llama 3.1: waves longer than a sequence of the pretraining become `factor` times longer, short ones stay, and
/// those between are interpolated (`rope_type` "llama3" in transformers).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RotaryScaling {
    /// Factor of the longest waves.
    pub factor: f32,
    /// Waves longer than `original_max_seq_len / low_freq_factor` are stretched by `factor`.
    pub low_freq_factor: f32,
    /// Waves shorter than `original_max_seq_len / high_freq_factor` stay.
    pub high_freq_factor: f32,
    /// Maximum sequence length of the pretraining.
    pub original_max_seq_len: usize,
}

impl Rotary {
    /// Checks that all numbers are positive.
    pub(super) fn check(&self) -> Result<(), DescriptorError> {
        positive("rope theta", self.theta)?;
        let Some(RotaryScaling { factor, low_freq_factor, high_freq_factor, original_max_seq_len }) = self.scaling
        else {
            return Ok(());
        };
        positive("rope factor", factor)?;
        positive("rope low_freq_factor", low_freq_factor)?;
        positive("rope high_freq_factor - low_freq_factor", high_freq_factor - low_freq_factor)?;
        positive("rope original_max_position_embeddings", original_max_seq_len as f32)
    }

    /// Returns the angle per position of each pair of a head.
    ///
    /// Powers, reciprocals and scaling are rounded to f32 one by one, as in transformers and in Meta's Llama. A power that is rounded
    /// only once would change a third of the frequencies in their last bit, and with them the angles at position 32,768 by up to 3e-3.
    pub fn frequencies(&self, head_size: usize) -> Vec<f32> {
        let frequency = |i: usize| {
            let exponent = (2 * i) as f32 / head_size as f32;
            1.0 / f64::from(self.theta).powf(f64::from(exponent)) as f32
        };
        let scaled = |f: f32| self.scaling.map_or(f, |scaling| scaling.apply(f));
        (0..head_size / 2).map(|i| scaled(frequency(i))).collect()
    }

    /// Returns the cosine and sine of each angle: (positions, HS/2, 2).
    pub fn table(&self, positions: usize, head_size: usize) -> Arc<[f32]> {
        let frequencies = self.frequencies(head_size);
        let pairs = (0..positions).flat_map(|t| {
            frequencies.iter().flat_map(move |frequency| {
                // transformers computes the angle in f32.
                let angle = f64::from(t as f32 * frequency);
                [angle.cos() as f32, angle.sin() as f32]
            })
        });
        pairs.collect()
    }
}

impl RotaryScaling {
    fn apply(&self, frequency: f32) -> f32 {
        let Self { factor, low_freq_factor: low, high_freq_factor: high, original_max_seq_len } = *self;
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

    #[test]
    fn frequencies_have_the_bits_of_transformers() {
        let scaling =
            RotaryScaling { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_seq_len: 8192 };
        let scaled = Rotary { scaling: Some(scaling), ..LLAMA };
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
    fn the_table_has_a_cosine_and_a_sine_for_each_pair() {
        let table = LLAMA.table(3, 4);
        assert_eq!((table.len(), &table[..4]), (12, &[1.0, 0.0, 1.0, 0.0][..]));
        assert_eq!(table[8..10], [2f32.cos(), 2f32.sin()]);
    }

    #[test]
    fn impossible_numbers_are_rejected() {
        let scaling =
            RotaryScaling { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 4.0, original_max_seq_len: 8192 };
        let error = Rotary { scaling: Some(scaling), ..LLAMA }.check().unwrap_err().to_string();
        assert_eq!(error, "rope high_freq_factor - low_freq_factor: expected a positive number, found 0");
        let error = Rotary { theta: f32::NAN, ..LLAMA }.check().unwrap_err().to_string();
        assert_eq!(error, "rope theta: expected a positive number, found NaN");
    }
}
