//! `shoal run` and the rest of the command line, as a person uses them.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use shoal_tests::audit::Scope;
use shoal_tests::daemon::{Home, binary, installation, kill_hard, send_signal};
use shoal_tests::wait::until_true;
use shoal_tests::{Audit, Daemon, until};

/// A directory for the private daemon, and what is needed to run the program as a person would.
struct Person {
    home: Home,
    private: PathBuf,
    /// How long the private daemon stays after the last run.
    linger: &'static str,
}

impl Person {
    /// One whose private daemon ends with the last run.
    fn new() -> Self {
        Self::with_linger("0")
    }

    fn with_linger(linger: &'static str) -> Self {
        let home = Home::new();
        let private = home.join("private");
        Self { home, private, linger }
    }

    fn shoal(&self, arguments: &[&str]) -> Command {
        self.program(&binary(), arguments)
    }

    fn program(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).env("SHOAL_PRIVATE_DIR", &self.private).env("HOME", self.home.path());
        command.env("SHOAL_PRIVATE_LINGER", self.linger);
        for name in ["SHOAL_URL", "SHOAL_API_KEY", "SHOAL_DATA_DIR"] {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.shoal(arguments).output().expect("the program can be started")
    }

    /// The process of the private daemon that lives.
    fn daemon(&self) -> i32 {
        let text = fs::read(self.private.join("data/daemon.json")).expect("a daemon lives");
        let listening: Value = serde_json::from_slice(&text).expect("JSON");
        listening["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("a process")
    }

    /// Ends the daemon that waits for its next client. A run may end before the daemon has noticed that its lease is gone.
    fn end_idle(&self, daemon: i32) {
        let socket = self.private.join("data/lease.sock").display().to_string();
        until_true("no lease is left", || {
            let sockets = fs::read_to_string("/proc/net/unix").expect("a list");
            sockets.lines().filter(|line| line.ends_with(&socket)).count() == 1 // The one that listens.
        });
        send_signal(daemon, Signal::TERM);
    }

    fn scopes(&self) -> Vec<Scope> {
        let data_dir = self.private.join("data");
        vec![Scope { installation: installation(&data_dir), data_dir }]
    }

    /// Everything that exists now, over all directories.
    fn audit(&self) -> Vec<String> {
        self.scopes().iter().flat_map(|scope| Audit::of(scope).0).collect()
    }

    /// Asserts that the last run has removed everything.
    #[track_caller]
    fn expect_nothing(&self, seen: &[Scope]) {
        let mut left = Vec::new();
        let give_up = std::time::Instant::now() + shoal_tests::DEADLINE;
        while std::time::Instant::now() < give_up {
            left = self.audit();
            left.extend(seen.iter().flat_map(|scope| Audit::of(scope).0));
            if self.private.exists() {
                let rest: Vec<_> = fs::read_dir(&self.private)
                    .into_iter()
                    .flatten()
                    .filter_map(|entry| Some(entry.ok()?.path()))
                    .collect();
                left.extend(
                    rest.iter().filter(|path| !path.ends_with("lock")).map(|path| path.display().to_string()),
                );
            }
            if left.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("left behind: {left:#?}");
    }
}

#[track_caller]
fn succeeded(output: Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {errors}", output.status);
    assert_eq!(errors, "", "a run that went well is silent on stderr");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_first_run_prints_the_answer_and_leaves_nothing_behind() {
    let person = Person::new();
    assert_eq!(succeeded(person.run(&["run", "--", "python3", "-c", "print(2 + 2)"])), "4\n");
    person.expect_nothing(&[]);
    // A second run, since the first may have left something that disturbs it.
    assert_eq!(succeeded(person.run(&["run", "--", "true"])), "");
    person.expect_nothing(&[]);
}

#[test]
fn exit_codes_are_passed_on() {
    let person = Person::new();
    for (arguments, code) in [
        (vec!["run", "--", "sh", "-c", "exit 7"], 7),
        (vec!["run", "--", "true"], 0),
        (vec!["run", "--", "sh", "-c", "kill -9 $$"], 137),
        (vec!["run", "--", "no-such-program"], 127),
        (vec!["run", "--", "/etc/passwd"], 126),
    ] {
        let output = person.run(&arguments);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    person.expect_nothing(&[]);
}

#[test]
fn what_cannot_start_is_told_on_stderr() {
    let person = Person::new();
    let output = person.run(&["run", "--", "no-such-program"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("no-such-program"), "{said}");
    assert_eq!(output.stdout, b"");
}

#[test]
fn both_streams_are_kept_apart_and_exact() {
    let person = Person::new();
    let output = person.run(&["run", "--", "python3", "-c", "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000); sys.stderr.buffer.write(bytes(range(255, -1, -1)) * 10)"]);
    assert!(output.status.success());
    assert_eq!(output.stdout, (0..=255u8).collect::<Vec<_>>().repeat(1000));
    assert_eq!(output.stderr, (0..=255u8).rev().collect::<Vec<_>>().repeat(10));
}

#[test]
fn stdin_is_piped_through() {
    let person = Person::new();
    let mut child =
        person.shoal(&["run", "--", "sha256sum"]).stdin(Stdio::piped()).spawn().expect("it starts");
    let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let mut stdin = child.stdin.take().expect("a pipe");
    let writer = std::thread::spawn({
        let bytes = bytes.clone();
        move || stdin.write_all(&bytes)
    });
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("no thread panics").expect("all is taken");
    let mut local =
        Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it is there");
    local.stdin.take().expect("a pipe").write_all(&bytes).expect("all is taken");
    assert_eq!(output.stdout, local.wait_with_output().expect("it ends").stdout);
}

#[test]
fn a_command_that_does_not_read_its_stdin_does_not_hang_the_run() {
    let person = Person::new();
    let mut child = person.shoal(&["run", "--", "true"]).stdin(Stdio::piped()).spawn().expect("it starts");
    let stdin = child.stdin.take().expect("a pipe");
    // The pipe stays open: the run must end nevertheless.
    let status = until("the run has ended", || child.try_wait().expect("a child can be asked"));
    assert!(status.success());
    drop(stdin);
}

/// Waits until a program under the person's private daemon has this text in its command line.
fn runs_inside(person: &Person, mark: &str) -> Option<()> {
    let inside: Vec<i32> = person.scopes().iter().flat_map(Scope::inside).collect();
    inside
        .iter()
        .any(|process| {
            fs::read(format!("/proc/{process}/cmdline"))
                .is_ok_and(|line| String::from_utf8_lossy(&line).contains(mark))
        })
        .then_some(())
}

fn start_sleep(person: &Person, seconds: &str) -> Child {
    let child = person.shoal(&["run", "--", "sleep", seconds]).spawn().expect("it starts");
    until("the command runs", || runs_inside(person, seconds));
    child
}

#[test]
fn ctrl_c_kills_the_command_and_leaves_nothing() {
    let person = Person::new();
    let mut child = start_sleep(&person, "1001.5");
    let seen = person.scopes();
    send_signal(child.id() as i32, Signal::INT);
    let status = until("the run has ended", || child.try_wait().expect("a child can be asked"));
    assert_ne!(status.code(), Some(0), "{status}");
    person.expect_nothing(&seen);
}

#[test]
fn ctrl_c_ends_a_command_that_ignores_it_too() {
    let person = Person::new();
    let mut child = person
        .shoal(&["run", "--", "sh", "-c", "trap '' INT TERM; while :; do sleep 1002.5; done"])
        .spawn()
        .expect("it starts");
    until("the command runs", || runs_inside(&person, "1002.5"));
    let seen = person.scopes();
    let status = until("the run has ended", || {
        // A person presses it again if nothing happens.
        send_signal(child.id() as i32, Signal::INT);
        std::thread::sleep(Duration::from_millis(200));
        child.try_wait().expect("a child can be asked")
    });
    assert_ne!(status.code(), Some(0));
    person.expect_nothing(&seen);
}

#[test]
fn sigterm_and_a_closed_terminal_leave_nothing_either() {
    for signal in [Signal::TERM, Signal::HUP] {
        let person = Person::new();
        let mut child = start_sleep(&person, "1003.5");
        let seen = person.scopes();
        send_signal(child.id() as i32, signal);
        until("the run has ended", || child.try_wait().expect("a child can be asked"));
        person.expect_nothing(&seen);
    }
}

/// How long anything of the private daemon stays after the run has ended.
fn lingers(person: &Person, child: &mut Child, seen: &[Scope]) -> Duration {
    until("the run has ended", || child.try_wait().expect("a child can be asked"));
    let began = Instant::now();
    person.expect_nothing(seen);
    began.elapsed()
}

#[test]
fn after_ctrl_c_nothing_stays_for_longer_than_after_a_normal_end() {
    let normal = {
        let person = Person::new();
        let mut child = person.shoal(&["run", "--", "sleep", "0.5"]).spawn().expect("it starts");
        until("the command runs", || runs_inside(&person, "sleep"));
        let seen = person.scopes();
        lingers(&person, &mut child, &seen)
    };
    let person = Person::new();
    let mut child = start_sleep(&person, "1008.5");
    let seen = person.scopes();
    send_signal(child.id() as i32, Signal::INT);
    let interrupted = lingers(&person, &mut child, &seen);
    assert!(interrupted <= normal * 3 + Duration::from_secs(1), "{interrupted:?}, else {normal:?}");
}

#[test]
fn a_private_daemon_holds_nothing_that_its_starter_had_open() {
    let person = Person::new();
    let file = person.home.join("open");
    let run = person.shoal(&["run", "--", "sleep", "1009.5"]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec 9>\"$0\"; exec \"$@\""]).arg(&file).arg(run.get_program()).args(run.get_args());
    for (name, value) in run.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let mut child = shell.stdin(Stdio::null()).spawn().expect("it starts");
    until("the command runs", || runs_inside(&person, "1009.5"));
    let seen = person.scopes();
    let holds = |process: &i32| {
        let open = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        open.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|target| target == file)
    };
    let run = child.id() as i32;
    assert!(holds(&run), "the run itself has it");
    let others: Vec<i32> = seen.iter().flat_map(Scope::processes).filter(|process| *process != run).collect();
    assert!(others.len() >= 3, "a daemon, a launcher, an init: {others:?}");
    assert_eq!(others.iter().find(|process| holds(process)), None);
    send_signal(run, Signal::INT);
    lingers(&person, &mut child, &seen);
}

#[test]
fn a_private_daemon_whose_launcher_was_replaced_leaves_nothing() {
    let person = Person::new();
    let mut child = start_sleep(&person, "1010.5");
    let seen = person.scopes();
    let is_launcher = |process: &i32| {
        let line = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).nth(1) == Some(b"launcher")
    };
    let launchers = || -> Vec<i32> { seen.iter().flat_map(Scope::processes).filter(is_launcher).collect() };
    let first = launchers();
    assert_eq!(first.len(), 1, "{first:?}");
    kill_hard(first[0]);
    assert_eq!(succeeded(person.run(&["run", "--", "echo", "again"])), "again\n");
    assert!(launchers().iter().all(|launcher| !first.contains(launcher)));
    send_signal(child.id() as i32, Signal::INT);
    lingers(&person, &mut child, &seen);
}

#[test]
fn a_killed_run_leaves_nothing_in_the_end() {
    let person = Person::new();
    let mut child = start_sleep(&person, "1004.5");
    let seen = person.scopes();
    child.kill().expect("it can be killed");
    child.wait().expect("it ends");
    person.expect_nothing(&seen);
}

#[test]
fn runs_at_once_share_one_daemon_and_the_last_one_out_removes_it() {
    let person = Person::new();
    let first = start_sleep(&person, "1005.5");
    let installations =
        || -> Vec<String> { person.scopes().into_iter().filter_map(|scope| scope.installation).collect() };
    let seen = person.scopes();
    let before = installations();
    std::thread::scope(|scope| {
        for n in 0..8 {
            let person = &person;
            scope.spawn(move || {
                assert_eq!(succeeded(person.run(&["run", "--", "echo", &n.to_string()])), format!("{n}\n"));
            });
        }
    });
    assert_eq!(installations(), before, "all runs used one daemon");
    assert!(runs_inside(&person, "1005.5").is_some(), "the first run is not disturbed by the others' end");
    let mut first = first;
    send_signal(first.id() as i32, Signal::INT);
    until("the run has ended", || first.try_wait().expect("a child can be asked"));
    person.expect_nothing(&seen);
}

#[test]
fn runs_that_come_and_go_at_the_same_time_all_succeed() {
    let person = Person::new();
    std::thread::scope(|scope| {
        for n in 0..4 {
            let person = &person;
            scope.spawn(move || {
                for round in 0..5 {
                    let word = format!("{n}.{round}");
                    assert_eq!(succeeded(person.run(&["run", "--", "echo", &word])), format!("{word}\n"));
                }
            });
        }
    });
    person.expect_nothing(&[]);
}

#[test]
fn a_private_daemon_killed_under_a_run_is_told_and_leaves_nothing_for_long() {
    let person = Person::new();
    let mut child = start_sleep(&person, "1006.5");
    let scopes = person.scopes();
    let outside: Vec<i32> = scopes
        .iter()
        .flat_map(|scope| {
            let inside = scope.inside();
            scope.processes().into_iter().filter(move |process| !inside.contains(process))
        })
        .filter(|process| *process != child.id() as i32)
        .collect();
    assert!(!outside.is_empty());
    outside.into_iter().for_each(|process| send_signal(process, Signal::KILL));
    // Whether the run recovers or gives up, it ends with a message, and the next one cleans up.
    send_signal(child.id() as i32, Signal::INT);
    until("the run has ended", || child.try_wait().expect("a child can be asked"));
    assert_eq!(succeeded(person.run(&["run", "--", "echo", "again"])), "again\n");
    person.expect_nothing(&scopes);
}

#[test]
fn the_next_run_uses_the_daemon_of_the_last_one() {
    let person = Person::with_linger("10m");
    // That its output ends while the daemon lives shows that the daemon does not hold it.
    assert_eq!(
        succeeded(person.run(&["run", "--", "sh", "-c", "echo secret > /workspace/file; echo 1"])),
        "1\n"
    );
    let (daemon, seen) = (person.daemon(), person.scopes());
    assert_eq!(succeeded(person.run(&["run", "--", "ls", "/workspace"])), "", "each run has its own sandbox");
    assert_eq!(person.daemon(), daemon);
    // Told to stop, it leaves as little as when it ends by itself.
    person.end_idle(daemon);
    person.expect_nothing(&seen);
}

#[test]
fn a_private_daemon_that_stayed_ends_by_itself() {
    let person = Person::with_linger("100ms");
    assert_eq!(succeeded(person.run(&["run", "--", "echo", "1"])), "1\n");
    person.expect_nothing(&[]);
}

#[test]
fn what_a_killed_run_left_does_not_stay_with_the_daemon() {
    let person = Person::with_linger("10m");
    let mut child = start_sleep(&person, "1011.5");
    let seen = person.scopes();
    child.kill().expect("it can be killed");
    child.wait().expect("it ends");
    person.expect_nothing(&seen);
}

#[test]
fn a_new_build_does_not_use_the_daemon_that_an_old_one_left() {
    let person = Person::with_linger("10m");
    assert_eq!(succeeded(person.run(&["run", "--", "echo", "old"])), "old\n");
    let (old, mut seen) = (person.daemon(), person.scopes());
    let upgraded = person.home.join("shoal");
    fs::copy(binary(), &upgraded).expect("it can be copied");
    let run = person.program(&upgraded, &["run", "--", "echo", "new"]).output().expect("it starts");
    assert_eq!(succeeded(run), "new\n");
    let new = person.daemon();
    assert_ne!(new, old);
    // A process that has ended and was not waited for yet has no program.
    until_true("the old one has ended", || fs::read_link(format!("/proc/{old}/exe")).is_err());
    let program = fs::read_link(format!("/proc/{new}/exe")).expect("it lives");
    assert_eq!(program, upgraded);
    seen.extend(person.scopes());
    person.end_idle(new);
    person.expect_nothing(&seen);
}

/// A file below the machine's own `/usr`, removed at the end.
struct HostFile(PathBuf);

impl HostFile {
    fn new(name: &str) -> Self {
        let path = Path::new("/usr/local/share").join(format!("shoal-test-{}-{name}", std::process::id()));
        fs::write(&path, "for everyone\n").expect("the test runs as root");
        Self(path)
    }

    fn set_mode(&self, mode: u32) {
        let permissions = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(mode);
        fs::set_permissions(&self.0, permissions).expect("it is ours");
    }
}

impl Drop for HostFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn a_file_below_usr_that_became_private_is_hidden_from_the_next_daemon() {
    let person = Person::new();
    let file = HostFile::new("private");
    let path = file.0.to_str().expect("text");
    file.set_mode(0o644);
    assert_eq!(succeeded(person.run(&["run", "--", "cat", path])), "for everyone\n");
    person.expect_nothing(&[]);
    // Neither a directory nor the package list changes with it.
    file.set_mode(0o600);
    let output = person.run(&["run", "--", "cat", path]);
    assert_ne!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert!(String::from_utf8_lossy(&output.stderr).contains("No such file"), "{output:?}");
    person.expect_nothing(&[]);
}

/// The command line on a daemon that a test started.
fn shoal_on(daemon: &Daemon, arguments: &[&str]) -> Output {
    Command::new(binary())
        .args(arguments)
        .env("SHOAL_URL", format!("http://{}", daemon.address))
        .env("SHOAL_API_KEY", &daemon.key)
        .env_remove("SHOAL_DATA_DIR")
        .stdin(Stdio::null())
        .output()
        .expect("the program can be started")
}

fn json_on(daemon: &Daemon, arguments: &[&str]) -> Value {
    serde_json::from_str(&succeeded(shoal_on(daemon, arguments))).expect("JSON")
}

#[test]
fn create_ls_inspect_run_logs_and_rm_do_what_they_say() {
    let daemon = Daemon::start();
    let made = json_on(&daemon, &["create", "--name", "by-hand", "--json"]);
    let id = made["id"].as_str().expect("an id").to_owned();
    let list = json_on(&daemon, &["ls", "--json"]);
    assert_eq!(list.as_array().map(Vec::len), Some(1), "{list}");
    assert_eq!(
        (&list[0]["id"], &list[0]["name"], &list[0]["state"]),
        (&made["id"], &"by-hand".into(), &"running".into())
    );
    assert!(succeeded(shoal_on(&daemon, &["ls"])).contains("by-hand"));
    assert_eq!(json_on(&daemon, &["inspect", &id, "--json"])["id"], made["id"]);
    assert_eq!(
        succeeded(shoal_on(
            &daemon,
            &["run", "--sandbox", &id, "--", "sh", "-c", "echo kept > /tmp/f; echo said"]
        )),
        "said\n"
    );
    assert_eq!(
        succeeded(shoal_on(&daemon, &["run", "--sandbox", &id, "--", "cat", "/tmp/f"])),
        "kept\n",
        "the sandbox lives on"
    );
    succeeded(shoal_on(&daemon, &["rm", &id]));
    assert_eq!(json_on(&daemon, &["ls", "--json"]), serde_json::json!([]));
}

#[test]
fn a_missing_sandbox_is_an_error_with_a_code() {
    let daemon = Daemon::start();
    let nobody = "00000000-0000-4000-8000-000000000000";
    for arguments in
        [vec!["inspect", nobody], vec!["rm", nobody], vec!["run", "--sandbox", nobody, "--", "true"]]
    {
        let output = shoal_on(&daemon, &arguments);
        assert!(!output.status.success(), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("does not exist") || said.contains("not found"), "{arguments:?}: {said}");
    }
}

#[test]
fn a_wrong_key_or_address_is_told_in_a_sentence() {
    let daemon = Daemon::start();
    let output = Command::new(binary())
        .args(["ls"])
        .env("SHOAL_URL", format!("http://{}", daemon.address))
        .env("SHOAL_API_KEY", "shoal_wrong_0123456789abcdef")
        .stdin(Stdio::null())
        .output()
        .expect("the program can be started");
    assert!(!output.status.success());
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("key"),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let output = Command::new(binary())
        .args(["ls"])
        .env("SHOAL_URL", "http://127.0.0.1:1")
        .env("SHOAL_API_KEY", &daemon.key)
        .stdin(Stdio::null())
        .output()
        .expect("the program can be started");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("127.0.0.1:1") && !said.contains("panicked"), "{said}");
}

#[test]
fn logs_follow_a_command_to_its_end() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let command = sandbox.spawn(
        serde_json::json!({"script": "echo one; until [ -e /tmp/go ]; do sleep 0.02; done; echo two"}),
    );
    let mut child = Command::new(binary())
        .args(["logs", "-f", &sandbox.id, &command])
        .env("SHOAL_URL", format!("http://{}", daemon.address))
        .env("SHOAL_API_KEY", &daemon.key)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    sandbox.wrote(&command, 4);
    sandbox.sh("touch /tmp/go").ok();
    until_true("the follower has ended", || child.try_wait().expect("a child can be asked").is_some());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "one\ntwo\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn help_is_there_for_every_command() {
    let person = Person::new();
    for command in ["serve", "run", "create", "ls", "inspect", "rm", "logs", "key"] {
        let said = succeeded(person.run(&[command, "--help"]));
        assert!(said.contains("Usage"), "{command}: {said}");
    }
    assert_eq!(person.run(&["dance"]).status.code(), Some(2));
    succeeded(person.run(&["--version"]));
}
