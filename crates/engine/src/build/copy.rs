//! `COPY` and `ADD`: send files of the context, of another stage or of an image into the sandbox of a step.
//!
//! Files of the context are never unpacked on the host: they go from the uploaded archive straight into the sandbox.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use archive::{Entry, EntryKind};
use image::dockerfile::{self, DockerfileError};
use image::hash::Hasher;
use serde_json::json;
use wire::files::{Condition, FileErrorKind, FileKind, Links, Relocate};

use super::builder::{Builder, Built, How};
use super::context::{Context, ContextEntry, PIECE};
use super::key::hash_part;
use super::rootfs::Rootfs;
use super::sandbox::{Broken, end_archive};
use super::steps::Work;
use crate::error::{BuildError, EngineError, Field, chain};
use crate::files::{Files, Unpacking};
use crate::model::GuestUser;
use crate::model::NetworkPolicy;
use crate::sandbox::live::LiveSandbox;

/// Where `--chown` unpacks files before they are moved. It is removed before the layer is made.
const STAGING: &str = "/.shoal-copy";

/// What a `COPY` or `ADD` asks for, with its variables expanded.
pub(super) struct Copy {
    pub(super) sources: Vec<String>,
    pub(super) target: String,
    pub(super) chown: Option<String>,
    pub(super) mode: Option<u32>,
    pub(super) line: usize,
}

/// The files that a step copies.
struct Sources {
    parts: Vec<Part>,
    /// Identifies `parts` in the name of the layer.
    key: Vec<u8>,
}

/// A file, or a directory with its contents. An empty path is the whole context.
struct Part {
    context: Arc<Context>,
    path: String,
    is_directory: bool,
}

/// Where a part goes: into a directory of the sandbox and, if the part is a file, under this name.
struct Destination {
    directory: String,
    name: Option<String>,
}

impl Builder {
    /// Copies files of the context.
    pub(super) async fn copy_from_context(&self, work: &mut Work, wish: &Copy) -> Built<How> {
        let sources = self.context_sources(wish)?;
        self.copy(work, wish, sources).await
    }

    /// Copies files of another stage or of an image.
    pub(super) async fn copy_from(
        &self,
        work: &mut Work,
        wish: &Copy,
        from: &str,
        done: &HashMap<usize, Rootfs>,
    ) -> Built<How> {
        let line = wish.line;
        let shared = self.engine.shared();
        let (rootfs, number) = match self.stage_named(from, work.number) {
            Some(number) => match done.get(&number) {
                Some(rootfs) => (rootfs.clone(), number),
                // The stages to build are chosen before any variable of a step has a value.
                None => {
                    let why = format!(
                        "stage `{from}` is not built, because only a variable names it; write its name after --from="
                    );
                    return Err(BuildError::Step { line, why });
                }
            },
            // No stage has this number.
            None => (self.base_image(from, line).await?, self.file.stages.len() + line),
        };
        if rootfs.over_host {
            // No layer identifies the files of this machine, and they can change, so their contents identify them.
            let _pins = shared.images.pin(rootfs.layers.iter().map(|layer| layer.layer));
            let parts = self.pack_sources(wish, number, &rootfs).await?;
            let key = json!([wish.sources, contents_key(&parts)]).to_string().into_bytes();
            return self.copy(work, wish, Sources { parts, key }).await;
        }
        let top = rootfs.layers.last().map(|layer| layer.layer.to_string()).unwrap_or_default();
        // The top layer identifies all files of the source, so the cache is found without reading any of them.
        let key = json!([wish.sources, top]).to_string().into_bytes();
        let layer = self.layer_name(work, "COPY", &[&key, &wish.key()]);
        // Pin the layer of this step too, before asking whether it exists. If it were collected after the answer, an
        // empty layer would take its name.
        let pinned = rootfs.layers.iter().map(|layer| layer.layer).chain([layer]);
        let _pins = shared.images.pin(pinned);
        let cached = shared.db.has_layer(layer).await;
        let parts = match cached.map_err(|error| BuildError::Step { line, why: chain(&error) })? {
            true => Vec::new(),
            false => self.pack_sources(wish, number, &rootfs).await?,
        };
        self.copy(work, wish, Sources { parts, key }).await
    }

