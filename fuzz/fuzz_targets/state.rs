#![no_main]

use fuzz::targets::STATE;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&STATE), |data: &[u8]| fuzz::run(&STATE, data));
