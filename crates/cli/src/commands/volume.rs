//! `shoal volume`: storage that outlives sandboxes.

use std::fs::File;
use std::io;
use std::sync::Arc;

use anyhow::Context;
use client::{Client, SandboxId, Upload, api};
use tokio::sync::mpsc;

use crate::args::{Copy, CopyVolume, CreateVolume, ExportVolume, ImportVolume, Volume, VolumeAction};
use crate::commands::copy::{self, Copied, End, PIECES_MAX};
use crate::commands::delete_each;
use crate::daemon::find::{self, Sure};
use crate::environment::Environment;
use crate::output::progress::{Progress, Waiting};
use crate::output::report::hinted;
use crate::output::{age, amount, print, report};
use crate::terminal::interrupts::Interrupts;

/// What a volume holds when nobody says how much: enough to begin with, and it can grow.
const SIZE_DEFAULT: &str = "1Gi";
/// How long a sandbox that copies stays when this program is killed.
const HELPER_IDLE_SECONDS: f64 = 300.0;

/// `shoal volume`
pub async fn volume(arguments: Volume, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    match arguments.action {
        VolumeAction::Create(arguments) => create(&client, arguments).await,
        VolumeAction::Get(arguments) => {
            let volume = client.volume(&find::volume(&client, &arguments.name, Sure::Unique).await?).await?;
            match arguments.json {
                true => print::json(&volume)?,
                false => print::line(described(&volume).trim_end())?,
            }
            Ok(0)
        }
        VolumeAction::Ls(arguments) => list(&client, arguments.json).await,
        VolumeAction::Resize(arguments) => {
            let update = api::UpdateVolume { size: Some(arguments.size), ..Default::default() };
            let name = find::volume(&client, &arguments.name, Sure::Unique).await?;
            told(&client.update_volume(&name, &update).await?, arguments.json)
        }
        VolumeAction::Rename(arguments) => {
            let update = api::UpdateVolume { name: Some(arguments.new), ..Default::default() };
            let name = find::volume(&client, &arguments.name, Sure::Unique).await?;
            told(&client.update_volume(&name, &update).await?, arguments.json)
        }
        VolumeAction::Rm(arguments) => {
            let delete = async |name: &str| {
                let name = find::volume(&client, name, Sure::Whole).await?;
                client.delete_volume(&name).await?;
                anyhow::Ok(name)
            };
            Ok(delete_each("volume", &arguments.names, environment, delete).await)
        }
        VolumeAction::Cp(arguments) => copy(&client, arguments, environment).await,
        VolumeAction::Import(arguments) => import(&client, arguments, environment).await,
        VolumeAction::Export(arguments) => export(&client, arguments).await,
    }
}

/// `data:/data`, as the flags take it.
pub fn mount_text(mount: &api::VolumeMount) -> String {
    let end = if mount.read_only { ":ro" } else { "" };
    format!("{}:{}{end}", mount.volume, mount.path)
}

fn told(volume: &api::Volume, json: bool) -> anyhow::Result<i32> {
    match json {
        true => print::json(volume)?,
        false => {
            print::line(&format!("{} {}", print::plain(&volume.name), amount::memory(volume.size_bytes)))?
        }
    }
    Ok(0)
}

async fn create(client: &Client, arguments: CreateVolume) -> anyhow::Result<i32> {
    let size = match (arguments.size, &arguments.from) {
        (Some(size), _) => size,
        (None, Some(from)) => client.volume(from).await?.size_bytes.to_string(),
        (None, None) => SIZE_DEFAULT.into(),
    };
    let wish = api::CreateVolume { name: arguments.name, size, from: arguments.from };
    told(&client.create_volume(&wish).await?, arguments.json)
}

async fn list(client: &Client, json: bool) -> anyhow::Result<i32> {
    let volumes = client.volumes().await?;
    if json {
        print::json(&volumes)?;
        return Ok(0);
    }
    let row = |volume: api::Volume| {
        let mut holders: Vec<String> =
            volume.mounted_by.iter().map(|holder| print::plain(&holder.name).to_string()).collect();
        holders.dedup();
        vec![
            print::plain(&volume.name).to_string(),
            amount::memory(volume.size_bytes),
            volume.used_bytes.map_or_else(|| "-".into(), amount::rounded),
            if holders.is_empty() { "-".into() } else { holders.join(" ") },
            age::ago(&volume.created_at),
        ]
    };
    let rows: Vec<Vec<String>> = volumes.into_iter().map(row).collect();
    print::table(&["NAME", "SIZE", "USED", "MOUNTED BY", "CREATED"], &rows)?;
    Ok(0)
}

