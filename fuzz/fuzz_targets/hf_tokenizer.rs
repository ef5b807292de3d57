#![no_main]

use fuzz::targets::HF_TOKENIZER;

libfuzzer_sys::fuzz_target!(init: fuzz::begin(&HF_TOKENIZER), |data: &[u8]| fuzz::run(&HF_TOKENIZER, data));
