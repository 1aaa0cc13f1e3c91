//! Labels: free pairs of key and value on a sandbox, and how sandboxes are found by them. Pure.
//!
//! A key has neither `=` nor `!`, so that a selector can be read in one way only. Everything else is free text.

use std::collections::BTreeMap;

use crate::error::{EngineError, Field, Must, shown};

/// Labels of one sandbox at most.
pub const LABELS_MAX: usize = 64;
/// Bytes of a key at most.
pub const LABEL_KEY_MAX: usize = 128;
/// Bytes of a value at most: room for a URL. All labels of a sandbox are less than its environment may be.
pub const LABEL_VALUE_MAX: usize = 1024;
/// Selectors in one question at most.
pub const SELECTORS_MAX: usize = 32;

/// The labels of a sandbox, checked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Labels(BTreeMap<String, String>);

impl Labels {
    /// Labels that are within their bounds.
    pub fn new(pairs: BTreeMap<String, String>) -> Result<Self, EngineError> {
        for (key, value) in &pairs {
            check_key(key).map_err(|must| must.of(Field::Labels))?;
            check_value(key, value)?;
        }
        if pairs.len() > LABELS_MAX {
            return Err(invalid(format!("have at most {LABELS_MAX} entries, got {}", pairs.len())));
        }
        Ok(Self(pairs))
    }

    /// The pairs, by key.
    pub fn pairs(&self) -> &BTreeMap<String, String> {
        &self.0
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Both; where both have a key, that of `other` stays.
    pub fn with(&self, other: &Self) -> Result<Self, EngineError> {
        let mut pairs = self.0.clone();
        pairs.extend(other.0.clone());
        Self::new(pairs)
    }

    /// What they are after a change.
    pub fn changed(&self, changes: &LabelChanges) -> Result<Self, EngineError> {
        let mut pairs = self.0.clone();
        for (key, value) in &changes.0 {
            match value {
                Some(value) => pairs.insert(key.clone(), value.clone()),
                None => pairs.remove(key),
            };
        }
        Self::new(pairs)
    }

    /// Whether all of `others` are among them, with the same values.
    pub fn include(&self, others: &Self) -> bool {
        others.0.iter().all(|(key, value)| self.0.get(key) == Some(value))
    }
}

/// What is to change about labels, all at once: a value to set, or `None` to remove the label.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LabelChanges(BTreeMap<String, Option<String>>);

impl LabelChanges {
    /// Changes that are within their bounds. Removing what is not there is harmless.
    pub fn new(changes: BTreeMap<String, Option<String>>) -> Result<Self, EngineError> {
        for (key, value) in &changes {
            check_key(key).map_err(|must| must.of(Field::Labels))?;
            if let Some(value) = value {
                check_value(key, value)?;
            }
        }
        // As many may go as come.
        if changes.len() > 2 * LABELS_MAX {
            return Err(invalid(format!("have at most {} changes, got {}", 2 * LABELS_MAX, changes.len())));
        }
        Ok(Self(changes))
    }

    /// Whether there is nothing to change.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Which sandboxes are meant, by one label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// `key=value`
    Is(String, String),
    /// `key!=value`: another value, or none at all.
    IsNot(String, String),
    /// `key`: any value.
    Has(String),
    /// `!key`: not at all.
    Lacks(String),
}

impl Selector {
    /// As people write it.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        let selector = match text.split_once('=') {
            Some((key, value)) => match key.strip_suffix('!') {
                Some(key) => Self::IsNot(key.into(), value.into()),
                None => Self::Is(key.into(), value.into()),
            },
            None => match text.strip_prefix('!') {
                Some(key) => Self::Lacks(key.into()),
                None => Self::Has(text.into()),
            },
        };
        let (Self::Is(key, _) | Self::IsNot(key, _) | Self::Has(key) | Self::Lacks(key)) = &selector;
        match check_key(key) {
            Ok(()) => Ok(selector),
            Err(must) => {
                let forms = "a selector is `key`, `key=value`, `key!=value` or `!key`";
                Err(Field::Label.must(format!("{must}; {forms}")))
            }
        }
    }

    /// Whether a sandbox with these labels is meant.
    pub fn matches(&self, labels: &Labels) -> bool {
        match self {
            Self::Is(key, value) => labels.0.get(key) == Some(value),
            Self::IsNot(key, value) => labels.0.get(key) != Some(value),
            Self::Has(key) => labels.0.contains_key(key),
            Self::Lacks(key) => !labels.0.contains_key(key),
        }
    }
}

