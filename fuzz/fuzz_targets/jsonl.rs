#![no_main]

use fuzz::targets::JSONL;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&JSONL), |data: &[u8]| fuzz::run(&JSONL, data));
