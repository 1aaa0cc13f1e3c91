//! `shoal serve --detach`: the daemon in the background, with its log in the data directory.
//!
//! This process starts the same program again with the same arguments, waits until that says it is ready, and ends. For a
//! daemon that shall outlive a reboot there is the systemd unit.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::Context;

use crate::daemon::FIRST_OWN_DESCRIPTOR;
use crate::output::report::{self, hinted};
use crate::output::{print, report::hinted_by};

/// What the daemon prints before its address.
pub const READY: &str = "shoal is ready at ";
/// The log, in the data directory.
const LOG: &str = "serve.log";
/// A log that is longer at a start is put aside, under [`LOG_BEFORE`].
const LOG_MAX: u64 = 16 << 20;
const LOG_BEFORE: &str = "serve.log.1";
/// How much of the log is shown when the daemon does not start.
const LOG_SHOWN_MAX: u64 = 8192;
/// How long a daemon may take to start: as long as its systemd unit allows.
const START_MAX: Duration = Duration::from_secs(300);
/// The file that this process was started from, whatever has become of its name.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// Starts the daemon of a data directory in the background and waits until it is ready. The exit code.
pub async fn start(data_dir: &Path) -> anyhow::Result<i32> {
    // For root alone, as the daemon would make it.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(data_dir)
        .with_context(|| format!("cannot create `{}`", data_dir.display()))?;
    let path = data_dir.join(LOG);
    if std::fs::metadata(&path).is_ok_and(|log| log.len() > LOG_MAX) {
        std::fs::rename(&path, data_dir.join(LOG_BEFORE))
            .with_context(|| format!("cannot rename `{}`", path.display()))?;
    }
    let open = OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
    let log = open.with_context(|| format!("cannot open `{}`", path.display()))?;
    let before = log.metadata().with_context(|| format!("cannot look at `{}`", path.display()))?.len();
    let mut command = Command::new(OWN_PROGRAM);
    command.arg0("shoal").args(arguments(std::env::args_os().skip(1)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    runtime::sys::close_on_exec_from(FIRST_OWN_DESCRIPTOR).context("cannot mark descriptors")?;
    let mut daemon = command.spawn().context("cannot start the daemon")?;
    let stdout = daemon.stdout.take().context("the daemon has no stdout")?;
    let ready = tokio::time::timeout(START_MAX, tokio::task::spawn_blocking(move || ready(stdout))).await;
    match ready {
        Ok(address) => {
            if let Some(address) =
                address.context("cannot wait for the daemon")?.context("cannot read from the daemon")?
            {
                print::line(&format!("{READY}{address}"))?;
                // There is little by default, and a person should know it: how much disk was taken, for one.
                eprint!("{}", print::harmless_lines(&since(&path, before).unwrap_or_default()));
                let pid = daemon.id();
                let place = path.display();
                report::done(&format!(
                    "the daemon runs in the background, with its log in {place}; `kill {pid}` stops it and leaves sandboxes running"
                ));
                return Ok(0);
            }
            let status = daemon.wait().context("cannot wait for the daemon")?;
            let said = since(&path, before).unwrap_or_default();
            let why = anyhow::Error::msg(said.trim_end().to_owned());
            let what = format!("the daemon did not start: it exited with {status}");
            Err(hinted_by(why, what, format!("the whole log is in {}", path.display())))
        }
        Err(_) => {
            daemon.kill().context("cannot end a daemon that does not get ready")?;
            let what = format!("the daemon was not ready within {} s", START_MAX.as_secs());
            Err(hinted(what, format!("look into its log, {}", path.display())))
        }
    }
}

/// The arguments of the daemon: our own, but it is the one that was detached. No option of `serve` takes a value that
/// begins with a dash.
fn arguments(own: impl Iterator<Item = OsString>) -> Vec<OsString> {
    own.map(|word| if word == "-d" || word == "--detach" { "--detached".into() } else { word }).collect()
}

/// The address of the daemon once it is ready; `None` if it ended before.
fn ready(stdout: ChildStdout) -> io::Result<Option<String>> {
    for line in BufReader::new(stdout).lines() {
        if let Some(address) = line?.strip_prefix(READY) {
            return Ok(Some(address.to_owned()));
        }
    }
    Ok(None)
}

/// The end of what was logged since a file had a length.
fn since(path: &Path, before: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(before.max(length.saturating_sub(LOG_SHOWN_MAX))))?;
    let mut bytes = Vec::new();
    file.take(LOG_SHOWN_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemon_gets_the_same_arguments() {
        let given = |words: &[&str]| arguments(words.iter().map(OsString::from));
        assert_eq!(given(&["serve", "-d", "--spares", "0"]), ["serve", "--detached", "--spares", "0"]);
        assert_eq!(
            given(&["--color", "never", "serve", "--detach"]),
            ["--color", "never", "serve", "--detached"]
        );
    }
}
