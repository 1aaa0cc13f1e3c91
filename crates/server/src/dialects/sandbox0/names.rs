//! Ids as Sandbox0 spells them.
//!
//! A sandbox is `sb_` and the bits of our own id in hexadecimal. The id of a context is the id of its command and says what the context
//! is, since a command has no other place for that: `ctx-…` is a program, `repl-ALIAS-…` an interpreter. `…:2` is the third run of a
//! context that was restarted; clients see the id without it.

use engine::EngineError;
use wire::{CommandId, SandboxId};

const SANDBOX: &str = "sb_";
const PROGRAM: &str = "ctx-";
const INTERPRETER: &str = "repl-";
/// Between the id that clients see and the number of the run.
const RUN: char = ':';
/// Hexadecimal digits of 128 bits.
const DIGITS: usize = 32;
/// The longest name of an interpreter.
pub const ALIAS_MAX: usize = 40;

/// A sandbox's id as clients see it.
pub fn sandbox(id: SandboxId) -> String {
    format!("{SANDBOX}{:032x}", id.bits())
}

/// The sandbox that a client names, in this spelling or in our own.
pub fn parse_sandbox(text: &str) -> Option<SandboxId> {
    let Some(digits) = text.strip_prefix(SANDBOX) else { return text.parse().ok() };
    let plain = digits.len() == DIGITS && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if plain { u128::from_str_radix(digits, 16).ok().map(SandboxId::from_bits) } else { None }
}

/// What runs in a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A program.
    Cmd,
    /// An interpreter, by its name.
    Repl(String),
}

/// A new id for a context.
pub fn new_context(kind: &Kind) -> Result<CommandId, EngineError> {
    let bits = |_| EngineError::Stopping;
    let (high, low) = (getrandom::u64().map_err(bits)?, getrandom::u64().map_err(bits)?);
    let text = match kind {
        Kind::Cmd => format!("{PROGRAM}{high:016x}{low:016x}"),
        Kind::Repl(alias) => format!("{INTERPRETER}{alias}-{high:016x}{low:016x}"),
    };
    text.parse().map_err(|_| EngineError::CommandNotFound { id: text })
}

/// What a command is. Commands of other clients are programs.
pub fn kind(id: &str) -> Kind {
    let named = context(id).strip_prefix(INTERPRETER).and_then(|rest| rest.rsplit_once('-'));
    named.map_or(Kind::Cmd, |(alias, _)| Kind::Repl(alias.to_owned()))
}

/// The id that clients see, without the number of the run.
pub fn context(id: &str) -> &str {
    match id.rsplit_once(RUN) {
        Some((context, run)) if is_ours(context) && run.bytes().all(|byte| byte.is_ascii_digit()) => context,
        _ => id,
    }
}

/// The command of a context's run; the first has no number.
pub fn run(context: &str, number: u32) -> Option<CommandId> {
    match number {
        0 => context.parse().ok(),
        _ if is_ours(context) => format!("{context}{RUN}{number}").parse().ok(),
        _ => None,
    }
}

/// Whether a context was made here, and may have been restarted.
fn is_ours(context: &str) -> bool {
    context.starts_with(PROGRAM) || context.starts_with(INTERPRETER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_has_two_spellings() {
        let id = SandboxId::from_random(u128::MAX / 3);
        assert_eq!(parse_sandbox(&sandbox(id)), Some(id));
        assert_eq!(parse_sandbox(&id.to_string()), Some(id));
        for wrong in ["", "sb_", "sb_abc123", &sandbox(id).to_uppercase(), &format!("{}0", sandbox(id))] {
            assert_eq!(parse_sandbox(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_id_says_what_the_context_is() {
        let repl = Kind::Repl("python".into());
        for what in [Kind::Cmd, repl.clone()] {
            let id = new_context(&what).expect("there are random bits");
            assert_eq!(kind(id.as_str()), what);
            let second = run(id.as_str(), 2).expect("it is short");
            assert_eq!((kind(second.as_str()), context(second.as_str())), (what, id.as_str()));
        }
        let theirs = "3f2b8c1e-90ab-4def-8123-456789abcdef";
        assert_eq!((kind(theirs), context(theirs)), (Kind::Cmd, theirs));
        assert_eq!((context("build:42"), run("build:42", 1)), ("build:42", None));
        assert!("x".repeat(ALIAS_MAX).len() + INTERPRETER.len() + DIGITS + 12 < CommandId::LENGTH_MAX);
    }
}
