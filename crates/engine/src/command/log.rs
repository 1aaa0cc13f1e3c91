//! The output of a command on disk, and its most recent part in memory.
//!
//! A stream is kept in segments, `<stream>.<offset of the first byte>`, so that its oldest part can be dropped by
//! removing files. Nothing is recorded about segments but their names and lengths: after a crash, the contents of the
//! files are what was stored, because bytes are written in order, only at the end, and before they are acknowledged.
//!
//! A few dedicated threads write the files. No task of the daemon ever waits for a disk, and a disk that stalls delays
//! acknowledgements only. A file is open only while it is being written or read.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use wire::guest::{OUTPUT_WINDOW, Stream};

use crate::guest::Violation;
use crate::model::Span;

/// The longest segment. Segments are shorter if little is kept, so that old output is dropped an eighth at a time.
const SEGMENT_MAX: u64 = 8 * 1024 * 1024;
const SEGMENT_MIN: u64 = 4 * 1024;
/// The least that can be configured to be kept of a stream: a few segments.
pub(crate) const KEPT_MIN: u64 = 64 * 1024;
/// Threads that write logs. More than one, so that one slow directory does not block all; few, since they share one
/// page cache.
const WRITERS: usize = 3;
/// How long a writer waits after a disk error, for example because the disk was full.
pub(crate) const RETRY: Duration = Duration::from_secs(1);
/// How many stored bytes of a stream stay in memory while it has no reader: enough for the output of a short command.
const TAIL_ALONE_MAX: usize = 16 * 1024;
/// The same while the stream has a reader: a reader that keeps up never touches the file.
const TAIL_READ_MAX: usize = 1024 * 1024;
/// Chunks smaller than this are joined, so that bytes that arrive one by one do not cost a chunk each.
const CHUNK_JOIN_MAX: usize = 512;
/// A stream that is no longer than this when its command ends is kept in the row and costs no file.
pub(crate) const SHORT_MAX: usize = 4 * 1024;
/// A write starts once this many bytes are waiting...
pub(crate) const WRITE_MIN: u64 = 256 * 1024;
const _: () =
    assert!(WRITE_MIN <= OUTPUT_WINDOW as u64 / 4, "init should not come to wait for what we wait for");
/// ... or once the bytes have waited this long: most commands have ended by then. Until bytes are stored, init keeps
/// them.
pub(crate) const PATIENCE: Duration = Duration::from_millis(200);
const _: () = assert!(SHORT_MAX <= TAIL_ALONE_MAX, "what is in memory alone is never trimmed");
/// The most that is read from a file at once.
const READ_MAX: u64 = 256 * 1024;

/// How long a segment may be when `kept_max` bytes of a stream are kept.
pub(crate) fn segment_max(kept_max: u64) -> u64 {
    (kept_max / 8).clamp(SEGMENT_MIN, SEGMENT_MAX)
}

/// One output stream of a command.
#[derive(Debug)]
pub(crate) struct StreamLog {
    stream: Stream,
    /// The segments on disk, without gaps.
    segments: VecDeque<Segment>,
    /// The end offset of what is on disk.
    stored: u64,
    /// The end offset of what init has sent.
    received: u64,
    /// The offset up to which init may forget the stream.
    granted: u64,
    /// The last chunks, without gaps, up to `received`; at least everything that is not yet stored.
    tail: VecDeque<Chunk>,
    tail_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    start: u64,
    end: u64,
}

#[derive(Debug)]
struct Chunk {
    offset: u64,
    /// Counts chunks of both streams of a command, so that a reader gets them in the order they came.
    serial: u64,
    bytes: Bytes,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

/// Where the next bytes for a reader are.
#[derive(Debug)]
pub(crate) enum Next {
    /// They were dropped; the first kept byte is at this offset.
    Lost(u64),
    /// In memory, with the number of their arrival.
    Memory(Bytes, u64),
    /// In a file.
    File(ReadPlan),
    /// They have not arrived yet.
    Nothing,
}

/// A read from a segment.
#[derive(Debug)]
pub(crate) struct ReadPlan {
    file: PathBuf,
    at: u64,
    length: usize,
}

/// Bytes to write to disk.
pub(crate) struct Append {
    stream: Stream,
    last: Option<Segment>,
    stored: u64,
    chunks: Vec<Bytes>,
}

/// The result of [`StreamLog::retire`].
#[derive(Default)]
pub(crate) struct Retired {
    /// Segments that are no longer part of the log.
    pub files: Vec<PathBuf>,
    /// More than the limit is kept, because a reader still needs the oldest part. Init must wait.
    pub held: bool,
}

impl StreamLog {
    pub fn new(stream: Stream) -> Self {
        Self {
            stream,
            segments: VecDeque::new(),
            stored: 0,
            received: 0,
            granted: 0,
            tail: VecDeque::new(),
            tail_bytes: 0,
        }
    }

