//! A sandbox's files, as callers use them: typed calls and streams over `transfer`.
//!
//! Every response comes from a guest and is not trusted: it is counted, bounded, and rejected if it is malformed.
//! Dropping any of the streams ends the operation in the guest.

mod calls;
mod kept;
mod memory;
pub(crate) mod transfer;

use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use serde::de::DeserializeOwned;
use wire::files::{
    ByteRange, COMMIT, Condition, Cut, EDIT_TEXT_MAX, Edit, FileDone, FileEntry, FileError, FileErrorKind,
    FileOp, FileStat, Grep, GrepMatch, GrepWith, LIST_MAX, Links, Opened, PATH_MAX, Relocate, SearchLimits,
    WatchEvent, WriteOptions, take_record,
};

use crate::error::{EngineError, Field};
use crate::files::transfer::{Patience, Place, Running, Transfers};
use crate::model::{GuestPath, GuestUser, Resume};

/// The most memory that the entries or matches of one response may take.
const GATHERED_MAX: usize = 32 * 1024 * 1024;
/// The most matches of one search.
pub const MATCHES_MAX: u32 = 10_000;

/// The files of one sandbox, as one of its users.
pub struct Files {
    transfers: Arc<Transfers>,
    user: Option<GuestUser>,
    resume: Resume,
}

/// A page of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// Sorted by name.
    pub entries: Vec<FileEntry>,
    /// Whether there are more.
    pub more: bool,
}

/// What a search found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found<T> {
    /// In no particular order.
    pub matches: Vec<T>,
    /// How many directory entries were examined.
    pub entries: u64,
    /// How many bytes of files were read.
    pub bytes: u64,
    /// How many files or directories could not be read.
    pub skipped: u64,
    /// Why the search stopped early, if it did.
    pub cut: Option<Cut>,
}

/// What a copy or an unpacked archive created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// Files, links and directories.
    pub entries: u64,
    /// The size of the files.
    pub bytes: u64,
    /// How many entries were left out.
    pub skipped: u64,
}

/// What an edit did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edited {
    /// The file as it is now.
    pub stat: FileStat,
    /// How many occurrences were replaced.
    pub replaced: u64,
}

impl Files {
    pub(crate) fn new(transfers: Arc<Transfers>, user: Option<GuestUser>) -> Self {
        Self { transfers, user, resume: Resume::default() }
    }

    /// Whether operations resume a paused sandbox first.
    pub fn with_resume(self, resume: Resume) -> Self {
        Self { resume, ..self }
    }

    async fn start(&self, op: FileOp, patience: Patience) -> Result<Running, EngineError> {
        let place = if matches!(op, FileOp::Watch { .. }) { Place::Watch } else { Place::Short };
        Running::start(&self.transfers, op, self.user.clone(), patience, place, self.resume).await
    }

    async fn done(&self, op: FileOp, patience: Patience) -> Result<(FileDone, Running), EngineError> {
        let running = self.start(op, patience).await?;
        Ok((running.result().await?, running))
    }

    /// The metadata of a file.
    pub async fn stat(&self, path: &[u8], links: Links) -> Result<FileStat, EngineError> {
        let op = FileOp::Stat { path: checked(path)?, links };
        match self.done(op, Patience::Idle).await? {
            (FileDone::Stat(stat), _) => Ok(stat),
            (_, running) => Err(running.strange()),
        }
    }

    /// The entries of a directory, sorted by name, after the given name; at most [`LIST_MAX`].
    pub async fn list(&self, path: &[u8], after: &[u8], limit: u32) -> Result<Listing, EngineError> {
        if !(1..=LIST_MAX).contains(&limit) {
            return Err(Field::Limit.must(format!("be between 1 and {LIST_MAX}, got {limit}")));
        }
        let op = FileOp::List { path: checked(path)?, after: after.to_vec(), limit };
        let running = self.start(op, Patience::Idle).await?;
        let entries = gather(&running, limit, path).await?;
        match running.result().await? {
            FileDone::Listed { more } => Ok(Listing { entries, more }),
            _ => Err(running.strange()),
        }
    }

    /// Opens a file for reading. Returns once the guest has opened it.
    pub async fn read(&self, path: &[u8], range: ByteRange) -> Result<Reading, EngineError> {
        let running = self.start(FileOp::Read { path: checked(path)?, range }, Patience::Idle).await?;
        let mut records = Records::new(&running);
        let Some(opened) = records.next::<Opened>().await? else {
            running.result().await?;
            return Err(running.strange());
        };
        let rest = records.buffer.freeze();
        let left = opened.length;
        running.watch_taking();
        Ok(Reading { running, opened, stretch: Stretch { rest, left, over: false } })
    }

