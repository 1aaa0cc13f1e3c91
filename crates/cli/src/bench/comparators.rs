//! Other tools that do the same, where they are installed. Each is left out, and said to be, where it is not.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};

use super::report::median;
use super::time_rounds;

/// `bwrap` with new namespaces, the machine's `/usr` and `/bin/true`.
pub fn bubblewrap(rounds: usize) -> anyhow::Result<Option<Duration>> {
    if !installed("bwrap") {
        return Ok(None);
    }
    let arguments = [
        "--unshare-all",
        "--ro-bind",
        "/usr",
        "/usr",
        "--symlink",
        "usr/bin",
        "/bin",
        "--symlink",
        "usr/lib",
        "/lib",
        "--symlink",
        "usr/lib64",
        "/lib64",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        "/bin/true",
    ];
    let times = time_rounds(rounds, || quietly(Command::new("bwrap").args(arguments)))?;
    Ok(Some(median(times)))
}

/// `runc run` of `/bin/true` on the same root filesystem, read-only.
pub fn runc_run(image: &Path, rounds: usize) -> anyhow::Result<Option<Duration>> {
    oci_run("runc", &[], image, rounds)
}

/// `runsc run` of the same.
pub fn runsc_run(image: &Path, rounds: usize) -> anyhow::Result<Option<Duration>> {
    oci_run("runsc", &["--network=none", "--ignore-cgroups"], image, rounds)
}

fn oci_run(program: &str, flags: &[&str], image: &Path, rounds: usize) -> anyhow::Result<Option<Duration>> {
    if !installed(program) {
        return Ok(None);
    }
    let bundle = Bundle::new(image, &["/bin/true"])?;
    let mut round = 0;
    let times = time_rounds(rounds, || {
        round += 1;
        let name = format!("{}-{round}", bundle.name);
        quietly(Command::new(program).args(flags).args(["run", "--bundle"]).arg(&bundle.path).arg(name))
    });
    Ok(or_left_out(program, times))
}

/// The median; or nothing, if the program is installed and does not work on this machine: worth a line, not the end of the run.
fn or_left_out(program: &str, times: anyhow::Result<Vec<Duration>>) -> Option<Duration> {
    times.map(median).inspect_err(|error| eprintln!("left out: {program}: {error:#}")).ok()
}

/// `podman run` of `/bin/true` over `runc`, on a root filesystem that is a skeleton with the machine's `/usr`.
pub fn podman_run(scratch: &Path, rounds: usize) -> anyhow::Result<Option<Duration>> {
    if !installed("podman") || !installed("runc") {
        return Ok(None);
    }
    let root = scratch.join("podman-root");
    for name in ["usr", "proc", "dev", "sys", "etc", "tmp", "run"] {
        std::fs::create_dir_all(root.join(name)).context("cannot make a root for podman")?;
    }
    for name in ["bin", "sbin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{name}"), root.join(name))
            .context("cannot make a root for podman")?;
    }
    let arguments = ["--runtime", "runc", "--cgroup-manager", "cgroupfs", "run", "--rm"];
    // Its own limits are more than some machines let root have.
    let limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"];
    let more = ["--network", "none", "--volume", "/usr:/usr:ro", "--rootfs"];
    let run = || {
        quietly(Command::new("podman").args(arguments).args(limits).args(more).arg(&root).arg("/bin/true"))
    };
    Ok(or_left_out("podman", time_rounds(rounds, run)))
}

/// `runc exec` of `/bin/true` in a container that runs.
pub fn runc_exec(image: &Path, rounds: usize) -> anyhow::Result<Option<Duration>> {
    if !installed("runc") {
        return Ok(None);
    }
    let bundle = Bundle::new(image, &["/bin/sleep", "infinity"])?;
    // Not `quietly`: the container keeps the descriptors it is given, and reading them to their end would take for ever.
    let status = Command::new("runc")
        .args(["run", "--detach", "--bundle"])
        .arg(&bundle.path)
        .arg(&bundle.name)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("cannot run runc")?;
    ensure!(status.success(), "`runc run --detach` ended with {status}");
    let times =
        time_rounds(rounds, || quietly(Command::new("runc").args(["exec", &bundle.name, "/bin/true"])));
    quietly(Command::new("runc").args(["delete", "--force", &bundle.name]))?;
    Ok(Some(median(times?)))
}

pub fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

pub fn quietly(command: &mut Command) -> anyhow::Result<()> {
    let output = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let output = output
        .and_then(|child| child.wait_with_output())
        .with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}: {}", output.status, said.trim());
    Ok(())
}

/// An OCI bundle whose root is the image `host`, removed at the end.
struct Bundle {
    path: PathBuf,
    name: String,
}

impl Bundle {
    fn new(image: &Path, args: &[&str]) -> anyhow::Result<Self> {
        let name = format!("shoal-bench-{}-{}", std::process::id(), args.len());
        let path = Path::new("/var/tmp").join(format!("{name}-bundle"));
        std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let bundle = Self { path, name };
        let namespaces =
            ["pid", "network", "ipc", "uts", "mount"].map(|kind| serde_json::json!({ "type": kind }));
        let config = serde_json::json!({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": false, "user": { "uid": 0, "gid": 0 }, "args": args, "cwd": "/",
                "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "noNewPrivileges": true,
            },
            "root": { "path": image.join("root"), "readonly": true },
            "hostname": "bench",
            "mounts": [
                { "destination": "/proc", "type": "proc", "source": "proc" },
                { "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"] },
                { "destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"] },
            ],
            "linux": { "namespaces": namespaces },
        });
        std::fs::write(bundle.path.join("config.json"), config.to_string())
            .context("cannot write a bundle")?;
        Ok(bundle)
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            eprintln!("cannot remove {}: {error}", self.path.display());
        }
    }
}
