//! Tests of the exercise `scan_race`.

exercises::tests! {
    scan_race: {
        /// The emulator finds no fault, and the sums are right.
        fn one_block_has_no_race() {
            let values: Vec<u32> = (0..128).map(|i| i * i % 31).collect();
            let mut memory = cuda_std::emulate::Memory::new();
            let (inp, out) = (memory.input("inp", &values), memory.output("out", 128));
            let mut layout = cuda_std::shared::Layout::new();
            solution::shared(&mut layout);
            solution::running_sums(out, inp, 128).emulate_checked(&mut memory, [1, 1, 1], layout.bytes()).unwrap();
            let mut sum = 0;
            let expected: Vec<u32> = values.iter().map(|value| { sum += value; sum }).collect();
            assert_eq!(memory.read(out), expected);
        }

        /// Threads without an element reach the barriers, too: the last block has 72 elements.
        fn a_partial_block_has_no_deadlock() {
            let values: Vec<u32> = (0..200).map(|i| 7 * i % 13).collect();
            let mut memory = cuda_std::emulate::Memory::new();
            let (inp, out) = (memory.input("inp", &values), memory.output("out", 200));
            let mut layout = cuda_std::shared::Layout::new();
            solution::shared(&mut layout);
            solution::running_sums(out, inp, 200).emulate_checked(&mut memory, [2, 1, 1], layout.bytes()).unwrap();
            let sums = |block: &[u32]| (0..block.len()).map(|i| block[..=i].iter().sum()).collect::<Vec<u32>>();
            assert_eq!(memory.read(out), [sums(&values[..128]), sums(&values[128..])].concat());
        }

        /// The kernel still has one array of 128 elements.
        fn shared_memory_is_one_array() {
            let mut layout = cuda_std::shared::Layout::new();
            solution::shared(&mut layout);
            assert_eq!(layout.bytes(), 4 * solution::THREADS);
            let mut memory = cuda_std::emulate::Memory::new();
            let (inp, out) = (memory.input("inp", &[5]), memory.output("out", 1));
            solution::running_sums(out, inp, 1).emulate_checked(&mut memory, [1, 1, 1], layout.bytes()).unwrap();
            assert_eq!(memory.read(out), [5]);
        }
    }
}