    /// Rebuilds the log from the segments on disk. Reads only names and lengths.
    pub fn recover(directory: &Path, stream: Stream) -> io::Result<Self> {
        let mut log = Self::new(stream);
        let mut found = Vec::new();
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(log),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let start = name.to_str().and_then(|name| name.strip_prefix(word(stream))?.strip_prefix('.'));
            if let Some(start) = start.and_then(|digits| digits.parse::<u64>().ok()) {
                found.push(Segment { start, end: start + entry.metadata()?.len() });
            }
        }
        found.sort_by_key(|segment| segment.start);
        for segment in found {
            // Each segment begins where the one before ends. If there is a gap, only the segments after it are used.
            if log.segments.back().is_some_and(|before| before.end != segment.start) {
                log.segments.clear();
            }
            log.segments.push_back(segment);
        }
        log.stored = log.segments.back().map_or(0, |last| last.end);
        (log.received, log.granted) = (log.stored, log.stored);
        Ok(log)
    }

    /// The log of a command that has ended. `span` is what was kept at that time, in files or as `short`.
    pub fn finished(directory: &Path, stream: Stream, span: Span, short: Option<Bytes>) -> io::Result<Self> {
        if let Some(bytes) = short {
            let mut log = Self::new(stream);
            (log.stored, log.received, log.granted) = (span.end, span.end, span.end);
            log.tail_bytes = bytes.len();
            log.tail.push_back(Chunk { offset: span.start, serial: 0, bytes });
            return Ok(log);
        }
        let mut log = Self::recover(directory, stream)?;
        if log.received < span.end {
            // Files were removed by someone else. The missing bytes are reported as lost.
            log.segments.clear();
            (log.stored, log.received, log.granted) = (span.end, span.end, span.end);
        }
        Ok(log)
    }

    pub fn span(&self) -> Span {
        let start = self
            .segments
            .front()
            .map(|first| first.start)
            .or_else(|| self.tail.front().map(|first| first.offset));
        Span { start: start.unwrap_or(self.received), end: self.received }
    }

    /// How much of the stream is on disk.
    pub fn kept_bytes(&self) -> u64 {
        match (self.segments.front(), self.segments.back()) {
            (Some(first), Some(last)) => last.end - first.start,
            (None, _) | (_, None) => 0,
        }
    }

    pub fn received(&self) -> u64 {
        self.received
    }

    pub fn granted(&self) -> u64 {
        self.granted
    }

    pub fn is_stored(&self) -> bool {
        self.stored == self.received
    }

    /// How much is not on disk yet.
    pub fn unstored_bytes(&self) -> u64 {
        self.received - self.stored
    }

    /// Whether the stream fits into the row.
    pub fn is_short(&self) -> bool {
        self.segments.is_empty() && self.received <= SHORT_MAX as u64
    }

    /// Whether none of the stream is lost when its command ends.
    pub fn is_kept(&self) -> bool {
        self.is_stored() || self.is_short()
    }

    /// What goes into the row: `None` if the stream is empty or on disk.
    pub fn short(&self) -> Option<Bytes> {
        if self.is_stored() || !self.is_short() {
            return None;
        }
        let mut all = BytesMut::with_capacity(self.tail_bytes);
        self.tail.iter().for_each(|chunk| all.extend_from_slice(&chunk.bytes));
        Some(all.freeze())
    }

