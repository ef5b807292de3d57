//! Tests of the exercise layernorm_variance.
exercises::tests! {
    layernorm_variance: {
        /// The parts (1, 1) and (5, 5) have mean 3 and squared deviations 4 + 4 + 4 + 4.
        fn two_halves() {
            let [low, high] = [1.0, 5.0].map(|mean| solution::Part { count: 2.0, mean, squares: 0.0 });
            assert_eq!(low.merge(high), solution::Part { count: 4.0, mean: 3.0, squares: 16.0 });
            assert_eq!(high.merge(low), low.merge(high));
        }

        /// Parts of different lengths have different weights.
        fn unequal_parts() {
            let part = solution::part_of(&[1.0, 2.0, 3.0]).merge(solution::part_of(&[6.0]));
            assert_eq!((part.count, part.mean), (4.0, 3.0));
            assert!((part.squares - 14.0).abs() < 1e-5, "{part:?}");
        }

        /// A lane past the end of the row has no elements.
        fn an_empty_part_changes_nothing() {
            let (empty, part) = (solution::Part::default(), solution::part_of(&[1.0, 5.0]));
            assert_eq!([empty.merge(part), part.merge(empty)], [part; 2]);
            assert_eq!(empty.merge(empty), empty);
        }

        /// Sums of squares would lose the variance of this row: its squares are near 10¹².
        fn a_large_mean_costs_no_digits() {
            let row: Vec<f32> = (0..1024).map(|i| 1e6 + (i % 2) as f32).collect();
            let halves = [&row[..512], &row[512..]].map(solution::part_of);
            let part = halves[0].merge(halves[1]);
            assert!((part.squares / part.count - 0.25).abs() < 0.02, "{part:?}");
        }
    }
}
