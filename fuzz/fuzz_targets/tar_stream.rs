//! See `shoal_tests::fuzzed::tar_stream`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::tar_stream(bytes));