fn check_key(key: &str) -> Result<(), Must> {
    let rule = if key.is_empty() {
        "have keys that are not empty".to_owned()
    } else if key.len() > LABEL_KEY_MAX {
        format!("have keys of at most {LABEL_KEY_MAX} bytes, got {} in {:?}", key.len(), shown(key))
    } else if key.contains(['=', '!']) {
        format!("have keys without `=` and `!`, got {key:?}")
    } else if key.chars().any(char::is_control) {
        format!("have keys without control characters, got {key:?}")
    } else {
        return Ok(());
    };
    Err(Must::new(rule))
}

fn check_value(key: &str, value: &str) -> Result<(), EngineError> {
    if value.len() > LABEL_VALUE_MAX {
        return Err(invalid(format!(
            "have values of at most {LABEL_VALUE_MAX} bytes, got {} for {key:?}",
            value.len()
        )));
    }
    if value.chars().any(char::is_control) {
        return Err(invalid(format!("have values without control characters, got one for {key:?}")));
    }
    Ok(())
}

fn invalid(rule: String) -> EngineError {
    Field::Labels.must(rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(&str, &str)]) -> BTreeMap<String, String> {
        list.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn labels(list: &[(&str, &str)]) -> Labels {
        Labels::new(pairs(list)).expect("they are labels")
    }

    fn changes(list: &[(&str, Option<&str>)]) -> LabelChanges {
        let changes = list.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned)));
        LabelChanges::new(changes.collect()).expect("they are changes")
    }

    #[test]
    fn labels_are_free_text_within_bounds() {
        labels(&[("thread id", "a/b=c, d"), ("ключ", ""), ("app.kubernetes.io/name", "ü!")]);
        let long = "k".repeat(LABEL_KEY_MAX + 1);
        let value = "v".repeat(LABEL_VALUE_MAX + 1);
        for (key, value) in
            [("", "x"), (&*long, "x"), ("a=b", "x"), ("a!", "x"), ("a\n", "x"), ("a", "\0"), ("a", &*value)]
        {
            assert!(Labels::new(pairs(&[(key, value)])).is_err(), "{key:.20?}={value:.20?}");
        }
        let many = |count| (0..count).map(|number| (format!("k{number}"), String::new())).collect();
        assert!(Labels::new(many(LABELS_MAX)).is_ok());
        assert!(Labels::new(many(LABELS_MAX + 1)).is_err());
    }

    #[test]
    fn changes_set_and_remove_and_stay_within_bounds() {
        let before = labels(&[("a", "1"), ("b", "2")]);
        let after = before.changed(&changes(&[("a", None), ("b", Some("3")), ("c", Some("4")), ("d", None)]));
        assert_eq!(after.expect("they fit"), labels(&[("b", "3"), ("c", "4")]));
        let full: BTreeMap<_, _> =
            (0..LABELS_MAX).map(|number| (format!("k{number}"), String::new())).collect();
        let full = Labels::new(full).expect("they just fit");
        full.changed(&changes(&[("one-more", Some(""))])).expect_err("one too many");
        full.changed(&changes(&[("one-more", Some("")), ("k0", None)])).expect("one goes, one comes");
    }

    #[track_caller]
    fn check(selector: &str, list: &[(&str, &str)], expected: bool) {
        let selector = Selector::parse(selector).expect("it is a selector");
        assert_eq!(selector.matches(&labels(list)), expected, "{selector:?} on {list:?}");
    }

    #[test]
    fn selectors_mean_what_they_say() {
        let some = [("app", "chat"), ("thread", "a=b")];
        check("app=chat", &some, true);
        check("app=other", &some, false);
        check("app=", &some, false);
        check("thread=a=b", &some, true);
        check("app!=chat", &some, false);
        check("app!=other", &some, true);
        check("user!=eve", &some, true);
        check("app", &some, true);
        check("user", &some, false);
        check("!user", &some, true);
        check("!app", &some, false);
        check("app=!", &[("app", "!")], true);
        check("app!==", &[("app", "=")], false);
        for wrong in ["", "=x", "!=x", "!", "a!b", "a!b=c", "!!a", "a\n=b", &"k".repeat(LABEL_KEY_MAX + 1)] {
            Selector::parse(wrong).expect_err(wrong);
        }
    }
}
