//! Stores blobs until their layers are unpacked.
//!
//! ```text
//! <directory>/<digest>            complete, and checked against its name
//!             <digest>.partial    incomplete; the next attempt continues at its end
//!             upload-<random>     an upload
//! ```
//!
//! A file gets its final name only after its digest was checked, so a crash at any moment leaves nothing that looks
//! more complete than it is. Only the daemon uses the directory; one lock per digest keeps two pulls of one blob
//! apart.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http_body_util::BodyExt;
use tokio::sync::mpsc;
use tokio::time::timeout;
use wire::Digest;

use crate::hash::{Hasher, Hashing};
use crate::registry::{BlobStream, Registry, RegistryError, SILENCE_SECONDS};

/// Chunks between the network and the disk.
const QUEUE_MAX: usize = 32;
/// How often a transfer may break without having delivered a byte.
const STANDSTILLS_MAX: u32 = 5;
/// Delay before the first retry; doubled for each further one.
const RETRY_FIRST: Duration = Duration::from_millis(200);
/// Longest delay between two attempts.
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Space that must stay free besides a blob, so that rows and logs can still be written.
pub const FREE_MIN: u64 = 64 << 20;
/// The least that a registry has to send of a blob in a minute. A transfer holds one of few places.
const BYTES_PER_MINUTE_MIN: u64 = 1 << 20;
/// How long a transfer may stay below that.
const MINUTE: Duration = Duration::from_secs(60);
/// Size of the copy buffer.
const BUFFER: usize = 256 * 1024;

const PARTIAL: &str = ".partial";
const UPLOAD: &str = "upload-";

/// The blobs of one data directory.
#[derive(Debug)]
pub struct Blobs {
    directory: PathBuf,
    held: Mutex<HashMap<Digest, Held>>,
    uploads: AtomicU64,
}

#[derive(Debug)]
struct Held {
    count: usize,
    /// Its layer is unpacked: the last holder removes the blob.
    over: bool,
    lock: Arc<tokio::sync::Mutex<()>>,
}

/// A pin: the blob is not removed while this exists.
#[derive(Debug)]
pub struct Holding {
    blobs: Arc<Blobs>,
    digest: Digest,
}

impl Drop for Holding {
    fn drop(&mut self) {
        let mut held = self.blobs.held();
        if let Some(entry) = held.get_mut(&self.digest) {
            entry.count -= 1;
            if entry.count == 0 {
                if entry.over
                    && let Err(error) = self.blobs.remove_files(self.digest)
                {
                    tracing::warn!(digest = %self.digest, %error, "cannot remove a blob; the sweep tries again");
                }
                held.remove(&self.digest);
            }
        }
    }
}

impl Holding {
    /// The blob's digest.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Releases the blob, because its layer is unpacked or will never be: the last holder removes the file. Blocks.
    pub fn remove(self) {
        if let Some(entry) = self.blobs.held().get_mut(&self.digest) {
            entry.over = true;
        }
    }
}

