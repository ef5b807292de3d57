//! Exercise: bias correction without touching m and v.
//!
//! AdamW's step is m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon). The corrections are the same for all parameters. Kingma and
//! Ba (section 2) fold them into two numbers that the host computes once per step: step = factor m / (sqrt(v) + epsilon'). Find both.

/// Returns factor and epsilon' of step `t`, counted from 1, such that the step is factor m / (sqrt(v) + epsilon').
pub fn folded_corrections(beta1: f64, beta2: f64, epsilon: f64, t: i32) -> (f64, f64) {
    unimplemented!("exercise adamw_bias_correction")
}
