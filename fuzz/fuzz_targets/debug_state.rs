#![no_main]

use fuzz::targets::DEBUG_STATE;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&DEBUG_STATE), |data: &[u8]| fuzz::run(&DEBUG_STATE, data));
