//! `shoal template`: what sandboxes are made from, and how far it is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use client::{Client, Upload, api};
use serde::Deserialize;

use crate::args::{
    ApplyTemplates, CreateTemplate, PrepareTemplate, Template, TemplateAction, UpdateTemplate,
};
use crate::commands::{build, delete_each, net, sandbox};
use crate::daemon::find::{self, Sure};
use crate::environment::Environment;
use crate::output::layers::Layers;
use crate::output::print::Paint;
use crate::output::progress::Waiting;
use crate::output::report::hinted;
use crate::output::{age, amount, print, report};

/// A longer file is a mistake.
const FILE_MAX: u64 = 1024 * 1024;

/// `shoal template`
pub async fn template(arguments: Template, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    match arguments.action {
        TemplateAction::Create(arguments) => create(&client, *arguments, environment).await,
        TemplateAction::Get(arguments) => {
            let template =
                client.template(&find::template(&client, &arguments.name, Sure::Unique).await?).await?;
            if arguments.json {
                print::json(&template)?
            } else {
                print::line(described(&template).trim_end())?
            }
            Ok(0)
        }
        TemplateAction::Ls(arguments) => list(&client, arguments.json).await,
        TemplateAction::Update(arguments) => update(&client, *arguments, environment).await,
        TemplateAction::Prepare(arguments) => prepare(&client, arguments, environment).await,
        TemplateAction::Rm(arguments) => {
            let delete = async |name: &str| {
                let name = find::template(&client, name, Sure::Whole).await?;
                client.delete_template(&name).await?;
                anyhow::Ok(name)
            };
            Ok(delete_each("template", &arguments.names, environment, delete).await)
        }
        TemplateAction::Apply(arguments) => apply(&client, arguments, environment).await,
    }
}

async fn create(
    client: &Client,
    arguments: CreateTemplate,
    environment: &Environment,
) -> anyhow::Result<i32> {
    let wish = api::CreateTemplate {
        name: arguments.name,
        image: arguments.image,
        cpu: arguments.cpu,
        memory: arguments.memory,
        disk: arguments.disk,
        env: arguments.env.into_iter().collect(),
        cwd: arguments.workdir,
        user: arguments.user,
        command: arguments.command,
        labels: arguments.labels.into_iter().collect(),
        mounts: arguments.mounts,
        network: net::network(arguments.net.as_deref())?,
        history: arguments.history,
        hooks: sandbox::hooks(arguments.hooks, arguments.require_hooks),
    };
    let template = client.create_template(&wish).await?;
    finish(client, template, arguments.wait, arguments.json, environment).await
}

async fn update(
    client: &Client,
    arguments: UpdateTemplate,
    environment: &Environment,
) -> anyhow::Result<i32> {
    let pairs = |before: BTreeMap<String, String>, fresh: bool, set: Vec<(String, String)>| {
        let mut pairs = if fresh { BTreeMap::new() } else { before };
        let changes = fresh || !set.is_empty();
        pairs.extend(set);
        changes.then_some(pairs)
    };
    let name = find::template(client, &arguments.template, Sure::Unique).await?;
    // Maps are replaced as a whole, so what stays has to be said again.
    let same = arguments.env.is_empty() && arguments.labels.is_empty() && arguments.mounts.is_empty();
    let (env, labels, mut mounts) = match same {
        true => (BTreeMap::new(), BTreeMap::new(), Vec::new()),
        false => {
            let before = client.template(&name).await?;
            (before.env, before.labels, before.mounts)
        }
    };
    let mounts = (arguments.no_mounts || !arguments.mounts.is_empty()).then(|| {
        mounts.retain(|mount| {
            !arguments.no_mounts && !arguments.mounts.iter().any(|other| other.path == mount.path)
        });
        mounts.extend(arguments.mounts);
        mounts
    });
    let or_none = |text: Option<String>| text.map(|text| Some(text).filter(|text| !text.is_empty()));
    let update = api::UpdateTemplate {
        name: arguments.name,
        image: arguments.image,
        cpu: arguments.cpu,
        memory: arguments.memory,
        disk: or_none(arguments.disk),
        env: pairs(env, arguments.no_env, arguments.env),
        cwd: or_none(arguments.workdir),
        user: or_none(arguments.user),
        command: Some(arguments.command).filter(|command| !command.is_empty()),
        labels: pairs(labels, arguments.no_labels, arguments.labels),
        mounts,
        network: net::network(arguments.net.as_deref())?.map(Some),
        history: None, // A file with templates changes these.
        hooks: None,
    };
    let template = client.update_template(&name, &update).await?;
    finish(client, template, arguments.wait, arguments.json, environment).await
}

async fn prepare(
    client: &Client,
    arguments: PrepareTemplate,
    environment: &Environment,
) -> anyhow::Result<i32> {
    let template =
        client.prepare_template(&find::template(client, &arguments.name, Sure::Unique).await?).await?;
    finish(client, template, arguments.wait, arguments.json, environment).await
}

