//! `shoal snapshot`, and what is made from snapshots: `rollback`, `fork`, `tree`, `promote`, `history` and `undo`.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};

use anyhow::{Context, bail};
use client::{Client, SandboxId, api};

use crate::args::{
    CreateSnapshot, Diff, ExportSnapshot, Fork, History, HostUsr, ImportSnapshot, ListSnapshots, Promote,
    Rollback, Snapshot, SnapshotAction, Tree, Undo,
};
use crate::commands::{delete_each, image};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::progress::Waiting;
use crate::output::{age, amount, print, report};

/// `shoal snapshot`
pub async fn snapshot(arguments: Snapshot, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    match arguments.action {
        SnapshotAction::Create(arguments) => create(&client, arguments).await,
        SnapshotAction::Ls(arguments) => list(&client, arguments).await,
        SnapshotAction::Inspect(arguments) => {
            let snapshot = client.snapshot(&arguments.snapshot).await?;
            match arguments.json {
                true => print::json(&snapshot)?,
                false => print::line(described(&snapshot).trim_end())?,
            }
            Ok(0)
        }
        SnapshotAction::Rm(arguments) => {
            let delete = async |name: &str| {
                client.delete_snapshot(name).await?;
                anyhow::Ok(name.to_owned())
            };
            Ok(delete_each("snapshot", &arguments.names, environment, delete).await)
        }
        SnapshotAction::Export(arguments) => export(&client, arguments).await,
        SnapshotAction::Import(arguments) => import(&client, arguments).await,
    }
}

async fn create(client: &Client, arguments: CreateSnapshot) -> anyhow::Result<i32> {
    let sandbox = find::sandbox(client, &arguments.sandbox).await?;
    let wish = api::TakeSnapshot { name: arguments.name, labels: arguments.labels.into_iter().collect() };
    let waiting = Waiting::new("taking a snapshot");
    let snapshot = client.take_snapshot(sandbox.id, &wish).await?;
    drop(waiting);
    match arguments.json {
        true => print::json(&snapshot)?,
        false => print::line(&snapshot.id)?,
    }
    Ok(0)
}

async fn export(client: &Client, arguments: ExportSnapshot) -> anyhow::Result<i32> {
    let ExportSnapshot { snapshot, output, usr } = arguments;
    if output.is_none() && std::io::stdout().is_terminal() {
        bail!("an archive must go to a file or a pipe: use -o FILE");
    }
    let waiting = Waiting::new("packing");
    let mut download = client.export_snapshot(&snapshot, usr == HostUsr::Include).await?;
    drop(waiting);
    let Some(path) = output else {
        let mut stdout = std::io::stdout().lock();
        while let Some(bytes) = download.next().await? {
            stdout.write_all(&bytes).context("cannot write the archive")?;
        }
        stdout.flush().context("cannot write the archive")?;
        return Ok(0);
    };
    let failed = || format!("cannot write `{}`", path.display());
    let mut file = std::fs::File::create(&path).with_context(failed)?;
    let written = async {
        while let Some(bytes) = download.next().await? {
            file.write_all(&bytes).with_context(failed)?;
        }
        file.sync_all().with_context(failed)
    };
    let written = written.await;
    if written.is_err() {
        // Half of an archive is of no use.
        std::fs::remove_file(&path).with_context(|| format!("cannot remove `{}`", path.display()))?;
    }
    written.map(|()| 0)
}

async fn import(client: &Client, arguments: ImportSnapshot) -> anyhow::Result<i32> {
    let ImportSnapshot { from, name, labels, json } = arguments;
    let upload = image::file_or_stdin(&from)?;
    let snapshot = client.import_snapshot(&name, &labels, upload).await?;
    match json {
        true => print::json(&snapshot)?,
        false => print::line(&snapshot.id)?,
    }
    Ok(0)
}

