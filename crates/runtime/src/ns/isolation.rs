//! Sandboxes: asks the launcher for them and connects to their inits.

use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rustix::fs::{Mode, OFlags};
use tokio::net::UnixStream;
use wire::SandboxId;
use wire::launch::{
    Answer, Ask, Found, INVENTORY_PAGE, Limits, Motion, Plan, Processes, Rootfs, StoreKind, Writable,
};

use crate::backend::{BackendError, GuestStream, Isolation, Machine, Spec, Usage};
use crate::ns::cgroup::{Cgroups, memory_bytes};
use crate::ns::link::{Link, refused, unexpected};
use crate::ns::spares::{Claim, Shape};
use crate::ns::{NsBackend, NsConfig, QUICK_DEADLINE, TEARDOWN_DEADLINE};
use crate::storage::places::INIT_SOCKET;

/// A launch takes milliseconds, and longer on a loaded machine.
const LAUNCH_DEADLINE: Duration = Duration::from_secs(30);
/// Init's socket listens from before init starts, so only a full queue delays a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// How long the image is used without checking every file below `/usr` for one that became private.
const IMAGE_TRUSTED_WHOLLY: Duration = Duration::from_secs(60);
/// How long the image is used without checking whether packages changed.
const IMAGE_TRUSTED: Duration = Duration::from_secs(5);

#[async_trait]
impl Isolation for NsBackend {
    async fn prepare(&self, rootfs: &Rootfs) -> Result<(), BackendError> {
        match rootfs {
            Rootfs::Host | Rootfs::OverHost(_) => {}
            // The engine unpacks layers before it creates a sandbox from them.
            Rootfs::Layers(_) => return Ok(()),
        }
        // One caller checks, the others wait for its result.
        let mut checked = self.0.image_checked.lock().await;
        let first = checked.quickly.is_none();
        if checked.quickly.is_none_or(|at| at.elapsed() > IMAGE_TRUSTED) {
            let generation = self.prepare_host_image(first).await?;
            checked.quickly = Some(Instant::now());
            self.note_generation(&mut checked, generation);
        }
        if first || checked.thoroughly.is_some_and(|at| at.elapsed() > IMAGE_TRUSTED_WHOLLY) {
            checked.thoroughly = Some(Instant::now());
            if !first {
                self.check_image_thoroughly();
            }
        }
        Ok(())
    }

    async fn launch(&self, spec: &Spec) -> Result<(), BackendError> {
        if spec.writable == Writable::Kept {
            return self.make(spec).await;
        }
        let shape = Shape { rootfs: spec.rootfs.clone(), limits: spec.limits };
        let claim = self.spares().claim(spec.sandbox, &shape);
        let fit = match claim {
            Claim::Nothing => true,
            Claim::Unfit => false,
            Claim::Ready => match self.open_stream(spec.sandbox).await {
                Ok(stream) => {
                    self.greeted().insert(spec.sandbox, stream);
                    return Ok(());
                }
                Err(error) => {
                    tracing::warn!(sandbox = %spec.sandbox, %error, "a spare has died; making a new sandbox instead");
                    false
                }
            },
        };
        if !fit {
            self.teardown(spec.sandbox).await?;
        }
        self.make(spec).await
    }

    async fn connect(&self, sandbox: SandboxId) -> Result<GuestStream, BackendError> {
        let greeted = self.greeted().remove(&sandbox);
        match greeted {
            Some(stream) => Ok(Box::new(stream)),
            None => Ok(Box::new(self.open_stream(sandbox).await?)),
        }
    }

    async fn teardown(&self, sandbox: SandboxId) -> Result<(), BackendError> {
        self.spares().forget(sandbox);
        self.greeted().remove(&sandbox);
        self.0.oom_kills.forget(sandbox);
        let answer = self.ask("remove a sandbox", Ask::Teardown { sandbox }, TEARDOWN_DEADLINE).await?;
        if let Answer::Held { sockets } = answer {
            tracing::warn!(
                %sandbox,
                sockets,
                "egress holds sockets of a sandbox that is gone; its network namespace lives until they are closed"
            );
        }
        self.put_range_back(sandbox);
        Ok(())
    }

    async fn end_processes(&self, sandbox: SandboxId, which: Processes) -> Result<(), BackendError> {
        if which == Processes::All {
            // The cgroup goes with the processes. Another launch makes a new one, which counts from zero.
            self.greeted().remove(&sandbox);
            self.0.oom_kills.forget(sandbox);
        }
        let ask = Ask::EndProcesses { sandbox, which };
        self.ask("end processes of a sandbox", ask, QUICK_DEADLINE).await.map(|_| ())
    }

    async fn freeze(&self, sandbox: SandboxId, motion: Motion) -> Result<(), BackendError> {
        let ask = Ask::Freeze { sandbox, motion };
        self.ask("freeze or thaw a sandbox", ask, QUICK_DEADLINE).await.map(|_| ())
    }

    fn foresee(&self, rootfs: &Rootfs, limits: &Limits) {
        let shape = Shape { rootfs: rootfs.clone(), limits: *limits };
        let unwanted = self.spares().foresee(&shape);
        self.remove_spares(unwanted);
        self.refill();
    }

