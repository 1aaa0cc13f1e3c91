//! See `shoal_tests::fuzzed::egress_control`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::egress_control(bytes));
