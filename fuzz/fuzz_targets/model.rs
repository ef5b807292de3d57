#![no_main]

use fuzz::targets::MODEL;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&MODEL), |data: &[u8]| fuzz::run(&MODEL, data));
