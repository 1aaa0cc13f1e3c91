//! The command line beyond running commands: its output, for people and for programs.

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
        "nf_tables",
        "nft_tproxy",
        "ipv6",
        "seccomp",
        "idmapped_mounts",
        "idmapped_usr",
        "overlayfs",
        "host_programs",
    ] {
        // The other tests create sandboxes here, so all of this exists.
        assert!(verdicts.contains(&(name.into(), "ok".into())), "{name}: {findings:#}");
    }
    assert!(verdicts.contains(&("daemon".into(), "limited".into())), "{findings:#}");
    for finding in
        findings.as_array().expect("an array").iter().filter(|finding| finding["verdict"] == "limited")
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
    assert!(verdicts_of(stranger).contains(&("api_key".into(), "limited".into())));
}

#[test]
fn doctor_says_what_is_missing_and_ends_with_one() {
    // The program must be where another user may execute it.
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
    // Options after the program belong to the program.
    let output = run(on(&daemon, &["run", "no-such-program", "--json"]));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: "), "{output:?}");
    assert_eq!(output.status.code(), Some(127));
}

#[test]
fn hints_speak_of_the_command_line_and_not_of_http() {
    let daemon = Daemon::start();
    daemon.sandbox_with(json!({"name": "work"}));
    for (arguments, error, hint) in [
        (&["image", "inspect", "foo"][..], "image `foo`", "`shoal image ls`"),
        (&["template", "get", "foo"], "template `foo` does not exist", "`shoal template ls`"),
        (&["volume", "get", "foo"], "volume `foo` does not exist", "`shoal volume ls`"),
        (&["pool", "rm", "foo"], "pool `foo` does not exist", "`shoal pool ls`"),
        (&["key", "rm", "foo"], "key `foo` does not exist", "`shoal key ls`"),
        (&["logs", "work", "foo"], "command `foo` does not exist", "`shoal ps -a SANDBOX`"),
        (&["create", "--template", "foo"], "template", "`shoal template ls`"),
        (&["create", "--name", "work"], "work", "choose another name"),
    ] {
        let output = run(on(&daemon, arguments));
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(error) && said.contains(&format!("hint: {hint}")), "{arguments:?}: {said}");
        assert!(!said.contains("/v1/") && !said.contains("GET "), "{arguments:?}: {said}");
    }
    let mut stranger = alone(&["ls"]);
    stranger.env("SHOAL_URL", format!("http://{}", daemon.address)).env("SHOAL_API_KEY", "wrong");
    let said = run(stranger);
    let said = String::from_utf8_lossy(&said.stderr);
    assert!(said.contains("hint: set SHOAL_API_KEY") && !said.contains("Bearer"), "{said}");
    let said = run(on(&daemon, &["cp", "work:note", "."]));
    let said = String::from_utf8_lossy(&said.stderr);
    assert!(said.contains("the path in sandbox `work` must be absolute, got `note`"), "{said}");
}

#[test]
fn the_beginning_of_an_id_or_a_name_is_enough() {
    let daemon = Daemon::start();
    let work = daemon.sandbox_with(json!({"name": "work"}));
    daemon.sandbox_with(json!({"name": "worker"}));
    let id_of = |text: &str| {
        let shown: Value =
            serde_json::from_str(&stdout(on(&daemon, &["inspect", "--json", text]))).expect("JSON");
        shown["id"].as_str().expect("a text").to_owned()
    };
    assert_eq!(id_of("work"), work.id);
    assert_eq!(id_of(&work.id[..13]), work.id);
    assert_ne!(id_of("worke"), work.id);
    let said = run(on(&daemon, &["inspect", "wor"]));
    let said = String::from_utf8_lossy(&said.stderr);
    assert!(said.contains("`wor` matches 2 sandboxes") && said.contains("hint: type more"), "{said}");
    let command = work.spawn(json!({"script": "echo found"}));
    until("it has written", || {
        (stdout(on(&daemon, &["logs", "work", &command[..8]])) == "found\n").then_some(())
    });
    let pool: Value =
        serde_json::from_str(&stdout(on(&daemon, &["pool", "create", "warm", "--replicas", "0", "--json"])))
            .expect("JSON");
    stdout(on(&daemon, &["pool", "rm", pool["id"].as_str().expect("a text")]));
}

