//! Checks that every file of tests is compiled.
//!
//! Packages with one executable for all their tests set `autotests = false` and list their files in a `main.rs`.
//! Cargo would not notice a file that is missing there.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// The folders with such a `main.rs`.
const FOLDERS: &[&str] = &["tests", "crates/engine/tests", "crates/runtime/tests", "crates/server/tests"];

/// Fails if a file beside a `main.rs` is not a module of it.
pub fn check() -> Result<()> {
    let mut missing = Vec::new();
    for folder in FOLDERS {
        let path = super::root().join(folder);
        let main = path.join("main.rs");
        let main = fs::read_to_string(&main).with_context(|| format!("cannot read {}", main.display()))?;
        missing.extend(not_listed(&main, &names(&path)?).map(|name| format!("{folder}/{name}.rs")));
    }
    if !missing.is_empty() {
        bail!(
            "not compiled, because the `main.rs` beside them does not list them as modules: {}",
            missing.join(", ")
        );
    }
    Ok(())
}

/// The files in a folder that could be modules of its `main.rs`.
fn names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let name = entry?.file_name();
        if let Some(stem) =
            name.to_str().and_then(|name| name.strip_suffix(".rs")).filter(|stem| *stem != "main")
        {
            names.push(stem.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

fn not_listed<'a>(main: &'a str, names: &'a [String]) -> impl Iterator<Item = &'a str> {
    let is_listed = |name: &str| main.lines().any(|line| line.trim() == format!("mod {name};"));
    names.iter().map(String::as_str).filter(move |name| !is_listed(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_listed_is_found() {
        let names = ["files", "limits"].map(str::to_owned);
        assert_eq!(not_listed("mod files;\nmod limits;\n", &names).count(), 0);
        assert_eq!(not_listed("mod files;\n// mod limits;\n", &names).collect::<Vec<_>>(), ["limits"]);
    }
}
