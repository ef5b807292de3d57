//! Tests of the exercise `occupancy`.

exercises::tests! {
    occupancy: {
        /// `gelu_naive`: limited by threads.
        fn few_registers() {
            let launch = solution::Launch { threads: 256, registers: 12, shared: 0 };
            assert_eq!(solution::blocks_per_sm(launch), 8);
            assert!((solution::occupancy(launch) - 1.0).abs() < 1e-12);
        }

        /// `gemm_registers_2d` with each limit of registers.
        fn registers_limit_a_gemm() {
            for (registers, blocks) in [(192, 1), (168, 1), (128, 2), (96, 2), (64, 4)] {
                let launch = solution::Launch { threads: 256, registers, shared: 8192 };
                assert_eq!(solution::blocks_per_sm(launch), blocks, "{registers} registers");
            }
        }

        /// A warp-specialized GEMM takes all of the SM. 65,536 registers would suffice for 170 each, but 176 are allocated for 169.
        fn registers_are_allocated_per_warp_in_a_partition() {
            let launch = |registers| solution::Launch { threads: 384, registers, shared: 200 << 10 };
            assert_eq!(solution::blocks_per_sm(launch(168)), 1);
            assert_eq!(solution::blocks_per_sm(launch(169)), 0);
            // 100 are rounded up to 104: 3,328 for a warp, 4 in a partition, 16 on the SM. 65,536 / (100 · 32) would be 20 warps.
            let five_warps = solution::Launch { threads: 160, registers: 100, shared: 0 };
            assert_eq!(solution::blocks_per_sm(five_warps), 3);
        }

        /// Small blocks are limited by the number of blocks, large ones of shared memory by the reserved kilobyte.
        fn blocks_and_shared_memory() {
            let launch = |threads, shared| solution::Launch { threads, registers: 16, shared };
            assert_eq!(solution::blocks_per_sm(launch(32, 0)), 32);
            assert_eq!(solution::blocks_per_sm(launch(33, 0)), 32, "33 threads are two warps");
            assert_eq!(solution::blocks_per_sm(launch(128, 227 << 10)), 1);
            assert_eq!(solution::blocks_per_sm(launch(128, 114 << 10)), 1, "2 x 114 KiB leave no room for the reserved bytes");
            assert_eq!(solution::blocks_per_sm(launch(128, 113 << 10)), 2);
            assert_eq!(solution::blocks_per_sm(launch(128, 228 << 10)), 0);
        }

        /// More registers than these cost a block.
        fn registers_that_keep_the_blocks() {
            let launch = solution::Launch { threads: 256, registers: 0, shared: 8192 };
            assert_eq!(solution::most_registers(launch, 2), Some(128));
            assert_eq!(solution::most_registers(launch, 1), Some(255));
            assert_eq!(solution::most_registers(launch, 8), Some(32));
            assert_eq!(solution::most_registers(launch, 9), None);
            let of_384 = solution::Launch { threads: 384, registers: 0, shared: 0 };
            assert_eq!(solution::most_registers(of_384, 1), Some(168));
        }
    }
}
