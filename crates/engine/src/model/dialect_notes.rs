//! Notes: what a dialect keeps with a sandbox because its own protocol shows it again, and what nothing here acts upon.
//!
//! A dialect keeps no state of its own, but its clients hand it things that the engine has no word for and expect to read them back.
//! They go into the sandbox's row, one text for each dialect, and live and die with the sandbox. Unlike labels they cannot be searched
//! for, and the native API does not show them.

use std::collections::BTreeMap;

use crate::error::{EngineError, Field};

/// Notes of one sandbox, keys and values together.
pub const NOTES_BYTES_MAX: usize = 256 * 1024;

/// Texts by the name of whoever keeps them, checked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Notes(BTreeMap<String, String>);

impl Notes {
    /// Within bounds.
    pub fn new(pairs: BTreeMap<String, String>) -> Result<Self, EngineError> {
        let size: usize = pairs.iter().map(|(key, value)| key.len() + value.len()).sum();
        if size > NOTES_BYTES_MAX {
            return Err(Field::Notes.must(format!("have at most {NOTES_BYTES_MAX} bytes, got {size}")));
        }
        Ok(Self(pairs))
    }

    /// One note.
    pub fn one(key: &str, value: String) -> Result<Self, EngineError> {
        Self::new([(key.to_owned(), value)].into())
    }

    /// What is noted under a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// All of them.
    pub fn pairs(&self) -> &BTreeMap<String, String> {
        &self.0
    }

    /// With these changes.
    pub fn changed(&self, changes: &NoteChanges) -> Result<Self, EngineError> {
        let mut pairs = self.0.clone();
        for (key, value) in &changes.0 {
            match value {
                Some(value) => pairs.insert(key.clone(), value.clone()),
                None => pairs.remove(key),
            };
        }
        Self::new(pairs)
    }
}

/// Notes to set, and to remove (`None`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NoteChanges(pub BTreeMap<String, Option<String>>);

impl NoteChanges {
    /// One note that is set.
    pub fn set(key: &str, value: String) -> Self {
        Self([(key.to_owned(), Some(value))].into())
    }

    /// Whether nothing should change.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_set_removed_and_bounded() {
        let notes = Notes::one("a", "1".into()).expect("it is short");
        let both = notes.changed(&NoteChanges::set("b", "2".into())).expect("it is short");
        assert_eq!((both.get("a"), both.get("b")), (Some("1"), Some("2")));
        let one = both.changed(&NoteChanges([("a".to_owned(), None)].into())).expect("it is short");
        assert_eq!((one.get("a"), one.get("b")), (None, Some("2")));
        notes.changed(&NoteChanges::set("b", "x".repeat(NOTES_BYTES_MAX))).expect_err("it is too long");
    }
}
