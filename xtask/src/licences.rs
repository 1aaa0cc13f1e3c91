//! Checks that every dependency has a licence that may be shipped under Apache-2.0.
//!
//! Reads `cargo metadata` and needs no network. An SPDX expression is accepted if one branch of its `OR`, and all of
//! its `AND`, are on the list.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Licences that only require attribution. `MPL-2.0` covers changes to its own files only.
const ALLOWED: [&str; 12] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MPL-2.0",
    "Unicode-3.0",
    "Zlib",
];

/// How much [`check`] prints on success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// One line.
    Count,
    /// Each licence with its crates.
    All,
}

/// Fails with every crate whose licence is not on the list.
pub fn check(report: Report) -> Result<()> {
    let text = super::printed(super::cargo().args(["metadata", "--format-version=1", "--locked"]))?;
    let metadata: Value =
        serde_json::from_slice(&text).context("cannot read what `cargo metadata` printed")?;
    let packages = metadata["packages"].as_array().context("`cargo metadata` names no packages")?;
    let mut by_licence: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut refused = Vec::new();
    for package in packages {
        let name = package["name"].as_str().context("a package without a name")?;
        let licence = package["license"].as_str().unwrap_or("none given");
        by_licence.entry(licence).or_default().push(name);
        if !allows(licence) {
            refused.push(format!("{name} {}: {licence}", package["version"].as_str().unwrap_or("?")));
        }
    }
    if report == Report::All {
        for (licence, crates) in &by_licence {
            println!("{licence}: {}", crates.join(", "));
        }
    }
    if !refused.is_empty() {
        bail!("these licences are not on the list in xtask/src/licences.rs:\n  {}", refused.join("\n  "));
    }
    println!("xtask: {} crates, all under licences on the list", packages.len());
    Ok(())
}

/// Whether the list satisfies an SPDX expression. Invalid expressions are rejected.
fn allows(expression: &str) -> bool {
    // An old spelling of OR, which some crates still use.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Parser { words: &words, at: 0 };
    parser.any() == Some(true) && parser.at == words.len()
}

/// `any = all { OR all }`, `all = one { AND one }`, `one = licence [ WITH exception ] | ( any )`
struct Parser<'a> {
    words: &'a [&'a str],
    at: usize,
}

impl Parser<'_> {
    fn any(&mut self) -> Option<bool> {
        let mut holds = self.all()?;
        while self.take("OR") {
            holds |= self.all()?;
        }
        Some(holds)
    }

    fn all(&mut self) -> Option<bool> {
        let mut holds = self.one()?;
        while self.take("AND") {
            holds &= self.one()?;
        }
        Some(holds)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let holds = self.any()?;
            return self.take(")").then_some(holds);
        }
        let licence = *self.words.get(self.at)?;
        self.at += 1;
        if self.take("WITH") {
            let exception = *self.words.get(self.at)?;
            self.at += 1;
            return Some(ALLOWED.contains(&format!("{licence} WITH {exception}").as_str()));
        }
        Some(ALLOWED.contains(&licence))
    }

    fn take(&mut self, word: &str) -> bool {
        let found = self.words.get(self.at) == Some(&word);
        self.at += usize::from(found);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::allows;

    #[track_caller]
    fn check(expression: &str, expected: bool) {
        assert_eq!(allows(expression), expected, "{expression}");
    }

    #[test]
    fn a_listed_licence_is_allowed_in_every_spelling() {
        check("MIT", true);
        check("MIT OR Apache-2.0", true);
        check("MIT/Apache-2.0", true);
        check("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT", true);
        check("(MIT OR Apache-2.0) AND Unicode-3.0", true);
        check("GPL-3.0-only OR MIT", true);
    }

    #[test]
    fn what_binds_us_to_an_unlisted_licence_is_refused() {
        check("GPL-3.0-only", false);
        check("MIT AND GPL-3.0-only", false);
        check("(MIT OR Apache-2.0) AND NCSA", false);
        check("Apache-2.0 WITH Classpath-exception-2.0", false);
    }

    #[test]
    fn what_does_not_parse_is_refused() {
        for expression in ["", "none given", "MIT OR", "(MIT", "MIT)", "MIT MIT", "AND", "WITH"] {
            check(expression, false);
        }
    }
}
