//! `shoal image`: images of the daemon, and how far they are on their way to it.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use client::{Client, ImageEvents, InUse, Upload, api};
use image::{Credentials, DockerConfig, ImageRef};
use tokio::sync::mpsc;

use crate::args::{AliasAction, Image, ImageAction, ImportImage, PullImage};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::layers::Layers;
use crate::output::progress::{Progress, size};
use crate::output::report::hinted;
use crate::output::{age, print, report};

/// A password that is longer is a mistake.
const PASSWORD_MAX: u64 = 64 * 1024;
/// What is read of a file at once, and how many such pieces wait.
const PIECE: usize = 256 * 1024;
const PIECES_MAX: usize = 8;
/// How much of a digest is shown in lists: enough to tell images apart, and to be given back.
const DIGITS_SHOWN: usize = 12;

/// `shoal image`
pub async fn image(arguments: Image, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    match arguments.action {
        ImageAction::Pull(arguments) => pull(&client, arguments, environment).await,
        ImageAction::Import(arguments) => import(&client, arguments, environment).await,
        ImageAction::Ls(arguments) => list(&client, arguments.json).await,
        ImageAction::Inspect(arguments) => {
            let image = client.image(&arguments.image).await?;
            if arguments.json {
                print::json(&image)?
            } else {
                print::line(described(&image).trim_end())?
            }
            Ok(0)
        }
        ImageAction::Rm(arguments) => {
            let mut all = api::CollectedImages::default();
            let mut failures = 0;
            let in_use = if arguments.force { InUse::Release } else { InUse::Refuse };
            for image in &arguments.images {
                match client.remove_image(image, in_use).await {
                    Ok(collected) => {
                        all.images += collected.images;
                        all.layers += collected.layers;
                        all.bytes += collected.bytes;
                    }
                    Err(error) => {
                        failures += 1;
                        report::failure(&error.into(), environment.colour);
                    }
                }
            }
            if failures < arguments.images.len() {
                let nothing =
                    "removed the name; the image stays, because other names, sandboxes or templates use it";
                collected(all, arguments.json, nothing)?;
            }
            Ok(i32::from(failures > 0))
        }
        ImageAction::Gc(arguments) => {
            let nothing = "removed nothing: every image and layer is in use";
            collected(client.collect_images().await?, arguments.json, nothing)?;
            Ok(0)
        }
        ImageAction::Alias(arguments) => alias(&client, arguments.action, environment).await,
    }
}

async fn pull(client: &Client, arguments: PullImage, environment: &Environment) -> anyhow::Result<i32> {
    let wish = api::PullImage {
        reference: arguments.reference.clone(),
        platform: arguments.platform.clone(),
        insecure: arguments.insecure,
        ..credentials(&arguments, environment)?
    };
    let images = shown(client.pull_image(&wish).await?, environment).await?;
    if arguments.json {
        // One was asked for.
        return print::json(&images.first()).map(|()| 0);
    }
    for image in &images {
        print::line(&image.digest)?;
    }
    Ok(0)
}

