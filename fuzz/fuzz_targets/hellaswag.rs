#![no_main]

use fuzz::targets::HELLASWAG;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&HELLASWAG), |data: &[u8]| fuzz::run(&HELLASWAG, data));
