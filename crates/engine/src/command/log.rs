//! The output of a command on disk, and the end of it in memory.
//!
//! A stream is kept in segments, `<stream>.<offset of the first byte>`, so that the front can fall off by removing
//! files. Their names and lengths are all that is known about them: after a crash, what is in the files is what was
//! stored, because bytes are written before they are acknowledged, in order, and only at the end.
//!
//! Files are written by a few threads of their own. No task of the daemon ever waits for a disk, and a disk that
//! stalls delays acknowledgements only. A file is open only while it is being written or read.

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

/// A segment is at most this long; shorter where little is kept, so that the front falls off in eighths.
const SEGMENT_MAX: u64 = 8 * 1024 * 1024;
const SEGMENT_MIN: u64 = 4 * 1024;
/// The least that may be kept of a stream: a few segments.
pub(crate) const KEPT_MIN: u64 = 64 * 1024;
/// Threads that write logs. More than one, so that one slow directory does not hold up all; few, since the page cache
/// is one.
const WRITERS: usize = 3;
/// How long a writer leaves a log alone after the disk refused, for example because it was full.
pub(crate) const RETRY: Duration = Duration::from_secs(1);
/// Stored bytes of a stream that stay in memory when nobody reads it: what a short command wrote.
const TAIL_ALONE_MAX: usize = 16 * 1024;
/// The same while someone reads it: a reader that keeps up never touches the file.
const TAIL_READ_MAX: usize = 1024 * 1024;
/// Smaller pieces than this are put together, so that bytes that come one by one do not each cost a chunk.
const CHUNK_JOIN_MAX: usize = 512;
/// A stream that is no longer than this when its command ends is kept in the row and costs no file.
pub(crate) const SHORT_MAX: usize = 4 * 1024;
/// So much is written at once...
pub(crate) const WRITE_MIN: u64 = 256 * 1024;
const _: () =
    assert!(WRITE_MIN <= OUTPUT_WINDOW as u64 / 4, "init should not come to wait for what we wait for");
/// ... and less only when it is this old: most commands are over by then. Until it is stored, init keeps it.
pub(crate) const PATIENCE: Duration = Duration::from_millis(200);
const _: () = assert!(SHORT_MAX <= TAIL_ALONE_MAX, "what is in memory alone is never trimmed");
/// Read from a file at once.
const READ_MAX: u64 = 256 * 1024;

/// How long a segment may be when `kept_max` bytes of a stream are kept.
pub(crate) fn segment_max(kept_max: u64) -> u64 {
    (kept_max / 8).clamp(SEGMENT_MIN, SEGMENT_MAX)
}

/// One output stream of a command.
#[derive(Debug)]
pub(crate) struct StreamLog {
    stream: Stream,
    /// What is on disk, without gaps.
    segments: VecDeque<Segment>,
    /// The end of what is on disk.
    stored: u64,
    /// The end of what came from init.
    received: u64,
    /// Up to where init may forget.
    granted: u64,
    /// The last chunks, without gaps, up to `received`; never less than what is not yet stored.
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
    /// They fell off; what is kept begins here.
    Lost(u64),
    /// In memory. With the order in which they came.
    Memory(Bytes, u64),
    /// In a file.
    File(ReadPlan),
    /// They have not come yet.
    Nothing,
}

/// A read from a segment.
#[derive(Debug)]
pub(crate) struct ReadPlan {
    file: PathBuf,
    at: u64,
    length: usize,
}

/// Bytes to be put on disk.
pub(crate) struct Append {
    stream: Stream,
    last: Option<Segment>,
    stored: u64,
    chunks: Vec<Bytes>,
}

/// What [`StreamLog::retire`] found.
#[derive(Default)]
pub(crate) struct Retired {
    /// Segments that are no longer part of the log.
    pub files: Vec<PathBuf>,
    /// Too much is kept, because someone still reads the front. Init must wait.
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

