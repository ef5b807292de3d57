//! Tests of the exercise `shard_boundaries`.

exercises::tests! {
    shard_boundaries: {
        /// A layer of d12 on eight ranks has 256 elements of padding.
        fn padding_of_a_layer_of_d12() {
            assert_eq!(solution::shard_elements(7_087_872, 8), 886_016);
            assert_eq!(8 * solution::shard_elements(7_087_872, 8) - 7_087_872, 256);
            // A single rank, and units that need no padding.
            assert_eq!(solution::shard_elements(640, 1), 640);
            assert_eq!(solution::shard_elements(640, 5), 128);
            assert_eq!(solution::shard_elements(640, 10), 64);
        }

        /// All shards have the same length, are aligned, follow each other, and cover the unit.
        fn shards_are_equal_and_aligned() {
            for elements in [1, 63, 64, 65, 1000, 7_087_872] {
                for n in [1, 2, 3, 7, 8] {
                    let shards: Vec<_> = (0..n).map(|rank| solution::shard(elements, rank, n)).collect();
                    assert_eq!(shards[0].start, 0);
                    assert!(shards.windows(2).all(|pair| pair[0].end == pair[1].start), "{shards:?}");
                    assert!(shards.iter().all(|shard| shard.start % solution::ALIGNMENT == 0), "{shards:?}");
                    assert!(shards.iter().all(|shard| shard.len() == shards[0].len()), "{shards:?}");
                    assert!(shards[n - 1].end >= elements, "{elements} elements, {n} ranks: {shards:?}");
                }
            }
        }

        /// The ranks together have each element of each tensor once, where both ranges name the same element.
        fn every_element_has_one_rank() {
            let lengths = [192, 64, 448, 1, 300, 7];
            let elements: usize = lengths.iter().sum();
            for n in [1, 2, 3, 5, 8] {
                let mut start = 0;
                for length in lengths {
                    let tensor = start..start + length;
                    start += length;
                    let mut owners = vec![0; length];
                    for rank in 0..n {
                        let shard = solution::shard(elements, rank, n);
                        let Some(held) = solution::held(&tensor, &shard) else { continue };
                        assert!(!held.of_tensor.is_empty());
                        assert_eq!(tensor.start + held.of_tensor.start, shard.start + held.of_shard.start);
                        assert_eq!(held.of_tensor.len(), held.of_shard.len());
                        held.of_tensor.for_each(|i| owners[i] += 1);
                    }
                    assert!(owners.iter().all(|&owners| owners == 1), "{n} ranks, {tensor:?}: {owners:?}");
                }
            }
        }

        /// A tensor beside a shard is not in it, even if they touch.
        fn a_tensor_may_be_in_no_shard() {
            assert_eq!(solution::held(&(0..64), &(64..128)), None);
            assert_eq!(solution::held(&(128..200), &(64..128)), None);
            let middle = solution::held(&(10..500), &(64..128)).unwrap();
            assert_eq!((middle.of_tensor, middle.of_shard), (54..118, 0..64));
        }
    }
}
