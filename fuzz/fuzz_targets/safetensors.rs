#![no_main]

use fuzz::targets::SAFETENSORS;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&SAFETENSORS), |data: &[u8]| fuzz::run(&SAFETENSORS, data));
