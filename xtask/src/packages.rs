//! What the tests need of the machine, installed where it is missing.
//!
//! Debian and Ubuntu only: elsewhere the missing programs are named and the person decides.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};

/// A program or a library that the tests use, and the Debian package that brings it.
struct Need {
    /// Where image `host` looks: it shows `/usr` alone, so a program elsewhere does not count.
    program: &'static str,
    package: &'static str,
}

const NEEDS: &[Need] = &[
    // Most probes that run inside a sandbox are small Python programs.
    Need { program: "/usr/bin/python3", package: "python3" },
    // Links Rust programs, builds SQLite, and compiles one probe.
    Need { program: "/usr/bin/cc", package: "gcc" },
    // `unshare`, `setsid` and `mount` are tried from inside.
    Need { program: "/usr/bin/unshare", package: "util-linux" },
    // Prometheus's own reader of its format judges what `/metrics` says.
    Need {
        program: "/usr/lib/python3/dist-packages/prometheus_client/openmetrics/parser.py",
        package: "python3-prometheus-client",
    },
    // The examples in the documents are run in network namespaces, and ask by HTTP.
    Need { program: "/usr/sbin/ip", package: "iproute2" },
    Need { program: "/usr/bin/curl", package: "curl" },
    Need { program: "/usr/bin/jq", package: "jq" },
    // One of them puts a daemon behind a proxy with a certificate.
    Need { program: "/usr/sbin/nginx", package: "nginx-light" },
    Need { program: "/usr/bin/openssl", package: "openssl" },
    // `btrfs check` judges the storage pools that Shoal makes by itself.
    Need { program: "/usr/bin/btrfs", package: "btrfs-progs" },
    // `ps` is what people type first.
    Need { program: "/usr/bin/ps", package: "procps" },
    // A terminal with a person at it, for the tests of `shoal shell`.
    Need { program: "/usr/bin/tmux", package: "tmux" },
    // `systemd-analyze` reads the unit; systemd itself need not run.
    Need { program: "/usr/bin/systemd-analyze", package: "systemd" },
    // A program with a screen of its own, run at such a terminal.
    Need { program: "/usr/bin/less", package: "less" },
    // Images are pulled from a real registry on loopback.
    Need { program: "/usr/bin/docker-registry", package: "docker-registry" },
    // They are pushed there, and saved as archives, by the tools that people use.
    Need { program: "/usr/bin/skopeo", package: "skopeo" },
    Need { program: "/usr/bin/umoci", package: "umoci" },
    // One of them is a whole distribution,
    Need { program: "/usr/sbin/debootstrap", package: "debootstrap" },
    // and the others are one static program.
    Need { program: "/bin/busybox", package: "busybox-static" },
];

/// Installs what is missing, and says what.
pub fn install_missing() -> Result<()> {
    let mut missing: Vec<&str> =
        NEEDS.iter().filter(|need| !Path::new(need.program).exists()).map(|need| need.package).collect();
    if cfg!(target_env = "gnu") && !has_static_libc() {
        // Init is a static executable.
        missing.push("libc6-dev");
    }
    // The suites of clients run in virtual environments. Debian keeps what makes one apart from Python itself, at a
    // path that has Python's version in it.
    if !super::answers(Command::new("/usr/bin/python3").args(["-c", "import ensurepip, venv"])) {
        missing.push("python3-venv");
    }
    // A machine may have it from elsewhere than Debian.
    if !super::answers(Command::new("npm").arg("--version")) {
        missing.push("npm");
    }
    if missing.is_empty() {
        return Ok(());
    }
    if !Path::new("/usr/bin/apt-get").exists() {
        bail!("the tests need these Debian packages or what is like them here: {}", missing.join(" "));
    }
    println!("xtask: install {}", missing.join(" "));
    // The lists may be older than the archive, or not there at all on a fresh machine.
    super::step("read the package lists", apt(&["update"]))?;
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(missing);
    super::step("install the packages", apt(&arguments))
}

fn apt(arguments: &[&str]) -> Command {
    let mut command = Command::new("/usr/bin/apt-get");
    command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    command
}

fn has_static_libc() -> bool {
    ["/usr/lib/x86_64-linux-gnu/libc.a", "/usr/lib/aarch64-linux-gnu/libc.a", "/usr/lib64/libc.a"]
        .iter()
        .any(|path| Path::new(path).exists())
}
