//! The daemon's side: sends requests to egress, and receives its records.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use wire::SandboxId;

use super::message::{
    Answer, Ask, Attach, Failure, FromEgress, Listener, Record, Request, Start, Started, Status, Totals,
    VERSION, from_bytes, to_bytes,
};
use super::packet::Channel;
use crate::credential::Credential;
use crate::limits::Limits;
use crate::policy::Ruleset;

/// The socket in egress's directory where the next daemon connects.
pub const SOCKET_FILE: &str = "egress.sock";
/// How long a quick request may take.
pub const QUICK_DEADLINE: Duration = Duration::from_secs(10);
/// How long egress may take to release a sandbox.
pub const DETACH_DEADLINE: Duration = Duration::from_secs(20);
/// How many records wait for the daemon's reader. Further records wait in egress.
const RECORDS_MAX: usize = 256;

/// Why a request to egress failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The connection broke, or egress has died.
    #[error("egress is gone while {doing}")]
    Gone {
        /// What was being done.
        doing: &'static str,
    },
    /// No answer in time.
    #[error("egress did not answer in {seconds} s while {doing}")]
    Late {
        /// What was being done.
        doing: &'static str,
        /// How long was waited.
        seconds: u64,
    },
    /// Egress rejected the request.
    #[error("cannot finish {doing}")]
    Failed {
        /// What was being done.
        doing: &'static str,
        /// The error from egress.
        source: Failure,
    },
    /// The answer does not match the request.
    #[error("egress gave an answer that does not fit while {doing}")]
    Unexpected {
        /// What was being done.
        doing: &'static str,
    },
    /// Egress speaks another version: only [`Egress::listeners`] and [`Egress::drain`] can be used, to replace it.
    #[error("egress speaks version {theirs}, this daemon speaks {VERSION}")]
    Version {
        /// Egress's version.
        theirs: u32,
    },
    /// A system call failed.
    #[error("cannot reach egress")]
    Io(#[from] io::Error),
}

type Waiting = Mutex<Option<HashMap<u64, oneshot::Sender<(Result<Answer, Failure>, Vec<OwnedFd>)>>>>;

/// A connection to egress. Dropping it leaves egress running.
#[derive(Debug)]
pub struct Egress {
    channel: Arc<Channel>,
    serial: AtomicU64,
    waiting: Arc<Waiting>,
    reader: tokio::task::JoinHandle<()>,
    /// Egress's first message.
    greeting: Greeting,
}

/// What egress reported about itself on this connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Greeting {
    /// Its version.
    pub version: u32,
    /// The sandboxes that it serves.
    pub attached: Vec<SandboxId>,
}

/// Records of egress, in order. Each must be stored and then acknowledged with [`Egress::acknowledge`].
pub type Records = mpsc::Receiver<(u64, Record)>;

impl Egress {
    /// Starts an egress whose standard input is the other end of `socket`, and greets it.
    pub async fn start(socket: OwnedFd, start: &Start) -> Result<(Self, Records, Started), ControlError> {
        const DOING: &str = "starting egress";
        let channel = Channel::new(socket)?;
        channel.send(&to_bytes(start), &[]).await?;
        let answer = match timeout(QUICK_DEADLINE, channel.receive()).await {
            Ok(answer) => answer?.ok_or(ControlError::Gone { doing: DOING })?,
            Err(_) => return Err(ControlError::Late { doing: DOING, seconds: QUICK_DEADLINE.as_secs() }),
        };
        let started = match from_bytes(&answer.0) {
            Some(FromEgress::Started(Ok(started))) => started,
            Some(FromEgress::Started(Err(source))) => {
                return Err(ControlError::Failed { doing: DOING, source });
            }
            _ => return Err(ControlError::Unexpected { doing: DOING }),
        };
        let (egress, records) = Self::greet(channel).await?;
        Ok((egress, records, started))
    }

