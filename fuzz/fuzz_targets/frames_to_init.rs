//! See `shoal_tests::fuzzed::frames_to_init`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::frames_to_init(bytes));