    /// Finds the sources of a `COPY` in the context.
    fn context_sources(&self, wish: &Copy) -> Built<Sources> {
        let line = wish.line;
        let context = &self.context;
        let mut parts = Vec::new();
        let mut hasher = Hasher::new();
        for source in &wish.sources {
            let pattern = dockerfile::context_path(source)
                .map_err(|problem| BuildError::Dockerfile { source: DockerfileError { line, problem } })?;
            let matching = context.matching(&pattern);
            if matching.is_empty() {
                let why = format!("`{source}` is not in the context (.dockerignore may leave it out)");
                return Err(BuildError::Step { line, why });
            }
            for path in matching {
                let is_directory = context.is_directory(&path);
                hash_part(context, &path, &mut hasher);
                parts.push(Part { context: Arc::clone(context), path, is_directory });
            }
        }
        Ok(Sources { parts, key: hasher.finish().to_string().into_bytes() })
    }

    /// Packs the sources of a `COPY --from` in a sandbox over `rootfs`, which is stored as stage `number`.
    async fn pack_sources(&self, wish: &Copy, number: usize, rootfs: &Rootfs) -> Built<Vec<Part>> {
        let failed = |why: String| BuildError::Step { line: wish.line, why };
        self.store_stage(number, rootfs).await.map_err(|error| failed(chain(&error)))?;
        let sandbox = self
            .create_sandbox(number, Vec::new(), NetworkPolicy::default())
            .await
            .map_err(|broken| failed(broken.0))?;
        let mut parts = Vec::new();
        for source in &wish.sources {
            parts.push(self.pack(&sandbox, source).await.map_err(|broken| failed(broken.0))?);
        }
        self.delete_sandbox(&sandbox).await.map_err(|broken| failed(broken.0))?;
        Ok(parts)
    }

    /// Packs a file or directory of a sandbox into an archive of its own.
    async fn pack(&self, sandbox: &Arc<LiveSandbox>, path: &str) -> Result<Part, Broken> {
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let files = Files::new(Arc::clone(&sandbox.transfers), None);
        let stat = files.stat(path.as_bytes(), Links::Follow).await?;
        let is_directory = stat.kind == FileKind::Directory;
        let (upload, room) = (self.engine.upload()?, self.engine.upload_room()?);
        let mut packing = files.pack(path.as_bytes()).await?;
        let mut file = upload.file.try_clone().map_err(|error| Broken(error.to_string()))?;
        let mut length = 0;
        while let Some(bytes) = packing.next().await? {
            length += bytes.len() as u64;
            if length > room {
                return Err(Broken("the disk has no room for the files to copy".into()));
            }
            file.write_all(&bytes).map_err(|error| Broken(error.to_string()))?;
        }
        let read = tokio::task::spawn_blocking(move || Context::read(upload)).await;
        let context = read.map_err(|_| Broken("the engine is stopping".into()))?;
        let context = context.map_err(|error| Broken(error.to_string()))?;
        let path = match is_directory {
            true => String::new(),
            false => context.entries.keys().next().cloned().unwrap_or_default(),
        };
        Ok(Part { context: Arc::new(context), path, is_directory })
    }

    /// Makes the layer of a `COPY`: sends all parts into a sandbox.
    async fn copy(&self, work: &mut Work, wish: &Copy, sources: Sources) -> Built<How> {
        let Sources { parts, key } = sources;
        let target = work.resolve(&wish.target);
        let names_directory = wish.target.ends_with('/') || wish.target == "." || parts.len() > 1;
        self.layer(work, wish.line, "COPY", &[&key, &wish.key()], async |_, sandbox| {
            let files = Files::new(Arc::clone(&sandbox.transfers), None);
            for part in &parts {
                let destination = if part.is_directory {
                    Destination::of_contents(&target)
                } else if names_directory || target == "/" || is_directory(&files, &target).await {
                    Destination::inside(&target, &part.path)
                } else {
                    Destination::exactly(&target)
                };
                match &wish.chown {
                    Some(owner) => {
                        let user = GuestUser::parse(user_of(owner)).map_err(|must| must.of(Field::User))?;
                        let user = Files::new(Arc::clone(&sandbox.transfers), Some(user));
                        send_as(&files, &user, part, &destination, wish.mode).await?;
                    }
                    None => {
                        make_directory(&files, &destination.directory).await?;
                        send(&files, part, &destination, &destination.directory, wish.mode).await?;
                    }
                }
            }
            Ok(())
        })
        .await
    }
}

