//! Exercise: the gradient of rstd.
//!
//! rstd = 1 / sqrt(variance of x + epsilon). Given `drstd`, the gradient of the loss with respect to rstd, compute that with respect
//! to x. Does the mean, through which each element also changes the variance, contribute anything?

/// Returns the gradient of `x`. The variance is the mean of the squared deviations.
pub fn rstd_gradient(drstd: f64, x: &[f64], epsilon: f64) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    let rstd = (variance + epsilon).sqrt().recip();
    // The mean contributes the sum of the deviations, which is 0.
    x.iter().map(|x| -drstd * rstd.powi(3) * (x - mean) / n).collect()
}
