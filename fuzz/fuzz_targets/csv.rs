#![no_main]

use fuzz::targets::CSV;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&CSV), |data: &[u8]| fuzz::run(&CSV, data));
