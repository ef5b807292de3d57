#![no_main]

use fuzz::targets::TOKENIZER;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&TOKENIZER), |data: &[u8]| fuzz::run(&TOKENIZER, data));
