//! `shoal serve`: the daemon. The only subcommand, beside the launcher, that is more than a client.

use std::sync::Arc;

use anyhow::Context;
use runtime::ns::{NsBackend, NsConfig, forget_installation};
use server::log::{self, Format};
use server::{
    Config, ConfigError, Daemon, DataDir, DataDirError, Ended, Layers, Listener, Machine, PrivateDir,
    ServeError, Settings, Start, choose_key,
};

use crate::args::Serve;
use crate::environment::Environment;
use crate::print;

/// The first descriptor beyond stdin, stdout and stderr.
pub const FIRST_OWN_DESCRIPTOR: i32 = 3;
/// A private daemon listens wherever there is room.
const PRIVATE_LISTEN: &str = "127.0.0.1:0";

/// `shoal serve`
pub async fn serve(arguments: Serve, environment: &Environment) -> anyhow::Result<i32> {
    // What whoever started the daemon had open beside the three that everyone has is no business of the launcher's.
    runtime::sys::close_on_exec_from(FIRST_OWN_DESCRIPTOR).context("cannot mark descriptors")?;
    let private = arguments.private.as_deref().map(PrivateDir::new);
    if private.is_some() {
        // A session of its own, so that Ctrl-C and the end of the terminal of whoever started it do not reach it.
        rustix::process::setsid().context("cannot leave the session")?;
    }
    let config = Config::check(&layers(arguments, environment, private.as_ref())?, Machine::this())?;
    let format = if config.log_json { Format::Json } else { Format::Human { colour: environment.colour } };
    let filter = environment.log.as_deref().unwrap_or(log::FILTER_DEFAULT);
    log::start(format, filter).with_context(|| format!("SHOAL_LOG is `{filter}`, which is no filter"))?;

    let data_dir = DataDir::open(&config.data_dir)?;
    // The launcher follows no link on its way there, and must know which mount it is on.
    let place = std::fs::canonicalize(&config.data_dir)
        .with_context(|| format!("cannot find `{}`", config.data_dir.display()))?;
    let installation = data_dir.installation();
    // A private daemon's key is nobody's choice.
    let chosen = environment.api_key.as_deref().filter(|_| private.is_none());
    let api_key = choose_key(&data_dir, chosen)?;
    let listener = Listener::bind(&config).await.map_err(ServeError::from)?;
    let backend = NsBackend::start(NsConfig {
        data_dir: place,
        installation,
        launcher: std::env::current_exe().context("cannot find this program")?,
        spares: config.spares as usize,
    })
    .await
    .context("cannot start the launcher")?;
    let start = Start { data_dir, backend: Arc::new(backend.clone()), api_key, listener, private };
    let daemon = Daemon::start(&config, start).await?;
    print::line(&format!("shoal is ready at {}", daemon.url()))?;
    match daemon.serve().await? {
        Ended::Stopped => {}
        Ended::LastLeaseGone(last) => {
            // The launcher has mounts in the directory that is to be removed.
            backend.end().await?;
            forget_installation(installation)?;
            last.remove()?;
        }
    }
    Ok(0)
}

fn layers(
    arguments: Serve,
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
    let file = arguments.config.as_deref().map(Settings::read).transpose()?.unwrap_or_default();
    let flags = Settings {
        listen: arguments.listen,
        // Relative to where the command was typed; from here on it means one place.
        data_dir: arguments
            .data_dir
            .map(std::path::absolute)
            .transpose()
            .context("cannot find --data-dir")?,
        public_url: arguments.public_url,
        tls_cert: arguments.tls_cert,
        tls_key: arguments.tls_key,
        insecure_http: arguments.insecure_http.then_some(true),
        log_json: arguments.log_json.then_some(true),
        spares: arguments.spares,
        ..Settings::default()
    };
    let environment = Settings {
        listen: environment.listen.clone(),
        data_dir: environment.data_dir.clone(),
        public_url: environment.public_url.clone(),
        ..Settings::default()
    };
    Ok(Layers { flags, environment, file })
}

/// What to do about a failure of the daemon, where there is something.
pub fn hint<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a str> {
    let config = cause.downcast_ref::<ConfigError>().and_then(ConfigError::hint);
    let data_dir = cause.downcast_ref::<DataDirError>().and_then(DataDirError::hint);
    config.or(data_dir).or_else(|| cause.downcast_ref::<ServeError>().and_then(ServeError::hint))
}
