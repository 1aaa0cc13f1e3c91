//! See `shoal_tests::fuzzed::launcher_reply`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::launcher_reply(bytes));