    /// Starts to write a file. The file does not appear until [`Writing::finish`].
    pub async fn write(&self, options: WriteOptions) -> Result<Writing, EngineError> {
        checked(&options.path)?;
        let running = self.start(FileOp::Write(options), Patience::Idle).await?;
        Ok(Writing { running })
    }

    /// Replaces text in a file.
    pub async fn edit(&self, wish: Edit) -> Result<Edited, EngineError> {
        checked(&wish.path)?;
        if wish.old.is_empty() {
            return Err(Field::Old.must("not be empty"));
        }
        for (field, text) in [(Field::Old, &wish.old), (Field::New, &wish.new)] {
            if text.len() > EDIT_TEXT_MAX {
                let rule = format!("have at most {EDIT_TEXT_MAX} bytes, got {}", text.len());
                return Err(field.must(rule));
            }
        }
        match self.done(FileOp::Edit(wish), Patience::Idle).await? {
            (FileDone::Edited { stat, replaced }, _) => Ok(Edited { stat, replaced }),
            (_, running) => Err(running.strange()),
        }
    }

    /// Creates a directory.
    pub async fn make_directory(
        &self,
        path: &[u8],
        parents: bool,
        mode: Option<u32>,
    ) -> Result<(), EngineError> {
        let op = FileOp::MakeDirectory { path: checked(path)?, parents, mode };
        self.done(op, Patience::Idle).await.map(drop)
    }

    /// Renames or moves a file or directory.
    pub async fn rename(&self, wish: Relocate) -> Result<(), EngineError> {
        checked(&wish.from)?;
        checked(&wish.to)?;
        // A move to another file system is a copy, which may take long.
        self.done(FileOp::Move(wish), Patience::Endless).await.map(drop)
    }

    /// Copies a file or directory.
    pub async fn copy(&self, wish: Relocate) -> Result<Made, EngineError> {
        checked(&wish.from)?;
        checked(&wish.to)?;
        match self.done(FileOp::Copy(wish), Patience::Endless).await? {
            (FileDone::Made { entries, bytes, skipped }, _) => Ok(Made { entries, bytes, skipped }),
            (_, running) => Err(running.strange()),
        }
    }

    /// Removes a file or directory.
    pub async fn remove(
        &self,
        path: &[u8],
        recursive: bool,
        condition: Condition,
    ) -> Result<(), EngineError> {
        let op = FileOp::Remove { path: checked(path)?, recursive, condition };
        self.done(op, Patience::Endless).await.map(drop)
    }

    /// Paths below a directory that match a pattern.
    pub async fn glob(
        &self,
        root: &[u8],
        pattern: &[u8],
        limits: SearchLimits,
    ) -> Result<Found<FileEntry>, EngineError> {
        check_matches(&limits)?;
        let op = FileOp::Glob { root: checked(root)?, pattern: pattern.to_vec(), limits };
        let running = self.start(op, Patience::Endless).await?;
        let matches = gather(&running, limits.matches, root).await?;
        found(matches, &running).await
    }

    /// Lines that match a pattern.
    pub async fn grep(&self, grep: Grep) -> Result<Found<GrepMatch>, EngineError> {
        check_matches(&grep.limits)?;
        let (root, limit) = (checked(&grep.root)?, grep.limits.matches);
        let running = self.start(FileOp::Grep(grep), Patience::Endless).await?;
        let matches = gather(&running, limit, &root).await?;
        found(matches, &running).await
    }

    /// Lines that match a pattern, and the number of files that were searched only in part because they turned out to
    /// be binary.
    pub async fn grep_with(&self, with: GrepWith) -> Result<(Found<GrepMatch>, u64), EngineError> {
        if with.exclude_directories.is_empty() && !with.carriage_returns {
            // Every version of init supports this.
            return Ok((self.grep(with.grep).await?, 0));
        }
        check_matches(&with.grep.limits)?;
        let (root, limit) = (checked(&with.grep.root)?, with.grep.limits.matches);
        let running = self.start(FileOp::GrepWith(with), Patience::Endless).await?;
        let matches = gather(&running, limit, &root).await?;
        match running.result().await? {
            FileDone::Grepped { entries, bytes, skipped, cut, mixed } => {
                Ok((Found { matches, entries, bytes, skipped, cut }, mixed))
            }
            _ => Err(running.strange()),
        }
    }