    /// Takes bytes that init sent, and skips bytes that arrived before; `false` if all of them had.
    pub fn receive(&mut self, offset: u64, bytes: &[u8], serial: u64) -> Result<bool, Violation> {
        let end = offset + bytes.len() as u64;
        if offset > self.received {
            return Err(Violation::Gap { expected: self.received, found: offset });
        }
        if end > self.granted.saturating_add(OUTPUT_WINDOW as u64) {
            return Err(Violation::BeyondWindow { end, acknowledged: self.granted });
        }
        if end <= self.received {
            return Ok(false);
        }
        let fresh = &bytes[(self.received - offset) as usize..];
        match self.tail.back_mut() {
            Some(last) if last.bytes.len() + fresh.len() <= CHUNK_JOIN_MAX => {
                let mut joined = BytesMut::with_capacity(last.bytes.len() + fresh.len());
                joined.extend_from_slice(&last.bytes);
                joined.extend_from_slice(fresh);
                last.bytes = joined.freeze();
            }
            Some(_) | None => self.tail.push_back(Chunk {
                offset: self.received,
                serial,
                bytes: Bytes::copy_from_slice(fresh),
            }),
        }
        self.tail_bytes += fresh.len();
        self.received = end;
        Ok(true)
    }

    /// The bytes that are not on disk yet.
    pub fn unstored(&self) -> Option<Append> {
        if self.is_stored() {
            return None;
        }
        let first = self.tail.partition_point(|chunk| chunk.end() <= self.stored);
        let chunks = self.tail.range(first..).map(|chunk| {
            let skip = self.stored.saturating_sub(chunk.offset) as usize;
            chunk.bytes.slice(skip..)
        });
        let last = self.segments.back().copied();
        Some(Append { stream: self.stream, last, stored: self.stored, chunks: chunks.collect() })
    }

    /// Records what an [`Append`] has written.
    pub fn record(&mut self, written: Written) {
        for segment in written.0 {
            match self.segments.back_mut() {
                Some(last) if last.start == segment.start => *last = segment,
                Some(_) | None => self.segments.push_back(segment),
            }
            self.stored = segment.end;
        }
    }

    /// Drops the oldest segments until `kept_max` bytes are kept, but nothing from `floor` on, where a reader is.
    pub fn retire(&mut self, directory: &Path, kept_max: u64, floor: Option<u64>) -> Retired {
        let mut retired = Retired::default();
        while let (Some(first), Some(last)) = (self.segments.front(), self.segments.back()) {
            if self.segments.len() == 1 || last.end - first.start <= kept_max {
                break;
            }
            if floor.is_some_and(|floor| floor < first.end) {
                retired.held = true;
                break;
            }
            retired.files.push(path(directory, self.stream, first.start));
            self.segments.pop_front();
        }
        retired
    }

    /// Drops the oldest segment, even if a reader still needs it. Returns its file and its length. Not while the log is being written.
    ///
    /// An empty segment replaces the last one, so that its name keeps the offset over a restart.
    pub fn drop_front(&mut self, directory: &Path) -> io::Result<Option<(PathBuf, u64)>> {
        let Some(first) = self.segments.front().copied().filter(|first| first.end > first.start) else {
            return Ok(None);
        };
        if self.segments.len() == 1 {
            drop(open(directory, self.stream, self.stored)?);
            self.segments.push_back(Segment { start: self.stored, end: self.stored });
        }
        self.segments.pop_front();
        Ok(Some((path(directory, self.stream, first.start), first.end - first.start)))
    }

    /// Whether a reader at `at` is why more than `kept_max` bytes are kept.
    pub fn is_held_by(&self, at: u64, kept_max: u64) -> bool {
        match (self.segments.front(), self.segments.back()) {
            (Some(first), Some(last)) => {
                self.segments.len() > 1 && last.end - first.start > kept_max && at < first.end
            }
            (None, _) | (_, None) => false,
        }
    }

    /// Lets init forget the bytes that are stored.
    pub fn grant(&mut self) {
        self.granted = self.stored;
    }

    /// Frees the memory of stored bytes. Keeps a little, and more if a reader at `floor` is about to need it.
    pub fn trim(&mut self, floor: Option<u64>) {
        while let Some(first) = self.tail.front() {
            let spare = first.end() <= self.stored && self.tail_bytes - first.bytes.len() >= TAIL_ALONE_MAX;
            let wanted = floor.is_some_and(|floor| floor < first.end()) && self.tail_bytes <= TAIL_READ_MAX;
            if !spare || wanted {
                break;
            }
            self.tail_bytes -= first.bytes.len();
            self.tail.pop_front();
        }
    }

