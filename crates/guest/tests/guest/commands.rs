//! Starting commands: programs, scripts, users, directories, and every way in which a start can fail.

use wire::guest::{Cwd, ExitStatus, FromInit, Handle, StartError, ToInit};

use crate::support::{Guest, Mode, argv, in_both_modes, in_both_modes_after, is_root, shell};

#[test]
fn exit_codes_and_both_streams_are_exact() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        client.run(argv(1, &["true"])).assert_printed("");
        assert_eq!(client.run(argv(2, &["false"])).status(), ExitStatus::Code(1));
        let outcome = client.run(shell(3, "printf out; printf err >&2; exit 42"));
        assert_eq!(outcome.status(), ExitStatus::Code(42));
        assert_eq!((&outcome.stdout[..], &outcome.stderr[..]), (&b"out"[..], &b"err"[..]));
        assert!(outcome.pid.is_some_and(|pid| pid > 1));
        let outcome = client.run(shell(4, "kill -9 $$"));
        assert_eq!(outcome.status(), ExitStatus::Signal(9));
        let outcome = client.run(argv(5, &["printf", "%s|", "two words", "", "ü"]));
        outcome.assert_printed("two words||ü|");
    });
}

#[test]
fn many_commands_at_once_all_end() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        let handles: Vec<u32> = (1..=100).collect();
        for handle in &handles {
            client.start(shell(*handle, &format!("echo {handle}; echo e{handle} >&2; exit {}", handle % 7)));
        }
        for (handle, outcome) in client.finish_all(&handles) {
            assert_eq!(outcome.stdout_text(), format!("{}\n", handle.0));
            assert_eq!(outcome.stderr, format!("e{}\n", handle.0).into_bytes());
            assert_eq!(outcome.status(), ExitStatus::Code((handle.0 % 7) as i32));
        }
    });
}

#[test]
fn the_environment_is_what_was_given_and_what_is_missing_is_filled_in() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    let mut start = argv(1, &["/usr/bin/env"]);
    start.env = [("A", "1"), ("B", "x=y"), ("A", "2"), ("USER", "somebody"), ("SHOAL_COMMAND_ID", "forged")]
        .map(|(name, value)| (name.into(), value.into()))
        .into();
    let outcome = client.run(start);
    let text = outcome.stdout_text();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    let expected_start = ["A=2", "B=x=y", "HOME=/root", "LOGNAME=root"];
    assert_eq!(&lines[..4], expected_start, "{text}");
    assert!(lines.contains(&"SHOAL_COMMAND_ID=test-1") && lines.contains(&"USER=somebody"), "{text}");
    assert!(lines.iter().any(|line| line.starts_with("PATH=/usr/local/sbin:")), "{text}");
    assert!(lines.iter().any(|line| line.starts_with("SHELL=/")), "{text}");
    assert_eq!(lines.len(), 8, "{text}");
}

#[test]
fn a_command_finds_a_clean_process_around_it() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    // No signal is ignored or blocked, and only the three streams are open.
    client
        .run(shell(1, "grep -E 'Sig(Blk|Ign)' /proc/self/status | tr -d '\\t'"))
        .assert_printed("SigBlk:0000000000000000\nSigIgn:0000000000000000\n");
    client.run(argv(2, &["sh", "-c", "cd /proc/self/fd && echo *"])).assert_printed("0 1 2 3\n");
    client
        .run(argv(3, &["sh", "-c", "[ $(ps -o sid= $$) = $$ ] && [ $(ps -o pgid= $$) = $$ ] && umask"]))
        .assert_printed("0022\n");
    client.run(shell(4, "cat /proc/self/oom_score_adj")).assert_printed("1000\n");
    let own = client.run(shell(5, "ulimit -n")).stdout_text();
    let ours = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.expect("a limit");
    assert_eq!(own.trim(), ours.to_string(), "the limit that init raised for itself is put back");
}

#[test]
fn a_start_that_is_repeated_starts_once() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        let marks = guest.path("marks");
        let script = format!("echo once >> {}; read line", marks.display());
        let start = wire::guest::Start { stdin: true, ..shell(1, &script) };
        client.start(start.clone());
        assert!(matches!(client.message(), FromInit::Started { handle: Handle(1), .. }));
        client.start(start.clone());
        assert!(client.sync().is_empty(), "a second start has no effect");
        client.send(&ToInit::StdinEnd { handle: Handle(1), offset: 0 });
        let FromInit::Ended { .. } = client.message() else { panic!("it ends") };
        // Ended, and not acknowledged: init still knows it.
        client.start(start);
        assert!(client.sync().is_empty());
        client.send(&ToInit::AckResult { handle: Handle(1) });
        client.sync();
        let (_, known) = guest.connect_knowing();
        assert_eq!(known, []);
        assert_eq!(std::fs::read_to_string(marks).expect("it ran"), "once\n");
        std::fs::remove_file(guest.path("marks")).expect("it is there");
    });
}

