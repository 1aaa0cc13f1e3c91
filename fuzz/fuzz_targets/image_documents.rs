//! See `shoal_tests::fuzzed::image_documents`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzzed::image_documents(bytes));
