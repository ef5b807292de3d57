//! The angles of rotary position embeddings.

use super::{DescriptorError, positive};
use engine::ops::RotaryPairs;
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;
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
    /// Longest sequence of the pretraining.
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

    /// Returns the angle per position of each pair of a head. They are rounded to f32, as in transformers.
    pub fn frequencies(&self, head_size: usize) -> Vec<f32> {
        let frequency = |i: usize| (f64::from(self.theta)).powf(-((2 * i) as f64) / head_size as f64);
        let scaled = |f: f64| self.scaling.map_or(f, |scaling| scaling.apply(f));
        (0..head_size / 2).map(|i| scaled(frequency(i)) as f32).collect()
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
    fn apply(&self, frequency: f64) -> f64 {
        let [factor, low, high] = [self.factor, self.low_freq_factor, self.high_freq_factor].map(f64::from);
        let wavelength = 2.0 * PI / frequency;
        let waves = self.original_max_seq_len as f64 / wavelength;
        if waves > high {
            frequency
        } else if waves < low {
            frequency / factor
        } else {
            let smooth = (waves - low) / (high - low);
            (1.0 - smooth) * frequency / factor + smooth * frequency
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: Rotary = Rotary { theta: 500_000.0, scaling: None, pairs: RotaryPairs::HalfSplit };

    #[test]
    fn frequencies_are_powers_of_theta() {
        let frequencies = LLAMA.frequencies(4);
        assert_eq!(frequencies, [1.0, (1.0 / 500_000f64.sqrt()) as f32]);
    }

    /// The expected values were computed in Python with the formula of transformers' `_compute_llama3_parameters`.
    #[test]
    fn llama_3_scales_long_waves_and_keeps_short_ones() {
        let scaling =
            RotaryScaling { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_seq_len: 8192 };
        let (plain, scaled) = (LLAMA.frequencies(64), Rotary { scaling: Some(scaling), ..LLAMA }.frequencies(64));
        assert_eq!(plain[..15], scaled[..15]);
        let close = |found: f32, expected: f32| assert!((found / expected - 1.0).abs() < 1e-6, "{found}, {expected}");
        close(scaled[15], 0.001_290_547_9);
        close(scaled[17], 9.708_288e-5);
        for i in 18..32 {
            close(scaled[i], plain[i] / 32.0);
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
            RotaryScaling { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 4.0, original_max_seq_len: 8192 };
        let error = Rotary { scaling: Some(scaling), ..LLAMA }.check().unwrap_err().to_string();
        assert_eq!(error, "rope high_freq_factor - low_freq_factor: expected a positive number, found 0");
        let error = Rotary { theta: f32::NAN, ..LLAMA }.check().unwrap_err().to_string();
        assert_eq!(error, "rope theta: expected a positive number, found NaN");
    }
}
