//! `shoal cp`, as a person uses it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use rustix::process::Signal;
use serde_json::Value;
use shoal_tests::daemon::{Home, binary, send_signal};
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Sandbox};

/// A daemon with a sandbox called `work`, and a local directory.
struct Desk {
    daemon: Daemon,
    sandbox: Sandbox,
    home: Home,
}

impl Desk {
    fn new() -> Self {
        let daemon = Daemon::start();
        let sandbox = daemon.sandbox_with(serde_json::json!({"name": "work"}));
        Self { daemon, sandbox, home: Home::new() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.home.join(name)
    }

    fn shoal(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.args(arguments).current_dir(self.home.path());
        command.env_remove("SHOAL_DATA_DIR");
        command
            .env("SHOAL_URL", format!("http://{}", self.daemon.address))
            .env("SHOAL_API_KEY", &self.daemon.key);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    #[track_caller]
    fn cp(&self, arguments: &[&str]) -> Output {
        let output = self.try_cp(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    fn try_cp(&self, arguments: &[&str]) -> Output {
        self.shoal(&[&["cp"], arguments].concat()).output().expect("the program can be started")
    }

    #[track_caller]
    fn refused(&self, arguments: &[&str], word: &str) {
        let output = self.try_cp(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(word), "{arguments:?} said {said}");
    }
}

#[test]
fn a_file_goes_in_and_out() {
    let desk = Desk::new();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|at| (at % 251) as u8).collect();
    fs::write(desk.at("f"), &bytes).expect("it is written");
    fs::set_permissions(desk.at("f"), fs::Permissions::from_mode(0o755)).expect("it is ours");
    desk.cp(&["f", "work:/workspace/"]);
    desk.cp(&["f", "work:/workspace"]);
    desk.cp(&["f", "work:/workspace/new/name"]);
    let sandbox = &desk.sandbox;
    sandbox.sh("cmp /workspace/f /workspace/new/name && test -x /workspace/f && ls /workspace | wc -l").ok();
    fs::create_dir(desk.at("down")).expect("it is new");
    desk.cp(&["work:/workspace/f", "down"]);
    desk.cp(&["work:/workspace/f", "g"]);
    assert!(fs::read(desk.at("down/f")).expect("it is there") == bytes);
    assert!(fs::read(desk.at("g")).expect("it is there") == bytes);
    assert_eq!(fs::metadata(desk.at("g")).expect("it is there").permissions().mode() & 0o777, 0o755);
    let told: Value =
        serde_json::from_slice(&desk.cp(&["--json", "f", "work:/workspace/h"]).stdout).expect("JSON");
    assert_eq!(told["bytes"], 3_000_000);
    // By its id too, and inside the sandbox.
    desk.cp(&[&format!("{}:/workspace/f", sandbox.id), "-"]);
    desk.cp(&["work:/workspace/f", "work:/workspace/copy"]);
    sandbox.sh("cmp /workspace/f /workspace/copy").ok();
    desk.cp(&["--user", "nobody", "f", "work:/tmp/theirs"]);
    assert_eq!(sandbox.sh("stat -c %U /tmp/theirs").ok().text(), "nobody");
}

#[test]
fn streams_go_in_and_out() {
    let desk = Desk::new();
    let mut up =
        desk.shoal(&["cp", "-", "work:/workspace/s"]).stdin(Stdio::piped()).spawn().expect("it starts");
    up.stdin.take().expect("it is a pipe").write_all(&vec![b'x'; 1_000_000]).expect("it is read");
    assert!(up.wait().expect("it ends").success());
    let down = desk.cp(&["work:/workspace/s", "-"]);
    assert_eq!(down.stdout, vec![b'x'; 1_000_000]);
    desk.sandbox.sh("mkdir /workspace/d; echo in > /workspace/d/f").ok();
    let archive = desk.cp(&["work:/workspace/d", "-"]).stdout;
    let mut tar =
        Command::new("tar").arg("t").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("tar");
    tar.stdin.take().expect("it is a pipe").write_all(&archive).expect("it is read");
    assert_eq!(tar.wait_with_output().expect("it ends").stdout, b"f\n");
}

#[test]
fn directories_go_in_and_out() {
    let desk = Desk::new();
    fs::create_dir_all(desk.at("src/deep")).expect("they are new");
    fs::write(desk.at("src/a"), "a").expect("it is written");
    fs::write(desk.at("src/deep/b"), vec![b'b'; 300_000]).expect("it is written");
    symlink("deep/b", desk.at("src/link")).expect("it is new");
    desk.cp(&["src", "work:/workspace"]);
    desk.cp(&["src/", "work:/workspace/other"]);
    desk.sandbox.sh("cd /workspace; diff -r src other && test -L src/link && cat src/deep/b | wc -c").ok();
    fs::create_dir(desk.at("down")).expect("it is new");
    desk.cp(&["work:/workspace/src", "down"]);
    desk.cp(&["work:/workspace/src", "renamed"]);
    for place in ["down/src", "renamed"] {
        assert_eq!(fs::read(desk.at(place).join("deep/b")).expect("it is there"), vec![b'b'; 300_000]);
        assert!(desk.at(place).join("link").is_symlink());
    }
}

#[test]
fn a_sandbox_cannot_write_beside_what_was_asked_for() {
    let desk = Desk::new();
    fs::write(desk.at("secret"), "kept").expect("it is written");
    let secret = desk.at("secret").to_string_lossy().into_owned();
    desk.sandbox
        .sh(&format!("mkdir -p /workspace/d/sub; cd /workspace/d; ln -s {secret} a; ln -s ../secret b; ln -s / root; echo x > f; mkfifo p"))
        .ok();
    let output = desk.cp(&["work:/workspace/d", "."]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("skipped"), "{said}");
    assert_eq!(fs::read_to_string(desk.at("secret")).expect("it is there"), "kept");
    assert!(desk.at("d/f").exists() && !desk.at("d/a").is_symlink() && !desk.at("d/root").is_symlink());
    // An existing local link is not followed out of the target either.
    fs::create_dir(desk.at("outside")).expect("it is new");
    fs::remove_dir(desk.at("d/sub")).expect("it is empty");
    symlink("../outside", desk.at("d/sub")).expect("it is new");
    desk.sandbox.sh("echo evil > /workspace/d/sub/f").ok();
    desk.refused(&["work:/workspace/d", "."], "link");
    assert_eq!(fs::read_dir(desk.at("outside")).expect("it is there").count(), 0);
}

#[test]
fn mistakes_are_said_and_leave_nothing() {
    let desk = Desk::new();
    fs::write(desk.at("f"), "x").expect("it is written");
    desk.refused(&["f", "g"], "SANDBOX:/path");
    desk.refused(&["missing", "work:/workspace/"], "missing");
    desk.refused(&["f", "nobody-has-this-name:/workspace/"], "does not exist");
    desk.refused(&["work:/nowhere", "."], "does not exist");
    desk.refused(&["work:/dev/zero", "zero"], "not a regular file");
    desk.refused(&["f", "work:/proc/1/x"], "");
    assert_eq!(fs::read_dir(desk.home.path()).expect("it is there").count(), 1);
}

#[test]
fn an_interrupted_copy_leaves_nothing() {
    let desk = Desk::new();
    desk.sandbox.sh("truncate -s 20G /workspace/big").ok();
    let mut down = desk.shoal(&["cp", "work:/workspace/big", "big"]).spawn().expect("it starts");
    until_true("it is under way", || fs::read_dir(desk.home.path()).is_ok_and(|all| all.count() > 0));
    send_signal(down.id() as i32, Signal::INT);
    assert_eq!(down.wait().expect("it ends").code(), Some(130));
    assert_eq!(fs::read_dir(desk.home.path()).expect("it is there").count(), 0);
    let mut up =
        desk.shoal(&["cp", "-", "work:/workspace/up"]).stdin(Stdio::piped()).spawn().expect("it starts");
    let mut stdin = up.stdin.take().expect("it is a pipe");
    stdin.write_all(&vec![b'x'; 1_000_000]).expect("it is read");
    send_signal(up.id() as i32, Signal::INT);
    assert_eq!(up.wait().expect("it ends").code(), Some(130));
    until_true("nothing is left inside", || desk.sandbox.sh("ls -A /workspace").ok().text() == "big");
}