    /// Where the bytes from `at` up to `end` are.
    pub fn next(&self, directory: &Path, at: u64, end: u64) -> Next {
        let start = self.span().start;
        if at >= end.min(self.received) {
            return Next::Nothing;
        }
        if at < start {
            return Next::Lost(start.min(end));
        }
        if self.tail.front().is_some_and(|first| first.offset <= at) {
            let chunk = &self.tail[self.tail.partition_point(|chunk| chunk.end() <= at)];
            let from = (at - chunk.offset) as usize;
            let to = (end.min(chunk.end()) - chunk.offset) as usize;
            return Next::Memory(chunk.bytes.slice(from..to), chunk.serial);
        }
        let segment = &self.segments[self.segments.partition_point(|segment| segment.end <= at)];
        let length = (end.min(segment.end) - at).min(READ_MAX) as usize;
        let file = path(directory, self.stream, segment.start);
        Next::File(ReadPlan { file, at: at - segment.start, length })
    }
}

impl ReadPlan {
    /// Reads. Blocks. A missing or short file is an error, since an attached reader keeps its segments.
    pub fn read(&self) -> io::Result<Bytes> {
        let mut bytes = BytesMut::zeroed(self.length);
        File::open(&self.file)?.read_exact_at(&mut bytes, self.at)?;
        Ok(bytes.freeze())
    }
}

/// The segments that an [`Append`] extended or created.
pub(crate) struct Written(Vec<Segment>);

impl Append {
    /// How many bytes there are to write.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len() as u64).sum()
    }

    /// Writes. Blocks. Can be retried after an error: the same bytes go to the same places.
    pub fn write(self, directory: &Path, segment_max: u64) -> io::Result<Written> {
        let mut written = Vec::new();
        let mut segment = self.last.unwrap_or(Segment { start: self.stored, end: self.stored });
        let mut chunks = self.chunks.as_slice();
        let mut skip = 0;
        while !chunks.is_empty() {
            if segment.end - segment.start >= segment_max {
                segment = Segment { start: segment.end, end: segment.end };
            }
            let mut file = open(directory, self.stream, segment.start)?;
            file.seek(SeekFrom::Start(segment.end - segment.start))?;
            while !chunks.is_empty() && segment.end - segment.start < segment_max {
                let room = segment_max - (segment.end - segment.start);
                let length = write_some(&mut file, chunks, skip, room)?;
                segment.end += length as u64;
                skip += length;
                while let Some(first) = chunks.first().filter(|first| skip >= first.len()) {
                    skip -= first.len();
                    chunks = &chunks[1..];
                }
            }
            written.push(segment);
        }
        Ok(Written(written))
    }
}

/// Writes from `chunks`, of which the first `skip` bytes are done, at most `room` bytes.
fn write_some(file: &mut File, chunks: &[Bytes], mut skip: usize, room: u64) -> io::Result<usize> {
    /// Every Unix accepts at least 16 slices per call; Linux accepts 1024.
    const SLICES_MAX: usize = 64;
    let mut room = usize::try_from(room).unwrap_or(usize::MAX);
    let mut slices = Vec::with_capacity(chunks.len().min(SLICES_MAX));
    for chunk in chunks.iter().take(SLICES_MAX) {
        let rest = &chunk[skip..];
        skip = 0;
        let part = &rest[..rest.len().min(room)];
        room -= part.len();
        slices.push(IoSlice::new(part));
    }
    loop {
        match file.write_vectored(&slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => return Ok(length),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn open(directory: &Path, stream: Stream, start: u64) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let file = path(directory, stream, start);
    match options.open(&file) {
        // The directory is created with the first byte: most commands write nothing at all.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
            options.open(&file)
        }
        result => result,
    }
}

fn path(directory: &Path, stream: Stream, start: u64) -> PathBuf {
    directory.join(format!("{}.{start}", word(stream)))
}

fn word(stream: Stream) -> &'static str {
    match stream {
        Stream::Stdin => "stdin",
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
    }
}

/// Removes a directory of logs. Harmless if it does not exist.
pub(crate) fn remove_directory(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Something that has bytes for the disk.
pub(crate) trait Writes: Send + Sync {
    /// Writes everything that is waiting. Blocks.
    fn write_pass(self: Arc<Self>) -> Again;
}

/// When to call again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    /// When it is scheduled again.
    Done,
    /// After the other logs in the queue.
    Now,
    /// After [`RETRY`].
    Later,
}