    /// Watches a file, or everything below a directory.
    pub async fn watch(&self, path: &[u8], recursive: bool) -> Result<Watching, EngineError> {
        let op = FileOp::Watch { path: checked(path)?, recursive };
        let running = self.start(op, Patience::Endless).await?;
        let mut watching = Watching { running, buffer: BytesMut::new() };
        // Read first, so that an error about the path is returned before the stream begins.
        match watching.next().await? {
            Some(WatchEvent::Ready) => Ok(watching),
            Some(event @ WatchEvent::NotWatched { .. }) => {
                // In a tree that is too large, this event comes before `Ready`; the stream returns it again.
                let mut back = Vec::new();
                wire::files::put_record(&event, &mut back);
                back.extend_from_slice(&watching.buffer);
                watching.buffer = back.as_slice().into();
                Ok(watching)
            }
            Some(_) | None => Err(watching.running.strange()),
        }
    }

    /// Packs a directory, or one file, as a tar stream.
    pub async fn pack(&self, path: &[u8]) -> Result<Packing, EngineError> {
        let running = self.start(FileOp::Pack { path: checked(path)? }, Patience::Idle).await?;
        // Read first, so that an error about the path is returned before the stream begins.
        let Some(rest) = running.next().await? else {
            running.result().await?;
            return Err(running.strange());
        };
        running.watch_taking();
        Ok(Packing { running, stretch: Stretch { rest, left: None, over: false } })
    }

    /// Starts to unpack a tar stream into a directory.
    pub async fn unpack(&self, path: &[u8]) -> Result<Unpacking, EngineError> {
        let running = self.start(FileOp::Unpack { path: checked(path)? }, Patience::Idle).await?;
        Ok(Unpacking { running })
    }
}

/// A path that can be sent to a guest. The guest checks the path too; this only saves the round trip.
fn checked(path: &[u8]) -> Result<Vec<u8>, EngineError> {
    let Err(must) = GuestPath::check(path) else { return Ok(path.to_vec()) };
    let path = path[..path.len().min(PATH_MAX)].to_vec();
    let source = FileError { kind: FileErrorKind::InvalidPath, path, detail: format!("it must {must}") };
    Err(EngineError::File { source })
}

fn check_matches(limits: &SearchLimits) -> Result<(), EngineError> {
    if (1..=MATCHES_MAX).contains(&limits.matches) {
        return Ok(());
    }
    Err(Field::Limit.must(format!("be between 1 and {MATCHES_MAX}, got {}", limits.matches)))
}

/// Records that arrive on stdout.
struct Records<'a> {
    running: &'a Running,
    buffer: BytesMut,
}

impl<'a> Records<'a> {
    fn new(running: &'a Running) -> Self {
        Self { running, buffer: BytesMut::new() }
    }

    async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, EngineError> {
        next_record(self.running, &mut self.buffer).await
    }
}

/// The next record, or `None` at the end of the stream. Cancel-safe.
async fn next_record<T: DeserializeOwned>(
    running: &Running,
    buffer: &mut BytesMut,
) -> Result<Option<T>, EngineError> {
    loop {
        match take_record(buffer) {
            Ok(Some((record, length))) => {
                buffer.advance(length);
                return Ok(Some(record));
            }
            Ok(None) => {}
            Err(_) => return Err(running.strange()),
        }
        match running.next().await? {
            Some(bytes) => buffer.extend_from_slice(&bytes),
            None if buffer.is_empty() => return Ok(None),
            // The stream was cut off in the middle of a record; the result has the reason.
            None => {
                running.result().await?;
                return Err(running.strange());
            }
        }
    }
}

/// All records, at most `limit`.
async fn gather<T: DeserializeOwned>(
    running: &Running,
    limit: u32,
    path: &[u8],
) -> Result<Vec<T>, EngineError> {
    let mut all = Vec::new();
    let mut held = 0;
    let mut records = Records::new(running);
    loop {
        let before = records.buffer.len();
        let Some(record) = records.next().await? else { return Ok(all) };
        held += before.saturating_sub(records.buffer.len()).max(size_of::<T>());
        if all.len() >= limit as usize {
            return Err(running.strange());
        }
        if held > GATHERED_MAX {
            let detail = "there is more than an answer can hold: ask for less at once";
            let source =
                FileError { kind: FileErrorKind::TooLarge, path: path.to_vec(), detail: detail.into() };
            return Err(EngineError::File { source });
        }
        all.push(record);
    }
}

