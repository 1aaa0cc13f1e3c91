//! `shoal serve`: the daemon. The only subcommand, beside the launcher, that is more than a client.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use runtime::ns::{NsBackend, NsConfig, forget_installation};
use server::log::{self, Format};
use server::{
    ConfigError, Daemon, DataDir, DataDirError, Ended, Layers, PrivateDir, ServeError, Settings, Start,
};

use crate::args::{DaemonFlags, Serve};
use crate::environment::Environment;
use crate::{config, print};

/// How long the launcher may take to end when its daemon does.
const LAUNCHER_END_MAX: Duration = Duration::from_secs(5);
/// Between two looks.
const LAUNCHER_END_STEP: Duration = Duration::from_millis(5);
/// A private daemon listens wherever there is room.
const PRIVATE_LISTEN: &str = "127.0.0.1:0";

/// `shoal serve`
pub async fn serve(arguments: Serve, environment: &Environment) -> anyhow::Result<i32> {
    let private = arguments.private.as_deref().map(PrivateDir::new);
    if private.is_some() {
        // A session of its own, so that Ctrl-C and the end of the terminal of whoever started it do not reach it.
        rustix::process::setsid().context("cannot leave the session")?;
    }
    let config = config::checked(&layers(arguments.flags, environment, private.as_ref())?)?;
    let format = if config.log_json { Format::Json } else { Format::Human { colour: environment.colour } };
    let filter = environment.log.as_deref().unwrap_or(log::FILTER_DEFAULT);
    log::start(format, filter).with_context(|| format!("SHOAL_LOG is `{filter}`, which is no filter"))?;

    let data_dir = DataDir::open(&config.data_dir)?;
    // The launcher follows no link on its way there, and must know which mount it is on.
    let place = std::fs::canonicalize(&config.data_dir)
        .with_context(|| format!("cannot find `{}`", config.data_dir.display()))?;
    let installation = data_dir.installation();
    let backend = NsBackend::start(NsConfig {
        data_dir: place,
        installation,
        launcher: std::env::current_exe().context("cannot find this program")?,
        spares: config.spares as usize,
    })
    .await
    .context("cannot start the launcher")?;
    let launcher = backend.launcher_pid().await;
    let start = Start {
        data_dir,
        backend: Arc::new(backend),
        // A private daemon's key is nobody's choice.
        api_key: environment.api_key.clone().filter(|_| private.is_none()),
        private,
    };
    let daemon = Daemon::start(&config, start).await?;
    print::line(&format!("shoal is ready at {}", daemon.url()))?;
    match daemon.serve().await? {
        Ended::Stopped => {}
        Ended::LastLeaseGone(last) => {
            // The backend went with the daemon, and the launcher ends when it notices.
            if let Some(launcher) = launcher {
                wait_for_end(launcher).await;
            }
            forget_installation(installation)?;
            last.remove()?;
        }
    }
    Ok(0)
}

fn layers(
    arguments: DaemonFlags,
    environment: &Environment,
    private: Option<&PrivateDir>,
) -> anyhow::Result<Layers> {
    if let Some(private) = private {
        let flags = Settings {
            listen: Some(PRIVATE_LISTEN.into()),
            data_dir: Some(private.data()),
            spares: arguments.spares,
            ..Settings::default()
        };
        return Ok(Layers { flags, ..Layers::default() });
    }
    let file = config::file(arguments.config.as_deref(), environment)?;
    config::layers(arguments, environment, file)
}

/// Waits until a process is dead, a zombie included.
async fn wait_for_end(pid: u32) {
    let deadline = Instant::now() + LAUNCHER_END_MAX;
    let lives = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The state follows the name, which is in brackets and may hold anything.
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
    };
    while lives() && Instant::now() < deadline {
        tokio::time::sleep(LAUNCHER_END_STEP).await;
    }
}

/// What to do about a failure of the daemon, where there is something.
pub fn hint(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    let config = cause.downcast_ref::<ConfigError>().and_then(ConfigError::hint);
    let data_dir = cause.downcast_ref::<DataDirError>().and_then(DataDirError::hint).map(str::to_owned);
    let serve = || cause.downcast_ref::<ServeError>().and_then(ServeError::hint).map(str::to_owned);
    config.or(data_dir).or_else(serve)
}
