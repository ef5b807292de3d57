#![no_main]

use fuzz::targets::LOG;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&LOG), |data: &[u8]| fuzz::run(&LOG, data));