/// The threads that write logs. Each log is in the queue at most once, so the number of commands bounds the queue.
pub(crate) struct LogWriters {
    queue: Arc<Queue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Queue {
    ready: Mutex<Ready>,
    wake: Condvar,
    runtime: tokio::runtime::Handle,
}

#[derive(Default)]
struct Ready {
    logs: VecDeque<Arc<dyn Writes>>,
    stopping: bool,
}

impl Queue {
    fn ready(&self) -> MutexGuard<'_, Ready> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, log: Arc<dyn Writes>) {
        let mut ready = self.ready();
        if !ready.stopping {
            ready.logs.push_back(log);
            drop(ready);
            self.wake.notify_one();
        }
    }

    fn work(self: &Arc<Self>) {
        loop {
            let mut ready = self.ready();
            let log = loop {
                if ready.stopping {
                    return;
                }
                match ready.logs.pop_front() {
                    Some(log) => break log,
                    None => ready = self.wake.wait(ready).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(ready);
            let passing = Arc::clone(&log);
            // A bug in one log must not stop the thread for all others. A log that panics is not retried.
            let again = catch_unwind(AssertUnwindSafe(|| passing.write_pass())).unwrap_or_else(|_| {
                tracing::error!("writing a log panicked; its command will get no result");
                Again::Done
            });
            match again {
                Again::Done => {}
                Again::Now => self.push(log),
                Again::Later => {
                    let queue = Arc::clone(self);
                    self.runtime.spawn(async move {
                        tokio::time::sleep(RETRY).await;
                        queue.push(log);
                    });
                }
            }
        }
    }
}

impl LogWriters {
    pub fn start(runtime: tokio::runtime::Handle) -> io::Result<Self> {
        let queue = Arc::new(Queue { ready: Mutex::default(), wake: Condvar::new(), runtime });
        let writers = Self { queue, threads: Mutex::default() };
        for _ in 0..WRITERS {
            let queue = Arc::clone(&writers.queue);
            let thread = std::thread::Builder::new().name("log-write".into()).spawn(move || queue.work())?;
            writers.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        }
        Ok(writers)
    }

    /// Queues `log` to be written soon. The caller makes sure that a log is queued at most once.
    pub fn schedule(&self, log: Arc<dyn Writes>) {
        self.queue.push(log);
    }

    /// Stops the threads once they finish their current write. Bytes that were not written were not acknowledged.
    pub fn stop(&self) {
        self.queue.ready().stopping = true;
        self.queue.ready().logs.clear();
        self.queue.wake.notify_all();
        for thread in std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner)) {
            if thread.join().is_err() {
                tracing::error!("a thread that writes logs had panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 4096;

    /// A log that follows a script.
    struct Scripted(std::sync::mpsc::Sender<()>, bool);

    impl Writes for Scripted {
        fn write_pass(self: Arc<Self>) -> Again {
            // Sent before the panic, so that the test knows that the panic is about to happen.
            self.0.send(()).expect("the test listens");
            assert!(!self.1, "a bug in one log");
            Again::Done
        }
    }

    #[tokio::test]
    async fn a_log_that_panics_takes_no_thread_from_the_others() {
        let writers = LogWriters::start(tokio::runtime::Handle::current()).expect("threads");
        let (told, telling) = std::sync::mpsc::channel();
        for panics in [true; WRITERS * 2].into_iter().chain([false]) {
            writers.schedule(Arc::new(Scripted(told.clone(), panics)));
            telling.recv_timeout(Duration::from_secs(20)).expect("a thread takes it");
        }
        writers.stop();
    }

    fn pattern(from: u64, length: usize) -> Vec<u8> {
        (from..from + length as u64).map(|at| (at % 251) as u8).collect()
    }

    fn store(log: &mut StreamLog, directory: &Path) {
        if let Some(append) = log.unstored() {
            log.record(append.write(directory, SEGMENT).expect("the disk takes it"));
            log.grant();
        }
    }

    fn read_all(log: &StreamLog, directory: &Path, mut at: u64) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let bytes = match log.next(directory, at, u64::MAX) {
                Next::Lost(to) => panic!("bytes from {at} to {to} were lost"),
                Next::Memory(bytes, _) => bytes,
                Next::File(plan) => plan.read().expect("the segment is there"),
                Next::Nothing => return all,
            };
            at += bytes.len() as u64;
            all.extend_from_slice(&bytes);
        }
    }

    #[test]
    fn what_was_stored_is_found_again_after_a_crash() {
        let directory = tempfile::tempdir().expect("a directory");
        let directory = directory.path().join("not/yet/there");
        let mut log = StreamLog::new(Stream::Stdout);
        let mut sent = 0;
        for length in [1, 10, 5000, 64 * 1024, 3, 70_000 - 64 * 1024] {
            log.receive(sent, &pattern(sent, length), 0).expect("in order");
            sent += length as u64;
            store(&mut log, &directory);
            log.trim(None);
            let again = StreamLog::recover(&directory, Stream::Stdout).expect("it reads");
            assert_eq!((again.span(), again.granted()), (Span { start: 0, end: sent }, sent));
            assert_eq!(read_all(&again, &directory, 0), pattern(0, sent as usize));
            assert_eq!(read_all(&log, &directory, 0), pattern(0, sent as usize));
        }
    }

    #[test]
    fn bytes_that_come_twice_are_kept_once_and_a_gap_is_refused() {
        let mut log = StreamLog::new(Stream::Stderr);
        assert_eq!(log.receive(0, b"hello", 0), Ok(true));
        assert_eq!(log.receive(0, b"hel", 0), Ok(false));
        assert_eq!(log.receive(3, b"lo world", 0), Ok(true));
        assert_eq!(read_all(&log, Path::new("nowhere"), 0), b"hello world");
        assert_eq!(log.receive(12, b"!", 0), Err(Violation::Gap { expected: 11, found: 12 }));
        let far = vec![0; OUTPUT_WINDOW];
        assert!(matches!(log.receive(11, &far, 0), Err(Violation::BeyondWindow { .. })));
    }

    #[test]
    fn the_front_falls_off_in_whole_segments_but_not_under_a_reader() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut log = StreamLog::new(Stream::Stdout);
        for at in 0..10u64 {
            log.receive(at * 10_000, &pattern(at * 10_000, 10_000), 0).expect("in order");
            store(&mut log, directory.path());
        }
        let held = log.retire(directory.path(), 50_000, Some(9000));
        assert!(held.held, "the reader at 9,000 needs the third segment");
        assert_eq!((held.files.len(), log.span().start), (2, 2 * SEGMENT));
        let retired = log.retire(directory.path(), 50_000, None);
        assert!(!retired.held);
        assert!(log.span().start >= 50_000 && log.span().start < 50_000 + SEGMENT, "{:?}", log.span());
        log.trim(None);
        assert!(matches!(log.next(directory.path(), 0, u64::MAX), Next::Lost(to) if to == log.span().start));
        assert_eq!(read_all(&log, directory.path(), 60_000), pattern(60_000, 40_000));
    }

    #[test]
    fn a_log_that_lost_everything_goes_on_where_it_was_after_a_crash() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut log = StreamLog::new(Stream::Stdout);
        log.receive(0, &pattern(0, 10_000), 0).expect("in order");
        store(&mut log, directory.path());
        let mut freed = 0;
        while let Some((file, bytes)) = log.drop_front(directory.path()).expect("the disk takes it") {
            fs::remove_file(file).expect("it is there");
            freed += bytes;
        }
        assert_eq!((freed, log.kept_bytes()), (10_000, 0));
        log.trim(None);
        assert_eq!(log.span(), Span { start: 10_000, end: 10_000 });
        for mut log in [StreamLog::recover(directory.path(), Stream::Stdout).expect("it reads"), log] {
            assert_eq!((log.granted(), log.received()), (10_000, 10_000));
            log.receive(10_000, b"more", 0).expect("in order");
            store(&mut log, directory.path());
            assert_eq!(read_all(&log, directory.path(), 10_000), b"more");
        }
    }

    #[test]
    fn bytes_one_by_one_do_not_each_cost_a_chunk() {
        let mut log = StreamLog::new(Stream::Stdout);
        for at in 0..10_000 {
            log.receive(at, b"x", 0).expect("in order");
        }
        assert!(log.tail.len() <= 10_000 / CHUNK_JOIN_MAX + 1, "{} chunks", log.tail.len());
    }
}
