//! The harness itself: an audit that sees nothing would make every test of leaks pass.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::json;
use shoal_tests::{Audit, Daemon};

#[test]
fn an_audit_sees_everything_that_a_sandbox_has() {
    let daemon = Daemon::start();
    daemon.sandbox().delete();
    let before = daemon.audit();
    let sandbox = daemon.sandbox();
    let command = sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    sandbox.running(&command);
    let more = daemon.audit().beyond(&before);
    let of = |kind: &str| more.iter().filter(|line| line.starts_with(kind)).count();
    assert!(of("cgroup") >= 4, "{more:?}");
    assert!(of("process") >= 2, "{more:?}");
    assert!(of("file") >= 1, "{more:?}");
    assert!(!daemon.scope().network_namespaces().is_empty());
    assert!(!daemon.launchers().is_empty());
    assert_eq!(sandbox.processes().len(), 2);
    sandbox.delete();
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn what_a_daemon_had_is_gone_with_it() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    let (scope, home) = (daemon.scope(), daemon.home.path().to_owned());
    drop(daemon);
    assert_eq!(Audit::of(&scope), Audit(BTreeSet::new()));
    assert!(!home.exists());
}

/// A claim in a document names the test that upholds it; a name that no test has would be an empty claim.
#[test]
fn every_test_that_the_documents_name_exists() {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is in a folder of the root");
    let read = |path: &Path| fs::read_to_string(path).expect("it is there");
    let mut tests = BTreeSet::new();
    for entry in
        fs::read_dir(root.join("tests")).expect("it is there").map(|entry| entry.expect("readable").path())
    {
        if entry.extension().is_some_and(|extension| extension == "rs") {
            let text = read(&entry);
            let names = text
                .lines()
                .filter_map(|line| line.strip_prefix("fn ")?.split('(').next().map(str::to_owned));
            tests.extend(names);
        }
    }
    let isolation = read(&root.join("docs/concepts/isolation.md"));
    // The table of tests: other words with underscores are the kernel's.
    let rows = isolation.lines().filter(|line| line.starts_with('|')).collect::<Vec<_>>().join("\n");
    let named: Vec<&str> = rows
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|word| {
            word.matches('_').count() >= 3
                && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        })
        .collect();
    assert!(named.len() > 5, "the documents name tests: {named:?}");
    let missing: Vec<&&str> = named.iter().filter(|name| !tests.contains(**name)).collect();
    assert!(missing.is_empty(), "no test is called {missing:?}");
}
