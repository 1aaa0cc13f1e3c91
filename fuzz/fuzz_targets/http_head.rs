//! See `shoal_tests::fuzzed::http_head`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::http_head(bytes));