#[test]
fn verbs_and_flags_that_hands_type_do_what_they_say() {
    let daemon = Daemon::start();
    let home = Home::new();
    let file = home.join("env").display().to_string();
    std::fs::write(&file, "# tokens\nWORD=hi\nOTHER=from the file\n").expect("it can be written");
    stdout(on(&daemon, &["create", "-n", "work", "--cpus", "1", "--env-file", &file, "-l", "app=chat"]));
    assert_eq!(stdout(on(&daemon, &["exec", "-i", "work", "sh", "-c", "echo $WORD"])), "hi\n");
    let own = ["exec", "--env-file", &file, "-e", "WORD=mine", "work", "sh", "-c", "echo $WORD $OTHER"];
    assert_eq!(stdout(on(&daemon, &own)), "mine from the file\n");
    assert_eq!(stdout(on(&daemon, &["run", "--rm", "--timeout", "1m", "--", "echo", "one"])), "one\n");
    let output = run(on(&daemon, &["run", "--timeout", "200ms", "--", "sleep", "60"]));
    assert_eq!(output.status.code(), Some(124), "{output:?}");

    // In the background, until it is killed.
    let command = stdout(on(&daemon, &["exec", "-d", "work", "sleep", "1000"]));
    assert_eq!(stdout(on(&daemon, &["ps", "-q", "work"])), command);
    assert!(stdout(on(&daemon, &["ps", "work"])).contains("sleep 1000"));
    stdout(on(&daemon, &["kill", "work"]));
    until("it is gone", || stdout(on(&daemon, &["ps", "-q", "work"])).is_empty().then_some(()));
    let all = stdout(on(&daemon, &["ps", "-a", "work"]));
    assert!(all.contains("sleep 1000") && all.contains("killed") && all.contains(" ago"), "{all}");
    let output = run(on(&daemon, &["kill", "work"]));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no command is running"), "{output:?}");

    let printed =
        stdout(on(&daemon, &["run", "-d", "--name", "web", "--", "sh", "-c", "seq 100; exec sleep 1000"]));
    assert_eq!(
        stdout(on(&daemon, &["ls", "-q"])).lines().next(),
        Some(printed.trim()),
        "the newest comes first"
    );
    let tail = || stdout(on(&daemon, &["logs", "--tail", "2", "web"]));
    until("it has written", || (tail() == "99\n100\n").then_some(()));

    stdout(on(&daemon, &["rename", "web", "site"]));
    assert!(stdout(on(&daemon, &["ps"])).contains("site"));
    assert!(stdout(on(&daemon, &["list"])).contains(" ago"));
    let json: Value = serde_json::from_str(&stdout(on(&daemon, &["ls", "--json"]))).expect("JSON");
    assert!(json[0]["created_at"].as_str().expect("a text").ends_with('Z'), "programs get the timestamp");
    stdout(on(&daemon, &["rm", "-l", "app=chat"]));
    assert_eq!(stdout(on(&daemon, &["ls", "-q"])), printed);
    stdout(on(&daemon, &["delete", "--all"]));
    assert_eq!(stdout(on(&daemon, &["ls", "-q"])), "");
    assert_eq!(run(on(&daemon, &["rm", "site"])).status.code(), Some(1));
    stdout(on(&daemon, &["rm", "-f", "site"]));

    assert!(stdout(on(&daemon, &["images"])).starts_with("NAME"));
    let said = stdout(on(&daemon, &["version"]));
    assert!(said.starts_with("shoal ") && said.contains("\ndaemon "), "{said}");
    assert!(stdout(alone(&["version"])).contains("daemon not running"));
}

#[test]
fn a_daemon_goes_to_the_background_and_says_when_it_is_ready() {
    let home = Home::new();
    let data_dir = home.join("data");
    let serve = |listen: &str| {
        let mut command =
            alone(&["serve", "-d", "--listen", listen, "--spares", "0", "--store", "directory"]);
        command.env("SHOAL_DATA_DIR", &data_dir);
        run(command)
    };
    let at = |arguments: &[&str]| {
        let mut command = alone(arguments);
        command.env("SHOAL_DATA_DIR", &data_dir);
        stdout(command)
    };
    let output = serve("127.0.0.1:0");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.starts_with("shoal is ready at http://127.0.0.1:"), "{output:?}");
    at(&["create", "-n", "work"]);
    assert!(at(&["ls"]).contains("work"));
    let log = std::fs::read_to_string(data_dir.join("serve.log")).expect("it has a log");
    assert!(!log.contains("answered"), "quiet by default: {log}");
    // A daemon that cannot start is a failure of the command that started it.
    let again = serve("127.0.0.1:0");
    let said = String::from_utf8_lossy(&again.stderr);
    assert_eq!(again.status.code(), Some(1), "{said}");
    assert!(said.contains("the daemon did not start") && said.contains("is in use by process"), "{said}");
    let pid: i32 = std::fs::read_to_string(data_dir.join("lock"))
        .expect("it holds its lock")
        .trim()
        .parse()
        .expect("a process id");
    shoal_tests::daemon::send_signal(pid, rustix::process::Signal::TERM);
    until("it is gone", || shoal_tests::audit::is_dead(pid).then_some(()));
}