/// The user who gets the files of `--chown`. As in other builders, a user id without a group implies the group with
/// the same number.
pub(super) fn user_of(chown: &str) -> String {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match chown.split_once(':') {
        Some(("", group)) => format!("0:{group}"),
        Some((user, "")) => user_of(user),
        None if is_number(chown) => format!("{chown}:{chown}"),
        Some(_) | None => chown.to_owned(),
    }
}

async fn make_directory(files: &Files, path: &str) -> Result<(), Broken> {
    match path {
        "/" | "" => Ok(()),
        path => Ok(files.make_directory(path.as_bytes(), true, None).await?),
    }
}

/// Sends one part into `directory`, which exists. All files belong to the user of `files`.
async fn send(
    files: &Files,
    part: &Part,
    destination: &Destination,
    directory: &str,
    mode: Option<u32>,
) -> Result<(), Broken> {
    let mut unpacking = files.unpack(directory.as_bytes()).await?;
    for (path, found) in part.entries(destination.name.as_deref()) {
        let entry = sent_entry(path, &found.entry, mode);
        unpacking.write(archive::entry_header(&entry).into()).await?;
        send_contents(&mut unpacking, &part.context, found).await?;
    }
    end_archive(unpacking).await
}

/// Sends one part for `user`. Init resolves the user, so the image needs no `chown`, and a number needs no account.
///
/// A user cannot write everywhere, and changing the owner of root's files would need a program in the image. So the
/// user unpacks into a directory of its own, and root moves the files from there.
async fn send_as(
    root: &Files,
    user: &Files,
    part: &Part,
    destination: &Destination,
    mode: Option<u32>,
) -> Result<(), Broken> {
    root.make_directory(STAGING.as_bytes(), false, Some(0o777)).await?;
    let new = format!("{STAGING}/new");
    user.make_directory(new.as_bytes(), false, None).await?;
    send(user, part, destination, &new, mode).await?;
    let directory = destination.directory.as_str();
    if kind_of(root, directory).await?.is_some() {
        move_entries(root, part, destination, &new).await?;
    } else {
        // The target does not exist, so it belongs to the user as well.
        let parent = directory.rsplit_once('/').map_or("", |(parent, _)| parent);
        make_directory(root, parent).await?;
        root.rename(relocate(&new, directory)).await?;
    }
    Ok(root.remove(STAGING.as_bytes(), true, Condition::None).await?)
}

/// Moves what was sent to `new` into the destination, which exists. Directories that exist there keep their owner,
/// and receive the new entries.
async fn move_entries(
    files: &Files,
    part: &Part,
    destination: &Destination,
    new: &str,
) -> Result<(), Broken> {
    let directory = destination.directory.trim_end_matches('/');
    let (mut moved, mut merged) = (HashSet::new(), HashSet::new());
    for (path, found) in part.entries(destination.name.as_deref()) {
        let ends = path.match_indices('/').map(|(end, _)| end).chain([path.len()]);
        for end in ends {
            let front = &path[..end];
            if moved.contains(front) {
                break;
            }
            if merged.contains(front) {
                continue;
            }
            let target = format!("{directory}/{front}");
            let is_directory = end < path.len() || found.entry.kind == EntryKind::Directory;
            if is_directory && kind_of(files, &target).await? == Some(FileKind::Directory) {
                merged.insert(front.to_owned());
                continue;
            }
            files.rename(relocate(&format!("{new}/{front}"), &target)).await?;
            moved.insert(front.to_owned());
            break;
        }
    }
    Ok(())
}

