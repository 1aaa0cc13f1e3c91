//! A sandbox's files, as callers use them: typed calls and streams over `transfer`.
//!
//! Whatever comes back was said by a guest, and is read like it: counted, bounded, and refused where it makes no sense. Dropping
//! any of the streams ends the operation in the guest.

mod calls;
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
use crate::model::{GuestPath, GuestUser};

/// What the entries or matches of one answer may add up to in memory.
const GATHERED_MAX: usize = 32 * 1024 * 1024;
/// Matches of one search at most.
pub const MATCHES_MAX: u32 = 10_000;

/// The files of one sandbox, as one of its users.
pub struct Files {
    transfers: Arc<Transfers>,
    user: Option<GuestUser>,
}

/// A page of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// By name.
    pub entries: Vec<FileEntry>,
    /// Whether there are more.
    pub more: bool,
}

/// What a search found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found<T> {
    /// In no particular order.
    pub matches: Vec<T>,
    /// Entries of directories that were looked at.
    pub entries: u64,
    /// Bytes of files that were read.
    pub bytes: u64,
    /// What could not be looked into.
    pub skipped: u64,
    /// Why it stopped before the end.
    pub cut: Option<Cut>,
}

/// What was made by a copy or from an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// Files, links and directories.
    pub entries: u64,
    /// What the files hold.
    pub bytes: u64,
    /// What was left out.
    pub skipped: u64,
}

/// What an edit did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edited {
    /// The file as it is now.
    pub stat: FileStat,
    /// In how many places.
    pub replaced: u64,
}

impl Files {
    pub(crate) fn new(transfers: Arc<Transfers>, user: Option<GuestUser>) -> Self {
        Self { transfers, user }
    }

    async fn start(&self, op: FileOp, patience: Patience) -> Result<Running, EngineError> {
        let place = if matches!(op, FileOp::Watch { .. }) { Place::Watch } else { Place::Short };
        Running::start(&self.transfers, op, self.user.clone(), patience, place).await
    }

    async fn done(&self, op: FileOp, patience: Patience) -> Result<(FileDone, Running), EngineError> {
        let running = self.start(op, patience).await?;
        Ok((running.result().await?, running))
    }

    /// What a file is.
    pub async fn stat(&self, path: &[u8], links: Links) -> Result<FileStat, EngineError> {
        let op = FileOp::Stat { path: checked(path)?, links };
        match self.done(op, Patience::Idle).await? {
            (FileDone::Stat(stat), _) => Ok(stat),
            (_, running) => Err(running.strange()),
        }
    }

    /// The entries of a directory by name, after one name, at most [`LIST_MAX`] of them.
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

    /// Opens a file to read it. Answers when it is known what it is.
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

    /// Begins to write a file. Nothing is there until [`Writing::finish`].
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

    /// Makes a directory.
    pub async fn make_directory(
        &self,
        path: &[u8],
        parents: bool,
        mode: Option<u32>,
    ) -> Result<(), EngineError> {
        let op = FileOp::MakeDirectory { path: checked(path)?, parents, mode };
        self.done(op, Patience::Idle).await.map(drop)
    }

    /// Gives something another name.
    pub async fn rename(&self, wish: Relocate) -> Result<(), EngineError> {
        checked(&wish.from)?;
        checked(&wish.to)?;
        // To another file system it is a copy, which takes its time.
        self.done(FileOp::Move(wish), Patience::Endless).await.map(drop)
    }

    /// Copies something.
    pub async fn copy(&self, wish: Relocate) -> Result<Made, EngineError> {
        checked(&wish.from)?;
        checked(&wish.to)?;
        match self.done(FileOp::Copy(wish), Patience::Endless).await? {
            (FileDone::Made { entries, bytes, skipped }, _) => Ok(Made { entries, bytes, skipped }),
            (_, running) => Err(running.strange()),
        }
    }

    /// Removes something.
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

