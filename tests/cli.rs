//! The command line beyond running things: what it says, to people and to programs.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use shoal_tests::daemon::{Home, binary};
use shoal_tests::{Daemon, Spawn, until};

/// The command line on the daemon of a data directory.
fn on(daemon: &Daemon, arguments: &[&str]) -> Command {
    let mut command = alone(arguments);
    command.env("SHOAL_DATA_DIR", &daemon.data_dir);
    command
}

/// The command line without a daemon.
fn alone(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(arguments).env("SHOAL_DATA_DIR", "/nonexistent/shoal").env("SHOAL_CONFIG", "");
    for name in ["SHOAL_URL", "SHOAL_API_KEY", "SHOAL_PRIVATE_DIR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"]
    {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(mut command: Command) -> Output {
    command.output().expect("the program can be started")
}

#[track_caller]
fn stdout(command: Command) -> String {
    let output = run(command);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {errors}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

fn verdicts(findings: &Value) -> Vec<(String, String)> {
    let findings = findings.as_array().expect("an array");
    let text = |finding: &Value, field: &str| finding[field].as_str().expect("a text").to_owned();
    findings.iter().map(|finding| (text(finding, "name"), text(finding, "verdict"))).collect()
}

#[test]
fn doctor_finds_what_this_machine_has_and_leaves_nothing_behind() {
    let home = Home::new();
    let place = home.path().display().to_string();
    let findings: Value =
        serde_json::from_str(&stdout(alone(&["doctor", "--json", "--data-dir", &place]))).expect("JSON");
    let verdicts = verdicts(&findings);
    for name in [
        "kernel",
        "root",
        "cgroup_v2",
        "cgroup_cpu",
        "cgroup_memory",
        "cgroup_pids",
        "cgroup_writable",
        "user_namespaces",
        "network_namespaces",
        "seccomp",
        "idmapped_mounts",
        "idmapped_usr",
        "overlayfs",
        "host_programs",
    ] {
        // The other tests make sandboxes here, so all of this is there.
        assert!(verdicts.contains(&(name.into(), "ok".into())), "{name}: {findings:#}");
    }
    assert!(verdicts.contains(&("daemon".into(), "lacking".into())), "{findings:#}");
    for finding in
        findings.as_array().expect("an array").iter().filter(|finding| finding["verdict"] == "lacking")
    {
        assert!(finding["cost"].is_string() && finding["remedy"].is_string(), "{finding}");
    }
    assert_eq!(std::fs::read_dir(home.path()).expect("it is there").count(), 0);
    let said = stdout(alone(&["doctor", "--data-dir", &place]));
    assert!(said.contains("Shoal works here") && !said.contains('\x1b'), "{said}");
}

#[test]
fn doctor_finds_the_daemon_and_its_key() {
    let daemon = Daemon::start();
    let verdicts_of = |command| verdicts(&serde_json::from_str(&stdout(command)).expect("JSON"));
    let verdicts = verdicts_of(on(&daemon, &["doctor", "--json"]));
    for name in ["daemon", "api_key"] {
        assert!(verdicts.contains(&(name.into(), "ok".into())), "{verdicts:?}");
    }
    let mut stranger = alone(&["doctor", "--json"]);
    stranger
        .env("SHOAL_URL", format!("http://{}", daemon.address))
        .env("SHOAL_API_KEY", "not-the-key-of-anyone");
    assert!(verdicts_of(stranger).contains(&("api_key".into(), "lacking".into())));
}

#[test]
fn doctor_says_what_is_missing_and_ends_with_one() {
    // The program must be where somebody else may execute it.
    let home = Home::new();
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    let program = home.join("shoal");
    std::fs::copy(binary(), &program).expect("it can be copied");
    let output = Command::new(&program)
        .args(["doctor", "--color", "always"])
        .env("SHOAL_DATA_DIR", "/nonexistent/shoal")
        .uid(65_534)
        .gid(65_534)
        .output()
        .expect("nobody may execute it");
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("\x1b[31mmissing\x1b[0m  root "), "{said}");
    assert!(said.contains("sudo shoal doctor") && said.contains("Shoal does not work here"), "{said}");
}

#[test]
fn colours_are_for_terminals_and_for_those_who_ask() {
    let daemon = Daemon::start();
    daemon.sandbox_with(json!({"name": "work"}));
    let state = "\x1b[32mrunning\x1b[0m";
    assert!(!stdout(on(&daemon, &["ls"])).contains('\x1b'));
    assert!(stdout(on(&daemon, &["ls", "--color", "always"])).contains(state));
    assert!(stdout(on(&daemon, &["--color=always", "ls"])).contains(state));
    let mut forced = on(&daemon, &["ls"]);
    forced.env("CLICOLOR_FORCE", "1");
    assert!(stdout(forced).contains(state));
    let mut refused = on(&daemon, &["ls"]);
    refused.env("CLICOLOR_FORCE", "1").env("NO_COLOR", "1");
    assert!(!stdout(refused).contains('\x1b'));
    assert_eq!(run(on(&daemon, &["ls", "--color", "sometimes"])).status.code(), Some(2));
}

#[test]
fn a_failure_is_told_to_people_and_to_programs() {
    let daemon = Daemon::start();
    let output = run(on(&daemon, &["inspect", "nobody"]));
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "error: sandbox `nobody` does not exist\nhint: `shoal ls` lists all sandboxes\n"
    );
    let output = run(on(&daemon, &["inspect", "--json", "nobody"]));
    let told: Value = serde_json::from_slice(&output.stderr).expect("one object");
    assert_eq!(told["error"], "sandbox `nobody` does not exist");
    assert_eq!(told["hint"], "`shoal ls` lists all sandboxes");
    let output = run(on(&daemon, &["create", "--json", "--cpu", "lots"]));
    let told: Value = serde_json::from_slice(&output.stderr).expect("one object");
    assert_eq!(told["code"], "invalid_request", "{told}");
    // An option of what is run is not one of ours.
    let output = run(on(&daemon, &["run", "no-such-program", "--json"]));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: "), "{output:?}");
    assert_eq!(output.status.code(), Some(127));
}

#[test]
fn completions_are_scripts_that_their_shell_can_read() {
    let script = stdout(alone(&["completions", "bash"]));
    // From a file: it is longer than an argument may be.
    let home = Home::new();
    let path = home.path().join("completions");
    std::fs::write(&path, script).expect("it can be written");
    let mut bash = Command::new("bash");
    bash.args(["-c", "source \"$0\"; complete -p shoal"]).arg(&path).env_clear().env("PATH", "/usr/bin:/bin");
    assert!(stdout(bash).contains("shoal"));
    for shell in ["zsh", "fish"] {
        assert!(stdout(alone(&["completions", shell])).contains("doctor"));
    }
    assert_eq!(run(alone(&["completions", "cmd.exe"])).status.code(), Some(2));
}

#[test]
fn logs_follow_through_a_restart_of_the_daemon() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"name": "work"}));
    let script =
        "for n in 1 2 3; do echo line $n; until [ -e /tmp/$n ]; do sleep 0.02; done; done; echo over; exit 3";
    let command = sandbox.spawn(json!({"script": script}));
    let mut child = on(&daemon, &["logs", "-f", "work", &command]).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut next = move || lines.next().map(|line| line.expect("text"));
    assert_eq!(next().as_deref(), Some("line 1"));
    let id = sandbox.id.clone();
    daemon.crash();
    let sandbox = daemon.sandbox_of(&id);
    sandbox.sh("touch /tmp/1").ok();
    assert_eq!(next().as_deref(), Some("line 2"));
    assert!(daemon.stop());
    daemon.start_again();
    let sandbox = daemon.sandbox_of(&id);
    sandbox.sh("touch /tmp/2 /tmp/3").ok();
    assert_eq!((next().as_deref(), next().as_deref()), (Some("line 3"), Some("over")));
    assert_eq!(next(), None);
    let status = until("it ends with the command", || child.try_wait().expect("a child can be asked"));
    assert!(status.success(), "what the command ended with is not how reading it went: {status}");
    let mut errors = String::new();
    child.stderr.take().expect("a pipe").read_to_string(&mut errors).expect("text");
    assert_eq!(errors, "");
}