#[track_caller]
fn check_failure(guest: &Guest, start: wire::guest::Start, expected: StartError) {
    let outcome = guest.connect().run(start);
    assert_eq!(outcome.error, Some(expected));
}

#[test]
fn whatever_cannot_start_says_why() {
    in_both_modes(|guest| {
        let not_found = |program: &str| StartError::ProgramNotFound { program: program.into() };
        check_failure(guest, argv(1, &["no-such-program", "x"]), not_found("no-such-program"));
        check_failure(guest, argv(2, &["/no/such/program"]), not_found("/no/such/program"));
        check_failure(guest, argv(3, &["/etc/passwd/x"]), not_found("/etc/passwd/x"));
        check_failure(guest, argv(4, &[]), not_found(""));
        check_failure(guest, argv(5, &[""]), not_found(""));
        let not_executable = |program: &str, reason: &str| StartError::NotExecutable {
            program: program.into(),
            reason: reason.into(),
        };
        check_failure(guest, argv(6, &["/etc/passwd"]), not_executable("/etc/passwd", "permission denied"));
        check_failure(guest, argv(7, &["/"]), not_executable("/", "permission denied"));
        let script = guest.path("script");
        let write = |text: &str| {
            std::fs::write(&script, text).expect("a file");
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(&script, mode).expect("it is ours");
        };
        let path = script.to_str().expect("text").to_owned();
        write("#!/no/such/interpreter\n");
        check_failure(guest, argv(8, &[&path]), not_executable(&path, "its interpreter was not found"));
        write("no first line that means anything\n");
        check_failure(guest, argv(9, &[&path]), not_executable(&path, "exec format error"));
        check_failure(
            guest,
            argv(10, &["echo", &"x".repeat(10 * 1024 * 1024)]),
            StartError::ArgumentsTooLong,
        );
        for (handle, start) in [
            (11, argv(11, &["echo", "a\0b"])),
            (12, shell(12, "echo a\0b")),
            (13, wire::guest::Start { cwd: Cwd::Named("/\0".into()), ..argv(13, &["true"]) }),
            (14, wire::guest::Start { env: vec![("A".into(), "\0".into())], ..argv(14, &["/bin/true"]) }),
        ] {
            let error = guest.connect().run(start).error;
            assert!(matches!(error, Some(StartError::NulByte { .. })), "{handle}: {error:?}");
        }
        let unknown = wire::guest::Start { user: Some("nobody-of-that-name".into()), ..argv(15, &["true"]) };
        check_failure(guest, unknown, StartError::UnknownUser { user: "nobody-of-that-name".into() });
    });
}

#[test]
fn a_directory_that_was_named_must_be_there_and_a_default_need_not() {
    let guest = Guest::start(Mode::Walk);
    let in_directory = |handle, cwd| wire::guest::Start { cwd, ..argv(handle, &["/bin/pwd"]) };
    let mut client = guest.connect();
    client.run(in_directory(1, Cwd::Named("/usr".into()))).assert_printed("/usr\n");
    client.run(in_directory(2, Cwd::Default("/usr/lib".into()))).assert_printed("/usr/lib\n");
    client.run(in_directory(3, Cwd::Default("/no/such/directory".into()))).assert_printed("/\n");
    for (handle, path, reason) in [
        (4, "/no/such/directory", "no such file or directory"),
        (5, "/etc/passwd", "not a directory"),
        (6, "", "no such file or directory"),
    ] {
        let expected = StartError::BadCwd { path: path.into(), reason: reason.into() };
        check_failure(&guest, in_directory(handle, Cwd::Named(path.into())), expected);
    }
}

#[test]
fn inits_own_descriptors_are_no_way_out_of_the_sandbox() {
    in_both_modes(|guest| {
        for (handle, number) in (1..).zip(3..40) {
            let cwd = Cwd::Named(format!("/proc/self/fd/{number}"));
            let outcome = guest.connect().run(wire::guest::Start { cwd, ..argv(handle, &["/bin/pwd"]) });
            assert!(matches!(outcome.error, Some(StartError::BadCwd { .. })), "{number}: {outcome:?}");
        }
    });
}

