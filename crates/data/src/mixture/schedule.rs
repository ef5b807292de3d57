//! The source of each row.

/// Chooses the source of the next row from the weights of the sources and the rows that each has had. Returns `None` if no weight is
/// above 0.
///
/// After any number of rows, the rows of a source differ from its share by less than 1: this is the algorithm of R. Tijdeman, "The
/// chairman assignment problem", Discrete Mathematics 32 (1980). Among the sources that are far enough behind their shares, it
/// chooses the one that would be the first to fall too far behind.
pub fn next_source(weights: &[f64], rows: &[u64]) -> Option<usize> {
    let total: f64 = weights.iter().sum();
    let sources = weights.iter().filter(|&&weight| weight > 0.0).count();
    if sources < 2 {
        return weights.iter().position(|&weight| weight > 0.0);
    }
    let slack = 1.0 / (2 * sources - 2) as f64;
    let next = (rows.iter().sum::<u64>() + 1) as f64;
    let mut chosen = None;
    for (i, (&weight, &rows)) in weights.iter().zip(rows).enumerate().filter(|(_, (weight, _))| **weight > 0.0) {
        let share = weight / total;
        let behind = share * next - rows as f64;
        let rows_left = (1.0 - slack - behind) / share;
        // Sources that are not far enough behind are a fallback in case of rounding errors.
        let key = (behind < slack, rows_left, i);
        if chosen.is_none_or(|chosen| key < chosen) {
            chosen = Some(key);
        }
    }
    chosen.map(|(_, _, source)| source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the rows of each source after each of the first `n` rows.
    fn counts(weights: &[f64], n: usize) -> Vec<Vec<u64>> {
        let mut counts = vec![vec![0; weights.len()]];
        for _ in 0..n {
            let mut next = counts[counts.len() - 1].clone();
            let source = next_source(weights, &next).unwrap();
            next[source] += 1;
            counts.push(next);
        }
        counts
    }

    proptest! {
        #[test]
        fn every_prefix_is_within_a_row_of_the_weights(
            // Powers of two: many sources fall behind at the same time. Choosing the one that is furthest behind fails for them.
            weights in prop::collection::vec(
                prop_oneof![1 => Just(0.0), 4 => 1e-3..1.0, 8 => (0..9).prop_map(|n| 0.5f64.powi(n))],
                1..24,
            ),
        ) {
            let total: f64 = weights.iter().sum();
            prop_assume!(total > 0.0);
            for (n, counts) in counts(&weights, 3000).iter().enumerate() {
                prop_assert_eq!(counts.iter().sum::<u64>(), n as u64);
                for (weight, count) in weights.iter().zip(counts) {
                    let difference = *count as f64 - weight / total * n as f64;
                    prop_assert!(difference.abs() < 1.0, "{} rows, weight {}: {}", n, weight, difference);
                }
            }
        }
    }

    /// A window of a million tokens consists of 1953 rows of 512 tokens, of which 0.1 % are 1.95 rows.
    #[test]
    fn shares_of_a_million_tokens_are_within_a_tenth_of_a_percent() {
        for weights in [vec![0.5, 0.5], vec![0.7, 0.2, 0.1], vec![0.9, 0.05, 0.03, 0.015, 0.005], vec![1.0; 20]] {
            for t in [64, 512] {
                let window = 1_000_000 / t;
                let counts = counts(&weights, 4 * window);
                let total: f64 = weights.iter().sum();
                for (before, after) in counts.iter().zip(&counts[window..]) {
                    for (i, weight) in weights.iter().enumerate() {
                        let share = (after[i] - before[i]) as f64 / window as f64;
                        assert!((share - weight / total).abs() <= 1e-3, "{weights:?}, T {t}: {share}");
                    }
                }
            }
        }
    }

    #[test]
    fn sources_without_weight_have_no_rows() {
        assert_eq!(next_source(&[0.0, 0.0], &[0, 0]), None);
        assert_eq!(next_source(&[0.0, 2.0], &[0, 10]), Some(1));
        assert_eq!(counts(&[0.0, 1.0, 1.0], 10)[10], [0, 5, 5]);
    }
}
