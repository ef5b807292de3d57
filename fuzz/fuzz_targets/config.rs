#![no_main]

use fuzz::targets::CONFIG;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&CONFIG), |data: &[u8]| fuzz::run(&CONFIG, data));
