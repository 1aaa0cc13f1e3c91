//! Ids as the client sees them: `dbx_` for a devbox, `bpt_` for a blueprint, with the bits of our own id in hexadecimal.
//!
//! A devbox that was shut down can still be asked for, and says so; one that never was is not found. Nothing is kept of either: the id
//! of a devbox ends with a tag of this installation for its owner, so that an id with the right tag was a devbox once.

use engine::{Engine, Owner};
use wire::{BuildId, SandboxId, TemplateId};

const DEVBOX: &str = "dbx_";
const BLUEPRINT: &str = "bpt_";
/// Hexadecimal digits of an id of ours.
const BITS_DIGITS: usize = 32;
/// Bytes of a tag: enough that nobody guesses one, and short.
const TAG_BYTES: usize = 8;

/// The id of a devbox.
pub fn devbox(engine: &Engine, owner: &Owner, id: SandboxId) -> String {
    format!("{DEVBOX}{:032x}{}", id.bits(), tag(engine, owner, id))
}

fn tag(engine: &Engine, owner: &Owner, id: SandboxId) -> String {
    let message =
        [&b"runloop devbox "[..], owner.as_str().as_bytes(), b" ", &id.bits().to_be_bytes()[..]].concat();
    engine.sign(&message)[..TAG_BYTES].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An id that a client sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devbox {
    /// It was given to this owner.
    Given(SandboxId),
    /// It may be the id of a sandbox that was made otherwise.
    Perhaps(SandboxId),
}

/// Reads the id of a devbox, or of any sandbox.
pub fn read_devbox(engine: &Engine, owner: &Owner, text: &str) -> Option<Devbox> {
    let Some(rest) = text.strip_prefix(DEVBOX) else { return text.parse().ok().map(Devbox::Perhaps) };
    let (bits, rest) = (bits(rest.get(..BITS_DIGITS)?)?, &rest[BITS_DIGITS..]);
    let id = SandboxId::from_bits(bits);
    match rest == tag(engine, owner, id) {
        true => Some(Devbox::Given(id)),
        false => Some(Devbox::Perhaps(id)).filter(|_| rest.is_empty()),
    }
}

fn bits(text: &str) -> Option<u128> {
    let plain =
        text.len() == BITS_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if plain { u128::from_str_radix(text, 16).ok() } else { None }
}

/// The id of the blueprint that a build is.
pub fn of_build(id: BuildId) -> String {
    format!("{BLUEPRINT}{:032x}", id.bits())
}

/// The id of the blueprint that a template is.
pub fn of_template(id: TemplateId) -> String {
    format!("{BLUEPRINT}{:032x}", id.bits())
}
