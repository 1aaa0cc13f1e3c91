//! Parsers of untrusted bytes, with random input from a fixed seed, so that CI gives the same result twice.
//!
//! The targets in `fuzz/` run the same functions without an end.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use shoal_tests::fuzzed;

/// Inputs for each parser.
const CASES: u32 = 4_096;

/// Runs one parser on three kinds of input: noise, frames with a valid header, and text that looks like JSON.
fn feed(parser: fn(&[u8])) {
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let noise = prop::collection::vec(any::<u8>(), 0..512);
    let frame = (0u8..4, prop::collection::vec(any::<u8>(), 0..96)).prop_map(|(kind, payload)| {
        let mut frame = (payload.len() as u32).to_le_bytes().to_vec();
        frame.push(kind);
        frame.extend(payload);
        frame
    });
    let frames = prop::collection::vec(frame, 0..8).prop_map(|frames| frames.concat());
    // postcard mostly consists of small numbers: variants, lengths, flags.
    let small = prop::collection::vec(0u8..12, 0..64);
    let words = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "\"name\"",
        "\"argv\"",
        "\"script\"",
        "\"env\"",
        "\"id\"",
        "\"type\"",
        "\"start\"",
        "\"signal\"",
        "\"timeout_seconds\"",
        "\"terminal\"",
        "\"rows\"",
        "\"columns\"",
        "\"wait\"",
        "null",
        "true",
        "0",
        "-1",
        "1e400",
        "\"\\u0000\"",
        "\"\\ud800\"",
        "\"a\"",
        "99999999999999999999",
    ]);
    let text = prop::collection::vec(words, 0..48).prop_map(|words| words.concat().into_bytes());
    let bytes = prop_oneof![noise, frames, small, text];
    runner
        .run(&bytes, |bytes| {
            parser(&bytes);
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn frames_of_a_hostile_init_are_read_within_bounds() {
    feed(fuzzed::frames_from_init);
}

#[test]
fn frames_to_init_are_read_within_bounds() {
    feed(fuzzed::frames_to_init);
}

#[test]
fn requests_to_the_launcher_are_read_or_refused() {
    feed(fuzzed::launcher_request);
}

#[test]
fn replies_of_the_launcher_are_read_or_refused() {
    feed(fuzzed::launcher_reply);
}

#[test]
fn bodies_and_ids_from_the_network_are_read_or_refused() {
    feed(fuzzed::api_bodies);
}

#[test]
fn what_a_file_operation_says_is_read_or_refused() {
    feed(fuzzed::file_records);
}

#[test]
fn tar_streams_are_read_or_refused() {
    feed(fuzzed::tar_stream);
}

#[test]
fn what_is_said_of_images_is_read_or_refused() {
    feed(fuzzed::image_documents);
}

#[test]
fn layers_are_read_or_refused() {
    feed(fuzzed::layer_stream);
}

#[test]
fn dns_questions_of_a_guest_are_read_or_refused() {
    feed(fuzzed::dns_question);
}

#[test]
fn first_bytes_of_tls_clients_are_read_or_refused() {
    feed(fuzzed::tls_hello);
}

#[test]
fn heads_of_requests_are_read_or_refused() {
    feed(fuzzed::http_head);
}

#[test]
fn packets_between_daemon_and_egress_are_read_or_refused() {
    feed(fuzzed::egress_control);
}