#[test]
fn config_show_says_what_is_in_force_and_who_said_so() {
    let home = Home::new();
    let file = home.join("shoal.toml");
    std::fs::write(&file, "# ours\nspares = 2\noutput_kept = \"1Mi\"\nlisten = \"127.0.0.1:1\"\n")
        .expect("a file");
    let file = file.display().to_string();
    let mut command = alone(&["config", "show", "--json", "--config", &file, "--listen", "127.0.0.1:3"]);
    command.env_remove("SHOAL_DATA_DIR").env("SHOAL_SPARES", "3").env("SHOAL_LISTEN", "127.0.0.1:2");
    let shown: Value = serde_json::from_str(&stdout(command)).expect("JSON");
    let of = |key: &str| {
        let all = shown.as_array().expect("an array");
        all.iter().find(|one| one["key"] == key).unwrap_or_else(|| panic!("no {key}: {shown:#}")).clone()
    };
    let flag = json!({"key": "listen", "value": "127.0.0.1:3", "source": "flag", "place": "--listen"});
    assert_eq!(of("listen"), flag);
    let variable = json!({"key": "spares", "value": 3, "source": "environment", "place": "SHOAL_SPARES"});
    assert_eq!(of("spares"), variable);
    let place = format!("{file}, line 3");
    assert_eq!(
        of("output_kept"),
        json!({"key": "output_kept", "value": "1Mi", "source": "file", "place": place})
    );
    assert_eq!(of("data_dir"), json!({"key": "data_dir", "value": "/var/lib/shoal", "source": "default"}));
    let mut command = alone(&["config", "show"]);
    command.env("SHOAL_CONFIG", &file);
    let said = stdout(command);
    assert!(said.contains(&format!("file: {file}")) && said.contains("/nonexistent/shoal"), "{said}");
}

