//! libFuzzer's entry point for the target that `FUZZ_TARGET` names.
#![no_main]

libfuzzer_sys::fuzz_target!(init: fuzz::begin(), |data: &[u8]| fuzz::run(data));
