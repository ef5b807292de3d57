//! Tests of the exercise `ring_all_reduce`.

exercises::tests! {
    ring_all_reduce: {
        /// Chunks cover all elements once and in order. The first ones are the larger ones.
        fn chunks_cover_all_elements() {
            for (len, n) in [(12, 4), (10, 4), (3, 4), (0, 3), (7, 1)] {
                let chunks: Vec<_> = (0..n).map(|c| solution::chunk(len, n, c)).collect();
                let all: Vec<usize> = chunks.iter().cloned().flatten().collect();
                assert_eq!(all, (0..len).collect::<Vec<_>>(), "{len} elements in {n} chunks: {chunks:?}");
                assert_eq!(chunks[0].len(), len.div_ceil(n));
            }
        }

        /// Every rank has the sums, for any number of ranks and elements.
        fn sums_are_on_all_ranks() {
            for n in 1..6 {
                for len in [0, 1, n, 3 * n, 3 * n + 1] {
                    // Small integers, whose sums are exact.
                    let values = |rank: usize| (0..len).map(|i| (rank * 100 + i) as f32).collect::<Vec<_>>();
                    let mut ranks: Vec<_> = (0..n).map(values).collect();
                    let expected: Vec<f32> = (0..len).map(|i| ranks.iter().map(|values| values[i]).sum()).collect();
                    solution::all_reduce(&mut ranks);
                    assert!(ranks.iter().all(|values| *values == expected), "{n} ranks, {len} elements: {ranks:?}");
                }
            }
        }

        /// The all-gather copies. A rank that adds its own values again, or adds in another order, has other bits.
        fn all_ranks_have_the_same_bits() {
            let value = |rank: i32, i: i32| ((rank * 8 + i) as f32 * 1.37).sin() * 1e4_f32.powi(rank);
            let mut ranks: Vec<Vec<f32>> = (0..4).map(|rank| (0..8).map(|i| value(rank, i)).collect()).collect();
            solution::all_reduce(&mut ranks);
            let bits = |rank: usize| ranks[rank].iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!((1..4).all(|rank| bits(rank) == bits(0)), "{ranks:?}");
        }

        /// Each rank sends 2 (n - 1) / n of the elements, whatever the number of ranks.
        fn each_rank_sends_less_than_twice_the_elements() {
            for n in [2, 3, 4, 6] {
                let len = 12;
                let mut ranks = vec![vec![1.0; len]; n];
                assert_eq!(solution::all_reduce(&mut ranks), vec![2 * (n - 1) * len / n; n], "{n} ranks");
            }
        }
    }
}
