#![no_main]

use fuzz::targets::TEXT;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&TEXT), |data: &[u8]| fuzz::run(&TEXT, data));
