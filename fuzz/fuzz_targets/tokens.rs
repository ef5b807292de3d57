#![no_main]

use fuzz::targets::TOKENS;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&TOKENS), |data: &[u8]| fuzz::run(&TOKENS, data));
