//! Tests of the exercise `model_flops`.

exercises::tests! {
    model_flops: {
        /// The numbers of parameters are those that `train` prints, with the padded vocabulary.
        fn parameters_are_those_of_the_program() {
            for ((layers, channels), expected) in
                [(12, 768), (24, 1024), (48, 1600)].into_iter().zip([124_475_904, 354_871_296, 1_557_686_400])
            {
                let shape = solution::Shape { layers, channels, vocab: 50_257, positions: 1024 };
                assert_eq!(solution::parameters(shape), expected, "{shape:?}");
            }
        }

        /// FLOPs count wte once, and half of the scores, because attention is causal.
        fn flops_are_those_of_the_program() {
            let shape = solution::Shape { layers: 12, channels: 768, vocab: 50_257, positions: 1024 };
            assert_eq!(solution::flops_per_token(shape, 1024), 803_478_528);
            // A shorter sequence has the same parameters: wpe keeps its rows.
            assert_eq!(solution::flops_per_token(shape, 512), 803_478_528 - 6 * 12 * 768 * 512);
        }

        /// The head is more than a quarter of a small model, and a twentieth of a large one.
        fn the_head_weighs_less_in_a_larger_model() {
            let d12 = solution::Shape { layers: 12, channels: 768, vocab: 50_257, positions: 1024 };
            let d48 = solution::Shape { layers: 48, channels: 1600, ..d12 };
            assert!((solution::head_share(d12, 1024) - 0.288_5).abs() < 1e-4);
            assert!((solution::head_share(d48, 1024) - 0.049_2).abs() < 1e-4);
        }

        /// Attention catches up with the matmuls at T = 12 C.
        fn attention_catches_up_with_long_sequences() {
            let shape = solution::Shape { layers: 24, channels: 1024, vocab: 50_257, positions: 65_536 };
            assert_eq!(solution::balanced_length(shape), 12_288);
        }

        /// The utilization of d12 on one H200, measured at 666,600 tokens/s.
        fn mfu_of_d12() {
            let shape = solution::Shape { layers: 12, channels: 768, vocab: 50_257, positions: 1024 };
            let mfu = solution::mfu(shape, 1024, 666_600.0, 528.0 * 1024.0 * 1.83e9);
            assert!((mfu - 0.541).abs() < 5e-4, "{mfu}");
        }
    }
}
