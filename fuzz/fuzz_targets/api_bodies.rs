//! See `shoal_tests::fuzzed::api_bodies`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::api_bodies(bytes));
