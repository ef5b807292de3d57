//! Ring reduce-scatter over ranks that are slices of one process.

/// Returns the range of chunk `c` if `len` elements are divided into `n` chunks of equal length. `n` must divide `len`.
pub fn chunk(len: usize, n: usize, c: usize) -> std::ops::Range<usize> {
    let size = len / n;
    c * size..(c + 1) * size
}

/// Sums the values of all ranks. Afterwards rank r has the complete sum in chunk r; its other chunks have partial sums.
///
/// In step s, rank r sends chunk r - 1 - s (modulo the number of ranks) to rank r + 1, which adds it to its own. Returns the number of
/// elements that each rank has sent.
pub fn reduce_scatter(ranks: &mut [Vec<f32>]) -> usize {
    let (n, len) = (ranks.len(), ranks[0].len());
    let mut sent = 0;
    for step in 0..n - 1 {
        // All ranks send at the same time, so the messages hold the values before the step.
        let messages: Vec<Vec<f32>> =
            (0..n).map(|r| ranks[r][chunk(len, n, (r + 2 * n - 1 - step) % n)].to_vec()).collect();
        for (from, message) in messages.iter().enumerate() {
            let to = (from + 1) % n;
            let own = &mut ranks[to][chunk(len, n, (from + 2 * n - 1 - step) % n)];
            for (own, received) in own.iter_mut().zip(message) {
                *own += received;
            }
        }
        sent += messages[0].len();
    }
    sent
}

/// Returns the time of a ring all-reduce in seconds: 2 (n - 1) messages of `bytes` / n, each with a latency.
pub fn all_reduce_seconds(n: usize, bytes: f64, latency: f64, bandwidth: f64) -> f64 {
    let messages = 2.0 * (n - 1) as f64;
    messages * (latency + bytes / n as f64 / bandwidth)
}

/// Returns the time in which rank 0 receives the values of all others, one after the other, and sends the sums back.
pub fn star_seconds(n: usize, bytes: f64, latency: f64, bandwidth: f64) -> f64 {
    2.0 * (n - 1) as f64 * (latency + bytes / bandwidth)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_r_has_the_sum_of_chunk_r() {
        for n in 1..6 {
            let mut ranks: Vec<Vec<f32>> = (0..n).map(|r| (0..3 * n).map(|i| (100 * r + i) as f32).collect()).collect();
            let expected: Vec<f32> = (0..3 * n).map(|i| ranks.iter().map(|values| values[i]).sum()).collect();
            let sent = reduce_scatter(&mut ranks);
            assert_eq!(sent, 3 * (n - 1), "{n} ranks");
            for (r, values) in ranks.iter().enumerate() {
                let own = chunk(3 * n, n, r);
                assert_eq!(values[own.clone()], expected[own], "rank {r} of {n}");
            }
        }
    }

    #[test]
    fn chunks_are_summed_in_different_orders() {
        // 2^24 + 1 is not an f32: chunk 1 begins with rank 2, which has -2^24.
        let big = 16_777_216.0;
        let mut ranks = vec![vec![big; 3], vec![1.0; 3], vec![-big; 3]];
        reduce_scatter(&mut ranks);
        // c0: (1 + -2^24) + 2^24; c1: (-2^24 + 2^24) + 1; c2: (2^24 + 1) + -2^24
        assert_eq!([ranks[0][0], ranks[1][1], ranks[2][2]].map(|sum| sum as i32), [1, 1, 0]);
    }

    #[test]
    fn times_of_d12_over_eight_gpus() {
        let bytes = 2.0 * 124_475_904.0;
        assert!((all_reduce_seconds(8, bytes, 0.0, 450e9) - 0.968e-3).abs() < 1e-6);
        assert!((star_seconds(8, bytes, 0.0, 450e9) - 7.745e-3).abs() < 1e-6);
        assert!(all_reduce_seconds(1, bytes, 1.0, 1.0) < 1e-12, "one rank sends nothing");
    }
}
