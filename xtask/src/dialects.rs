//! The table of other systems' clients in `docs/dialects/README.md`, made from the results of their suites.
//!
//! A suite leaves the names of the environments that passed in a file. The table lists these, so it cannot name a version
//! that was not run: `cargo xtask test` fails if the table and the results differ.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::clients::{self, System};

const PAGE: &str = "docs/dialects/README.md";
const BEGIN: &str =
    "<!-- The table is written by `cargo xtask dialects` from the results of the suites. -->\n";
const END: &str = "<!-- End of the table. -->\n";

/// Writes the table from the results of the last run of every suite.
pub fn write() -> Result<()> {
    let page = super::root().join(PAGE);
    let text = fs::read_to_string(&page).with_context(|| format!("cannot read {PAGE}"))?;
    let text = with_table(&text, &table()?)?;
    fs::write(&page, text).with_context(|| format!("cannot write {PAGE}"))
}

/// Checks that the table says what the suites did.
pub fn check() -> Result<()> {
    let text = fs::read_to_string(super::root().join(PAGE)).with_context(|| format!("cannot read {PAGE}"))?;
    if with_table(&text, &table()?)? != text {
        bail!("the table in {PAGE} is not what the suites ran: write it with `cargo xtask dialects`");
    }
    Ok(())
}

/// The page with another table.
fn with_table(page: &str, table: &str) -> Result<String> {
    let missing = || format!("{PAGE} has lost the lines around its table");
    let (before, rest) = page.split_once(BEGIN).with_context(missing)?;
    let (_, after) = rest.split_once(END).with_context(missing)?;
    Ok(format!("{before}{BEGIN}{table}{END}{after}"))
}

fn table() -> Result<String> {
    let mut rows =
        String::from("| system | clients whose whole suite passes | suite |\n| --- | --- | --- |\n");
    for (system, suite, passed) in clients::systems()? {
        let System { title, page, of } = system;
        let names: Vec<&str> = passed.iter().map(String::as_str).filter(|name| is_of(name, of)).collect();
        if names.is_empty() {
            bail!("no environment of {title} has passed: run its suite with `cargo xtask clients`");
        }
        let names = names.join(", ");
        rows += &format!("| [{title}]({page}) | {names} | [{suite}](../../{suite}) |\n");
    }
    Ok(rows)
}

/// Whether an environment is about a system: suites also have environments of the project's own.
fn is_of(name: &str, of: &[&str]) -> bool {
    of.is_empty() || of.iter().any(|word| name.starts_with(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_table_is_replaced() {
        let page = format!("# Title\n{BEGIN}old\n{END}rest\n");
        let expected = format!("# Title\n{BEGIN}new\n{END}rest\n");
        assert_eq!(with_table(&page, "new\n").expect("the lines are there"), expected);
        with_table("# Title\n", "new\n").expect_err("there is no place for a table");
    }

    #[test]
    fn environments_of_the_project_itself_are_left_out() {
        assert!(is_of("e2b 2.5", &[]));
        assert!(is_of("deepagents 0.7", &["deepagents", "dcode"]));
        assert!(!is_of("wheel", &["deepagents", "dcode"]));
    }
}
