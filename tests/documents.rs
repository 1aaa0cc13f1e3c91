//! Runs every example in the documents, page by page, as a reader would; checks that every link leads somewhere, and
//! that every test that a page names exists.
//!
//! `src/page.rs` defines how examples are written and compared, and `src/reader.rs` runs them: in short, `console`
//! blocks are typed and their output compared, `sh` and `python` blocks are run and must succeed, each page in a
//! world with its own ports and `/var/lib/shoal`. The README's `cargo run --release --` is run with the program of
//! this build, and `cargo xtask test` is only checked to be a chore.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use shoal_tests::page::{Page, repository};
use shoal_tests::reader::Reader;

/// One test for each page with examples, with the number of those that are not run, and a list of them all.
macro_rules! pages {
    ($($test:ident: $path:literal, $not_run:literal not run;)*) => {
        $(#[test]
        fn $test() {
            follow($path, $not_run);
        })*

        /// The pages above.
        const PAGES: &[&str] = &[$($path),*];
    };
}

pages! {
    the_readme: "README.md", 4 not run;
    the_page_on_contributing: "CONTRIBUTING.md", 0 not run;
    the_page_on_deploying: "docs/deploy.md", 3 not run;
    the_cookbook: "docs/cookbook.md", 0 not run;
    the_page_on_trouble: "docs/troubleshooting.md", 1 not run;
    the_page_on_lifecycle: "docs/concepts/lifecycle.md", 0 not run;
    the_page_on_daytona: "docs/dialects/daytona.md", 2 not run;
    the_page_on_e2b: "docs/dialects/e2b.md", 2 not run;
    the_page_on_langsmith: "docs/dialects/langsmith.md", 2 not run;
    the_page_on_modal: "docs/dialects/modal.md", 2 not run;
    the_page_on_runloop: "docs/dialects/runloop.md", 2 not run;
    the_page_on_sandbox0: "docs/dialects/sandbox0.md", 3 not run;
    the_start: "docs/start.md", 0 not run;
    the_guide_to_commands: "docs/guides/commands.md", 0 not run;
    the_guide_to_files: "docs/guides/files.md", 0 not run;
    the_guide_to_deep_agents: "docs/deepagents.md", 3 not run;
    the_guide_to_images: "docs/guides/images.md", 1 not run;
    the_guide_to_http: "docs/guides/http.md", 0 not run;
    the_guide_to_lifetimes: "docs/guides/lifetimes.md", 0 not run;
    the_guide_to_pauses: "docs/guides/pause.md", 0 not run;
    the_guide_to_limits: "docs/guides/limits.md", 0 not run;
    the_guide_to_networks: "docs/guides/network.md", 1 not run;
    the_guide_to_observing: "docs/guides/observe.md", 2 not run;
    the_guide_to_pools: "docs/guides/pools.md", 0 not run;
    the_guide_to_forks: "docs/guides/fork.md", 0 not run;
    the_guide_to_hooks: "docs/guides/hooks.md", 0 not run;
    the_guide_to_events: "docs/guides/events.md", 0 not run;
    the_guide_to_undoing: "docs/guides/undo.md", 0 not run;
    the_guide_to_ports: "docs/guides/ports.md", 1 not run;
    the_guide_to_python: "docs/python.md", 12 not run;
    the_guide_to_secrets: "docs/guides/secrets.md", 0 not run;
    the_guide_to_templates: "docs/guides/templates.md", 0 not run;
    the_guide_to_terminals: "docs/guides/terminals.md", 3 not run;
    the_guide_to_threads: "docs/guides/threads.md", 0 not run;
    the_guide_to_upgrading: "docs/guides/upgrade.md", 1 not run;
    the_guide_to_volumes: "docs/guides/volumes.md", 0 not run;
    the_page_on_operating: "docs/operate.md", 7 not run;
    the_page_on_configuration: "docs/reference/config.md", 0 not run;
    the_page_on_errors: "docs/reference/errors.md", 0 not run;
}

#[track_caller]
fn follow(path: &str, not_run_expected: usize) {
    let page = Page::read(path);
    let mut reader = Reader::of(&page);
    let mut not_run = 0;
    for block in page.blocks() {
        match &block.not_run {
            Some(reason) => {
                println!("{path}:{}: not run: {reason}", block.line);
                not_run += 1;
            }
            None => reader.follow(&block),
        }
    }
    reader.finish();
    assert_eq!(not_run, not_run_expected, "so many examples of {path} are not run: say why, and count them");
}

#[test]
fn every_page_with_examples_is_in_the_list() {
    let is_example = |kind: &str| kind != "text";
    let with_examples: BTreeSet<String> = Page::all()
        .iter()
        .filter(|page| page.blocks().iter().any(|block| is_example(&block.kind)))
        .map(|page| page.path.display().to_string())
        .collect();
    let listed: BTreeSet<String> = PAGES.iter().map(|page| page.to_string()).collect();
    assert_eq!(listed, with_examples, "left: the list in tests/documents.rs; right: pages with examples");
}

#[test]
fn every_link_leads_somewhere() {
    let mut broken = Vec::new();
    for page in Page::all() {
        for link in page.links() {
            if let Some(why) = why_broken(&page, &link.target) {
                broken.push(format!("{}:{}: {}: {why}", page.path.display(), link.line, link.target));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Links to other machines are not followed, since the tests reach none.
fn why_broken(page: &Page, target: &str) -> Option<&'static str> {
    if target.contains("://") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let own = page.path.parent().expect("a page is in a folder");
    let path = if path.is_empty() { page.path.clone() } else { normal(&own.join(path)) };
    if !repository().join(&path).exists() {
        return Some("there is no such file");
    }
    let anchor = anchor?;
    let found = Page::read(path).anchors().iter().any(|known| known == anchor);
    (!found).then_some("there is no such heading")
}

/// Without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        if part.as_os_str() == ".." {
            assert!(normal.pop(), "{} leads out of the repository", path.display());
        } else {
            normal.push(part);
        }
    }
    normal
}

#[test]
fn every_test_that_a_page_names_exists() {
    let tests = names_of_tests();
    let mut missing = Vec::new();
    let mut named = 0;
    for page in Page::all() {
        for (line, name) in page.last_column("test") {
            named += 1;
            let exists =
                if name.contains('/') { repository().join(&name).exists() } else { tests.contains(&name) };
            if !exists {
                missing.push(format!("{}:{line}: `{name}`", page.path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "there are no such tests:\n{}", missing.join("\n"));
    assert!(named > 0, "the page on isolation names tests");
}

/// Every function in the repository that is marked as a test.
fn names_of_tests() -> BTreeSet<String> {
    let mut files = Vec::new();
    collect(&repository().join("tests"), &mut files);
    collect(&repository().join("crates"), &mut files);
    let mut names = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("the repository's own files are text");
        let mut is_test = false;
        for line in text.lines().map(str::trim) {
            if line.starts_with("#[") {
                is_test |= line == "#[test]" || line.contains("::test");
            } else if let Some(name) = line.split("fn ").nth(1).and_then(|rest| rest.split('(').next()) {
                if is_test {
                    names.insert(name.to_owned());
                }
                is_test = false;
            }
        }
    }
    names
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("the repository can be read").flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}
