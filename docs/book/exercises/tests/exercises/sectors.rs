//! Tests of the exercise sectors.
exercises::tests! {
    sectors: {
        /// Neighboring lanes read neighboring elements of 2, 4 and 16 bytes.
        fn coalesced_loads_touch_each_sector_once() {
            for bytes in [2, 4, 16] {
                let addresses = std::array::from_fn(|lane| 4096 + lane as u64 * bytes);
                assert_eq!(solution::sectors(&addresses, bytes), bytes as usize);
            }
        }

        /// The naive LayerNorm: lanes read bf16 elements that are a row of 768 apart.
        fn strided_loads_touch_a_sector_per_lane() {
            assert_eq!(solution::sectors(&std::array::from_fn(|lane| lane as u64 * 1536), 2), 32);
        }

        /// A coalesced load that begins in the middle of a sector needs one more.
        fn misaligned_load_touches_one_more() {
            assert_eq!(solution::sectors(&std::array::from_fn(|lane| 4112 + lane as u64 * 4), 4), 5);
            assert_eq!(solution::sectors(&[30; 32], 4), 2);
        }

        /// The order of the lanes does not matter, and equal addresses count once.
        fn order_and_repetition_do_not_matter() {
            assert_eq!(solution::sectors(&std::array::from_fn(|lane| (lane as u64 * 7 % 32) * 4), 4), 4);
            assert_eq!(solution::sectors(&std::array::from_fn(|lane| (lane as u64 % 2) * 4096), 4), 2);
        }
    }
}
