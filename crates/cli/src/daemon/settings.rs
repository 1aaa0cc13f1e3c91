//! The settings of a daemon, from the command line, the environment and the configuration file.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use server::config::settings::{self, FILE_DEFAULT, File};
use server::config::{ConfigError, DATA_DIR_DEFAULT};
use server::{Config, Layers, Machine, Settings};

use crate::args::DaemonFlags;
use crate::environment::Environment;
use crate::output::report;

/// The configuration file: the one that was named, or the machine's own if it exists.
pub fn file(named: Option<&Path>, environment: &Environment) -> anyhow::Result<Option<File>> {
    let by_variable = environment.config.as_deref();
    let path = match named.or(by_variable) {
        // An empty path means no file.
        Some(path) if path.as_os_str().is_empty() => return Ok(None),
        Some(path) => std::path::absolute(path).context("cannot find the configuration file")?,
        None => match std::fs::metadata(FILE_DEFAULT) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            _ => FILE_DEFAULT.into(),
        },
    };
    Ok(Some(File::read(&path)?))
}

/// All settings that were given. Warns of variables that look like a misspelt setting.
pub fn layers(flags: DaemonFlags, environment: &Environment, file: Option<File>) -> anyhow::Result<Layers> {
    for (variable, meant) in settings::misspelt(environment.variables.keys().map(String::as_str)) {
        let what = format!("unknown environment variable {variable}; did you mean {meant}?");
        report::warning(&what, environment.colour);
    }
    let said = settings::from_environment(|name| environment.variables.get(name).cloned())?;
    let flags = Settings {
        listen: flags.listen,
        // Relative to where the command was typed; from here on it means one place.
        data_dir: flags.data_dir.map(std::path::absolute).transpose().context("cannot find --data-dir")?,
        public_url: flags.public_url,
        tls_cert: flags.tls_cert,
        tls_key: flags.tls_key,
        insecure_http: flags.insecure_http.then_some(true),
        log_json: flags.log_json.then_some(true),
        spares: flags.spares,
        store: flags.store,
        store_size: flags.store_size,
        otlp_endpoint: flags.otlp_endpoint,
        ..Settings::default()
    };
    Ok(Layers::new(flags, said, file))
}

/// The checked configuration. An error says where the wrong value was given.
pub fn checked(layers: &Layers) -> anyhow::Result<Config> {
    blamed(layers, Config::check(layers, Machine::this()))
}

/// The same for a daemon, with what is in the files that it names.
pub fn whole(layers: &Layers) -> anyhow::Result<Config> {
    blamed(layers, checked(layers)?.read_files())
}

fn blamed(layers: &Layers, config: Result<Config, ConfigError>) -> anyhow::Result<Config> {
    config.map_err(|error| match error.key().and_then(|key| Some((key, settings::said_at(layers, key)?))) {
        Some((key, place)) => {
            anyhow::Error::new(error).context(format!("cannot use the setting `{key}` from {place}"))
        }
        None => error.into(),
    })
}

/// The data directory of the daemon on this machine. Errors in the configuration file are for `serve` to report.
pub fn data_dir(environment: &Environment) -> PathBuf {
    let of_file = || file(None, environment).ok().flatten()?.settings.data_dir;
    environment.data_dir.clone().or_else(of_file).unwrap_or_else(|| DATA_DIR_DEFAULT.into())
}
