//! `shoal serve`: the daemon. The only subcommand, beside the launcher, that is more than a client.

use std::io::IsTerminal;
use std::sync::Arc;

use anyhow::Context;
use runtime::StoreConfig;
use runtime::ns::{NsBackend, NsConfig, forget_installation};
use server::observe::log::{self, Format};
use server::observe::traces::Traces;
use server::{Daemon, DataDir, Ended, Layers, Listener, PrivateDir, ServeError, Settings, Start, choose_key};

use wire::launch::StoreKind;

use crate::args::{DaemonFlags, Serve};
use crate::daemon::{FIRST_OWN_DESCRIPTOR, detached, notify, settings};
use crate::environment::Environment;
use crate::output::print;

/// The file that this process was started from, whatever has become of its name: a launcher of another build, put in place for
/// the next start, would not understand this daemon.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// A private daemon listens wherever there is room.
const PRIVATE_LISTEN: &str = "127.0.0.1:0";

/// `shoal serve`
pub async fn serve(arguments: Serve, environment: &Environment) -> anyhow::Result<i32> {
    // The launcher must not inherit other descriptors of the process that started the daemon.
    runtime::sys::close_on_exec_from(FIRST_OWN_DESCRIPTOR).context("cannot mark descriptors")?;
    let private = arguments.private.as_deref().map(PrivateDir::new);
    if private.is_some() || arguments.detached {
        // A session of its own, so that Ctrl-C and the end of the terminal that started it do not reach it.
        rustix::process::setsid().context("cannot leave the session")?;
    }
    let (take_over, linger) = (arguments.take_over, arguments.linger);
    // A person who reads along wants to know of trouble, not of every request.
    let quiet = arguments.detached || std::io::stderr().is_terminal();
    let config = settings::whole(&layers(arguments.flags, environment, private.as_ref())?)?;
    if arguments.detach {
        return detached::start(&config.data_dir).await;
    }
    let format = if config.log_json { Format::Json } else { Format::Human { colour: environment.colour } };
    let filter = match environment.log.as_deref() {
        Some(filter) => filter,
        None if quiet && !config.log_json => log::FILTER_QUIET,
        None => log::FILTER_DEFAULT,
    };
    let traces = config.otlp_endpoint.as_ref().map(Traces::start).transpose()?;
    log::start(format, filter, traces.as_ref())
        .with_context(|| format!("SHOAL_LOG is not a valid filter: `{filter}`"))?;

    let data_dir = match take_over {
        true => {
            server::check(&config)?;
            DataDir::take_over(&config.data_dir)?
        }
        false => DataDir::open(&config.data_dir)?,
    };
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
        launcher: OWN_PROGRAM.into(),
        spares: config.spares as usize,
        store: StoreConfig { wish: config.store, size_bytes: config.store_bytes },
    })
    .await
    .context("cannot start the launcher")?;
    let machine = environment.package_managers.clone();
    let start =
        Start { data_dir, backend: Arc::new(backend.clone()), api_key, listener, private, linger, machine };
    let daemon = Daemon::start(&config, start).await?;
    print::line(&format!("{}{}", detached::READY, daemon.url()))?;
    if let Some(socket) = &environment.notify_socket {
        let state = format!("READY=1\nSTATUS=listening at {}", daemon.url());
        notify::notify(socket, &state).context("cannot tell the service manager that the daemon is ready")?;
    }
    let ended = daemon.serve().await;
    if let Some(traces) = traces {
        traces.stop().await;
    }
    match ended? {
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
    arguments: DaemonFlags,
    environment: &Environment,
    private: Option<&PrivateDir>,
) -> anyhow::Result<Layers> {
    if let Some(private) = private {
        let flags = Settings {
            listen: Some(PRIVATE_LISTEN.into()),
            data_dir: Some(private.data()),
            spares: arguments.spares,
            // It lives for a command, and shall leave nothing mounted behind and cost nothing at its start.
            store: Some(arguments.store.unwrap_or_else(|| StoreKind::Directory.word().into())),
            store_size: arguments.store_size,
            ..Settings::default()
        };
        return Ok(Layers { flags, ..Layers::default() });
    }
    let file = settings::file(arguments.config.as_deref(), environment)?;
    settings::layers(arguments, environment, file)
}
