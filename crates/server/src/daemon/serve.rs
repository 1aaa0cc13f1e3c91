//! The daemon from start to end, and the order of both.
//!
//! At the start, the daemon checks its configuration and binds the socket before it changes anything; then the engine
//! adopts what runs, the key is set, and only then is the address published for local clients. At the end, the daemon
//! accepts no new connections, closes streams, lets short requests finish, and stops the engine; sandboxes keep
//! running.

use std::sync::Arc;
use std::time::Duration;

use engine::network::presets::Where;
use engine::{DbError, Engine, EngineConfig, EngineError, KeySecret};
use runtime::Backend;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::{Config, ConfigError};
use crate::daemon::compose;
use crate::daemon::data_dir::{DataDir, DataDirError, Listening};
use crate::daemon::listen::{Connections, ListenError, Listener};
use crate::daemon::memory;
use crate::daemon::private::{Idle, LastOut, LeaseError, Leases, PrivateDir};
use crate::http::app::App;
use crate::native;
use crate::observe::metrics::resident_bytes;
use crate::webhook;

/// How long requests and streams may take to finish when the daemon is asked to stop.
const FINISH_MAX: Duration = Duration::from_secs(5);

/// What a daemon is started with, besides its configuration.
pub struct Start {
    /// Locked by this process.
    pub data_dir: DataDir,
    /// How sandboxes are isolated.
    pub backend: Arc<dyn Backend>,
    /// From [`choose_key`].
    pub api_key: KeySecret,
    /// Bound before the backend was started: if the address is in use, the start fails before anything on the machine
    /// changes.
    pub listener: Listener,
    /// Whether the daemon lives only while a client holds a lease.
    pub private: Option<PrivateDir>,
    /// How much longer such a daemon lives if its clients left nothing behind.
    pub linger: Duration,
    /// Where the configuration of package managers is looked for.
    pub machine: Where,
}

/// Checks for problems that would keep a daemon from starting, before another daemon is asked to end.
pub fn check(config: &Config) -> Result<(), ServeError> {
    Listener::check(config)?;
    Engine::check(&config.data_dir).map_err(ServeError::Engine)
}

/// A daemon that accepts requests.
pub struct Daemon {
    app: App,
    data_dir: DataDir,
    listener: Listener,
    leases: Option<Leases>,
    linger: Duration,
    listening: Listening,
    signals: Signals,
}

/// Why a daemon ended.
#[derive(Debug)]
pub enum Ended {
    /// It was asked to stop. Sandboxes keep running.
    Stopped,
    /// It was private and the last lease is gone, with every sandbox. Its directory must be removed once the backend
    /// has ended.
    LastLeaseGone(LastOut),
}

impl Daemon {
    /// Starts. When this returns, requests are accepted.
    pub async fn start(config: &Config, start: Start) -> Result<Self, ServeError> {
        let Start { data_dir, backend, api_key, listener, private, linger, machine } = start;
        // First, so that a signal during a long start ends the daemon cleanly after it.
        let signals = Signals::new()?;
        let engine_config = EngineConfig {
            data_dir: data_dir.path().into(),
            capacity: config.capacity,
            output_kept_max: config.output_kept_max,
            images: config.images.clone(),
            network: config.network.settings(data_dir.installation(), &machine)?,
        };
        let engine = Engine::start(engine_config, backend).await.map_err(ServeError::Engine)?;
        set_key(&engine, &data_dir, &api_key).await?;
        let app = compose::app(engine, config);
        let listening = Listening { url: listener.local_url(), pid: std::process::id() };
        data_dir.write_listening(&listening)?;
        let leases = private.map(Leases::open).transpose()?;
        Ok(Self { app, data_dir, listener, leases, linger, listening, signals })
    }

    /// The URL for clients on this machine.
    pub fn url(&self) -> &str {
        &self.listening.url
    }

