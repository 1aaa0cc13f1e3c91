//! The backend `ns` with a real launcher, which is this package's program. Needs root; fails loudly without.
//!
//! What a caller of the HTTP API cannot do is done here: two requests of one sandbox at the same instant.

#[path = "launcher/network.rs"]
mod network;
#[path = "launcher/snapshots.rs"]
mod snapshots;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use runtime::StoreConfig;
use runtime::ns::{NsBackend, NsConfig, forget_installation};
use runtime::{BackendError, Isolation, Spec};
use wire::launch::{Limits, Processes, Rootfs, StoreKind, StoreWish, Writable};
use wire::{InstallationId, SandboxId};

/// A backend with a directory and an installation of its own. What it has on the machine goes with it.
struct Host {
    directory: tempfile::TempDir,
    installation: InstallationId,
}

impl Host {
    fn new() -> Self {
        assert!(rustix::process::geteuid().is_root(), "this needs root");
        // Not in /tmp, which may be memory and lack what overlays need.
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        Self { directory, installation: InstallationId::from_random(random()) }
    }

    async fn start(&self) -> NsBackend {
        self.start_on(StoreConfig { wish: StoreWish::Just(StoreKind::Directory), size_bytes: None }).await
    }

    async fn start_on(&self, store: StoreConfig) -> NsBackend {
        let config = NsConfig {
            data_dir: self.directory.path().into(),
            installation: self.installation,
            launcher: Path::new(env!("CARGO_BIN_EXE_shoal")).into(),
            spares: 0,
            store,
        };
        let backend = NsBackend::start(config).await.expect("the launcher starts");
        backend.prepare(&Rootfs::Host).await.expect("the image is built");
        backend
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Err(error) = forget_installation(self.installation) {
            assert!(std::thread::panicking(), "something is left: {error:?}");
        }
    }
}

fn random() -> u64 {
    getrandom::u64().expect("the machine has randomness")
}

fn spec() -> Spec {
    Spec {
        sandbox: SandboxId::from_random(u128::from(random()) << 64 | u128::from(random())),
        rootfs: Rootfs::Host,
        limits: Limits { cpu_millis: 1000, memory_bytes: 256 << 20, pids: 64, disk_bytes: None },
        mounts: Vec::new(),
        over: Default::default(),
        writable: Writable::New,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_teardown_beside_a_launch_leaves_nothing_whichever_comes_first() {
    let host = Host::new();
    let backend = host.start().await;
    let mut launched = [0, 0];
    for round in 0..120_u64 {
        let spec = Arc::new(spec());
        let launch = {
            let (backend, spec) = (backend.clone(), Arc::clone(&spec));
            tokio::spawn(async move { backend.launch(&spec).await })
        };
        // From before it has begun to after it is done.
        tokio::time::sleep(Duration::from_micros(round * 50)).await;
        backend.teardown(spec.sandbox).await.expect("a teardown never fails for want of something");
        launched[usize::from(launch.await.expect("no panic").is_ok())] += 1;
        // A launch that was sent after it would be whole now; one that was sent before is gone.
        if backend.inventory().await.expect("it can be listed").contains(&spec.sandbox) {
            assert!(backend.connect(spec.sandbox).await.is_ok(), "round {round}: half of a sandbox is left");
            backend.teardown(spec.sandbox).await.expect("it goes");
        }
    }
    assert!(launched[0] > 0, "no launch was ever struck: {launched:?}");
    assert_eq!(backend.inventory().await.expect("it can be listed"), []);
    backend.end().await.expect("the launcher ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_processes_leaves_the_files_and_is_harmless_twice() {
    let host = Host::new();
    let backend = host.start().await;
    let spec = spec();
    backend.launch(&spec).await.expect("it is made");
    backend.connect(spec.sandbox).await.expect("its init listens");
    for _ in 0..2 {
        backend
            .end_processes(spec.sandbox, Processes::OfCommand(wire::guest::Handle(7)))
            .await
            .expect("there is none");
    }
    backend.connect(spec.sandbox).await.expect("its init is well");
    for _ in 0..2 {
        backend.end_processes(spec.sandbox, Processes::All).await.expect("they end");
    }
    assert!(matches!(backend.connect(spec.sandbox).await, Err(BackendError::Gone)));
    assert!(host.directory.path().join("sandboxes").join(spec.sandbox.to_string()).join("fs").is_dir());
    assert_eq!(backend.inventory().await.expect("it can be listed"), [spec.sandbox]);
    backend.teardown(spec.sandbox).await.expect("it goes");
    assert_eq!(backend.inventory().await.expect("it can be listed"), []);
    backend.end().await.expect("the launcher ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_that_was_ended_starts_no_launcher_again() {
    let host = Host::new();
    let backend = host.start().await;
    backend.end().await.expect("the launcher ends");
    backend.end().await.expect("asking twice is harmless");
    let refused = backend.inventory().await;
    assert!(matches!(refused, Err(BackendError::LauncherGone { .. })), "{refused:?}");
    // It is dead, and not merely on its way: its lock is free.
    let next = host.start().await;
    assert_eq!(next.inventory().await.expect("it can be listed"), []);
    next.end().await.expect("the launcher ends");
}
