//! Model FLOPs utilization (MFU), by llm.c's formula.

use engine::Peak;

/// Returns the fraction of the peak throughput that training at this rate achieves.
pub fn mfu(flops_per_token: usize, tokens_per_second: f64, peak: &Peak) -> f64 {
    flops_per_token as f64 * tokens_per_second / (peak.tflops * 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mfu_of_d12_matches_a_hand_computed_value() {
        let peak = Peak { tflops: 988.8, estimated: false };
        // 803,478,528 FLOPs per token at 640,000 tokens per second.
        assert!((mfu(803_478_528, 640_000.0, &peak) - 0.520_05).abs() < 1e-4);
    }
}
