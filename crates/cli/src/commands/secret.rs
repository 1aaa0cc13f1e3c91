//! `shoal secret` and `shoal ledger`: keys that sandboxes use without holding them.

use std::io::{IsTerminal, Read};

use anyhow::Context;
use client::{Client, api};

use crate::args::{Ledger, LedgerAction, RotateSecret, Secret, SecretAction, SetSecret};
use crate::commands::delete_each;
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::report::hinted;
use crate::output::{age, amount, print};

/// The longest value that is read; the daemon accepts less.
const VALUE_BYTES_MAX: u64 = 1 << 20;

/// `shoal secret`
pub async fn secret(arguments: Secret, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    match arguments.action {
        SecretAction::Set(arguments) => set(&client, *arguments).await,
        SecretAction::Rotate(RotateSecret { name, json }) => {
            client.secret(&name).await?;
            let wish = api::SetSecret { value: Some(from_stdin()?), ..Default::default() };
            told(&client.set_secret(&name, &wish).await?, json)
        }
        SecretAction::Ls(arguments) => list(&client, arguments.json).await,
        SecretAction::Rm(arguments) => {
            let delete = async |name: &str| {
                client.delete_secret(name).await?;
                anyhow::Ok(name.to_owned())
            };
            Ok(delete_each("secret", &arguments.names, environment, delete).await)
        }
    }
}

/// `shoal ledger`
pub async fn ledger(arguments: Ledger, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    if let Some(LedgerAction::Verify(verify)) = arguments.action {
        let check = client.verify_ledger().await?;
        match (verify.json, check.broken_at) {
            (true, _) => print::json(&check)?,
            (false, None) => print::line(&format!("{} lines, none changed or removed", check.lines))?,
            (false, Some(number)) => print::line(&format!(
                "line {number} was changed or removed; {} lines before it are right",
                check.lines
            ))?,
        }
        return Ok(i32::from(!check.whole));
    }
    let lines = client.ledger(arguments.after, arguments.limit).await?;
    if arguments.json {
        print::json(&lines)?;
        return Ok(0);
    }
    let row = |line: api::LedgerLine| {
        vec![
            line.number.to_string(),
            age::ago(&line.at),
            line.sandbox_id.to_string(),
            print::plain(&line.secret).to_string(),
            print::plain(&format!("{} {}:{}{}", line.method, line.host, line.port, line.path)).to_string(),
            line.status.map_or_else(|| "-".into(), |status| status.to_string()),
            amount::rounded(line.sent_bytes),
            amount::rounded(line.received_bytes),
        ]
    };
    let rows: Vec<Vec<String>> = lines.into_iter().map(row).collect();
    print::table(&["NUMBER", "WHEN", "SANDBOX", "SECRET", "REQUEST", "STATUS", "SENT", "RECEIVED"], &rows)?;
    Ok(0)
}

async fn set(client: &Client, arguments: SetSecret) -> anyhow::Result<i32> {
    let inject = inject(&arguments)?;
    let rule = |domain: &String| api::SecretRule {
        domain: domain.clone(),
        ports: arguments.port.clone(),
        methods: arguments.methods.clone(),
        paths: arguments.paths.clone(),
        inject: inject.clone(),
    };
    let rules = arguments.hosts.iter().map(rule).collect();
    let file = arguments.from_file.as_ref().map(|path| {
        path.to_str().map(str::to_owned).ok_or_else(|| anyhow::anyhow!("the path must be UTF-8"))
    });
    let (file, environment) = (file.transpose()?, arguments.from_env);
    let value = match (&file, &environment) {
        (None, None) => Some(from_stdin()?),
        _ => None,
    };
    let wish = api::SetSecret {
        value,
        file,
        environment,
        preset: arguments.preset,
        rules,
        variables: arguments.variables,
        ..Default::default()
    };
    told(&client.set_secret(&arguments.name, &wish).await?, arguments.json)
}

fn inject(arguments: &SetSecret) -> anyhow::Result<api::SecretInject> {
    if let Some(user) = &arguments.basic {
        return Ok(api::SecretInject::Basic { user: user.clone() });
    }
    if let Some(name) = &arguments.header {
        return Ok(api::SecretInject::Header { name: name.clone(), prefix: String::new() });
    }
    if let Some(name) = &arguments.query {
        return Ok(api::SecretInject::Query { name: name.clone() });
    }
    if !arguments.placeholder.is_empty() {
        let known = ["header", "query", "body"];
        if let Some(other) = arguments.placeholder.iter().find(|place| !known.contains(&place.as_str())) {
            let hint = "write one or more of header,query,body";
            return Err(hinted(format!("--placeholder must name places in requests, got `{other}`"), hint));
        }
        let has = |place: &str| arguments.placeholder.iter().any(|given| given == place);
        return Ok(api::SecretInject::Placeholder {
            header: has("header"),
            query: has("query"),
            body: has("body"),
        });
    }
    Ok(api::SecretInject::Bearer)
}

/// The value, without the line end that shells and editors add.
fn from_stdin() -> anyhow::Result<String> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        let hint = "pipe it, so that it stays out of the shell's history: printf %s \"$TOKEN\" | shoal secret set NAME";
        return Err(hinted("the value must come from stdin", hint));
    }
    let mut value = String::new();
    stdin.take(VALUE_BYTES_MAX).read_to_string(&mut value).context("cannot read the value from stdin")?;
    let length = value.trim_end_matches(['\r', '\n']).len();
    value.truncate(length);
    Ok(value)
}

fn told(secret: &api::Secret, json: bool) -> anyhow::Result<i32> {
    match json {
        true => print::json(secret)?,
        false => print::line(&format!("{} {}", print::plain(&secret.name), hosts(secret)))?,
    }
    Ok(0)
}

fn hosts(secret: &api::Secret) -> String {
    let hosts: Vec<&str> = secret.rules.iter().map(|rule| rule.domain.as_str()).collect();
    print::plain(&hosts.join(" ")).to_string()
}

async fn list(client: &Client, json: bool) -> anyhow::Result<i32> {
    let secrets = client.secrets().await?;
    if json {
        print::json(&secrets)?;
        return Ok(0);
    }
    let row = |secret: api::Secret| {
        vec![
            print::plain(&secret.name).to_string(),
            secret.source.clone(),
            hosts(&secret),
            print::plain(&secret.variables.join(" ")).to_string(),
            secret.sandboxes.to_string(),
            age::ago(&secret.updated_at),
        ]
    };
    let rows: Vec<Vec<String>> = secrets.into_iter().map(row).collect();
    print::table(&["NAME", "SOURCE", "HOSTS", "VARIABLES", "SANDBOXES", "SET"], &rows)?;
    Ok(0)
}