    /// Connects to the egress that an earlier daemon left in `directory`. An egress of another version is connected too; see
    /// [`Egress::check_version`].
    pub async fn connect(directory: &Path) -> Result<(Self, Records), ControlError> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(io::Error::from)?;
        let address = SocketAddrUnix::new(directory.join(SOCKET_FILE)).map_err(io::Error::from)?;
        connect(&socket, &address).map_err(io::Error::from)?;
        Self::greet(Channel::new(socket)?).await
    }

    async fn greet(channel: Channel) -> Result<(Self, Records), ControlError> {
        let channel = Arc::new(channel);
        let waiting: Arc<Waiting> = Arc::new(Mutex::new(Some(HashMap::new())));
        let (give, records) = mpsc::channel(RECORDS_MAX);
        let reader = tokio::spawn(read(channel.clone(), waiting.clone(), give));
        let mut egress =
            Self { channel, serial: AtomicU64::new(0), waiting, reader, greeting: Greeting::default() };
        match egress.ask("greeting egress", Ask::Hello { version: VERSION }, &[], QUICK_DEADLINE).await? {
            (Answer::Hello { version, attached }, _) => egress.greeting = Greeting { version, attached },
            _ => return Err(ControlError::Unexpected { doing: "greeting egress" }),
        }
        Ok((egress, records))
    }

    /// Egress's first message.
    pub fn greeting(&self) -> &Greeting {
        &self.greeting
    }

    /// Fails if egress speaks another version and must be replaced.
    pub fn check_version(&self) -> Result<(), ControlError> {
        match self.greeting.version {
            VERSION => Ok(()),
            theirs => Err(ControlError::Version { theirs }),
        }
    }

    /// Serves a sandbox. `listeners` are in the order of `attach.listeners`; the caller may keep its own copies.
    pub async fn attach(&self, attach: Attach, listeners: &[BorrowedFd<'_>]) -> Result<(), ControlError> {
        self.done("attaching a sandbox", Ask::Attach(Box::new(attach)), listeners).await
    }

    /// Replaces a policy; when this returns, connections that lost their rule are cut.
    pub async fn set_policy(&self, sandbox: SandboxId, rules: Ruleset) -> Result<(), ControlError> {
        self.done("changing a policy", Ask::SetPolicy { sandbox, rules: Box::new(rules) }, &[]).await
    }

    /// Replaces the credentials of a sandbox. Requests after this get the new ones, on open connections too.
    pub async fn set_credentials(
        &self,
        sandbox: SandboxId,
        credentials: Vec<Credential>,
    ) -> Result<(), ControlError> {
        self.done("changing credentials", Ask::SetCredentials { sandbox, credentials }, &[]).await
    }

    /// Replaces limits.
    pub async fn set_limits(&self, sandbox: SandboxId, limits: Limits) -> Result<(), ControlError> {
        self.done("changing limits", Ask::SetLimits { sandbox, limits }, &[]).await
    }

    /// Stops serving a sandbox. When this returns, egress holds no descriptor of its namespace.
    pub async fn detach(&self, sandbox: SandboxId) -> Result<Totals, ControlError> {
        const DOING: &str = "detaching a sandbox";
        match self.ask(DOING, Ask::Detach { sandbox }, &[], DETACH_DEADLINE).await? {
            (Answer::Detached(totals), _) => Ok(totals),
            _ => Err(ControlError::Unexpected { doing: DOING }),
        }
    }

    /// The listeners of a sandbox, for a daemon that needs its own copies.
    pub async fn listeners(&self, sandbox: SandboxId) -> Result<Vec<(Listener, OwnedFd)>, ControlError> {
        const DOING: &str = "taking over listeners";
        match self.ask(DOING, Ask::Listeners { sandbox }, &[], QUICK_DEADLINE).await? {
            (Answer::Listeners(kinds), descriptors) if kinds.len() == descriptors.len() => {
                Ok(kinds.into_iter().zip(descriptors).collect())
            }
            _ => Err(ControlError::Unexpected { doing: DOING }),
        }
    }

    /// Makes egress stop accepting and exit when its connections have ended, after `seconds` at the latest.
    pub async fn drain(&self, seconds: u32) -> Result<(), ControlError> {
        self.done("draining egress", Ask::Drain { seconds }, &[]).await
    }

    /// The status of egress.
    pub async fn status(&self) -> Result<Status, ControlError> {
        const DOING: &str = "asking how egress does";
        match self.ask(DOING, Ask::Status, &[], QUICK_DEADLINE).await? {
            (Answer::Status(status), _) => Ok(status),
            _ => Err(ControlError::Unexpected { doing: DOING }),
        }
    }

    /// Acknowledges that records up to `through` are stored.
    pub async fn acknowledge(&self, through: u64) -> Result<(), ControlError> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let request = Request { serial, ask: Ask::Acknowledge { through } };
        Ok(self.channel.send(&to_bytes(&request), &[]).await?)
    }

    async fn done(
        &self,
        doing: &'static str,
        ask: Ask,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        match self.ask(doing, ask, descriptors, QUICK_DEADLINE).await? {
            (Answer::Done, _) => Ok(()),
            _ => Err(ControlError::Unexpected { doing }),
        }
    }

    async fn ask(
        &self,
        doing: &'static str,
        ask: Ask,
        descriptors: &[BorrowedFd<'_>],
        deadline: Duration,
    ) -> Result<(Answer, Vec<OwnedFd>), ControlError> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let (give, answered) = oneshot::channel();
        match self.waiting.lock().expect("nobody panics while holding it").as_mut() {
            Some(waiting) => waiting.insert(serial, give),
            None => return Err(ControlError::Gone { doing }),
        };
        let exchange = async {
            if self.channel.send(&to_bytes(&Request { serial, ask }), descriptors).await.is_err() {
                return Err(ControlError::Gone { doing });
            }
            match answered.await {
                Ok((Ok(answer), descriptors)) => Ok((answer, descriptors)),
                Ok((Err(source), _)) => Err(ControlError::Failed { doing, source }),
                Err(_) => Err(ControlError::Gone { doing }),
            }
        };
        let result = timeout(deadline, exchange).await;
        if let Some(waiting) = self.waiting.lock().expect("nobody panics while holding it").as_mut() {
            waiting.remove(&serial);
        }
        result.unwrap_or(Err(ControlError::Late { doing, seconds: deadline.as_secs() }))
    }
}

