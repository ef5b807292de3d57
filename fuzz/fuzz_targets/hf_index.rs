#![no_main]

use fuzz::targets::HF_INDEX;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&HF_INDEX), |data: &[u8]| fuzz::run(&HF_INDEX, data));