#[test]
fn a_command_runs_as_the_user_it_was_started_for() {
    if !is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let guest = Guest::start(Mode::Groups);
    let mut client = guest.connect();
    let as_user = |handle, user: &str, arguments: &[&str]| wire::guest::Start {
        user: Some(user.into()),
        ..argv(handle, arguments)
    };
    client.run(as_user(1, "nobody", &["id", "-un"])).assert_printed("nobody\n");
    client
        .run(as_user(2, "4242:2424", &["sh", "-c", "echo $(id -u) $(id -g) $(id -G) $HOME $USER"]))
        .assert_printed("4242 2424 2424 / 4242\n");
    client.run(as_user(3, "daemon:adm", &["id", "-gn"])).assert_printed("adm\n");
    // The user's own permissions decide about entering, and the user's own capabilities remain.
    let private = guest.path("private");
    std::fs::create_dir(&private).expect("a directory");
    std::fs::set_permissions(&private, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("ours");
    let path = private.to_str().expect("text").to_owned();
    let start = wire::guest::Start { cwd: Cwd::Named(path.clone()), ..as_user(4, "nobody", &["true"]) };
    check_failure(&guest, start, StartError::BadCwd { path, reason: "permission denied".into() });
    let mut client = guest.connect();
    client
        .run(as_user(5, "nobody", &["sh", "-c", "grep CapEff /proc/self/status | tr -d '\\t'"]))
        .assert_printed("CapEff:0000000000000000\n");
    // That user also reads a script that is too long for an argument.
    let script = format!("id -un\n# {}", "x".repeat(200_000));
    client
        .run(wire::guest::Start { user: Some("nobody".into()), ..shell(6, &script) })
        .assert_printed("nobody\n");
}

#[test]
fn a_script_may_be_of_any_length() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        for (handle, length) in [(1, 99_000), (2, 131_000), (3, 131_072), (4, 200_000), (5, 8 * 1024 * 1024)]
        {
            let script = format!(
                "echo $0 $LINENO; cat; ls /proc/self/fd | tr '\\n' ' '\n: {}\necho $LINENO",
                "x".repeat(length)
            );
            client.run(shell(handle, &script)).assert_printed("/bin/bash 1\n0 1 2 3 3\n");
        }
    });
}

#[test]
fn a_guest_without_room_for_another_group_says_so() {
    if !is_root() {
        println!("skipped: this needs a cgroup");
        return;
    }
    let guest = Guest::start(Mode::Groups);
    let mut client = guest.connect();
    // Init's own cgroup is the only one allowed.
    std::fs::write(guest.group_path().join("cgroup.max.descendants"), "1").expect("ours");
    // Not the number whose cgroup was prepared ahead.
    let outcome = client.run(argv(7, &["true"]));
    assert!(matches!(outcome.error, Some(StartError::NoRoom { .. })), "{outcome:?}");
    std::fs::write(guest.group_path().join("cgroup.max.descendants"), "max").expect("ours");
    client.run(argv(8, &["true"])).assert_printed("");
}

#[test]
fn a_guest_without_processes_left_says_so_and_recovers() {
    if !is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    // The limit counts all processes of one user on the machine; no other process runs as this one.
    let user = (1_000_000 + std::process::id()).to_string();
    let init = crate::support::default_init();
    let guest =
        Guest::try_start_after(Mode::Groups, &init, "prlimit --pid $$ --nproc=3:3").expect("it starts");
    let mut client = guest.connect();
    let sleeper =
        |handle| wire::guest::Start { user: Some(user.clone()), ..argv(handle, &["sleep", "1000"]) };
    let mut running = Vec::new();
    let refused = (1..20).find(|handle| {
        client.start(sleeper(*handle));
        match client.message() {
            FromInit::Started { handle, .. } => {
                running.push(handle);
                false
            }
            FromInit::StartFailed { error: StartError::NoRoom { .. }, .. } => true,
            other => panic!("{other:?}"),
        }
    });
    assert!(refused.is_some() && !running.is_empty());
    for handle in running {
        client.send(&ToInit::Kill { handle });
        assert!(matches!(client.message(), FromInit::Ended { .. }));
    }
    client.start(sleeper(100));
    assert!(matches!(client.message(), FromInit::Started { .. }));
}

#[test]
fn a_guest_without_descriptors_left_says_so_and_stays_in_reach() {
    in_both_modes_after("ulimit -n 80", |guest| {
        let mut client = guest.connect();
        let mut running = 0;
        loop {
            client.start(wire::guest::Start { stdin: true, ..argv(running + 1, &["sleep", "1000"]) });
            match client.message() {
                FromInit::Started { .. } => running += 1,
                FromInit::StartFailed { error: StartError::NoRoom { .. }, .. } => break,
                other => panic!("{other:?}"),
            }
        }
        println!("there was room for {running}");
        assert!(running > 5);
        // Init accepts a new connection, and running commands can be ended.
        let (mut client, known) = guest.connect_knowing();
        assert_eq!(known.len() as u32, running + 1);
        for handle in 1..=running {
            client.send(&ToInit::Resume { handle: Handle(handle), stdout: 0, stderr: 0 });
            client.send(&ToInit::Kill { handle: Handle(handle) });
        }
        let handles: Vec<u32> = (1..=running).collect();
        client.finish_all(&handles);
        client.run(argv(1000, &["true"])).assert_printed("");
    });
}
