//! See `shoal_tests::fuzzed::launcher_request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::launcher_request(bytes));
