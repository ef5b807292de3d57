#![no_main]

use fuzz::targets::MMLU;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&MMLU), |data: &[u8]| fuzz::run(&MMLU, data));
