//! Three ways to compute a variance in f32, of which one loses its digits.

/// Returns the variance in two passes: the mean, and then the mean of the squared differences.
pub fn two_passes(x: &[f32]) -> f32 {
    let n = x.len() as f32;
    let mean = x.iter().sum::<f32>() / n;
    x.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / n
}

/// Returns the variance in one pass, as the mean of the squares minus the square of the mean.
pub fn one_pass(x: &[f32]) -> f32 {
    let n = x.len() as f32;
    let (mut sum, mut squares) = (0.0, 0.0);
    for x in x {
        sum += x;
        squares += x * x;
    }
    squares / n - (sum / n) * (sum / n)
}

/// Returns the variance in one pass over the differences from the first element, which have the same variance.
pub fn one_shifted_pass(x: &[f32]) -> f32 {
    let shifted: Vec<f32> = x.iter().map(|element| element - x[0]).collect();
    one_pass(&shifted)
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::*;

    #[test]
    fn all_agree_if_the_mean_is_small() {
        let x = [1.0, 1.0, 5.0, 5.0];
        assert_eq!([two_passes(&x), one_pass(&x), one_shifted_pass(&x)], [4.0; 3]);
    }

    #[test]
    fn a_large_mean_cancels_the_digits_of_one_pass() {
        let x = [10_001.0, 10_001.0, 10_005.0, 10_005.0];
        assert_eq!([two_passes(&x), one_shifted_pass(&x)], [4.0; 2]);
        // Near 10⁸, neighboring f32 numbers are 8 apart.
        assert_eq!(one_pass(&x), 8.0);
    }
}
