//! Removes leftovers of tests that ended before they could clean up: a hang that the runner killed, a power cut.
//!
//! `cargo xtask test` runs it before and after the tests, so that an earlier failed run does not disturb the next one.

#![forbid(unsafe_code)]

fn main() {
    for home in shoal_tests::daemon::remove_abandoned() {
        println!("sweep: removed what an ended test had left in {}", home.display());
    }
}
