#![no_main]

use fuzz::targets::HF_CONFIG;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&HF_CONFIG), |data: &[u8]| fuzz::run(&HF_CONFIG, data));