    fn reserve(&self, rootfs: &Rootfs, limits: &Limits) -> Option<SandboxId> {
        let taken = self.spares().take(&Shape { rootfs: rootfs.clone(), limits: *limits });
        *self.0.last_taken.lock().expect("nobody panics while holding an instant") = Instant::now();
        self.foresee(rootfs, limits);
        taken
    }

    async fn stop(&self) {
        let ready = self.spares().close();
        // A spare that is being made is removed by the task that makes it.
        drop(self.0.making_spare.lock().await);
        for sandbox in ready {
            self.remove_spare(sandbox).await;
        }
    }

    async fn inventory(&self) -> Result<Vec<SandboxId>, BackendError> {
        let found = inventory(&*self.link().await?).await?;
        // Read after the inventory: a spare that was made or claimed in between is held, or has a driver.
        let spares = self.spares();
        Ok(found.into_iter().map(|found| found.sandbox).filter(|sandbox| !spares.holds(*sandbox)).collect())
    }

    async fn oom_kills(&self, sandbox: SandboxId) -> Result<u64, BackendError> {
        // The kernel generates this file on reading, so no disk is involved.
        self.0.oom_kills.of(sandbox).map_err(refused("count memory kills"))
    }

    async fn usage(&self, sandboxes: &[SandboxId]) -> Result<Vec<Option<Usage>>, BackendError> {
        let (installation, sandboxes) = (self.0.config.installation, sandboxes.to_vec());
        // These files are world-readable, so asking the launcher, which forks for each request, is not needed.
        let read = move || {
            let groups = Cgroups::look(installation)?;
            sandboxes.into_iter().map(|sandbox| groups.usage(sandbox)).collect()
        };
        beside(read).await.map_err(refused("read what sandboxes use"))
    }

    async fn machine(&self) -> Result<Machine, BackendError> {
        let config = self.0.config.clone();
        let mut machine = beside(move || machine(&config)).await.map_err(refused("look at the machine"))?;
        if self.0.store.kind == StoreKind::Loop {
            // Mounted in the launcher's namespace only.
            const DOING: &str = "look at the store";
            match self.ask(DOING, Ask::StoreUsage, QUICK_DEADLINE).await? {
                Answer::StoreUsage { bytes, available_bytes } => {
                    (machine.disk_bytes, machine.disk_available_bytes) = (bytes, available_bytes);
                }
                other => return Err(unexpected(DOING, &other)),
            }
        }
        Ok(machine)
    }
}

impl NsBackend {
    /// Launches a sandbox without using a spare.
    pub(super) async fn make(&self, spec: &Spec) -> Result<(), BackendError> {
        let plan = Plan {
            sandbox: spec.sandbox,
            base: self.take_range(spec.sandbox)?,
            rootfs: spec.rootfs.clone(),
            limits: spec.limits,
            hostname: wire::network::host_name(spec.sandbox),
            mounts: spec.mounts.clone(),
            over: spec.over.clone(),
            writable: spec.writable,
        };
        let launched = self.ask("launch a sandbox", Ask::Launch(Box::new(plan)), LAUNCH_DEADLINE).await;
        self.keep_slots_ready();
        launched.map(|_| ())
    }

    /// Connects to a sandbox's init.
    async fn open_stream(&self, sandbox: SandboxId) -> Result<UnixStream, BackendError> {
        let path = self.0.config.data_dir.join("sandboxes").join(sandbox.to_string());
        let gone =
            |e: &io::Error| matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
        let connected = async {
            let dir =
                rustix::fs::open(&path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            // Through the descriptor, since the full path may be longer than a socket address allows.
            UnixStream::connect(format!("/proc/self/fd/{}/{INIT_SOCKET}", dir.as_raw_fd())).await
        };
        match tokio::time::timeout(CONNECT_DEADLINE, connected).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(e)) if gone(&e) => Err(BackendError::Gone),
            Ok(Err(e)) => Err(refused("connect to init")(e)),
            Err(_) => {
                Err(BackendError::Late { doing: "connect to init", seconds: CONNECT_DEADLINE.as_secs() })
            }
        }
    }
}

/// Runs work that blocks for a moment on a thread that may block.
pub(super) async fn beside<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}

fn machine(config: &NsConfig) -> io::Result<Machine> {
    let cpus = std::thread::available_parallelism()?;
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let disk = rustix::fs::statvfs(&config.data_dir)?;
    Ok(Machine {
        cpus: u32::try_from(cpus.get()).unwrap_or(u32::MAX),
        memory_bytes: memory_bytes(&text, "MemTotal")?,
        memory_available_bytes: memory_bytes(&text, "MemAvailable")?,
        disk_bytes: disk.f_blocks.saturating_mul(disk.f_frsize),
        disk_available_bytes: disk.f_bavail.saturating_mul(disk.f_frsize),
        sandboxes: Cgroups::look(config.installation)?.usage_of_all()?,
    })
}

pub(super) async fn inventory(link: &Link) -> Result<Vec<Found>, BackendError> {
    let mut all: Vec<Found> = Vec::new();
    loop {
        let after = all.last().map(|found| found.sandbox);
        match link.ask("list what exists", Ask::Inventory { after }, QUICK_DEADLINE).await? {
            Answer::Inventory(page) => {
                let last = page.len() < INVENTORY_PAGE;
                all.extend(page);
                if last {
                    return Ok(all);
                }
            }
            other => return Err(unexpected("list what exists", &other)),
        }
    }
}