/// Pulls an image for a sandbox that is about to be made, unless it is here. The daemon would do so too, and say nothing.
pub async fn have(client: &Client, name: &str, environment: &Environment) -> anyhow::Result<()> {
    if name == "host" {
        return Ok(());
    }
    match client.image(name).await {
        Ok(_) => return Ok(()),
        Err(error) if error.code() == Some("image_not_found") => {}
        // An alias of `host`.
        Err(error) if error.code() == Some("invalid_request") => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    // What the daemon calls it: an alias stands for another name.
    let aliases = client.image_aliases().await?;
    let canonical =
        ImageRef::parse(name).map(|reference| reference.familiar()).unwrap_or_else(|_| name.into());
    let target = aliases.into_iter().find(|alias| alias.name == canonical).map(|alias| alias.target);
    let reference = target.unwrap_or_else(|| name.to_owned());
    let wish = api::PullImage { reference, ..Default::default() };
    shown(client.pull_image(&wish).await?, environment).await?;
    Ok(())
}

/// Flags go before the environment, and that before Docker's file.
fn credentials(arguments: &PullImage, environment: &Environment) -> anyhow::Result<api::PullImage> {
    let none = api::PullImage::default();
    if arguments.anonymous {
        return Ok(none);
    }
    if let Some(username) = &arguments.username {
        let mut password = String::new();
        std::io::stdin()
            .take(PASSWORD_MAX)
            .read_to_string(&mut password)
            .context("cannot read the password")?;
        let password = password.trim_end_matches(['\r', '\n']).to_owned();
        return Ok(api::PullImage { username: Some(username.clone()), password: Some(password), ..none });
    }
    match (&environment.registry_username, &environment.registry_password) {
        (Some(username), Some(password)) => {
            let (username, password) = (Some(username.clone()), Some(password.clone()));
            return Ok(api::PullImage { username, password, ..none });
        }
        (None, None) => {}
        (Some(_), None) | (None, Some(_)) => {
            return Err(hinted(
                "only one of SHOAL_REGISTRY_USERNAME and SHOAL_REGISTRY_PASSWORD is set",
                "set both, or neither",
            ));
        }
    }
    let Some(path) = &environment.docker_config else { return Ok(none) };
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(none),
        Err(error) => return Err(error).with_context(|| format!("cannot read `{}`", path.display())),
    };
    let config = DockerConfig::parse(&text).with_context(|| format!("cannot use `{}`", path.display()))?;
    // What is no reference is refused by the daemon, in the same words for everyone.
    let Ok(reference) = ImageRef::parse(&arguments.reference) else { return Ok(none) };
    Ok(match config.find(reference.registry()) {
        Credentials::Basic { username, password } => {
            api::PullImage { username: Some(username), password: Some(password), ..none }
        }
        Credentials::Identity { token } => api::PullImage { identity_token: Some(token), ..none },
        Credentials::Anonymous | Credentials::Bearer { .. } => none,
    })
}

async fn import(client: &Client, arguments: ImportImage, environment: &Environment) -> anyhow::Result<i32> {
    let ImportImage { from, name, format, json } = arguments;
    let upload = if from.is_dir() {
        let progress = Arc::new(Progress::new(None));
        Upload::directory(&from, move |bytes| progress.add(bytes))?
    } else {
        file_or_stdin(&from)?
    };
    // What it was called on disk is a better guess than none.
    let name = name.or_else(|| if format.as_deref() == Some("rootfs") { named_after(&from) } else { None });
    let events = client.import_image(upload, name.as_deref(), format.as_deref()).await?;
    let images = shown(events, environment).await?;
    if json {
        return print::json(&images).map(|()| 0);
    }
    for image in &images {
        print::line(&format!("{}  {}", image.digest, image.names.join(" ")))?;
    }
    Ok(0)
}

/// A file, or standard input for `-`, piece by piece.
pub(super) fn file_or_stdin(from: &Path) -> anyhow::Result<Upload> {
    if from.as_os_str() == "-" {
        return Ok(stream(Box::new(std::io::stdin()), None));
    }
    let file = std::fs::File::open(from).with_context(|| format!("cannot open `{}`", from.display()))?;
    let size = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|meta| meta.len());
    Ok(stream(Box::new(file), size))
}

/// `rootfs.tar.gz` is `rootfs`.
fn named_after(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = name.split('.').next()?.to_ascii_lowercase();
    ImageRef::parse(&stem).ok().map(|_| stem)
}

