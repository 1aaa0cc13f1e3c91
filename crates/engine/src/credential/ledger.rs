//! The hash chain of the ledger. Pure.
//!
//! The hash of a line covers the previous line's hash and every field of the line. Changing, inserting or removing a line
//! in the middle breaks the chain at that line. Removing lines at either end is detected too, because both ends are stored
//! separately. An attacker with write access to the database can compute a new chain; to detect that, store a recent hash
//! outside of this machine.

use egress::control::Used;
use sha2::{Digest, Sha256};

/// The hash before the first line.
pub(crate) const BEGINNING: [u8; 32] = [0; 32];
/// How many lines are kept.
pub(crate) const LINES_MAX: u64 = 1_000_000;

/// The hash of a line.
pub(crate) fn hash(before: &[u8; 32], number: u64, owner: &str, used: &Used) -> [u8; 32] {
    let Used { id, sandbox, at_ms, secret, secret_name, host, port, method, path, status, sent, received } =
        used;
    let mut hasher = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hasher.update((bytes.len() as u64).to_be_bytes());
        hasher.update(bytes);
    };
    part(before);
    part(&number.to_be_bytes());
    part(owner.as_bytes());
    part(&id.to_be_bytes());
    part(&sandbox.bits().to_be_bytes());
    part(&at_ms.to_be_bytes());
    part(&secret.to_be_bytes());
    for text in [secret_name.as_str(), host.as_str(), method.as_str(), path.as_str()] {
        part(text.as_bytes());
    }
    for number in [u64::from(*port), u64::from(*status), *sent, *received] {
        part(&number.to_be_bytes());
    }
    hasher.finalize().into()
}
