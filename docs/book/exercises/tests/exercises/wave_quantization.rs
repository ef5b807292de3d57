//! Tests of the exercise `wave_quantization`.

exercises::tests! {
    wave_quantization: {
        /// The table of d48: 16,384 x 1,600 on 132 SMs.
        fn tiles_and_waves_of_d48() {
            let table = [((256, 192), 576, 5, 245_760), ((128, 192), 1152, 9, 221_184), ((128, 320), 640, 5, 204_800)];
            for ((rows, columns), tiles, waves, work) in table {
                let tile = solution::Tile { rows, columns };
                assert_eq!(solution::tiles(16_384, 1600, tile), tiles, "{tile:?}: tiles at the edge count as full ones");
                assert_eq!(solution::waves(tiles, 132), waves, "{tile:?}");
                assert_eq!(solution::work(16_384, 1600, tile, 132), work, "{tile:?}");
            }
        }

        /// One micro-batch of 1,024 tokens of d12: the projections have 48 tiles, a wave that is 36 % full.
        fn a_small_batch_fills_a_third_of_the_sms() {
            let tile = solution::Tile { rows: 128, columns: 128 };
            assert_eq!(solution::tiles(1024, 768, tile), 48);
            assert_eq!(solution::waves(48, 132), 1);
            assert!((solution::utilization(1024, 768, tile, 132) - 48.0 / 132.0).abs() < 1e-12);
        }

        /// A tile that sticks out of the output wastes work even if the wave is full.
        fn edges_waste_work() {
            let tile = solution::Tile { rows: 128, columns: 128 };
            assert!((solution::utilization(128, 129, tile, 2) - 129.0 / 256.0).abs() < 1e-12);
            assert_eq!(solution::tiles(1, 1, tile), 1);
        }

        /// One tile more than the SMs doubles the time.
        fn one_tile_too_many() {
            assert_eq!([131, 132, 133, 264, 265].map(|tiles| solution::waves(tiles, 132)), [1, 1, 2, 2, 3]);
        }

        /// The best tile depends on the shape.
        fn best_tiles() {
            let shapes = [(256, 192), (128, 192), (128, 320), (128, 128)];
            let tiles = shapes.map(|(rows, columns)| solution::Tile { rows, columns });
            assert_eq!(solution::best(16_384, 1600, &tiles, 132), tiles[2]);
            // One wave of the smallest tile.
            assert_eq!(solution::best(1024, 768, &tiles, 132), tiles[3]);
        }
    }
}