fn described(volume: &api::Volume) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| text += &format!("{name:<10} {value}\n");
    line("name", &print::plain(&volume.name));
    let kept = if volume.size_enforced { "" } else { " (not enforced: the storage has no limits)" };
    line("size", &format!("{}{kept}", amount::memory(volume.size_bytes)));
    volume.used_bytes.iter().for_each(|bytes| line("used", &amount::rounded(*bytes)));
    for holder in &volume.mounted_by {
        let end = if holder.read_only { ", read-only" } else { "" };
        line("mounted", &print::plain(&format!("by {} at {}{end}", holder.name, holder.path)));
    }
    line("id", &volume.id);
    line("created", &age::ago_and_when(&volume.created_at));
    line("updated", &age::ago_and_when(&volume.updated_at));
    text
}

async fn copy(client: &Client, arguments: CopyVolume, environment: &Environment) -> anyhow::Result<i32> {
    let remote = |text: &str| match End::parse(text) {
        End::Remote { sandbox, path } => Some((sandbox, path)),
        End::Stream | End::Local(_) => None,
    };
    let (from, to) = (remote(&arguments.from), remote(&arguments.to));
    let volume = match (&from, &to) {
        (None, None) => {
            let hint = "write VOLUME:/path, for example `shoal volume cp notes.txt data:/`";
            return Err(hinted("one of the two paths must be in a volume", hint));
        }
        (Some((one, _)), Some((other, _))) if one != other => {
            let hint = format!("use `shoal volume export {one} | shoal volume import {other}`");
            return Err(hinted("cannot copy directly from one volume to another", hint));
        }
        (Some((volume, _)), _) | (None, Some((volume, _))) => volume.clone(),
    };
    let mut interrupts = Interrupts::catch()?;
    // Under the volume's own name, so that what is copied out of it as a whole has that.
    let path = format!("/mnt/{volume}");
    let mount = api::VolumeMount { volume, path: path.clone(), read_only: to.is_none() };
    let rule = api::LifetimeRule {
        since: api::RuleSince::LastUse,
        after_seconds: HELPER_IDLE_SECONDS,
        action: api::RuleAction::Delete,
        accept_inactive: false,
    };
    let wish = api::CreateSandbox { mounts: vec![mount], lifetime: vec![rule], ..Default::default() };
    let waiting = Waiting::new("mounting the volume");
    let helper = client.create_sandbox(&wish).await?.id;
    drop(waiting);
    let inside = |text: &str, end: &Option<(String, String)>| match end {
        Some((_, in_volume)) => format!("{helper}:{path}{in_volume}"),
        None => text.to_owned(),
    };
    let copying = Copy {
        from: inside(&arguments.from, &from),
        to: inside(&arguments.to, &to),
        user: None,
        json: arguments.json,
    };
    let copied = tokio::select! {
        copied = copy::between(&copying, environment) => Some(copied),
        code = interrupts.next() => {
            ended(client, helper, environment).await;
            return Ok(code);
        }
    };
    ended(client, helper, environment).await;
    match copied {
        Some(copied) => copy::told(&copied?, arguments.json, environment),
        None => Ok(1),
    }
}

async fn ended(client: &Client, helper: SandboxId, environment: &Environment) {
    if let Err(error) = client.delete_sandbox(helper).await {
        let what = format!(
            "cannot delete the temporary sandbox {helper}, which deletes itself in {HELPER_IDLE_SECONDS} s: {error}"
        );
        report::warning(&what, environment.colour);
    }
}

async fn import(client: &Client, arguments: ImportVolume, environment: &Environment) -> anyhow::Result<i32> {
    let (from, size): (Box<dyn io::Read + Send>, Option<u64>) = match &arguments.file {
        Some(path) => {
            let cannot = || format!("cannot read `{}`", path.display());
            let file = File::open(path).with_context(cannot)?;
            let about = file.metadata().with_context(cannot)?;
            (Box::new(file), about.is_file().then_some(about.len()))
        }
        None => (Box::new(io::stdin()), None),
    };
    let progress = Arc::new(Progress::new(size));
    let (pieces, body) = mpsc::channel(PIECES_MAX);
    let seen = Arc::clone(&progress);
    // A thread that is left behind when the program ends: stdin may never do so.
    std::thread::spawn(move || copy::feed(from, size, &pieces, &seen));
    let made = client
        .import_volume(
            &find::volume(client, &arguments.name, Sure::Unique).await?,
            &arguments.path,
            Upload::pieces(body, size),
        )
        .await?;
    copy::told(&Copied::from(made), arguments.json, environment)
}

async fn export(client: &Client, arguments: ExportVolume) -> anyhow::Result<i32> {
    let mut download = client
        .export_volume(&find::volume(client, &arguments.name, Sure::Unique).await?, &arguments.path)
        .await?;
    let Some(path) = &arguments.file else {
        copy::to_stdout(download).await?;
        return Ok(0);
    };
    let cannot = || format!("cannot write `{}`", path.display());
    let mut landing = copy::Landing::open(path, 0o600)?;
    let progress = Progress::new(None);
    while let Some(piece) = download.next().await? {
        progress.add(piece.len() as u64);
        io::Write::write_all(&mut landing.file, &piece).with_context(cannot)?;
    }
    landing.keep().with_context(cannot)?;
    Ok(0)
}