impl Drop for Egress {
    fn drop(&mut self) {
        self.reader.abort();
        // This fails only if egress is gone already.
        let _ = rustix::net::shutdown(self.channel.as_fd(), rustix::net::Shutdown::Both);
    }
}

/// Passes answers to the tasks that wait for them, and records to the daemon, until the connection ends.
async fn read(channel: Arc<Channel>, waiting: Arc<Waiting>, records: mpsc::Sender<(u64, Record)>) {
    loop {
        let (message, descriptors) = match channel.receive().await {
            Ok(Some(received)) => received,
            Ok(None) => break,
            Err(error) => {
                tracing::warn!(%error, "cannot read from egress");
                break;
            }
        };
        match from_bytes(&message) {
            Some(FromEgress::Answer { serial, result }) => {
                let mut waiting = waiting.lock().expect("nobody panics while holding it");
                if let Some(waiter) = waiting.as_mut().and_then(|waiting| waiting.remove(&serial)) {
                    // The caller may have stopped waiting.
                    let _ = waiter.send((result, descriptors));
                }
            }
            Some(FromEgress::Record { sequence, record }) => {
                // A daemon that does not read records still gets answers, as long as there is room.
                if records.send((sequence, record)).await.is_err() {
                    tracing::debug!("nobody takes the records of egress");
                }
            }
            Some(FromEgress::Started(_)) | None => {
                tracing::error!("egress sent something that does not parse");
                break;
            }
        }
    }
    waiting.lock().expect("nobody panics while holding it").take();
}
