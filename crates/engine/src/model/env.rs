//! Environment variables, as callers give them.

use std::collections::BTreeMap;

use crate::error::{Must, shown};

/// A command's own variables. Together with everything else of the command they may have no more.
pub type CommandEnv = Env<{ crate::COMMAND_BYTES_MAX }>;
/// The variables of a sandbox or of a template: they are added to every command's.
pub type SandboxEnv = Env<{ crate::SANDBOX_ENV_BYTES_MAX }>;

/// Variables with names that a process can have, of at most `BYTES_MAX` bytes in all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Env<const BYTES_MAX: usize>(BTreeMap<String, String>);

impl<const BYTES_MAX: usize> Env<BYTES_MAX> {
    /// Checks names and values.
    pub fn new(pairs: BTreeMap<String, String>) -> Result<Self, Must> {
        for (name, value) in &pairs {
            if name.is_empty() || name.contains(['=', '\0']) {
                let rule = "have names that are not empty and contain neither `=` nor a NUL byte, got";
                return Err(Must::new(format!("{rule} {:?}", shown(name))));
            }
            if value.contains('\0') {
                let rule = format!("have values without NUL bytes, and that of `{}` has one", shown(name));
                return Err(Must::new(rule));
            }
        }
        let size: usize = pairs.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
        if size > BYTES_MAX {
            return Err(Must::new(format!("have at most {BYTES_MAX} bytes, got {size}")));
        }
        Ok(Self(pairs))
    }

    /// From a row: what was an environment once stays one.
    pub(crate) fn kept(pairs: BTreeMap<String, String>) -> Self {
        Self(pairs)
    }

    /// All of them.
    pub fn pairs(&self) -> &BTreeMap<String, String> {
        &self.0
    }

    /// All of them.
    pub fn into_pairs(self) -> BTreeMap<String, String> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, value: &str, rule: Option<&str>) {
        let pairs = [(name.to_owned(), value.to_owned())].into();
        let broken = Env::<32>::new(pairs).err().map(|must| must.to_string());
        assert_eq!(broken.as_deref(), rule);
    }

    #[test]
    fn names_and_values_are_what_a_process_can_have() {
        check("A", "", None);
        check("A b", "x=y\nz", None);
        let names = "have names that are not empty and contain neither `=` nor a NUL byte, got";
        check("", "x", Some(&format!("{names} \"\"")));
        check("A=B", "x", Some(&format!("{names} \"A=B\"")));
        check("A\0", "x", Some(&format!("{names} \"A\\0\"")));
        check("A", "x\0", Some("have values without NUL bytes, and that of `A` has one"));
        check("A", &"x".repeat(29), None);
        check("A", &"x".repeat(30), Some("have at most 32 bytes, got 33"));
    }
}