fn relocate(from: &str, to: &str) -> Relocate {
    let (from, to) = (from.as_bytes().to_vec(), to.as_bytes().to_vec());
    Relocate { from, to, overwrite: true, parents: false, recursive: true }
}

/// The kind of file at a path, with links followed; `None` if nothing exists there.
async fn kind_of(files: &Files, path: &str) -> Result<Option<FileKind>, Broken> {
    match files.stat(path.as_bytes(), Links::Follow).await {
        Ok(stat) => Ok(Some(stat.kind)),
        Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Part {
    /// The entries to send, each with its path below the destination's directory. `name`: what a file is renamed to; a directory is
    /// not renamed, since only its contents are sent.
    fn entries<'a>(&'a self, name: Option<&'a str>) -> impl Iterator<Item = (String, &'a ContextEntry)> {
        let inside = if self.path.is_empty() { String::new() } else { format!("{}/", self.path) };
        self.context.entries.iter().filter_map(move |(path, found)| {
            let shown = match name {
                Some(name) => (*path == self.path).then_some(name),
                None => path.strip_prefix(&inside),
            };
            let shown = shown.filter(|shown| !shown.is_empty())?;
            Some((shown.to_owned(), found))
        })
    }
}

impl Destination {
    /// The contents of a directory go into the target.
    fn of_contents(target: &str) -> Self {
        Self { directory: target.to_owned(), name: None }
    }

    /// A file goes into the target under its own name.
    fn inside(target: &str, path: &str) -> Self {
        let name = path.rsplit('/').next().unwrap_or_default();
        Self { directory: target.to_owned(), name: Some(name.to_owned()) }
    }

    /// A file becomes the target.
    fn exactly(target: &str) -> Self {
        let (directory, name) = target.rsplit_once('/').unwrap_or(("", target));
        let directory = if directory.is_empty() { "/" } else { directory };
        Self { directory: directory.to_owned(), name: Some(name.to_owned()) }
    }
}

/// Identifies the names, modes and contents of all parts.
fn contents_key(parts: &[Part]) -> String {
    let mut hasher = Hasher::new();
    for part in parts {
        hash_part(&part.context, &part.path, &mut hasher);
    }
    hasher.finish().to_string()
}

async fn is_directory(files: &Files, path: &str) -> bool {
    match files.stat(path.as_bytes(), Links::Follow).await {
        Ok(stat) => stat.kind == FileKind::Directory,
        Err(_) => false,
    }
}

/// An entry as the sandbox gets it: owned by root, without extended attributes, and with the mode of `--chmod`.
fn sent_entry(path: String, found: &Entry, mode: Option<u32>) -> Entry {
    Entry {
        path: path.into_bytes(),
        mode: match (mode, found.kind) {
            (Some(mode), EntryKind::File | EntryKind::Directory) => mode,
            _ => found.mode,
        },
        uid: 0,
        gid: 0,
        attributes: Vec::new(),
        ..found.clone()
    }
}

/// Sends the contents of a file, padded to whole blocks.
async fn send_contents(
    unpacking: &mut Unpacking,
    context: &Context,
    found: &ContextEntry,
) -> Result<(), Broken> {
    let mut at = found.at;
    let end = found.at + found.entry.size;
    while at < end {
        let length = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
        let file = context.upload.file.try_clone().map_err(|error| Broken(error.to_string()))?;
        let read = tokio::task::spawn_blocking(move || {
            let mut piece = vec![0; length];
            file.read_exact_at(&mut piece, at).map(|()| piece)
        });
        let piece = read.await.map_err(|_| Broken("the engine is stopping".into()))?;
        let piece = piece.map_err(|error| Broken(error.to_string()))?;
        at += piece.len() as u64;
        unpacking.write(piece.into()).await?;
    }
    let padding = (archive::BLOCK as u64 - found.entry.size % archive::BLOCK as u64) % archive::BLOCK as u64;
    if padding > 0 {
        unpacking.write(vec![0; padding as usize].into()).await?;
    }
    Ok(())
}
