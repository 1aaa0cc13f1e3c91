//! The result of one check.

/// Whether something is as Shoal needs it to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It is.
    Found,
    /// The check could not run.
    Unknown,
    /// It is not; Shoal works, with a drawback.
    Limited,
    /// It is not; Shoal does not work.
    Missing,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Short and stable, for programs: `idmapped_mounts`.
    pub name: &'static str,
    /// The verdict.
    pub verdict: Verdict,
    /// What the check found.
    pub found: String,
    /// What its absence costs. Empty if nothing is missing.
    pub cost: String,
    /// How to get it. Empty if nothing is missing.
    pub remedy: String,
}

impl Finding {
    /// It is as it should be.
    pub fn found(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            verdict: Verdict::Found,
            found: found.into(),
            cost: String::new(),
            remedy: String::new(),
        }
    }

    /// The check could not determine the answer.
    pub fn unknown(name: &'static str, why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { verdict: Verdict::Unknown, remedy: remedy.into(), ..Self::found(name, why) }
    }

    /// Shoal works without it.
    pub fn limited(
        name: &'static str,
        found: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (cost, remedy) = (cost.into(), remedy.into());
        Self { verdict: Verdict::Limited, cost, remedy, ..Self::found(name, found) }
    }

    /// Shoal does not work without it.
    pub fn missing(
        name: &'static str,
        found: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { verdict: Verdict::Missing, ..Self::limited(name, found, cost, remedy) }
    }
}

/// Checks that a finding is as expected, and that a finding about a problem has its cost and its remedy.
#[cfg(test)]
#[track_caller]
pub(super) fn check(finding: Finding, verdict: Verdict, word: &str) {
    assert_eq!(finding.verdict, verdict, "{finding:?}");
    assert!(finding.found.contains(word), "{finding:?}");
    let lacks = matches!(verdict, Verdict::Limited | Verdict::Missing);
    assert!(!lacks || !finding.cost.is_empty() && !finding.remedy.is_empty(), "{finding:?}");
}
