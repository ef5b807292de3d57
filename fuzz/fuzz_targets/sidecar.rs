#![no_main]

use fuzz::targets::SIDECAR;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&SIDECAR), |data: &[u8]| fuzz::run(&SIDECAR, data));
