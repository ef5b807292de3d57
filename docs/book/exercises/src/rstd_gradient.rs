//! Exercise: the gradient of rstd.
//!
//! rstd = 1 / sqrt(variance of x + epsilon). Given `drstd`, the gradient of the loss with respect to rstd, compute that with respect
//! to x. Does the mean, through which each element also changes the variance, contribute anything?

/// Returns the gradient of `x`. The variance is the mean of the squared deviations.
pub fn rstd_gradient(drstd: f64, x: &[f64], epsilon: f64) -> Vec<f64> {
    unimplemented!("exercise rstd_gradient")
}
