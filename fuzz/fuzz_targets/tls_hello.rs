//! See `shoal_tests::fuzzed::tls_hello`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::tls_hello(bytes));