async fn list(client: &Client, arguments: ListSnapshots) -> anyhow::Result<i32> {
    let snapshots = client.snapshots().await?;
    if arguments.json {
        print::json(&snapshots)?;
        return Ok(0);
    }
    if arguments.quiet {
        for snapshot in &snapshots {
            print::line(&snapshot.id)?;
        }
        return Ok(0);
    }
    let row = |snapshot: api::Snapshot| {
        let sandbox = snapshot.sandbox_id.map(|id| print::short_id(&id.to_string()).to_owned());
        vec![
            print::short_id(&snapshot.id).to_owned(),
            print::plain(&snapshot.name),
            print::word(&snapshot.state),
            sandbox.unwrap_or_else(|| "-".into()),
            snapshot.size_bytes.map_or_else(|| "-".into(), amount::rounded),
            age::ago(&snapshot.created_at),
        ]
    };
    let rows: Vec<Vec<String>> = snapshots.into_iter().map(row).collect();
    print::table(&["ID", "NAME", "STATE", "SANDBOX", "SIZE", "CREATED"], &rows)?;
    Ok(0)
}

fn described(snapshot: &api::Snapshot) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| text += &format!("{name:<10} {value}\n");
    line("id", &snapshot.id);
    line("name", &print::plain(&snapshot.name));
    line("state", &print::word(&snapshot.state));
    snapshot.reason.iter().for_each(|reason| line("reason", &print::plain(reason)));
    snapshot.sandbox_id.iter().for_each(|id| line("sandbox", &id.to_string()));
    snapshot.parent.iter().for_each(|id| line("parent", id));
    snapshot.image.iter().for_each(|image| line("image", &print::plain(image)));
    snapshot.size_bytes.iter().for_each(|bytes| line("size", &amount::rounded(*bytes)));
    snapshot.stopped_ms.iter().for_each(|ms| line("stopped", &format!("{ms:.1} ms")));
    for (key, value) in &snapshot.labels {
        line("label", &print::plain(&format!("{key}={value}")));
    }
    line("created", &age::ago_and_when(&snapshot.created_at));
    text
}

/// `shoal rollback`
pub async fn rollback(arguments: Rollback, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let id = find::sandbox(&client, &arguments.sandbox).await?.id;
    let waiting = Waiting::new("rolling back");
    let sandbox = client.rollback(id, &arguments.snapshot).await?;
    drop(waiting);
    told(&sandbox, arguments.json)
}

fn told(sandbox: &api::Sandbox, json: bool) -> anyhow::Result<i32> {
    match json {
        true => print::json(sandbox)?,
        false => print::line(&sandbox.id.to_string())?,
    }
    Ok(0)
}

/// `shoal fork`
pub async fn fork(arguments: Fork, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let id = find::sandbox(&client, &arguments.sandbox).await?.id;
    let wish = api::Fork {
        count: Some(arguments.count),
        env: arguments.env.into_iter().collect(),
        labels: arguments.labels.into_iter().collect(),
    };
    let waiting = Waiting::new("forking");
    let children = client.fork(id, &wish).await?;
    drop(waiting);
    let failed = children.iter().any(|child| child.error.is_some());
    if arguments.json {
        print::json(&children)?;
        return Ok(i32::from(failed));
    }
    for child in &children {
        match (&child.sandbox, &child.error) {
            (Some(sandbox), _) => print::line(&sandbox.id.to_string())?,
            (None, Some(error)) => report::warning(&print::plain(&error.message), environment.colour),
            (None, None) => {}
        }
    }
    Ok(i32::from(failed))
}