    /// What a stream's segments on disk say. Nothing is read but names and lengths.
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
            // A segment is begun where the one before ends. Should that not hold, only what follows the gap is true.
            if log.segments.back().is_some_and(|before| before.end != segment.start) {
                log.segments.clear();
            }
            log.segments.push_back(segment);
        }
        log.stored = log.segments.back().map_or(0, |last| last.end);
        (log.received, log.granted) = (log.stored, log.stored);
        Ok(log)
    }

    /// The log of a command that is over, of which `span` was kept then, in files or as `short`.
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
            // Someone removed files. What is missing is reported as lost.
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

    /// Whether it could go into the row as it is.
    pub fn is_short(&self) -> bool {
        self.segments.is_empty() && self.received <= SHORT_MAX as u64
    }

    /// Whether the end of its command loses none of it.
    pub fn is_kept(&self) -> bool {
        self.is_stored() || self.is_short()
    }

    /// What would go into the row: `None` if there is nothing, or it is on disk.
    pub fn short(&self) -> Option<Bytes> {
        if self.is_stored() || !self.is_short() {
            return None;
        }
        let mut all = BytesMut::with_capacity(self.tail_bytes);
        self.tail.iter().for_each(|chunk| all.extend_from_slice(&chunk.bytes));
        Some(all.freeze())
    }

    /// Takes bytes that init sent. Those that came before are skipped; `false` if that was all of them.
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

    /// What is not on disk yet.
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

    /// Takes note of what an [`Append`] has written.
    pub fn record(&mut self, written: Written) {
        for segment in written.0 {
            match self.segments.back_mut() {
                Some(last) if last.start == segment.start => *last = segment,
                Some(_) | None => self.segments.push_back(segment),
            }
            self.stored = segment.end;
        }
    }

    /// Lets the front fall off until `kept_max` bytes are kept, but nothing from `floor` on, where a reader is.
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

    /// Whether a reader at `at` is why more than `kept_max` bytes are kept.
    pub fn is_held_by(&self, at: u64, kept_max: u64) -> bool {
        match (self.segments.front(), self.segments.back()) {
            (Some(first), Some(last)) => {
                self.segments.len() > 1 && last.end - first.start > kept_max && at < first.end
            }
            (None, _) | (_, None) => false,
        }
    }

    /// Lets init forget what is stored.
    pub fn grant(&mut self) {
        self.granted = self.stored;
    }

    /// Frees memory of what is stored. Keeps a little, and more where a reader at `floor` is about to want it.
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

    /// Where the bytes at `at` are, up to `end`.
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
    /// Reads. Blocks. A file that is gone or too short is an error: an attached reader keeps its segments.
    pub fn read(&self) -> io::Result<Bytes> {
        let mut bytes = BytesMut::zeroed(self.length);
        File::open(&self.file)?.read_exact_at(&mut bytes, self.at)?;
        Ok(bytes.freeze())
    }
}

/// The segments that an [`Append`] made longer or new.
pub(crate) struct Written(Vec<Segment>);

impl Append {
    /// Writes. Blocks. After an error it may be done again: the same bytes go to the same places.
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
    /// As many as the kernel takes at once on any Unix is 16; Linux takes 1024.
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
        // The directory is made when the first byte comes: most commands write nothing at all.
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

/// Removes a directory of logs. Harmless when there is none.
pub(crate) fn remove_directory(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Something that has bytes for the disk.
pub(crate) trait Writes: Send + Sync {
    /// Writes what there is. Blocks.
    fn write_pass(self: Arc<Self>) -> Again;
}

/// When to come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    /// When asked again.
    Done,
    /// After the others.
    Now,
    /// After [`RETRY`].
    Later,
}

/// The threads that write logs. Each log is in the queue once at most, so the queue is bounded by the commands.
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
            // A bug in one log must not take the thread from all others. What panics is not tried again.
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

    /// Has `log` written soon. The caller sees to it that it is asked once at a time.
    pub fn schedule(&self, log: Arc<dyn Writes>) {
        self.queue.push(log);
    }

    /// Ends the threads after what they are at. What was not written was not acknowledged.
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

    /// A log that does as it is told.
    struct Scripted(std::sync::mpsc::Sender<()>, bool);

    impl Writes for Scripted {
        fn write_pass(self: Arc<Self>) -> Again {
            // Before the panic, so that whoever waits knows that it is on its way.
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
    fn bytes_one_by_one_do_not_each_cost_a_chunk() {
        let mut log = StreamLog::new(Stream::Stdout);
        for at in 0..10_000 {
            log.receive(at, b"x", 0).expect("in order");
        }
        assert!(log.tail.len() <= 10_000 / CHUNK_JOIN_MAX + 1, "{} chunks", log.tail.len());
    }
}
