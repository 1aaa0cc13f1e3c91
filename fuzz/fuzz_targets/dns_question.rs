//! See `shoal_tests::fuzzed::dns_question`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::dns_question(bytes));
