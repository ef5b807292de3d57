//! Sums of f32 numbers in the orders of a CPU and of a GPU.

/// Returns the sum in the order of the array.
pub fn in_order(values: &[f32]) -> f32 {
    values.iter().sum()
}

/// Returns the sum that a warp computes by shuffles: each lane adds the value of the lane whose number differs in one bit.
pub fn of_warp(mut lanes: [f32; 32]) -> [f32; 32] {
    for mask in [16, 8, 4, 2, 1] {
        let before = lanes;
        for lane in 0..32 {
            lanes[lane] = before[lane] + before[lane ^ mask];
        }
    }
    lanes
}

/// Returns the sum over a grid of `threads` threads: each adds every `threads`-th element, and the threads' sums are added in order.
pub fn of_grid(values: &[f32], threads: usize) -> f32 {
    let of_thread = |first: usize| values.iter().skip(first).step_by(threads).sum::<f32>();
    (0..threads).map(of_thread).sum()
}

/// Returns the norm: the square root of the sum of squares, added in f64.
pub fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

/// Returns the factor that limits the norm of the gradients to `clip`.
pub fn clipping_factor(norm: f64, clip: f64) -> f64 {
    if norm > clip { clip / norm } else { 1.0 }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::*;

    /// Returns numbers in ±1 that look random.
    fn numbers(n: u32) -> Vec<f32> {
        (0..n).map(|i| i.wrapping_mul(2_654_435_761) as i32 as f32 / 2f32.powi(31)).collect()
    }

    #[test]
    fn one_sum_in_f32_stops_at_2_to_the_24() {
        let ones = vec![1.0; 1 << 25];
        assert_eq!(in_order(&ones), 16_777_216.0);
        assert_eq!(of_grid(&ones, 1024), 33_554_432.0);
    }

    #[test]
    fn the_grid_determines_the_bits() {
        let values = numbers(100_000);
        let exact: f64 = values.iter().map(|&x| f64::from(x)).sum();
        let sums = [in_order(&values), of_grid(&values, 1024), of_grid(&values, 2048)];
        assert!(sums[0] != sums[1] && sums[1] != sums[2] && sums[0] != sums[2], "{sums:?}");
        assert_eq!(of_grid(&values, 1024), sums[1]);
        assert!(sums.iter().all(|&sum| (f64::from(sum) - exact).abs() < 0.05), "{sums:?} {exact}");
    }

    #[test]
    fn all_lanes_get_the_same_bits() {
        let lanes = of_warp(std::array::from_fn(|lane| numbers(32)[lane]));
        assert!(lanes.iter().all(|lane| lane.to_bits() == lanes[0].to_bits()));
    }

    #[test]
    fn clipping_limits_the_norm() {
        assert_eq!(norm(&[3.0, 0.0, 4.0]), 5.0);
        assert_eq!([clipping_factor(5.0, 1.0), clipping_factor(0.3, 1.0)], [0.2, 1.0]);
    }
}
