#![no_main]

use fuzz::targets::TOKENIZER_FILE;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&TOKENIZER_FILE), |data: &[u8]| fuzz::run(&TOKENIZER_FILE, data));
