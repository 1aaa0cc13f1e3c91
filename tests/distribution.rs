//! What `cargo xtask dist` makes, from the program of this build: installed from the tarball, and read as a Debian package.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use shoal_tests::daemon::{Home, binary};

/// Runs a program that must succeed, and returns what it printed.
#[track_caller]
fn ok(command: &mut Command) -> String {
    let output = ran(command);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {errors}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

fn ran(command: &mut Command) -> Output {
    command.output().expect("it can be started")
}

/// Makes everything but the wheel, which the suite of the Python SDK builds and installs.
fn dist(out: &Path) -> Vec<String> {
    let xtask = binary().with_file_name("xtask");
    ok(Command::new(xtask)
        .args(["dist", "--no-wheel", "--quick", "--program"])
        .arg(binary())
        .arg("--out")
        .arg(out)
        .env("SOURCE_DATE_EPOCH", "1700000000"));
    let entries = std::fs::read_dir(out).expect("it is there");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("readable").file_name().into_string().expect("text")).collect();
    names.sort();
    names
}

fn named(names: &[String], end: &str) -> String {
    names.iter().find(|name| name.ends_with(end)).unwrap_or_else(|| panic!("{end}: {names:?}")).clone()
}

#[test]
fn what_is_packed_can_be_installed_without_a_network() {
    let home = Home::new();
    let out = home.join("out");
    let names = dist(&out);
    assert_eq!(names.len(), 3, "nothing in between is left: {names:?}");
    let (tarball, deb) = (named(&names, ".tar.gz"), named(&names, ".deb"));
    let version = env!("CARGO_PKG_VERSION");
    assert!(tarball.starts_with(&format!("shoal-{version}-linux-")), "{tarball}");
    assert!(deb.starts_with(&format!("shoal_{version}_")), "{deb}");
    ok(Command::new("sha256sum").args(["--check", "SHA256SUMS"]).current_dir(&out));

    // The same again gives the same bytes.
    let again = home.join("again");
    dist(&again);
    let sums = |place: &PathBuf| std::fs::read_to_string(place.join("SHA256SUMS")).expect("text");
    assert_eq!(sums(&out), sums(&again));

    // Without a network: in a namespace that has none.
    ok(Command::new("tar").arg("xf").arg(out.join(&tarball)).arg("-C").arg(home.path()));
    let unpacked = home.join(tarball.trim_end_matches(".tar.gz"));
    let prefix = home.join("prefix");
    let install = |more: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--net", "--"]).arg(unpacked.join("install.sh")).arg("--prefix").arg(&prefix);
        command.arg("--no-service").args(more);
        command
    };
    let said = ok(&mut install(&[]));
    assert!(said.contains(&format!("installed shoal {version}")), "{said}");
    ok(&mut install(&[]));
    let said = ok(Command::new(prefix.join("bin/shoal")).arg("--version"));
    assert!(said.starts_with(&format!("shoal {version}")), "{said}");
    for file in ["share/bash-completion/completions/shoal", "share/doc/shoal/docs/start.md"] {
        assert!(prefix.join(file).is_file(), "{file}");
    }
    ok(&mut install(&["--uninstall"]));
    assert!(!prefix.join("bin/shoal").exists() && !prefix.join("share/doc/shoal").exists());
    assert_eq!(ran(&mut install(&["--frobnicate"])).status.code(), Some(2));

    // What was changed on its way is not installed.
    let unit = unpacked.join("shoal.service");
    std::fs::write(&unit, "[Service]\nExecStart=/bin/evil\n").expect("it can be written");
    let refused = ran(&mut install(&[]));
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("do not match SHA256SUMS"), "{refused:?}");
    assert!(!prefix.join("bin/shoal").exists());
}

#[test]
fn the_debian_package_has_what_a_service_needs() {
    let home = Home::new();
    let out = home.join("out");
    let deb = out.join(named(&dist(&out), ".deb"));
    let field =
        |name: &str| ok(Command::new("dpkg-deb").arg("--field").arg(&deb).arg(name)).trim().to_owned();
    assert_eq!(field("Package"), "shoal");
    assert_eq!(field("Version"), env!("CARGO_PKG_VERSION"));
    assert!(field("Depends").starts_with("libc6 (>= 2."), "{}", field("Depends"));
    let tree = home.join("tree");
    ok(Command::new("dpkg-deb").arg("--raw-extract").arg(&deb).arg(&tree));
    let said = ok(Command::new(tree.join("usr/bin/shoal")).arg("--version"));
    assert!(said.starts_with("shoal "), "{said}");
    let unit = std::fs::read_to_string(tree.join("usr/lib/systemd/system/shoal.service")).expect("a unit");
    assert!(unit.contains("ExecStart=/usr/bin/shoal serve") && !unit.contains("/usr/local"), "{unit}");
    for script in ["postinst", "prerm", "postrm"] {
        ok(Command::new("sh").arg("-n").arg(tree.join("DEBIAN").join(script)));
    }
    let listed = ok(Command::new("dpkg-deb").arg("--contents").arg(&deb));
    assert!(listed.lines().all(|line| line.contains(" root/root ")), "{listed}");
    assert!(!listed.contains("/etc/"), "settings belong to the operator: {listed}");
}