/// Waits, if that was asked for, and says how it is.
async fn finish(
    client: &Client,
    mut template: api::Template,
    wait: bool,
    json: bool,
    environment: &Environment,
) -> anyhow::Result<i32> {
    if wait {
        template = settled(client, template, environment).await?;
    }
    if json {
        print::json(&template)?;
    } else {
        print::line(&summary(&template))?;
    }
    Ok(0)
}

/// Shows how far a template is until it is ready. One that failed is an error.
pub async fn settled(
    client: &Client,
    template: api::Template,
    environment: &Environment,
) -> anyhow::Result<api::Template> {
    let template = match template.state {
        api::TemplateState::Ready | api::TemplateState::Failed => template,
        api::TemplateState::Preparing => {
            let mut events = client.template_events(&template.name).await?;
            let mut layers = Layers::new(environment.colour);
            // Until it is known what there is to wait for.
            let mut waiting = Some(Waiting::new("preparing the template"));
            loop {
                match events.next().await? {
                    Some(api::TemplateEvent::Progress { layers: now }) => {
                        if !now.is_empty() {
                            drop(waiting.take());
                        }
                        layers.show(&now);
                    }
                    Some(api::TemplateEvent::Ready(template) | api::TemplateEvent::Failed(template)) => {
                        break *template;
                    }
                    Some(api::TemplateEvent::Gone(_)) | None => break template,
                }
            }
        }
    };
    match &template.reason {
        Some(reason) if template.state == api::TemplateState::Failed => Err(hinted(
            format!("template `{}` could not be prepared: {reason}", template.name),
            format!("fix the cause, then retry with `shoal template prepare --wait {}`", template.name),
        )),
        Some(_) | None => Ok(template),
    }
}

fn summary(template: &api::Template) -> String {
    format!("{}  version {}  {}", print::plain(&template.name), template.version, state(template))
}

fn word(state: api::TemplateState) -> (&'static str, Paint) {
    match state {
        api::TemplateState::Preparing => ("preparing", Paint::Yellow),
        api::TemplateState::Ready => ("ready", Paint::Green),
        api::TemplateState::Failed => ("failed", Paint::Red),
    }
}

fn state(template: &api::Template) -> String {
    let (word, paint) = word(template.state);
    print::painted(word, paint)
}

fn image(template: &api::Template) -> String {
    match &template.image_target {
        Some(target) => format!("{} -> {target}", template.image),
        None => template.image.clone(),
    }
}

async fn list(client: &Client, json: bool) -> anyhow::Result<i32> {
    let templates = client.templates().await?;
    if json {
        return print::json(&templates).map(|()| 0);
    }
    let rows: Vec<Vec<String>> = templates
        .iter()
        .map(|template| {
            vec![
                template.name.clone(),
                template.version.to_string(),
                word(template.state).0.to_owned(),
                image(template),
                amount::cpu(u64::from(template.limits.cpu_millis)),
                amount::memory(template.limits.memory_bytes),
                template.disk_bytes.map_or_else(|| "-".into(), amount::memory),
                template.sandboxes.to_string(),
                template.updated_at.as_deref().map_or_else(|| "built in".into(), age::ago),
            ]
        })
        .collect();
    let header = ["name", "version", "state", "image", "cpu", "memory", "disk", "sandboxes", "updated"];
    print::table(&header, &rows)?;
    Ok(0)
}

/// A template for people.
fn described(template: &api::Template) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| text += &format!("{name:<10} {value}\n");
    let plain = |value: &str| print::plain(value).to_string();
    line("name", &plain(&template.name));
    line("version", &template.version.to_string());
    line("state", &state(template));
    template.reason.iter().for_each(|reason| line("reason", &plain(reason)));
    line("image", &plain(&image(template)));
    template.image_digest.iter().for_each(|digest| line("digest", digest));
    line("cpu", &amount::cpu(u64::from(template.limits.cpu_millis)));
    line("memory", &amount::memory(template.limits.memory_bytes));
    if let Some(disk) = template.disk_bytes {
        line("disk", &amount::memory(disk));
    }
    template
        .mounts
        .iter()
        .for_each(|mount| line("mount", &plain(&crate::commands::volume::mount_text(mount))));
    template.cwd.iter().for_each(|cwd| line("directory", &plain(cwd)));
    template.user.iter().for_each(|user| line("user", &plain(user)));
    if !template.command.is_empty() {
        line("command", &plain(&template.command.join(" ")));
    }
    template.env.iter().for_each(|(name, value)| line("env", &plain(&format!("{name}={value}"))));
    template.labels.iter().for_each(|(key, value)| line("label", &plain(&format!("{key}={value}"))));
    line("sandboxes", &template.sandboxes.to_string());
    template.id.iter().for_each(|id| line("id", id));
    template.created_at.iter().for_each(|at| line("created", &age::ago_and_when(at)));
    template.updated_at.iter().for_each(|at| line("updated", &age::ago_and_when(at)));
    text
}

