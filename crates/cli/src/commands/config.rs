//! `shoal config`: the settings that a daemon would have, and where each comes from.

use serde::Serialize;
use serde_json::Value;
use server::config::Source;
use server::config::settings::{self, FILE_DEFAULT};

use crate::args::ShowConfig;
use crate::daemon;
use crate::environment::Environment;
use crate::output::print;

/// A setting for programs.
#[derive(Serialize)]
struct Line {
    key: &'static str,
    value: Value,
    /// `flag`, `environment`, `file` or `default`.
    source: &'static str,
    /// Where exactly it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    place: Option<String>,
}

/// `shoal config show`
pub fn show(arguments: ShowConfig, environment: &Environment) -> anyhow::Result<i32> {
    let file = daemon::settings::file(arguments.flags.config.as_deref(), environment)?;
    let used = file.as_ref().map(|file| file.path.clone());
    let layers = daemon::settings::layers(arguments.flags, environment, file)?;
    let config = daemon::settings::checked(&layers)?;
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
        None => print::line(&format!("\nfile: none ({FILE_DEFAULT} does not exist)"))?,
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
