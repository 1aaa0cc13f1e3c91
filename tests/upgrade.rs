//! A new program takes over from a running one, with live sandboxes: of the same version, older, newer, and
//! incompatible.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use shoal_tests::ages::Age;
use shoal_tests::daemon::{Home, binary, kill_hard};
use shoal_tests::page::repository;
use shoal_tests::{Collected, Daemon, Response, Said, Sandbox, Spawn, until};

/// Prints 0, 1, 2, ... one per line, up to its argument, with a pause now and then, so that every byte is
/// predictable.
const COUNT: &str = "
import sys, time
for n in range(int(sys.argv[1])):
    sys.stdout.write(f'{n}\\n')
    if n % 200 == 0: sys.stdout.flush(); time.sleep(0.002)
";
/// Marks the rows as those of a newer daemon, while the daemon writes to them.
const SET_VERSION: &str = "
import sqlite3, sys
sqlite3.connect(sys.argv[1], timeout=60).execute('pragma user_version = 99')
";
/// Writes the rows as a daemon of an older schema would have: its tables, with the columns that both have.
const REWRITE: &str = "
import os, sqlite3, sys
path, schema = sys.argv[1:]
older = sqlite3.connect(path + '.older', isolation_level=None)
older.executescript(open(schema).read())
older.execute('attach ? as ours', (path,))
columns = lambda of, table: [row[1] for row in older.execute(f'pragma {of}.table_info({table})')]
for (table,) in older.execute('select name from main.sqlite_master where type = \\'table\\'').fetchall():
    ours = columns('ours', table)
    shared = ', '.join(column for column in columns('main', table) if column in ours)
    older.execute(f'delete from main.{table}')
    if shared: older.execute(f'insert into main.{table} ({shared}) select {shared} from ours.{table}')
older.close()
for suffix in ('-wal', '-shm'):
    if os.path.exists(path + suffix): os.remove(path + suffix)
os.rename(path + '.older', path)
";
/// Takes long enough for a few upgrades.
const LINES: u32 = 300_000;

fn count(sandbox: &Sandbox) -> String {
    sandbox.spawn(json!({"argv": ["python3", "-c", COUNT, LINES.to_string()]}))
}

#[track_caller]
fn is_count(collected: &Collected) {
    assert_eq!(collected.result()["exit_code"], 0);
    let expected: String = (0..LINES).map(|n| format!("{n}\n")).collect();
    // Not assert_eq: megabytes of numbers do not help.
    assert!(collected.stdout == expected.as_bytes(), "not the count, after {} bytes", collected.stdout.len());
}

/// Reads some more of a command's output, and stops in the middle.
fn some(daemon: &Daemon, sandbox: &str, command: &str, all: &mut Collected) {
    let mut socket = daemon.sandbox_of(sandbox).attach(command, all);
    let enough = all.stdout.len() + 20_000;
    while all.stdout.len() < enough {
        match socket.hear() {
            Said::Output { stream, offset, bytes } => all.add(stream, offset, &bytes),
            Said::Event(event) => {
                assert_ne!(event["type"], "ended", "the command is too quick for this test")
            }
            Said::Closed(code) => panic!("closed with {code:?}"),
        }
    }
}

fn rest(daemon: &Daemon, sandbox: &str, command: &str, all: Collected) -> Collected {
    daemon.sandbox_of(sandbox).attach(command, &all).collect(all)
}

#[track_caller]
fn version(daemon: &Daemon) -> Value {
    daemon.get("/v1/version").expect(200)["version"].clone()
}

/// A daemon of a modified program.
fn start(program: PathBuf) -> Daemon {
    Spawn { program: Some(program), ..Spawn::default() }.start()
}

fn read_file(sandbox: &Sandbox) -> Response {
    sandbox.request("GET", "/files?path=/etc/hostname").send(sandbox.address)
}

