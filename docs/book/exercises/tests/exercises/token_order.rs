//! Tests of the exercise token_order.
exercises::tests! {
    token_order: {
        /// The example of the chapter.
        fn example_by_hand() {
            assert_eq!(solution::run_starts(&[2, 0, 2, 1, 2, 0], 4), [0, 2, 3, 6, 6]);
            assert_eq!(solution::token_order(&[2, 0, 2, 1, 2, 0], 4), [1, 5, 3, 0, 2, 4]);
        }

        /// Positions of one token ascend: any other order would change the bits of the sum.
        fn sort_is_stable() {
            let tokens: Vec<u32> = (0..5000u32).map(|i| i.wrapping_mul(2_654_435_761) >> 16 & 63).collect();
            let mut expected: Vec<u32> = (0..5000).collect();
            expected.sort_by_key(|&position| tokens[position as usize]);
            assert_eq!(solution::token_order(&tokens, 64), expected);
        }

        /// A batch of one token is one run, and the other tokens have empty runs.
        fn one_token() {
            assert_eq!(solution::run_starts(&[1; 4], 3), [0, 0, 4, 4]);
            assert_eq!(solution::token_order(&[1; 4], 3), [0, 1, 2, 3]);
        }

        /// An empty batch has no positions.
        fn no_tokens() {
            assert_eq!(solution::run_starts(&[], 2), [0, 0, 0]);
            assert!(solution::token_order(&[], 2).is_empty());
        }
    }
}
