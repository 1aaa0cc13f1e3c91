//! What a daemon is told, put together from the command line, the environment and the file; and `shoal config show`.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use server::config::{ConfigError, DATA_DIR_DEFAULT, Source};
use server::settings::{self, FILE_DEFAULT, File};
use server::{Config, Layers, Machine, Settings};

use crate::args::{DaemonFlags, ShowConfig};
use crate::environment::Environment;
use crate::{print, report};

/// A setting for programs.
#[derive(Serialize)]
struct Line {
    key: &'static str,
    value: Value,
    /// `flag`, `environment`, `file` or `default`.
    source: &'static str,
    /// Where exactly it was said.
    #[serde(skip_serializing_if = "Option::is_none")]
    place: Option<String>,
}

/// `shoal config show`
pub fn show(arguments: ShowConfig, environment: &Environment) -> anyhow::Result<i32> {
    let file = file(arguments.flags.config.as_deref(), environment)?;
    let used = file.as_ref().map(|file| file.path.clone());
    let layers = layers(arguments.flags, environment, file)?;
    let config = checked(&layers)?;
    let all = settings::in_force(&layers, &config);
    if arguments.json {
        let lines: Vec<Line> = all
            .into_iter()
            .map(|one| Line { key: one.name, value: one.value, source: word(one.source), place: one.place })
            .collect();
        print::json(&lines)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = all
        .into_iter()
        .map(|one| vec![one.name.into(), shown(&one.value), one.place.unwrap_or_else(|| "default".into())])
        .collect();
    print::table(&["key", "value", "from"], &rows)?;
    match used {
        Some(path) => print::line(&format!("\nfile: {}", path.display()))?,
        None => print::line(&format!("\nfile: none ({FILE_DEFAULT} would be read if it existed)"))?,
    }
    Ok(0)
}

fn word(source: Source) -> &'static str {
    match source {
        Source::Flag => "flag",
        Source::Environment => "environment",
        Source::File => "file",
        Source::Default => "default",
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        Value::Array(items) if items.is_empty() => "-".into(),
        Value::Array(items) => items.iter().map(shown).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

/// The configuration file: the one that was named, or the machine's own if it exists.
pub fn file(named: Option<&Path>, environment: &Environment) -> anyhow::Result<Option<File>> {
    let by_variable = environment.config.as_deref();
    let path = match named.or(by_variable) {
        // Said to be none.
        Some(path) if path.as_os_str().is_empty() => return Ok(None),
        Some(path) => std::path::absolute(path).context("cannot find the configuration file")?,
        None => match std::fs::metadata(FILE_DEFAULT) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            _ => FILE_DEFAULT.into(),
        },
    };
    Ok(Some(File::read(&path)?))
}

/// All that was said. A variable that is a misspelt setting is warned of.
pub fn layers(flags: DaemonFlags, environment: &Environment, file: Option<File>) -> anyhow::Result<Layers> {
    for (variable, meant) in settings::misspelt(environment.variables.keys().map(String::as_str)) {
        let what = format!("the environment variable {variable} means nothing; did you mean {meant}?");
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

/// The checked configuration. An error says where the wrong value was said.
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

/// The data directory of the daemon of this machine, as its file says. What is wrong with the file is for `serve` to say.
pub fn data_dir(environment: &Environment) -> PathBuf {
    let of_file = || file(None, environment).ok().flatten()?.settings.data_dir;
    environment.data_dir.clone().or_else(of_file).unwrap_or_else(|| DATA_DIR_DEFAULT.into())
}
