//! Sandbox ids as E2B spells them, and the tokens that open one sandbox.
//!
//! Clients put the id into host names, so it is made of digits and small letters. A token names the key that it was made
//! for and proves that this installation made it, for this sandbox; it ends with the key, and nothing is kept of it.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use engine::{Engine, Key};
use wire::SandboxId;

use crate::dialects::common::spelling;

/// Enough digits for 128 bits.
const ID_DIGITS: usize = 25;

/// A sandbox's id as clients see it.
pub fn id(id: SandboxId) -> String {
    spelling::write(id.bits(), spelling::SMALL, ID_DIGITS)
}

/// The sandbox that a client names.
pub fn parse_id(text: &str) -> Option<SandboxId> {
    spelling::read(text, spelling::SMALL, ID_DIGITS).map(SandboxId::from_bits)
}

/// What a token proves. The time tells a key from one that replaced it under its id.
fn claim(key: &Key, id: SandboxId) -> Vec<u8> {
    let made = key.created_at.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_millis();
    format!("e2b access {id} {made} {}", key.id).into_bytes()
}

/// The token that opens a sandbox for a key.
pub fn token(engine: &Engine, key: &Key, id: SandboxId) -> String {
    format!("{}.{}", key.id, BASE64_URL_SAFE_NO_PAD.encode(engine.sign(&claim(key, id))))
}

/// The key that a token was made for, if the token opens this sandbox.
pub fn key(engine: &Engine, token: &str, id: SandboxId) -> Option<Key> {
    let (key, tag) = token.split_once('.')?;
    let key = engine.key(key).filter(|key| !key.metrics_only)?;
    let tag = BASE64_URL_SAFE_NO_PAD.decode(tag).ok()?;
    engine.has_signed(&claim(&key, id), &tag).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_a_label_of_a_host_name() {
        let sandbox = SandboxId::from_random(u128::MAX / 3);
        let text = id(sandbox);
        assert!(text.bytes().all(|byte| byte.is_ascii_digit() || byte.is_ascii_lowercase()), "{text}");
        assert_eq!(parse_id(&text), Some(sandbox));
        for wrong in ["", "debug_sandbox_id", &sandbox.to_string(), &text.to_uppercase(), &text[1..]] {
            assert_eq!(parse_id(wrong), None, "{wrong}");
        }
    }
}
