//! Egress as a process of its own, on loopback: no packet leaves the machine.
//!
//! The pool of synthetic addresses is a part of 127.0.0.0/8 here, so that no route and no right is needed; a connection's local
//! address says what was meant, as it does behind TPROXY.

// The rest of the workspace knows the crate by this name.
extern crate shoal_egress as egress;

mod harness;

mod credentials;
mod daemon;
mod names;
mod policy;
mod streams;

/// Not a test: the egress of the other tests, which start this executable again.
#[test]
#[ignore = "started by the other tests"]
fn the_process() {
    if std::env::var_os(harness::IS_EGRESS).is_some() {
        egress::process::main().expect("egress ends well");
    }
}