impl Blobs {
    /// Opens the directory, and creates it if missing.
    pub fn open(directory: PathBuf) -> io::Result<Arc<Self>> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        Ok(Arc::new(Self { directory, held: Mutex::default(), uploads: AtomicU64::new(0) }))
    }

    /// Path of a complete blob.
    pub fn path(&self, digest: Digest) -> PathBuf {
        self.directory.join(digest.hex())
    }

    fn partial(&self, digest: Digest) -> PathBuf {
        self.directory.join(digest.hex() + PARTIAL)
    }

    fn remove_files(&self, digest: Digest) -> io::Result<()> {
        gone(fs::remove_file(self.path(digest)))?;
        gone(fs::remove_file(self.partial(digest)))
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Digest, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pins a blob, whether it exists or not.
    pub fn hold(self: &Arc<Self>, digest: Digest) -> Holding {
        let mut held = self.held();
        held.entry(digest).or_insert_with(|| Held { count: 0, over: false, lock: Arc::default() }).count += 1;
        Holding { blobs: Arc::clone(self), digest }
    }

    fn lock_of(&self, digest: Digest) -> Arc<tokio::sync::Mutex<()>> {
        self.held().get(&digest).map(|held| Arc::clone(&held.lock)).unwrap_or_default()
    }

    /// Downloads a blob, unless it is stored. Calls `arrived` with the number of bytes that are stored.
    pub async fn fetch(
        self: &Arc<Self>,
        registry: &Registry,
        digest: Digest,
        size: u64,
        arrived: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<Holding, RegistryError> {
        let holding = self.hold(digest);
        let lock = self.lock_of(digest);
        let _alone = lock.lock().await;
        let keep = |source| RegistryError::Keep { digest, source };
        if self.path(digest).try_exists().map_err(keep)? {
            arrived(size);
            return Ok(holding);
        }
        let mut wait = RETRY_FIRST;
        let mut standstills = 0;
        loop {
            let partial = Partial::open(self.partial(digest), digest).map_err(keep)?;
            let before = partial.length();
            if before > size {
                partial.remove().map_err(keep)?;
                continue;
            }
            check_room(&self.directory, size - before).map_err(keep)??;
            let result = self.go_on(registry, partial, size, arrived).await;
            match result {
                Ok(()) => return Ok(holding),
                Err(error) => {
                    // The bytes are wrong, or there is no room for them: a retry would not help.
                    if matches!(&error, RegistryError::Corrupt { .. } | RegistryError::WrongSize { .. })
                        || is_full(&error)
                    {
                        gone(fs::remove_file(self.partial(digest))).map_err(keep)?;
                        return Err(error);
                    }
                    let after = fs::metadata(self.partial(digest)).map_or(0, |meta| meta.len());
                    if after > before {
                        (standstills, wait) = (0, RETRY_FIRST);
                    } else {
                        standstills += 1;
                    }
                    if !error.may_pass() || standstills >= STANDSTILLS_MAX {
                        return Err(error);
                    }
                    tracing::debug!(%digest, after, size, %error, "a transfer broke and is continued");
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(RETRY_MAX);
                }
            }
        }
    }

    /// One transfer, continuing where the previous one ended.
    async fn go_on(
        &self,
        registry: &Registry,
        partial: Partial,
        size: u64,
        arrived: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), RegistryError> {
        let digest = partial.digest;
        let keep = |source| RegistryError::Keep { digest, source };
        let mut partial = blocking(move || partial.hash_what_is_there()).await.map_err(keep)?;
        if partial.length() < size || size == 0 {
            let stream = registry.blob(digest, partial.length()).await?;
            if stream.from != partial.length() {
                // The registry does not support ranges.
                if stream.from != 0 {
                    let said = ": its response does not begin at the requested offset".into();
                    return Err(RegistryError::Strange { registry: stream.registry, status: 206, said });
                }
                partial = blocking(move || partial.begin_anew()).await.map_err(keep)?;
            }
            partial = receive(stream, partial, size, arrived).await?;
        }
        let found = partial.hasher.clone().finish();
        if found != digest {
            return Err(RegistryError::Corrupt { expected: digest, found });
        }
        let to = self.path(digest);
        blocking(move || partial.name(&to)).await.map_err(keep)
    }

    /// Stores bytes as a blob. Blocks. With `expected`, the bytes must have that digest.
    pub fn put(
        self: &Arc<Self>,
        from: &mut dyn Read,
        expected: Option<Digest>,
    ) -> io::Result<Result<(Holding, u64), Digest>> {
        let mut upload = self.upload()?;
        let mut hashing = Hashing::new(from);
        io::copy(&mut hashing, &mut upload.file)?;
        let size = hashing.bytes;
        let digest = hashing.finish();
        if expected.is_some_and(|expected| expected != digest) {
            return Ok(Err(digest));
        }
        Ok(Ok((upload.keep(digest)?, size)))
    }

    /// A file for an upload. It is removed when dropped.
    pub fn upload(self: &Arc<Self>) -> io::Result<Upload> {
        let number = self.uploads.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("{UPLOAD}{}-{number}", std::process::id()));
        let file = fs::OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Upload { file, path, blobs: Arc::clone(self) })
    }

    /// How much more may be written here.
    pub fn free(&self) -> io::Result<u64> {
        free(&self.directory)
    }

    /// Removes blobs that have not been used for `kept`, and uploads of earlier daemons. Blocks.
    pub fn sweep(&self, kept: Duration) -> io::Result<usize> {
        let mut removed = 0;
        let own = format!("{UPLOAD}{}-", std::process::id());
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            // The lock on the table is held, so that no other task can pin it in between.
            let held = self.held();
            let stale = if name.starts_with(UPLOAD) {
                !name.starts_with(&own)
            } else {
                let digest = Digest::from_hex(name.strip_suffix(PARTIAL).unwrap_or(&name));
                let old = match entry.metadata() {
                    Ok(meta) => {
                        let since = SystemTime::now().duration_since(meta.modified()?);
                        since.is_ok_and(|since| since >= kept)
                    }
                    Err(error) if error.kind() == io::ErrorKind::NotFound => false,
                    Err(error) => return Err(error),
                };
                old && digest.is_none_or(|digest| !held.contains_key(&digest))
            };
            if stale {
                gone(fs::remove_file(entry.path()))?;
                removed += 1;
            }
        }
        Ok(removed)
    }
}

