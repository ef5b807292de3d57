//! Tests of the exercise `activation_memory`.

exercises::tests! {
    activation_memory: {
        /// One layer without recomputation: 16 units of 2 · 3 · 5 · 8 bytes, four vectors of 15 f32, and lse of 2 · 15 f32.
        fn one_small_layer() {
            let sizes = solution::Sizes { layers: 1, channels: 8, heads: 2, batch: 3, tokens: 5 };
            assert_eq!(solution::activation_bytes(sizes, 0), 16 * 240 + 4 * 60 + 120);
        }

        /// The plans of d12 with B = 64, in units of 96 MiB and 1 MiB.
        fn levels_of_d12() {
            let sizes = solution::Sizes { layers: 12, channels: 768, heads: 12, batch: 64, tokens: 1024 };
            let mib = |level| solution::activation_bytes(sizes, level) >> 20;
            assert_eq!(mib(0), 12 * (16 * 96 + 4));
            assert_eq!(mib(0) - mib(1), 11 * 4 * 96, "level 1 needs the output of GELU of one layer");
            assert_eq!(mib(1) - mib(2), 12 * 2 * 96, "level 2 uses a buffer for norms that exists anyway");
            assert_eq!(mib(2) - mib(3), 11 * 868, "level 3 keeps residual3 of all layers, and one layer's buffers");
        }

        /// A model with one layer gains nothing from levels that recompute into the buffers of one layer.
        fn one_layer_gains_from_norms_only() {
            let sizes = solution::Sizes { layers: 1, channels: 64, heads: 2, batch: 2, tokens: 16 };
            let bytes = |level| solution::activation_bytes(sizes, level);
            assert_eq!(bytes(0), bytes(1));
            assert_eq!(bytes(1) - bytes(2), 2 * 2 * 2 * 16 * 64);
            assert_eq!(bytes(2), bytes(3));
        }

        /// Memory that the state leaves free is divided by the activations of one sequence.
        fn batches_that_fit() {
            let sizes = solution::Sizes { layers: 12, channels: 768, heads: 12, batch: 64, tokens: 1024 };
            let largest = |level, memory: usize| solution::largest_batch(sizes, level, 124_475_904, 16, memory);
            assert_eq!(largest(0, 80 << 30), 277);
            assert_eq!(largest(3, 80 << 30), 2130);
            assert_eq!(largest(0, 1 << 30), 0, "the state alone does not fit");
        }
    }
}
