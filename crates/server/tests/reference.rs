//! The pages of the reference that people read: `api.md` is written from the description of the API, and `errors.md` has
//! every code that the source has, with its status.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::page;

fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(name)
}

#[test]
fn the_page_of_the_api_has_not_drifted() {
    let path = reference("api.md");
    let description = serde_json::from_str(&shoal_server::native::openapi::json()).expect("it is JSON");
    let now = page::write(&description);
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        fs::write(&path, &now).expect("the page can be written");
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == now,
        "docs/reference/api.md is not what the code says; look at what changed and update it with\n    \
         UPDATE_REFERENCE=1 cargo test -p shoal-server --test reference"
    );
}

#[test]
fn every_code_is_on_the_page_of_errors_with_its_status() {
    let page = codes_on_the_page();
    let source = codes_in_the_source();
    let mut wrong = Vec::new();
    for (code, statuses) in &source {
        match page.get(code) {
            None => wrong.push(format!("`{code}` ({statuses:?}) is not on the page")),
            Some(told) => wrong.extend(
                statuses
                    .difference(told)
                    .map(|status| format!("`{code}` comes with {status} too, and the page does not say so")),
            ),
        }
    }
    let text = source_text();
    for code in page.keys().filter(|code| !text.contains(&format!("\"{code}\""))) {
        wrong.push(format!("`{code}` is on the page, and nothing answers with it"));
    }
    assert!(
        wrong.is_empty(),
        "docs/reference/errors.md is not what the code says:\n  {}",
        wrong.join("\n  ")
    );
}

/// Rows are `` | `code` | 400, 409 | means | do | ``.
fn codes_on_the_page() -> BTreeMap<String, BTreeSet<u16>> {
    let page = fs::read_to_string(reference("errors.md")).expect("the page is there");
    let mut codes = BTreeMap::new();
    for row in page.lines().filter_map(|line| line.strip_prefix("| `")) {
        let mut cells = row.split(" | ");
        let code = cells.next().expect("a row has cells").trim_end_matches('`').to_owned();
        let statuses = cells.next().expect("a row has a status").split(", ");
        let statuses = statuses.map(|status| status.parse().expect("a status is a number")).collect();
        assert!(codes.insert(code.clone(), statuses).is_none(), "`{code}` is there twice");
    }
    codes
}

/// Wherever a status is followed by a text that looks like a code.
fn codes_in_the_source() -> BTreeMap<String, BTreeSet<u16>> {
    let text = source_text();
    let mut codes: BTreeMap<String, BTreeSet<u16>> = BTreeMap::new();
    for part in text.split("StatusCode::").skip(1) {
        let end = part.find(|c: char| !c.is_ascii_uppercase() && c != '_').unwrap_or(part.len());
        let (name, rest) = part.split_at(end);
        let Some(rest) = rest.trim_start().strip_prefix(',') else { continue };
        let Some(rest) = rest.trim_start().strip_prefix('"') else { continue };
        let Some((code, _)) = rest.split_once('"') else { continue };
        if !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_') {
            codes.entry(code.to_owned()).or_default().insert(status(name));
        }
    }
    assert!(codes.len() > 50, "codes are found in the source: {codes:?}");
    codes
}

/// The number of a status that is named as in the crate `http`.
fn status(name: &str) -> u16 {
    let words = name.to_lowercase().replace('_', " ");
    let number = (100..600).find(|number| {
        let status = axum::http::StatusCode::from_u16(*number).expect("it is in the range");
        status.canonical_reason().is_some_and(|reason| reason.to_lowercase().replace('-', " ") == words)
    });
    number.unwrap_or_else(|| panic!("no status is called {name}"))
}

/// All of the crate's source, without the tests in it.
fn source_text() -> String {
    let mut open = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut all = String::new();
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).expect("the source is there").flatten() {
            if entry.path().is_dir() {
                // Dialects answer with the codes of other systems.
                if entry.file_name() != "dialects" {
                    open.push(entry.path());
                }
            } else {
                let text = fs::read_to_string(entry.path()).expect("source is text");
                all.push_str(text.split("#[cfg(test)]").next().unwrap_or_default());
            }
        }
    }
    all
}