    /// Lines that match a pattern, and how many files were looked at in part because they turned out to be binary.
    pub async fn grep_with(&self, with: GrepWith) -> Result<(Found<GrepMatch>, u64), EngineError> {
        if with.exclude_directories.is_empty() && !with.carriage_returns {
            // Every init knows this.
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

    /// What happens to a file or below a directory.
    pub async fn watch(&self, path: &[u8], recursive: bool) -> Result<Watching, EngineError> {
        let op = FileOp::Watch { path: checked(path)?, recursive };
        let running = self.start(op, Patience::Endless).await?;
        let mut watching = Watching { running, buffer: BytesMut::new() };
        // So that what is wrong with the path is known before the stream begins.
        match watching.next().await? {
            Some(WatchEvent::Ready) => Ok(watching),
            Some(event @ WatchEvent::NotWatched { .. }) => {
                // It comes before `Ready` in a tree that is too large; it is told again.
                let mut back = Vec::new();
                wire::files::put_record(&event, &mut back);
                back.extend_from_slice(&watching.buffer);
                watching.buffer = back.as_slice().into();
                Ok(watching)
            }
            Some(_) | None => Err(watching.running.strange()),
        }
    }

    /// A directory, or one file, as a tar stream.
    pub async fn pack(&self, path: &[u8]) -> Result<Packing, EngineError> {
        let running = self.start(FileOp::Pack { path: checked(path)? }, Patience::Idle).await?;
        // So that what is wrong with the path is known before the stream begins.
        let Some(rest) = running.next().await? else {
            running.result().await?;
            return Err(running.strange());
        };
        running.watch_taking();
        Ok(Packing { running, stretch: Stretch { rest, left: None, over: false } })
    }

    /// Begins to unpack a tar stream into a directory.
    pub async fn unpack(&self, path: &[u8]) -> Result<Unpacking, EngineError> {
        let running = self.start(FileOp::Unpack { path: checked(path)? }, Patience::Idle).await?;
        Ok(Unpacking { running })
    }
}

/// A path that can be said to a guest. The guest looks again; this saves it the trouble.
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

/// Records of stdout.
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
            // It was cut off in the middle; its result says why.
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
    /// Came with what was looked at first.
    rest: Bytes,
    /// How many there may still be, where that is known.
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
            // Only the result tells an end from a break.
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

/// A file that is read.
pub struct Reading {
    running: Running,
    opened: Opened,
    stretch: Stretch,
}

impl Reading {
    /// What was opened, and which of its bytes come.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// The next bytes, at most 64 KiB; `None` when all have come. After an error, what came is not all.
    pub async fn next(&mut self) -> Result<Option<Bytes>, EngineError> {
        self.stretch.next(&self.running).await
    }
}

/// A directory that is packed.
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

/// Hands over bytes, or tells why the guest takes no more.
async fn give(running: &Running, bytes: Bytes) -> Result<(), EngineError> {
    if running.give(bytes).await? {
        return Ok(());
    }
    // It has ended before all bytes came, and a good end without them would make no sense.
    running.result().await?;
    Err(running.strange())
}

/// Says that the bytes are all, and waits for what comes of them.
async fn finish(running: &Running) -> Result<FileDone, EngineError> {
    give(running, Bytes::from_static(&[COMMIT])).await?;
    running.end_input();
    running.result().await
}

/// A file that is written. Dropped before it is finished, it leaves nothing behind.
pub struct Writing {
    running: Running,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The file as it is now.
    pub stat: FileStat,
    /// Whether there was none before.
    pub created: bool,
}

impl Writing {
    /// Hands over bytes; waits while the guest does not take them.
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), EngineError> {
        give(&self.running, bytes).await
    }

    /// That was all: the file gets its name.
    pub async fn finish(self) -> Result<Written, EngineError> {
        match finish(&self.running).await? {
            FileDone::Written { stat, created } => Ok(Written { stat, created }),
            _ => Err(self.running.strange()),
        }
    }
}

/// A tar stream that is unpacked. Dropped before it is finished, what came before stays.
pub struct Unpacking {
    running: Running,
}

impl Unpacking {
    /// As [`Writing::write`].
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), EngineError> {
        give(&self.running, bytes).await
    }

    /// That was all.
    pub async fn finish(self) -> Result<Made, EngineError> {
        match finish(&self.running).await? {
            FileDone::Made { entries, bytes, skipped } => Ok(Made { entries, bytes, skipped }),
            _ => Err(self.running.strange()),
        }
    }
}

/// Files that are watched.
pub struct Watching {
    running: Running,
    buffer: BytesMut,
}

impl Watching {
    /// What happened next. `None`: nothing more will be told. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<WatchEvent>, EngineError> {
        match next_record(&self.running, &mut self.buffer).await? {
            Some(event) => Ok(Some(event)),
            None => self.running.result().await.map(|_| None),
        }
    }
}