async fn found<T>(matches: Vec<T>, running: &Running) -> Result<Found<T>, EngineError> {
    match running.result().await? {
        FileDone::Searched { entries, bytes, skipped, cut } => {
            Ok(Found { matches, entries, bytes, skipped, cut })
        }
        _ => Err(running.strange()),
    }
}

/// Bytes on their way to the caller.
struct Stretch {
    /// Arrived together with the first record.
    rest: Bytes,
    /// How many bytes may still follow, if known.
    left: Option<u64>,
    over: bool,
}

impl Stretch {
    async fn next(&mut self, running: &Running) -> Result<Option<Bytes>, EngineError> {
        if self.over {
            return Ok(None);
        }
        let bytes =
            if self.rest.is_empty() { running.next().await? } else { Some(std::mem::take(&mut self.rest)) };
        let Some(bytes) = bytes else {
            self.over = true;
            // Only the result distinguishes the end of the stream from a broken one.
            return match running.result().await? {
                FileDone::Sent { .. } if self.left.is_none_or(|left| left == 0) => Ok(None),
                _ => Err(running.strange()),
            };
        };
        if let Some(left) = &mut self.left {
            *left = left.checked_sub(bytes.len() as u64).ok_or_else(|| running.strange())?;
        }
        Ok(Some(bytes))
    }
}

/// A file that is being read.
pub struct Reading {
    running: Running,
    opened: Opened,
    stretch: Stretch,
}

impl Reading {
    /// The file that was opened, and which of its bytes follow.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// The next bytes, at most 64 KiB; `None` once all have arrived. After an error, the bytes so far are incomplete.
    pub async fn next(&mut self) -> Result<Option<Bytes>, EngineError> {
        self.stretch.next(&self.running).await
    }
}

/// A directory that is being packed.
pub struct Packing {
    running: Running,
    stretch: Stretch,
}

impl Packing {
    /// As [`Reading::next`].
    pub async fn next(&mut self) -> Result<Option<Bytes>, EngineError> {
        self.stretch.next(&self.running).await
    }
}

/// Sends bytes to the guest, or returns why the guest accepts no more.
async fn give(running: &Running, bytes: Bytes) -> Result<(), EngineError> {
    if running.give(bytes).await? {
        return Ok(());
    }
    // The operation ended before all bytes arrived, so a success here would be malformed.
    running.result().await?;
    Err(running.strange())
}

/// Ends the input, and waits for the result.
async fn finish(running: &Running) -> Result<FileDone, EngineError> {
    give(running, Bytes::from_static(&[COMMIT])).await?;
    running.end_input();
    running.result().await
}

/// A file that is being written. If this is dropped before it is finished, no file is left behind.
pub struct Writing {
    running: Running,
}

/// The result of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The file as it is now.
    pub stat: FileStat,
    /// Whether the file did not exist before.
    pub created: bool,
}

impl Writing {
    /// Sends bytes; waits while the guest does not accept them.
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), EngineError> {
        give(&self.running, bytes).await
    }

    /// Ends the input: the file gets its name.
    pub async fn finish(self) -> Result<Written, EngineError> {
        match finish(&self.running).await? {
            FileDone::Written { stat, created } => Ok(Written { stat, created }),
            _ => Err(self.running.strange()),
        }
    }
}

/// A tar stream that is being unpacked. If this is dropped before it is finished, the entries unpacked so far stay.
pub struct Unpacking {
    running: Running,
}

impl Unpacking {
    /// As [`Writing::write`].
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), EngineError> {
        give(&self.running, bytes).await
    }

    /// Ends the input, and waits for the result.
    pub async fn finish(self) -> Result<Made, EngineError> {
        match finish(&self.running).await? {
            FileDone::Made { entries, bytes, skipped } => Ok(Made { entries, bytes, skipped }),
            _ => Err(self.running.strange()),
        }
    }
}

/// A file or directory that is being watched.
pub struct Watching {
    running: Running,
    buffer: BytesMut,
}

impl Watching {
    /// The next event. `None`: there will be no more. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<WatchEvent>, EngineError> {
        match next_record(&self.running, &mut self.buffer).await? {
            Some(event) => Ok(Some(event)),
            None => self.running.result().await.map(|_| None),
        }
    }
}
