//! Ids as Modal spells them, and what is kept in them: apps, images and secrets have no rows, their ids say what they are.
//!
//! ```text
//! sb-<22 letters>     a sandbox of the older calls    ta-<22 letters>     its task
//! sb-<22 letters>-v2  a sandbox of the newer calls    ta-<22 letters>V    its task
//! ap-, im-, st-       a name, an image, variables, with a proof that this installation made the id
//! ```
//!
//! Clients choose between older and newer calls by the shape of a sandbox's id; both are answered for both.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use engine::{Engine, Key, TAG_LENGTH};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wire::SandboxId;

use super::grpc::Status;
use crate::dialects::common::spelling;

/// Enough letters for 128 bits, and as many as the vendor's ids have.
const ID_LETTERS: usize = 22;
const NEWER: &str = "-v2";

/// Which calls a client makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `SandboxCreate` and its kin.
    Older,
    /// `SandboxCreateV2` and its kin.
    Newer,
}

fn letters(id: SandboxId) -> String {
    spelling::write(id.bits(), spelling::LETTERS, ID_LETTERS)
}

fn parsed(text: &str) -> Option<SandboxId> {
    spelling::read(text, spelling::LETTERS, ID_LETTERS).map(SandboxId::from_bits)
}

/// A sandbox's id.
pub fn sandbox(id: SandboxId, family: Family) -> String {
    match family {
        Family::Older => format!("sb-{}", letters(id)),
        Family::Newer => format!("sb-{}{NEWER}", letters(id)),
    }
}

/// The sandbox of an id of either shape.
pub fn parse_sandbox(text: &str) -> Result<(SandboxId, Family), Status> {
    let found = text.strip_prefix("sb-").and_then(|rest| match rest.strip_suffix(NEWER) {
        Some(rest) => Some((parsed(rest)?, Family::Newer)),
        None => Some((parsed(rest)?, Family::Older)),
    });
    found.ok_or_else(|| Status::not_found(format!("Sandbox with ID {} not found", shown(text))))
}

/// The id of a sandbox's only task.
pub fn task(id: SandboxId, family: Family) -> String {
    match family {
        Family::Older => format!("ta-{}", letters(id)),
        Family::Newer => format!("ta-{}V", letters(id)),
    }
}

/// The sandbox of a task.
pub fn parse_task(text: &str) -> Result<SandboxId, Status> {
    let rest = text.strip_prefix("ta-").unwrap_or_default();
    let found = parsed(rest).or_else(|| parsed(rest.strip_suffix('V')?));
    found.ok_or_else(|| Status::not_found(format!("Task with ID {} not found", shown(text))))
}

/// The beginning of what a caller said, for a message.
pub fn shown(text: &str) -> String {
    const SHOWN_MAX: usize = 64;
    text.chars().take(SHOWN_MAX).collect()
}

/// An app is a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppId {
    /// Its name.
    pub name: String,
}

/// What sandboxes are made from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageId {
    /// A reference, or none for the built-in template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Variables that layers add.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// The last working directory that a layer sets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
}

/// Variables that a client sends ahead of the sandbox that gets them. They are in the id alone, which only the client has.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SecretId {
    /// By their names.
    pub env: BTreeMap<String, String>,
}

/// What an id is about.
pub trait Kept: Serialize + DeserializeOwned {
    /// What its ids begin with.
    const PREFIX: &'static str;
    /// What it is called.
    const WORD: &'static str;
}

impl Kept for AppId {
    const PREFIX: &'static str = "ap-";
    const WORD: &'static str = "App";
}

impl Kept for ImageId {
    const PREFIX: &'static str = "im-";
    const WORD: &'static str = "Image";
}

impl Kept for SecretId {
    const PREFIX: &'static str = "st-";
    const WORD: &'static str = "Secret";
}

/// The id that says something, for one owner.
pub fn keep<T: Kept>(engine: &Engine, key: &Key, value: &T) -> String {
    let said = serde_json::to_vec(value).expect("what is kept is made of types that JSON can write");
    let tag = engine.sign(&claim::<T>(key, &said));
    format!("{}{}", T::PREFIX, BASE64_URL_SAFE_NO_PAD.encode([&tag[..], &said].concat()))
}

/// What an id says, if it was made here for this owner.
pub fn kept<T: Kept>(engine: &Engine, key: &Key, id: &str) -> Result<T, Status> {
    let read = || {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(id.strip_prefix(T::PREFIX)?).ok()?;
        let (tag, said) = bytes.split_at_checked(TAG_LENGTH)?;
        engine.has_signed(&claim::<T>(key, said), tag).then(|| serde_json::from_slice(said).ok())?
    };
    read().ok_or_else(|| Status::not_found(format!("{} with ID {} not found", T::WORD, shown(id))))
}

fn claim<T: Kept>(key: &Key, said: &[u8]) -> Vec<u8> {
    let words = format!("modal {} {} ", T::PREFIX, key.owner);
    [words.as_bytes(), said].concat()
}

/// What the token of a sandbox's commands proves. The time tells a key from one that replaced it under its id.
fn token_claim(key: &Key, id: SandboxId) -> Vec<u8> {
    let made = key.created_at.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_millis();
    format!("modal commands {id} {made} {}", key.id).into_bytes()
}

/// The token that runs commands in a sandbox. Without dots: clients ask for another when it is refused.
pub fn token(engine: &Engine, key: &Key, id: SandboxId) -> String {
    format!(
        "{}:{}:{}",
        key.id,
        letters(id),
        BASE64_URL_SAFE_NO_PAD.encode(engine.sign(&token_claim(key, id)))
    )
}

/// The key that a token was made for, and the sandbox that it opens.
pub fn key_of(engine: &Engine, token: &str) -> Option<(Key, SandboxId)> {
    let mut parts = token.splitn(3, ':');
    let key = engine.key(parts.next()?).filter(|key| !key.metrics_only)?;
    let id = parsed(parts.next()?)?;
    let tag = BASE64_URL_SAFE_NO_PAD.decode(parts.next()?).ok()?;
    engine.has_signed(&token_claim(&key, id), &tag).then_some((key, id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_the_shape_of_its_family() {
        let id = SandboxId::from_random(u128::MAX / 7);
        for family in [Family::Older, Family::Newer] {
            let text = sandbox(id, family);
            assert_eq!(parse_sandbox(&text).expect("it is an id"), (id, family));
            let plain =
                text.len() == "sb-".len() + 22 && text[3..].bytes().all(|b| b.is_ascii_alphanumeric());
            assert_eq!(plain, family == Family::Older, "{text}");
            assert_eq!(parse_task(&task(id, family)).expect("it is an id"), id);
        }
        for wrong in ["", "sb-", "sb-x", "ta-", &id.to_string(), &format!("sb-{}", "z".repeat(22))] {
            parse_sandbox(wrong).expect_err(wrong);
            parse_task(wrong).expect_err(wrong);
        }
    }
}
