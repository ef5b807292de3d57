//! Model FLOPs utilisation by llm.c's formula.

use engine::Peak;

/// Share of the peak that training at this rate makes use of, in 0..1.
pub fn mfu(flops_per_token: usize, tokens_per_second: f64, peak: &Peak) -> f64 {
    flops_per_token as f64 * tokens_per_second / (peak.tflops * 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utilisation_of_d12() {
        let peak = Peak { tflops: 988.8, estimated: false };
        // 803,478,528 FLOPs a token at 640,000 tokens a second.
        assert!((mfu(803_478_528, 640_000.0, &peak) - 0.520_05).abs() < 1e-4);
    }
}
