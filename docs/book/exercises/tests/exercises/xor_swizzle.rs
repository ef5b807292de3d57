//! Tests of the exercise `xor_swizzle`.

/// Returns the words of a chunk at place `place` of a row.
fn words_of(row: usize, place: usize) -> impl Iterator<Item = usize> {
    (0..4).map(move |word| row * 32 + place * 4 + word)
}

exercises::tests! {
    xor_swizzle: {
        /// A word that several lanes read is broadcast in one pass.
        fn passes_of_known_accesses() {
            let stride = |stride: usize| (0..32).map(|lane| lane * stride).collect::<Vec<_>>();
            for (distance, expected) in [(0, 1), (1, 1), (2, 2), (8, 8), (32, 32), (33, 1)] {
                assert_eq!(solution::passes(&stride(distance)), expected, "stride {distance}");
            }
            assert_eq!(solution::passes(&[0, 0, 32, 32, 5]), 2);
            assert_eq!(solution::passes(&[]), 0);
        }

        /// Each row stores each of its chunks at a place of its own.
        fn swizzle_is_a_permutation_of_each_row() {
            for row in 0..16 {
                let mut places: Vec<_> = (0..8).map(|chunk| solution::swizzled_chunk(row, chunk)).collect();
                places.sort_unstable();
                assert_eq!(places, [0, 1, 2, 3, 4, 5, 6, 7], "row {row}");
            }
        }

        /// Reading one chunk of 8 consecutive rows takes one pass, and so does reading a row.
        fn columns_and_rows_take_one_pass() {
            for first in [0, 8, 3] {
                for chunk in 0..8 {
                    let column = |row| words_of(row, solution::swizzled_chunk(row, chunk));
                    let words: Vec<_> = (first..first + 8).flat_map(column).collect();
                    assert_eq!(solution::passes(&words), 1, "chunk {chunk} of rows from {first} on");
                }
                let place = |chunk| words_of(first, solution::swizzled_chunk(first, chunk));
                assert_eq!(solution::passes(&(0..8).flat_map(place).collect::<Vec<_>>()), 1, "row {first}");
            }
        }

        /// The places are those that the hardware uses, so that TMA can write a tile and wgmma can read it.
        fn places_are_those_of_the_hardware() {
            for (row, chunk, place) in [(0, 3, 3), (1, 0, 1), (1, 1, 0), (3, 5, 6), (7, 7, 0), (9, 2, 3)] {
                assert_eq!(solution::swizzled_chunk(row, chunk), place, "chunk {chunk} of row {row}");
            }
        }
    }
}