#[test]
fn logs_of_the_last_minutes_are_those_of_all_commands_since() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"name": "work"}));
    assert_eq!(stdout(on(&daemon, &["logs", "--since", "10m", "work"])), "");
    for word in ["one", "two"] {
        sandbox.run(json!({"script": format!("echo {word}\necho {word} again")}));
    }
    let said = stdout(on(&daemon, &["logs", "--since", "10m", "work"]));
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 6, "{said}");
    assert!(lines[0].starts_with("==> ") && lines[0].ends_with(" echo one echo one again <=="), "{said}");
    assert_eq!((lines[1], lines[2], lines[4]), ("one", "one again", "two"));
    let said = stdout(on(&daemon, &["logs", "--since", "10m", "--tail", "1", "work"]));
    assert_eq!(said.lines().collect::<Vec<_>>()[1..3].join(" "), format!("one again {}", lines[3]), "{said}");
}

#[test]
fn a_user_who_may_not_read_the_data_directory_is_told_so() {
    let daemon = Daemon::start();
    let home = Home::new();
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    let program = home.join("shoal");
    std::fs::copy(binary(), &program).expect("it can be copied");
    let as_nobody = |arguments: &[&str], data_dir: &std::path::Path| {
        let output = Command::new(&program)
            .args(arguments)
            .env("SHOAL_DATA_DIR", data_dir)
            .env("SHOAL_CONFIG", "")
            .env_remove("SHOAL_URL")
            .env_remove("SHOAL_API_KEY")
            .stdin(Stdio::null())
            .uid(65_534)
            .gid(65_534)
            .output()
            .expect("nobody may execute it");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = as_nobody(&["ls"], &daemon.data_dir);
    assert!(said.contains("cannot read") && said.contains("as this user"), "{said}");
    assert!(!said.contains("no daemon is running"), "{said}");
    let said = as_nobody(&["run", "--", "true"], std::path::Path::new("/nonexistent/shoal"));
    assert!(said.starts_with("error: `shoal run` without a daemon needs root\nhint: "), "{said}");
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
fn completions_offer_the_names_that_the_daemon_has() {
    let daemon = Daemon::start();
    daemon.sandbox_with(json!({"name": "work"}));
    daemon.sandbox_with(json!({"name": "$(touch${IFS}expanded)"}));
    let home = Home::new();
    let path = home.path().join("completions");
    std::fs::write(&path, stdout(alone(&["completions", "bash"]))).expect("it can be written");
    let offered = |words: &[&str]| {
        let script = "source \"$0\"; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _shoal_with_names shoal \
                      \"${@: -1}\" \"${@: -2:1}\"; echo \"${COMPREPLY[@]}\"";
        let mut bash = Command::new("bash");
        let programs = binary().parent().expect("it is in a directory").display().to_string();
        bash.args(["-c", script]).arg(&path).args(words).env("SHOAL_DATA_DIR", &daemon.data_dir);
        bash.env("PATH", format!("{programs}:/usr/bin:/bin"))
            .env_remove("SHOAL_URL")
            .env_remove("SHOAL_API_KEY");
        bash.stdout(Stdio::piped()).stderr(Stdio::piped());
        stdout(bash)
    };
    assert_eq!(offered(&["shoal", "rm", "wo"]), "work\n");
    assert_eq!(offered(&["shoal", "rm", ""]), "work\n", "a name that the shell would expand is not offered");
    assert_eq!(offered(&["shoal", "run", "--sandbox", "w"]), "work\n");
    assert_eq!(offered(&["shoal", "template", "get", "d"]), "default\n");
    assert!(offered(&["shoal", "insp"]).contains("inspect"));
    assert!(offered(&["shoal", "rm", "--"]).contains("--all"));
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
        // Both read it in the same way.
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
    // The program that it starts must exist where it is verified.
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