/// A file or a pipe, piece by piece.
fn stream(mut from: Box<dyn Read + Send>, size: Option<u64>) -> Upload {
    let (pieces, body) = mpsc::channel(PIECES_MAX);
    let progress = Progress::new(size);
    tokio::task::spawn_blocking(move || {
        loop {
            let mut piece = vec![0; PIECE];
            let piece = match from.read(&mut piece) {
                Ok(0) => return,
                Ok(length) => {
                    piece.truncate(length);
                    progress.add(length as u64);
                    Ok(piece.into())
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let broken = piece.is_err();
            if pieces.blocking_send(piece).is_err() || broken {
                return; // The daemon takes no more; it says why.
            }
        }
    });
    Upload::pieces(body, size)
}

/// Shows how far it is until the images are here.
async fn shown(mut events: ImageEvents, environment: &Environment) -> anyhow::Result<Vec<api::Image>> {
    let mut layers = Layers::new(environment.colour);
    loop {
        match events.next().await? {
            Some(api::ImageEvent::Progress { layers: now }) => layers.show(&now),
            Some(api::ImageEvent::Done { images }) => return Ok(images),
            Some(api::ImageEvent::Failed(_)) | None => return Ok(Vec::new()),
        }
    }
}

async fn list(client: &Client, json: bool) -> anyhow::Result<i32> {
    let images = client.images().await?;
    if json {
        return print::json(&images).map(|()| 0);
    }
    let or_dash = |list: &[String]| if list.is_empty() { "-".to_owned() } else { list.join(" ") };
    let rows: Vec<Vec<String>> = images
        .iter()
        .map(|image| {
            vec![
                or_dash(&image.names),
                or_dash(&image.aliases),
                short(&image.digest).to_owned(),
                image.platform.clone(),
                size(image.size_bytes),
                size(image.unpacked_bytes),
                image.sandboxes.to_string(),
                age::ago(&image.created_at),
            ]
        })
        .collect();
    let header = ["name", "alias", "digest", "platform", "size", "unpacked", "sandboxes", "created"];
    print::table(&header, &rows)?;
    Ok(0)
}

fn short(digest: &str) -> &str {
    let digits = digest.strip_prefix("sha256:").unwrap_or(digest);
    digits.get(..DIGITS_SHOWN).unwrap_or(digits)
}

/// An image for people.
fn described(image: &api::Image) -> String {
    let config = &image.config;
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        text += &format!("{name:<10} {}\n", print::plain(value));
    };
    line("digest", &image.digest);
    image.names.iter().for_each(|name| line("name", name));
    image.aliases.iter().for_each(|alias| line("alias", alias));
    line("platform", &image.platform);
    line("size", &format!("{} compressed, {} unpacked", size(image.size_bytes), size(image.unpacked_bytes)));
    line("created", &age::ago_and_when(&image.created_at));
    line("sandboxes", &image.sandboxes.to_string());
    if image.private {
        line("private", "visible only to the owner of this key");
    }
    config.user.iter().for_each(|user| line("user", user));
    config.working_directory.iter().for_each(|directory| line("directory", directory));
    if !config.entrypoint.is_empty() {
        line("entrypoint", &config.entrypoint.join(" "));
    }
    if !config.command.is_empty() {
        line("command", &config.command.join(" "));
    }
    config.env.iter().for_each(|(name, value)| line("env", &format!("{name}={value}")));
    config.labels.iter().for_each(|(key, value)| line("label", &format!("{key}={value}")));
    for layer in &image.layers {
        let digest = layer.digest.as_deref().map_or("built here", short);
        let mut notes = format!("{digest}  {}, {} entries", size(layer.unpacked_bytes), layer.entries);
        for (count, what) in [
            (layer.devices_skipped, "devices skipped"),
            (layer.owners_changed, "owners changed to nobody"),
            (layer.attributes_dropped, "attributes skipped"),
        ] {
            if count > 0 {
                notes += &format!(", {count} {what}");
            }
        }
        line("layer", &notes);
    }
    text
}

/// Prints what was removed, or `nothing`.
fn collected(collected: api::CollectedImages, json: bool, nothing: &str) -> anyhow::Result<()> {
    if json {
        return print::json(&collected);
    }
    let count = |number: u64, word: &str| format!("{number} {word}{}", if number == 1 { "" } else { "s" });
    let api::CollectedImages { images, layers, bytes } = collected;
    if images == 0 && layers == 0 {
        return print::line(nothing);
    }
    print::line(&format!(
        "removed {} and {}, {}",
        count(images, "image"),
        count(layers, "layer"),
        size(bytes)
    ))
}

async fn alias(client: &Client, action: AliasAction, environment: &Environment) -> anyhow::Result<i32> {
    match action {
        AliasAction::Set(arguments) => {
            let alias = client.set_image_alias(&arguments.name, &arguments.target).await?;
            print::line(&format!("{} -> {}", alias.name, alias.target))?;
            Ok(0)
        }
        AliasAction::Ls(arguments) => {
            let aliases = client.image_aliases().await?;
            if arguments.json {
                return print::json(&aliases).map(|()| 0);
            }
            let rows: Vec<Vec<String>> = aliases
                .into_iter()
                .map(|alias| vec![alias.name, alias.target, age::ago(&alias.created_at)])
                .collect();
            print::table(&["name", "target", "created"], &rows)?;
            Ok(0)
        }
        AliasAction::Rm(arguments) => {
            let mut failures = 0;
            for name in &arguments.names {
                match client.delete_image_alias(name).await {
                    Ok(()) => report::done(&format!("removed alias `{name}`")),
                    Err(error) => {
                        failures += 1;
                        report::failure(&error.into(), environment.colour);
                    }
                }
            }
            Ok(i32::from(failures > 0))
        }
    }
}