/// A file with templates.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    templates: BTreeMap<String, Entry>,
}

/// What a file says of one template: what the API takes, and how its image is built.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Entry {
    image: Option<String>,
    cpu: Option<String>,
    memory: Option<String>,
    disk: Option<String>,
    env: BTreeMap<String, String>,
    cwd: Option<String>,
    user: Option<String>,
    command: Vec<String>,
    labels: BTreeMap<String, String>,
    mounts: Vec<api::VolumeMount>,
    network: Option<api::Network>,
    history: Option<u32>,
    hooks: BTreeMap<String, api::Hook>,
    build: Option<Steps>,
}

/// How an image is built: by a Dockerfile, or by a script over `image`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Steps {
    /// Beside the file, if left out.
    context: Option<PathBuf>,
    /// In the context.
    dockerfile: Option<String>,
    target: Option<String>,
    args: BTreeMap<String, String>,
    network: Option<api::Network>,
    script: Option<String>,
}

impl Entry {
    fn spec(self) -> (api::TemplateSpec, Option<Steps>) {
        let Self { image, cpu, memory, disk, env, cwd, user, command, labels, mounts, network, .. } = self;
        let Self { history, hooks, build, .. } = self;
        let spec = api::TemplateSpec {
            image,
            cpu,
            memory,
            disk,
            env,
            cwd,
            user,
            command,
            labels,
            mounts,
            network,
            history,
            hooks,
        };
        (spec, build)
    }
}

/// Makes one template what the file says.
async fn apply_one(
    client: &Client,
    name: &str,
    entry: Entry,
    beside: &Path,
) -> anyhow::Result<api::Template> {
    let (mut spec, steps) = entry.spec();
    let Some(steps) = steps else { return Ok(client.apply_template(name, &spec).await?) };
    let image = spec.image.take();
    let mut wish = api::StartBuild {
        template: name.to_owned(),
        spec,
        dockerfile: steps.dockerfile.clone(),
        target: steps.target,
        args: steps.args,
        secrets: BTreeMap::new(),
        network: steps.network,
    };
    let context = match (steps.script, image) {
        (Some(_), None) => {
            return Err(hinted("`build.script` needs an image to run in", "set `image` next to it"));
        }
        (Some(_), Some(_)) if steps.dockerfile.is_some() => {
            return Err(hinted("`build` has both a script and a Dockerfile", "keep one of them"));
        }
        (Some(script), Some(image)) => {
            wish.dockerfile = None;
            Upload::bytes(build::script_context(&image, &script))
        }
        (None, Some(_)) => {
            return Err(hinted(
                "`image` and a Dockerfile exclude each other",
                "remove `image`; FROM in the Dockerfile names it",
            ));
        }
        (None, None) => {
            let directory = beside.join(steps.context.unwrap_or_default());
            build::context(&directory, steps.dockerfile.as_deref().unwrap_or("Dockerfile"))?
        }
    };
    build::built(client, &wish, context).await?;
    Ok(client.template(name).await?)
}

fn read(path: &Path) -> anyhow::Result<File> {
    let shown = path.display();
    let open = std::fs::metadata(path).with_context(|| format!("cannot read `{shown}`"))?;
    if open.len() > FILE_MAX {
        return Err(hinted(format!("`{shown}` is longer than {FILE_MAX} bytes"), "is it the right file?"));
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read `{shown}`"))?;
    let file: File = toml::from_str(&text).map_err(|error| {
        let hint = "see `shoal template apply --help` for an example";
        hinted(format!("`{shown}` is not a valid templates file: {}", error.to_string().trim_end()), hint)
    })?;
    if file.templates.is_empty() {
        let hint = "add one under `[templates.NAME]`";
        return Err(hinted(format!("`{shown}` has no templates"), hint));
    }
    Ok(file)
}

async fn apply(client: &Client, arguments: ApplyTemplates, environment: &Environment) -> anyhow::Result<i32> {
    let file = read(&arguments.file)?;
    let mut templates = Vec::new();
    let mut failures = 0;
    let beside = arguments.file.parent().unwrap_or(Path::new("")).to_owned();
    for (name, entry) in file.templates {
        match apply_one(client, &name, entry, &beside).await {
            Ok(template) => templates.push(template),
            Err(error) => {
                failures += 1;
                let error = error.context(format!("cannot apply template `{name}`"));
                report::failure(&error, environment.colour);
            }
        }
    }
    let mut shown = Vec::new();
    for template in templates {
        let template = match arguments.wait {
            true => settled(client, template, environment).await,
            false => Ok(template),
        };
        match template {
            Ok(template) => {
                if !arguments.json {
                    print::line(&summary(&template))?;
                }
                shown.push(template);
            }
            Err(error) => {
                failures += 1;
                report::failure(&error, environment.colour);
            }
        }
    }
    if arguments.json {
        print::json(&shown)?;
    }
    Ok(i32::from(failures > 0))
}