#[test]
fn a_wrong_configuration_is_refused_with_its_place() {
    let home = Home::new();
    let file = home.join("shoal.toml");
    let place = file.display().to_string();
    for (text, words) in [
        ("\nlistn = \"127.0.0.1:1\"\n", &["`listn` in line 2", "did you mean `listen`?"][..]),
        ("spares = 1\nlisten = \"here\"\n", &["`listen`", "line 2", "not `here`"]),
        ("listen = [1]\n", &["line 1", "expected a string"]),
        ("listen = \n", &["line 1"]),
    ] {
        std::fs::write(&file, text).expect("a file");
        // Both look at it in the same way.
        for arguments in [&["config", "show", "--config", &place][..], &["serve", "--config", &place]] {
            let mut command = alone(arguments);
            command.env("SHOAL_DATA_DIR", home.join("data"));
            let output = run(command);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
            assert!(said.contains(&place), "{said}");
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
        }
    }
    assert!(!home.join("data").exists(), "nothing was begun");
    let mut command = alone(&["config", "show"]);
    command.env("SHOAL_INSECURE_HTTP", "perhaps");
    let said = String::from_utf8_lossy(&run(command).stderr).into_owned();
    assert!(said.contains("SHOAL_INSECURE_HTTP") && said.contains("true or false"), "{said}");
    let mut command = alone(&["config", "show"]);
    command.env("SHOAL_LISTN", "127.0.0.1:1");
    let output = run(command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("did you mean SHOAL_LISTEN?"), "{said}");
}

#[test]
fn the_command_line_finds_a_daemon_where_the_file_says() {
    let daemon = Daemon::start();
    daemon.sandbox_with(json!({"name": "work"}));
    let file = daemon.home.join("machine.toml");
    std::fs::write(&file, format!("data_dir = \"{}\"\n", daemon.data_dir.display())).expect("a file");
    let mut command = alone(&["ls"]);
    command.env_remove("SHOAL_DATA_DIR").env("SHOAL_CONFIG", &file);
    assert!(stdout(command).contains("work"));
}

#[test]
fn a_service_manager_is_told_when_the_daemon_is_ready() {
    let home = Home::new();
    let path = home.join("notify");
    let socket = UnixDatagram::bind(&path).expect("it can be bound");
    socket.set_read_timeout(Some(shoal_tests::DEADLINE)).expect("it can be set");
    let environment = vec![("NOTIFY_SOCKET".into(), path.display().to_string())];
    let daemon = Spawn { environment, ..Spawn::default() }.start();
    let mut told = [0; 256];
    let length = socket.recv(&mut told).expect("it says that it is ready");
    let told = String::from_utf8_lossy(&told[..length]);
    assert_eq!(told, format!("READY=1\nSTATUS=listening at http://{}", daemon.address));
}

#[test]
fn the_unit_is_one_that_systemd_reads() {
    let home = Home::new();
    let unit =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../dist/shoal.service")).expect("text");
    for line in ["KillMode=process", "Delegate=yes", "Type=notify"] {
        assert!(unit.lines().any(|known| known == line), "{line}");
    }
    // What it starts must exist where it is verified.
    let unit = unit.replace("/usr/local/bin/shoal", &binary().display().to_string());
    let path = home.join("shoal.service");
    std::fs::write(&path, unit).expect("a file");
    let output = Command::new("systemd-analyze")
        .arg("verify")
        .arg(&path)
        .output()
        .expect("systemd-analyze is installed: `cargo xtask test` does that");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{}: {said}", output.status);
}