/// `shoal tree`
pub async fn tree(arguments: Tree, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let sandbox = match &arguments.sandbox {
        Some(text) => Some(find::sandbox(&client, text).await?.id),
        None => None,
    };
    let members = client.tree(sandbox).await?;
    if arguments.json {
        print::json(&members)?;
        return Ok(0);
    }
    let mut children: BTreeMap<Option<SandboxId>, Vec<&api::TreeMember>> = BTreeMap::new();
    for member in &members {
        children.entry(member.parent).or_default().push(member);
    }
    let mut waiting: Vec<(usize, &api::TreeMember)> =
        children.get(&None).into_iter().flatten().rev().map(|member| (0, *member)).collect();
    while let Some((depth, member)) = waiting.pop() {
        let state = member.state.as_ref().map_or_else(|| "deleted".into(), print::word);
        let id = member.sandbox_id.to_string();
        let name = print::plain(&member.name);
        print::line(&format!("{:indent$}{name} {} {state}", "", print::short_id(&id), indent = 2 * depth))?;
        let below = children.get(&Some(member.sandbox_id)).into_iter().flatten().rev();
        waiting.extend(below.map(|child| (depth + 1, *child)));
    }
    Ok(0)
}

/// `shoal diff`
pub async fn diff(arguments: Diff, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let waiting = Waiting::new("comparing");
    let found = client.diff(&arguments.a, &arguments.b, arguments.content).await?;
    drop(waiting);
    if arguments.json {
        print::json(&found)?;
        return Ok(0);
    }
    for entry in &found.entries {
        let sign = match entry.change {
            api::DiffChange::Added => "+",
            api::DiffChange::Changed => "~",
            api::DiffChange::Removed => "-",
        };
        let end = if entry.kind == "directory" { "/" } else { "" };
        print::line(&format!("{sign} {}{end}", print::plain(&entry.path)))?;
        for line in lines_of_difference(entry.before.as_deref(), entry.after.as_deref()) {
            print::line(&print::plain(&line))?;
        }
    }
    if !found.complete {
        report::warning("there are more differences than are shown", environment.colour);
    }
    Ok(0)
}

/// The lines that differ between two texts, each with a sign: what both begin and end with is left out.
fn lines_of_difference(before: Option<&str>, after: Option<&str>) -> Vec<String> {
    if before.is_none() && after.is_none() {
        return Vec::new();
    }
    let lines = |text: Option<&str>| text.unwrap_or_default().lines().map(str::to_owned).collect::<Vec<_>>();
    let (old, new) = (lines(before), lines(after));
    let same = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
    let at_end =
        old[same..].iter().rev().zip(new[same..].iter().rev()).take_while(|(old, new)| old == new).count();
    let removed = old[same..old.len() - at_end].iter().map(|line| format!("    - {line}"));
    let added = new[same..new.len() - at_end].iter().map(|line| format!("    + {line}"));
    removed.chain(added).collect()
}

/// `shoal promote`
pub async fn promote(arguments: Promote, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let id = find::sandbox(&client, &arguments.sandbox).await?.id;
    let parent = match (arguments.delete_parent, arguments.pause_parent) {
        (true, _) => api::PromoteParent::Delete,
        (false, true) => api::PromoteParent::Pause,
        (false, false) => api::PromoteParent::Keep,
    };
    told(&client.promote(id, parent).await?, arguments.json)
}

/// `shoal history`
pub async fn history(arguments: History, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let id = find::sandbox(&client, &arguments.sandbox).await?.id;
    let steps = client.history(id).await?;
    if arguments.json {
        print::json(&steps)?;
        return Ok(0);
    }
    let row = |step: api::HistoryStep| {
        vec![
            step.step.to_string(),
            print::short_id(&step.snapshot).to_owned(),
            amount::rounded(step.size_bytes),
            age::ago(&step.taken_at),
        ]
    };
    let rows: Vec<Vec<String>> = steps.into_iter().map(row).collect();
    print::table(&["STEP", "SNAPSHOT", "SIZE", "TAKEN"], &rows)?;
    Ok(0)
}

/// `shoal undo`
pub async fn undo(arguments: Undo, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let id = find::sandbox(&client, &arguments.sandbox).await?.id;
    let waiting = Waiting::new("going back");
    let sandbox = client.undo(id, arguments.steps).await?;
    drop(waiting);
    told(&sandbox, arguments.json)
}
