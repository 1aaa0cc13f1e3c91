//! See `shoal_tests::fuzzed::layer_stream`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::layer_stream(bytes));