    /// Serves until SIGTERM or SIGINT, or until the last lease of a private daemon is gone.
    pub async fn serve(self) -> Result<Ended, ServeError> {
        let Self { app, data_dir, listener, leases, linger, listening, mut signals } = self;
        let open = Connections::new();
        let idle = leases.as_ref().map(Leases::idle);
        // A daemon stays if its clients left nothing, and if the sandbox that it keeps ready hides everything private
        // on this machine.
        let may_stay = || async {
            app.engine.is_empty().await.unwrap_or(false) && app.engine.check_host_image().await.is_ok()
        };
        let last = async {
            match leases {
                Some(leases) => leases.until_last(&listening, linger, may_stay).await,
                None => std::future::pending().await,
            }
        };
        let told_to_stop = async {
            loop {
                let name = signals.wait().await;
                // A daemon that only waits for its next client ends as it would by itself, and leaves nothing.
                if !idle.as_ref().is_some_and(Idle::retire) {
                    return name;
                }
            }
        };
        let ended = tokio::select! {
            () = listener.serve(compose::router(&app), &open) => unreachable!("the listener never returns"),
            () = webhook::tend(app.engine.clone(), native::webhooks::written) => {
                unreachable!("the engine lives as long as the daemon")
            }
            () = memory::give_back(resident_bytes) => unreachable!("memory is returned for as long as requests come"),
            name = told_to_stop => {
                tracing::info!(signal = name, "stopping");
                Ok(Ended::Stopped)
            }
            last = last => last.map(Ended::LastLeaseGone),
        };
        drop(listener);
        app.stop();
        let finish = async {
            open.finish().await;
            app.streams_closed().await;
        };
        if tokio::time::timeout(FINISH_MAX, finish).await.is_err() {
            tracing::warn!(seconds = FINISH_MAX.as_secs(), "some requests did not finish in time");
        }
        let deleted = match &ended {
            Ok(Ended::LastLeaseGone(_)) => app.engine.delete_all().await.map_err(ServeError::DeleteAll),
            Ok(Ended::Stopped) | Err(_) => Ok(()),
        };
        app.engine.stop().await;
        data_dir.remove_listening()?;
        deleted?;
        Ok(ended?)
    }
}

/// The operator's key, or the stored one, or a new one. An unusable key fails the start before anything changes.
pub fn choose_key(data_dir: &DataDir, chosen: Option<&str>) -> Result<KeySecret, ServeError> {
    match (chosen, data_dir.read_key()?) {
        (Some(chosen), _) => KeySecret::parse(chosen).map_err(ServeError::ChosenKey),
        (None, Some(kept)) => KeySecret::parse(&kept).map_err(ServeError::KeptKey),
        (None, None) => Ok(KeySecret::random()),
    }
}

/// Stored in the file before it is set, so that a crash in between leaves no key that is written down nowhere.
async fn set_key(engine: &Engine, data_dir: &DataDir, secret: &KeySecret) -> Result<(), ServeError> {
    if data_dir.read_key()?.as_deref() != Some(secret.reveal()) {
        data_dir.write_key(secret.reveal())?;
    }
    engine.set_bootstrap_key(secret).await.map_err(ServeError::Key)?;
    Ok(())
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, ServeError> {
        let catch = |kind| signal(kind).map_err(ServeError::Signals);
        Ok(Self { terminate: catch(SignalKind::terminate())?, interrupt: catch(SignalKind::interrupt())? })
    }

    async fn wait(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Why a daemon could not start, or did not end cleanly.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A file that is a part of the configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// See the cause.
    #[error(transparent)]
    DataDir(#[from] DataDirError),
    /// See the cause.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// See the cause.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The store cannot be opened, or running sandboxes cannot be adopted.
    #[error("cannot start the engine")]
    Engine(#[source] EngineError),
    /// The key cannot be stored.
    #[error("cannot set the api key")]
    Key(#[source] EngineError),
    /// The operator's key could be guessed, or cannot be sent in a header.
    #[error("SHOAL_API_KEY cannot be the api key")]
    ChosenKey(#[source] EngineError),
    /// The file was damaged.
    #[error("the key in `api.key` in the data directory cannot be the api key")]
    KeptKey(#[source] EngineError),
    /// Signals cannot be caught.
    #[error("cannot catch signals")]
    Signals(#[source] std::io::Error),
    /// Some sandbox of a private daemon still exists.
    #[error("cannot delete all sandboxes")]
    DeleteAll(#[source] EngineError),
}

impl ServeError {
    /// How to fix it, if there is a way.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::DataDir(error) => error.hint(),
            Self::ChosenKey(_) => {
                Some("set it to a random text such as the output of `openssl rand -hex 32`")
            }
            Self::KeptKey(_) => Some("remove the file; the daemon makes another at its next start"),

            Self::Listen(ListenError::Bind { .. }) => Some("choose another address with --listen"),
            Self::Engine(EngineError::Store { source: DbError::Newer { .. }, .. }) => Some(
                "start the newer program again, or put back the copy of `shoal.db` that was made before it ran",
            ),
            Self::Listen(_)
            | Self::Config(_)
            | Self::Lease(_)
            | Self::Engine(_)
            | Self::Key(_)
            | Self::Signals(_)
            | Self::DeleteAll(_) => None,
        }
    }
}
