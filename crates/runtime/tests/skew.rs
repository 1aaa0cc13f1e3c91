//! A launcher of another version than the daemon's: they agree or they part.
//!
//! The launcher is a small program of another language here, so that its half of the talk is written down a second time.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use runtime::BackendError;
use runtime::StoreConfig;
use runtime::ns::{NsBackend, NsConfig};
use shoal_runtime as runtime;
use wire::InstallationId;
use wire::launch::VERSION;

/// Answers the first packet with `REPLY`, in postcard: the serial, which is the first byte of a first request, then what follows.
const LAUNCHER: &str = "#!/usr/bin/python3
import socket
link = socket.socket(fileno=0)
packet = link.recv(65536)
assert packet[1] == 0, 'the first request is a hello'
link.send(packet[:1] + REPLY)
link.recv(65536)
";

/// Starts a backend whose launcher answers so, and tells what came of it.
async fn greeted_with(reply: &str) -> Result<(), BackendError> {
    let home = tempfile::tempdir().expect("a temporary directory");
    let launcher: PathBuf = home.path().join("launcher");
    std::fs::write(&launcher, LAUNCHER.replace("REPLY", reply)).expect("it can be written");
    std::fs::set_permissions(&launcher, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    let config = NsConfig {
        data_dir: home.path().into(),
        installation: InstallationId::from_random(1),
        launcher,
        spares: 0,
        store: StoreConfig::default(),
    };
    NsBackend::start(config).await.map(drop)
}

#[track_caller]
fn said(result: Result<(), BackendError>) -> String {
    let error = result.expect_err("they do not agree");
    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    format!("{error}: {cause}")
}

#[tokio::test]
async fn a_launcher_that_says_another_version_is_not_used() {
    // Ok, `Hello`, its version.
    let said = said(greeted_with(&format!("bytes([0, 0, {}])", VERSION + 1)).await);
    assert_eq!(
        said,
        format!(
            "cannot use the launcher: the launcher speaks version {}, this daemon speaks {VERSION}",
            VERSION + 1
        )
    );
}

#[tokio::test]
async fn a_launcher_that_refuses_our_version_is_believed() {
    // Err, what it could not do, no error number.
    let text = "speak version 2 with a launcher of 1";
    let said = said(greeted_with(&format!("bytes([1, {}]) + b'{text}' + bytes([0])", text.len())).await);
    assert_eq!(said, format!("cannot {text}: the launcher refused"));
}

#[tokio::test]
async fn a_launcher_that_does_not_understand_a_word_is_told_from_one_that_refuses() {
    for reply in ["b'\\xff\\xff\\xff'", "b''"] {
        let error = greeted_with(reply).await.expect_err("that is no answer");
        assert!(matches!(error, BackendError::LauncherGone { .. }), "{reply}: {error}");
    }
}