#[test]
fn a_writing_command_runs_through_upgrades_and_no_byte_is_lost_or_doubled() {
    let mut daemon = Daemon::start();
    let own = version(&daemon);
    let next = Age { version: Some("9.8.7"), ..Age::default() }.program(&daemon.home);
    let sandbox = daemon.sandbox();
    let command = count(&sandbox);
    let mut all = Collected::default();
    for (program, expected) in [(&next, json!("9.8.7")), (&binary(), own), (&next, json!("9.8.7"))] {
        some(&daemon, &sandbox.id, &command, &mut all);
        let (address, before) = (daemon.address, daemon.launchers());
        daemon.upgrade(program);
        assert_eq!(
            (version(&daemon), daemon.address),
            (expected, address),
            "the new program is in the old place"
        );
        let launchers = until("the launcher before is gone", || {
            Some(daemon.launchers()).filter(|now| now.len() == 1 && !before.contains(&now[0]))
        });
        let file = std::fs::read_link(format!("/proc/{}/exe", launchers[0])).expect("it runs");
        assert_eq!(&file, program, "the launcher is the new program's");
        assert_eq!(sandbox.sh("echo old").ok().text(), "old");
        assert_eq!(read_file(&sandbox).status, 200);
        let new = daemon.sandbox();
        assert_eq!(new.sh("echo new").ok().text(), "new");
        new.delete();
    }
    is_count(&rest(&daemon, &sandbox.id, &command, all));
    assert_eq!(sandbox.get()["state"], "running");
}

#[test]
fn a_sandbox_of_the_version_before_works_without_what_its_version_lacks() {
    let home = Home::new();
    let former = Age { init: Some((1, 1)), ..Age::default() }.program(&home);
    let mut daemon = start(former);
    let sandbox = daemon.sandbox();
    read_file(&sandbox).expect_refusal(409, "sandbox_too_old");
    let command = count(&sandbox);
    let mut all = Collected::default();
    some(&daemon, &sandbox.id, &command, &mut all);
    daemon.upgrade(&binary());

    let refused = read_file(&sandbox).expect_refusal(409, "sandbox_too_old");
    assert!(refused["message"].as_str().is_some_and(|text| text.contains("(1)")), "{refused}");
    let echo = sandbox.spawn(json!({"argv": ["cat"], "stdin": true}));
    sandbox.write(&echo, b"through an old init");
    sandbox.end_stdin(&echo);
    assert_eq!(sandbox.output(&echo).stdout, b"through an old init");
    let sleeper = sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    sandbox.running(&sleeper);
    sandbox.kill(&sleeper).expect(204);
    assert_eq!(sandbox.ended(&sleeper)["result"]["outcome"], "killed");
    is_count(&rest(&daemon, &sandbox.id, &command, all));
    assert_eq!(read_file(&daemon.sandbox()).status, 200, "a new sandbox supports what the old one does not");
}

/// A database of each schema that ever landed, as SQL, the oldest first.
fn schemas() -> Vec<PathBuf> {
    let folder = repository().join("crates/engine/tests/fixtures");
    let entries = std::fs::read_dir(folder).expect("the repository can be read");
    let mut schemas: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    schemas.sort();
    schemas
}

