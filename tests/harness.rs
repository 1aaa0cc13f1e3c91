//! Tests of the harness: an audit that sees nothing would make every leak test pass.

use std::collections::BTreeSet;

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