/// An uploaded file.
#[derive(Debug)]
pub struct Upload {
    /// Its contents.
    pub file: File,
    path: PathBuf,
    blobs: Arc<Blobs>,
}

impl Upload {
    /// Makes it a blob. The caller has hashed it.
    pub fn keep(self, digest: Digest) -> io::Result<Holding> {
        let holding = self.blobs.hold(digest);
        self.file.sync_all()?;
        fs::rename(&self.path, self.blobs.path(digest))?;
        Ok(holding)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // The file is gone already if it became a blob. If removing fails, the sweep of the next daemon removes it.
        let _ = fs::remove_file(&self.path);
    }
}

/// A partly downloaded blob.
struct Partial {
    file: File,
    path: PathBuf,
    digest: Digest,
    length: u64,
    hasher: Hasher,
}

impl Partial {
    fn open(path: PathBuf, digest: Digest) -> io::Result<Self> {
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)?;
        let length = file.metadata()?.len();
        Ok(Self { file, path, digest, length, hasher: Hasher::new() })
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn remove(self) -> io::Result<()> {
        gone(fs::remove_file(self.path))
    }

    fn hash_what_is_there(mut self) -> io::Result<Self> {
        self.file.seek(SeekFrom::Start(0))?;
        let mut buffer = vec![0; BUFFER];
        let mut left = self.length;
        while left > 0 {
            let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            match self.file.read(&mut buffer[..most])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                length => {
                    self.hasher.update(&buffer[..length]);
                    left -= length as u64;
                }
            }
        }
        Ok(self)
    }

    fn begin_anew(mut self) -> io::Result<Self> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        (self.length, self.hasher) = (0, Hasher::new());
        Ok(self)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.hasher.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    fn name(self, path: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, path)
    }
}

/// Writes a stream to the disk. A blocking thread hashes and writes.
async fn receive(
    mut stream: BlobStream,
    partial: Partial,
    size: u64,
    arrived: &(dyn Fn(u64) + Send + Sync),
) -> Result<Partial, RegistryError> {
    let digest = partial.digest;
    let keep = |source| RegistryError::Keep { digest, source };
    let mut length = partial.length();
    arrived(length);
    let (chunks, mut incoming) = mpsc::channel::<Bytes>(QUEUE_MAX);
    let writing = tokio::task::spawn_blocking(move || {
        let mut partial = partial;
        while let Some(chunk) = incoming.blocking_recv() {
            partial.write(&chunk)?;
        }
        Ok::<_, io::Error>(partial)
    });
    let mut broken = None;
    let (mut minute, mut at_its_start) = (Instant::now(), length);
    loop {
        if minute.elapsed() >= MINUTE {
            if length - at_its_start < BYTES_PER_MINUTE_MIN {
                let (registry, bytes) = (stream.registry.clone(), BYTES_PER_MINUTE_MIN);
                broken = Some(RegistryError::TooSlow { registry, bytes });
                break;
            }
            (minute, at_its_start) = (Instant::now(), length);
        }
        let frame = match timeout(Duration::from_secs(SILENCE_SECONDS), stream.body.frame()).await {
            Ok(None) => break,
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(error))) => {
                broken =
                    Some(RegistryError::Broken { registry: stream.registry.clone(), source: error.into() });
                break;
            }
            Err(_) => {
                broken =
                    Some(RegistryError::Late { registry: stream.registry.clone(), seconds: SILENCE_SECONDS });
                break;
            }
        };
        let Ok(chunk) = frame.into_data() else { continue };
        length += chunk.len() as u64;
        if length > size {
            broken = Some(RegistryError::WrongSize { digest, expected: size, found: length });
            break;
        }
        if chunks.send(chunk).await.is_err() {
            break; // The disk failed; the thread returns the reason.
        }
        arrived(length);
    }
    drop(chunks);
    let partial = writing.await.map_err(|error| keep(io::Error::other(error)))?.map_err(keep)?;
    match broken {
        Some(error) => Err(error),
        None if partial.length() < size => {
            let source = Box::new(io::Error::from(io::ErrorKind::UnexpectedEof));
            Err(RegistryError::Broken { registry: stream.registry, source })
        }
        None => Ok(partial),
    }
}

/// Runs blocking work.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}

fn free(directory: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(directory)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

fn check_room(directory: &Path, needed: u64) -> io::Result<Result<(), RegistryError>> {
    let free = free(directory)?;
    Ok(match free >= needed.saturating_add(FREE_MIN) {
        true => Ok(()),
        false => Err(RegistryError::DiskFull { needed, free }),
    })
}

fn is_full(error: &RegistryError) -> bool {
    match error {
        RegistryError::DiskFull { .. } => true,
        RegistryError::Keep { source, .. } => {
            matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        }
        _ => false,
    }
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
