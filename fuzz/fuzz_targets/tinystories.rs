#![no_main]

use fuzz::targets::TINYSTORIES;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&TINYSTORIES), |data: &[u8]| fuzz::run(&TINYSTORIES, data));
