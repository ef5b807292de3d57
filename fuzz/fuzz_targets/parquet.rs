#![no_main]

use fuzz::targets::PARQUET;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&PARQUET), |data: &[u8]| fuzz::run(&PARQUET, data));