/// The program of an older build is not available here. What it leaves behind is: rows of its schema, and live
/// sandboxes with an init as old.
#[test]
fn a_data_directory_of_every_build_before_goes_on_with_its_sandboxes_alive() {
    let home = Home::new();
    let mut daemon = start(Age { init: Some((1, 1)), ..Age::default() }.program(&home));
    let old = daemon.sandbox_with(json!({"name": "old", "env": {"AGE": "old"}})).id;
    daemon.sandbox_of(&old).sh("echo kept > /workspace/f").ok();
    let finished = daemon.sandbox_of(&old).sh("echo before").ok().id().to_owned();
    let counting = count(&daemon.sandbox_of(&old));
    daemon.spawn.program = None;
    let schemas = schemas();
    let (newest, older) = schemas.split_last().expect("there are schemas");
    for schema in older {
        daemon.kill();
        let database = daemon.data_dir.join("shoal.db");
        let rewritten = Command::new("python3").arg("-c").arg(REWRITE).arg(&database).arg(schema).status();
        assert!(rewritten.expect("python can be started").success(), "{}", schema.display());
        daemon.start_again();
        let sandbox = daemon.sandbox_of(&old);
        let now = sandbox.get();
        assert_eq!((&now["name"], &now["state"]), (&json!("old"), &json!("running")), "{}", schema.display());
        assert_eq!(sandbox.sh("cat /workspace/f; echo $AGE").ok().text(), "kept\nold");
        assert_eq!(sandbox.output(&finished).stdout, b"before\n");
        assert_eq!(daemon.list().len(), 1, "{}", schema.display());
    }
    assert!(newest.exists() && older.len() > 10, "there is a schema for each migration");
    is_count(&rest(&daemon, &old, &counting, Collected::default()));
    let before = daemon.audit();
    daemon.sandbox_of(&old).delete();
    let new = daemon.sandbox();
    new.sh("true").ok();
    new.delete();
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn a_sandbox_that_knows_no_edits_has_all_other_file_operations() {
    let home = Home::new();
    let former = Age { init: Some((1, 2)), ..Age::default() }.program(&home);
    let mut daemon = start(former);
    let sandbox = daemon.sandbox();
    daemon.upgrade(&binary());
    let edit = |sandbox: &Sandbox| {
        let request = sandbox.request("POST", "/files/edit?path=/workspace/f");
        request.json(&json!({"old": "one", "new": "two"})).send(sandbox.address)
    };
    sandbox.sh("echo one > /workspace/f").ok();
    edit(&sandbox).expect_refusal(409, "sandbox_too_old");
    assert_eq!(read_file(&sandbox).status, 200);
    let new = daemon.sandbox();
    new.sh("echo one > /workspace/f").ok();
    assert_eq!(edit(&new).expect(200)["replaced"], 1, "a new sandbox supports what the old one does not");
}

#[test]
fn a_sandbox_that_is_newer_than_the_daemon_is_spoken_to_in_the_daemons_version() {
    let home = Home::new();
    let future = Age { version: Some("9.8.7"), init: Some((2, 4)), daemon: Some((1, 4)) }.program(&home);
    let mut daemon = start(future);
    let sandbox = daemon.sandbox();
    let command = count(&sandbox);
    let mut all = Collected::default();
    some(&daemon, &sandbox.id, &command, &mut all);
    daemon.upgrade(&binary());
    assert_eq!(read_file(&sandbox).status, 200);
    is_count(&rest(&daemon, &sandbox.id, &command, all));
}

#[test]
fn a_sandbox_of_no_common_version_is_refused_and_left_as_it_is() {
    let home = Home::new();
    let stranger = Age { version: Some("9.8.7"), init: Some((9, 9)), daemon: Some((9, 9)) }.program(&home);
    let mut daemon = start(stranger.clone());
    let sandbox = daemon.sandbox();
    let command = count(&sandbox);
    let mut all = Collected::default();
    some(&daemon, &sandbox.id, &command, &mut all);

    daemon.upgrade(&binary());
    let failed = until("the two have met", || Some(sandbox.get()).filter(|now| now["state"] == "failed"));
    let reason = failed["reason"].as_str().expect("a failed sandbox has a reason");
    assert!(reason.contains("versions 9 to 9") && reason.contains("1 to 3"), "{reason}");
    sandbox.post_command(&json!({"argv": ["true"]})).expect_refusal(409, "sandbox_too_new");
    read_file(&sandbox).expect_refusal(409, "sandbox_too_new");
    assert!(sandbox.processes().len() > 1, "its command is still there");
    let own = daemon.sandbox();
    own.sh("true").ok();

    daemon.upgrade(&stranger);
    until("the old daemon has it again", || Some(sandbox.get()).filter(|now| now["state"] == "running"));
    is_count(&rest(&daemon, &sandbox.id, &command, all));
    let failed = until("the two have met", || Some(own.get()).filter(|now| now["state"] == "failed"));
    assert!(failed["reason"].as_str().is_some_and(|reason| reason.contains("versions 1 to 3")), "{failed}");
    own.post_command(&json!({"argv": ["true"]})).expect_refusal(409, "sandbox_too_old");
    let before = daemon.audit();
    own.delete();
    assert!(own.processes().is_empty(), "what cannot be used can be deleted");
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn a_program_that_is_replaced_under_its_daemon_does_not_break_the_launcher() {
    let home = Home::new();
    let program = Age { version: Some("1.2.3"), ..Age::default() }.program(&home);
    let daemon = start(program.clone());
    daemon.sandbox().delete();
    let other = home.join("other");
    std::fs::write(&other, "#!/bin/sh\nexit 7\n").expect("the test's own directory takes files");
    std::fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("it is ours");
    std::fs::rename(&other, &program).expect("the test's own directory takes names");
    daemon.launchers().into_iter().for_each(kill_hard);
    let sandbox = daemon.sandbox();
    assert_eq!(sandbox.sh("echo on").ok().text(), "on");
    assert_eq!(version(&daemon), "1.2.3");
}

#[test]
fn taking_over_from_nobody_is_a_start_and_without_it_two_daemons_do_not_meet() {
    let mut daemon = Spawn { arguments: vec!["--take-over".into()], ..Spawn::default() }.start();
    let sandbox = daemon.sandbox();
    let pid = daemon.pid();
    let refused = start_beside(&daemon, &[]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains(&format!("in use by process {pid}")), "{said}");
    assert!(said.contains("--take-over"), "the hint says how: {said}");
    // A killed daemon left its process id behind; the process that has it now must not be signalled.
    daemon.kill();
    std::fs::write(daemon.data_dir.join("lock"), format!("{}\n", std::process::id())).expect("it is ours");
    daemon.start_again();
    assert_eq!(sandbox_state(&daemon, &sandbox), "running");
}

fn sandbox_state(daemon: &Daemon, sandbox: &Sandbox) -> Value {
    daemon.get(&sandbox.path("")).expect(200)["state"].clone()
}

/// Starts another daemon on the data directory, which must end by itself.
fn start_beside(daemon: &Daemon, arguments: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(&daemon.data_dir).args(arguments);
    command.env("SHOAL_STORE", "directory").output().expect("the program can be started")
}

#[test]
fn a_program_that_could_not_start_does_not_end_the_daemon_before() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let command = sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    let wrong = daemon.home.join("no.pem").display().to_string();
    let certificate = start_beside(&daemon, &["--take-over", "--tls-cert", &wrong, "--tls-key", &wrong]);
    // Judging by its rows, the running daemon is newer than the one that wants to take over.
    let database = daemon.data_dir.join("shoal.db");
    let update = Command::new("python3").arg("-c").arg(SET_VERSION).arg(&database).status();
    assert!(update.expect("python can be started").success());
    let rows = start_beside(&daemon, &["--take-over"]);
    for (refused, expected) in [(certificate, "no.pem"), (rows, "has version 99")] {
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(expected), "{said}");
        assert!(!said.contains("asking the daemon before to end"), "{said}");
    }
    sandbox.running(&command);
    assert_eq!(sandbox.sh("echo on").ok().text(), "on", "the daemon before is still there");
}

#[test]
fn programs_of_other_ages_are_the_same_program_with_other_numbers() {
    let home = Home::new();
    let program = Age { version: Some("9.8.7"), init: Some((3, 4)), daemon: None }.program(&home);
    let output = Command::new(program).arg("--version").output().expect("it can be started");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "shoal 9.8.7\n");
}
