//! One launcher process and the socket to it: requests go out, and each reply is handed to the call that waits for it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use tokio::io::unix::AsyncFd;
use tokio::sync::{oneshot, watch};
use wire::launch::{
    Answer, Ask, Failure, PACKET_MAX, Reply, Request, StoreFacts, VERSION, from_packet, to_packet,
};

use crate::backend::BackendError;
use crate::ns::{NsConfig, QUICK_DEADLINE};
use crate::sys;

/// One launcher process and the socket to it.
pub(super) struct Link {
    socket: AsyncFd<OwnedFd>,
    /// Closes once the process has been reaped.
    pub(super) dead: watch::Receiver<()>,
    serial: AtomicU64,
    /// The callers that wait, by serial. `None` once the launcher has died.
    waiting: Mutex<Option<HashMap<u64, Waiter>>>,
}

struct Waiter {
    answer: oneshot::Sender<Result<Answer, Failure>>,
    /// Receives the progress.
    progress: Option<watch::Sender<u64>>,
}

impl Link {
    pub(super) async fn open(config: &NsConfig) -> Result<(Arc<Self>, StoreFacts), BackendError> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|e| refused("make a socket pair")(e.into()))?;
        rustix::io::ioctl_fionbio(&ours, true).map_err(|e| refused("prepare a socket")(e.into()))?;
        let mut child = tokio::process::Command::new(&config.launcher)
            .arg0("shoal")
            .arg("launcher")
            .arg("--data-dir")
            .arg(&config.data_dir)
            .args(["--installation", &config.installation.to_string()])
            .args(["--store", config.store.wish.word()])
            .args(config.store.size_bytes.map(|bytes| format!("--store-size={bytes}")))
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(refused("start the launcher"))?;
        let (dies, is_dead) = watch::channel(());
        let replies = watched(ours.try_clone().map_err(refused("share a socket"))?)?;
        let link = Arc::new(Self {
            socket: watched(ours)?,
            dead: is_dead,
            serial: AtomicU64::new(0),
            waiting: Mutex::new(Some(HashMap::new())),
        });
        tokio::spawn(read_replies(replies, Arc::downgrade(&link)));
        let ended = Arc::downgrade(&link);
        tokio::spawn(async move {
            match child.wait().await {
                Ok(status) => tracing::debug!(%status, "the launcher has ended"),
                Err(error) => tracing::warn!(%error, "cannot wait for the launcher"),
            }
            // Its walkers share the socket, so the socket may stay open for a moment.
            if let Some(link) = ended.upgrade() {
                link.give_up();
            }
            drop(dies);
        });
        let hello = Ask::Hello { version: VERSION, installation: config.installation };
        match link.ask("greet the launcher", hello, QUICK_DEADLINE).await? {
            Answer::Hello { version: VERSION } => {}
            Answer::Hello { version } => {
                let source = io::Error::other(format!(
                    "the launcher speaks version {version}, this daemon speaks {VERSION}"
                ));
                return Err(refused("use the launcher")(source));
            }
            other => return Err(unexpected("greet the launcher", &other)),
        }
        match link.ask("ask for the store", Ask::Store, QUICK_DEADLINE).await? {
            Answer::Store { facts, made_bytes, notes } => {
                for note in notes {
                    tracing::warn!("{note}");
                }
                if let Some(bytes) = made_bytes {
                    let gib = bytes as f64 / f64::from(1 << 30);
                    tracing::info!(
                        "created a store of {gib:.1} GiB in the data directory; `store_size` chooses another size"
                    );
                }
                tracing::debug!(kind = facts.kind.word(), limits = facts.limits, "the store is open");
                Ok((link, facts))
            }
            other => Err(unexpected("ask for the store", &other)),
        }
    }

    /// Reports to every waiting caller that the launcher is gone, by dropping their senders.
    fn give_up(&self) {
        self.waiting.lock().expect("nobody panics while holding it").take();
    }

    pub(super) fn is_alive(&self) -> bool {
        self.waiting.lock().expect("nobody panics while holding it").is_some()
    }

    pub(super) async fn ask(
        &self,
        doing: &'static str,
        ask: Ask,
        deadline: Duration,
    ) -> Result<Answer, BackendError> {
        self.ask_and_hear(doing, ask, deadline, None).await
    }

    pub(super) async fn ask_and_hear(
        &self,
        doing: &'static str,
        ask: Ask,
        deadline: Duration,
        progress: Option<watch::Sender<u64>>,
    ) -> Result<Answer, BackendError> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        match self.waiting.lock().expect("nobody panics while holding it").as_mut() {
            Some(waiting) => waiting.insert(serial, Waiter { answer, progress }),
            None => return Err(BackendError::LauncherGone { doing }),
        };
        let packet = to_packet(&Request { serial, ask });
        let exchange = async {
            if self.send(&packet).await.is_err() {
                return Err(BackendError::LauncherGone { doing });
            }
            match answered.await {
                Ok(Ok(answer)) => Ok(answer),
                Ok(Err(failure)) => Err(failed(failure)),
                Err(_) => Err(BackendError::LauncherGone { doing }),
            }
        };
        let result = tokio::time::timeout(deadline, exchange).await;
        if let Some(waiting) = self.waiting.lock().expect("nobody panics while holding it").as_mut() {
            waiting.remove(&serial);
        }
        result.unwrap_or(Err(BackendError::Late { doing, seconds: deadline.as_secs() }))
    }

    async fn send(&self, packet: &[u8]) -> io::Result<()> {
        loop {
            let mut ready = self.socket.writable().await?;
            match send(self.socket.get_ref(), packet, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Ends the launcher, and the task that reads its replies.
    pub(super) fn hang_up(&self) {
        // This fails only if the launcher is gone already.
        let _ = rustix::net::shutdown(self.socket.get_ref(), rustix::net::Shutdown::Both);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.hang_up();
    }
}

fn watched(socket: OwnedFd) -> Result<AsyncFd<OwnedFd>, BackendError> {
    sys::watch_descriptor(socket).map_err(refused("watch the launcher's socket"))
}

/// Hands each reply to the caller that waits for it, until the launcher is gone or the link is dropped.
async fn read_replies(socket: AsyncFd<OwnedFd>, link: Weak<Link>) {
    let mut packet = vec![0; PACKET_MAX];
    loop {
        let received = async {
            let mut ready = socket.readable().await?;
            match recv(socket.get_ref().as_fd(), packet.as_mut_slice(), RecvFlags::DONTWAIT) {
                Ok((0, _)) => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                Ok((length, _)) => Ok(Some(length)),
                Err(Errno::AGAIN) => {
                    ready.clear_ready();
                    Ok(None)
                }
                Err(Errno::INTR) => Ok(None),
                Err(e) => Err(e.into()),
            }
        };
        let received = received.await;
        let Some(link) = link.upgrade() else { return };
        let gone = match received {
            Ok(None) => false,
            Ok(Some(length)) => match from_packet::<Reply>(&packet[..length]) {
                Some(Reply { serial, result: Ok(Answer::Unpacking { bytes }) }) => {
                    let waiting = link.waiting.lock().expect("nobody panics while holding it");
                    let waiter = waiting.as_ref().and_then(|waiting| waiting.get(&serial));
                    if let Some(progress) = waiter.and_then(|waiter| waiter.progress.as_ref()) {
                        progress.send_replace(bytes);
                    }
                    false
                }
                Some(Reply { serial, result }) => {
                    let mut waiting = link.waiting.lock().expect("nobody panics while holding it");
                    if let Some(waiter) = waiting.as_mut().and_then(|waiting| waiting.remove(&serial)) {
                        // The caller may have stopped waiting.
                        let _ = waiter.answer.send(result);
                    }
                    false
                }
                None => {
                    tracing::error!("the launcher sent a reply that does not parse");
                    true
                }
            },
            Err(_) => true,
        };
        if gone {
            link.give_up();
            return;
        }
    }
}

/// Distinguishes a full machine from a broken one.
fn failed(Failure { doing, errno }: Failure) -> BackendError {
    let full = match errno {
        libc::EAGAIN => "processes",
        libc::EMFILE | libc::ENFILE => "file descriptors",
        libc::ENOMEM => "memory",
        libc::ENOSPC | libc::EDQUOT => "disk space or kernel objects",
        0 => return BackendError::Refused { doing, source: io::Error::other("the launcher refused") },
        errno => return BackendError::Refused { doing, source: io::Error::from_raw_os_error(errno) },
    };
    BackendError::Full { what: full }
}

pub(super) fn refused(doing: &'static str) -> impl FnOnce(io::Error) -> BackendError {
    move |source| BackendError::Refused { doing: doing.into(), source }
}

pub(super) fn unexpected(doing: &'static str, answer: &Answer) -> BackendError {
    BackendError::Refused {
        doing: doing.into(),
        source: io::Error::other(format!("unexpected answer {answer:?}")),
    }
}
