//! See `shoal_tests::fuzzed::file_records`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::file_records(bytes));
