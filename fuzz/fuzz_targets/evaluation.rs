#![no_main]

use fuzz::targets::EVALUATION;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&EVALUATION), |data: &[u8]| fuzz::run(&EVALUATION, data));
