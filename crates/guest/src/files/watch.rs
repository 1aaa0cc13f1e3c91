//! Reports changes of files, with inotify(7).
//!
//! One file is watched through its directory, so that the watch survives an editor that replaces the file. Below a
//! directory, each directory has a watch of its own, and a new one gets one too; entries that it has by then are
//! reported as created, perhaps twice. The kernel's queue is bounded, and a slow reader gets `Overflow`.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{Dir, FileType};
use rustix::io::Errno;
use wire::files::{Change, FileDone, FileError, PATH_MAX, WatchEvent};

use super::list::is_dots;
use super::place::open_directory;
use super::transfer::is_directory;
use super::{At, Records, failure, refused};

/// Most directories watched at once. The kernel has its own limit for all watches of a user.
const WATCHES_MAX: usize = 8192;
/// Size of the event buffer.
const BUFFER: usize = 64 * 1024;
/// Most nested directories that are entered when they are first watched.
const DEPTH_MAX: usize = 256;

const EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

/// Reports changes until it is ended or nothing is left to watch.
pub fn watch(path: &[u8], recursive: bool) -> Result<FileDone, FileError> {
    let stat = rustix::fs::stat(path).at(path)?;
    let (top, only) = if is_directory(&stat) {
        (path.strip_suffix(b"/").filter(|path| !path.is_empty()).unwrap_or(path).to_vec(), None)
    } else {
        let slash = path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        (path[..slash.max(1)].to_vec(), Some(path[slash + 1..].to_vec()))
    };
    let queue = inotify::init(CreateFlags::CLOEXEC).map_err(|errno| no_watch(path, errno))?;
    let recursive = recursive && only.is_none();
    let mut watching =
        Watching { queue, recursive, only, paths: BTreeMap::new(), records: Records::default() };
    let first = watching.add(&top).map_err(|errno| no_watch(path, errno))?;
    if recursive {
        watching.add_below(&top, Told::No, 0)?;
    }
    watching.records.put(&WatchEvent::Ready)?;
    watching.records.flush()?;
    watching.run(first)
}

fn no_watch(path: &[u8], errno: Errno) -> FileError {
    match errno {
        Errno::NOSPC | Errno::MFILE => {
            let detail = "the kernel has no more watches for this sandbox";
            failure(wire::files::FileErrorKind::NoRoom, path, detail)
        }
        errno => refused(path, errno),
    }
}

/// Whether entries found in a directory are reported as created.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    Yes,
    No,
}

struct Watching {
    queue: OwnedFd,
    recursive: bool,
    /// The only name in the directory that is reported.
    only: Option<Vec<u8>>,
    paths: BTreeMap<i32, Vec<u8>>,
    records: Records,
}

impl Watching {
    fn add(&mut self, path: &[u8]) -> Result<i32, Errno> {
        if self.paths.len() >= WATCHES_MAX {
            return Err(Errno::NOSPC);
        }
        let number = inotify::add_watch(&self.queue, path, EVENTS)?;
        self.paths.insert(number, path.to_vec());
        Ok(number)
    }

    /// Watches every directory below a watched one.
    fn add_below(&mut self, path: &[u8], told: Told, depth: usize) -> Result<(), FileError> {
        let Ok(directory) = open_directory(path).map(Dir::new) else { return self.not_watched(path) };
        let Ok(mut directory) = directory else { return self.not_watched(path) };
        while let Some(Ok(entry)) = directory.read() {
            let name = entry.file_name();
            if is_dots(name) {
                continue;
            }
            let below = join(path, name.to_bytes());
            let is_directory = entry.file_type() == FileType::Directory;
            if told == Told::Yes {
                self.tell(Change::Created, &below, is_directory)?;
            }
            if !is_directory {
                continue;
            }
            if depth >= DEPTH_MAX || below.len() > PATH_MAX {
                self.not_watched(&below)?;
                continue;
            }
            match self.add(&below) {
                Ok(_) => self.add_below(&below, told, depth + 1)?,
                Err(Errno::NOENT | Errno::NOTDIR) => {} // It has vanished.
                Err(_) => self.not_watched(&below)?,
            }
        }
        Ok(())
    }

    fn not_watched(&mut self, path: &[u8]) -> Result<(), FileError> {
        self.records.put(&WatchEvent::NotWatched { path: path.to_vec() })
    }

    fn tell(&mut self, change: Change, path: &[u8], directory: bool) -> Result<(), FileError> {
        self.records.put(&WatchEvent::Changed { change, path: path.to_vec(), directory })
    }

    fn run(mut self, first: i32) -> Result<FileDone, FileError> {
        let queue = self
            .queue
            .try_clone()
            .map_err(|error| refused(b"", Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))?;
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER];
        let mut reader = Reader::new(&queue, &mut buffer);
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(refused(b"", errno)),
            };
            let events = event.events();
            let name = event.file_name().map(|name| name.to_bytes().to_vec());
            let number = event.wd();
            if events.contains(ReadFlags::QUEUE_OVERFLOW) {
                self.records.put(&WatchEvent::Overflow)?;
            } else if events.contains(ReadFlags::IGNORED) {
                self.paths.remove(&number);
            } else if number == first && events.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF) {
                // From here on its path leads somewhere else, or nowhere.
                self.records.put(&WatchEvent::Gone)?;
                self.records.flush()?;
                return Ok(FileDone::Done);
            } else if let Some(name) = name {
                self.happened(number, events, &name)?;
            }
            if reader.is_buffer_empty() {
                self.records.flush()?;
            }
        }
    }

    fn happened(&mut self, number: i32, events: ReadFlags, name: &[u8]) -> Result<(), FileError> {
        if self.only.as_ref().is_some_and(|only| only != name) {
            return Ok(());
        }
        let Some(directory) = self.paths.get(&number) else { return Ok(()) };
        let path = join(directory, name);
        let is_directory = events.contains(ReadFlags::ISDIR);
        let changes = [
            (ReadFlags::CREATE, Change::Created),
            (ReadFlags::MODIFY, Change::Modified),
            (ReadFlags::CLOSE_WRITE, Change::Written),
            (ReadFlags::ATTRIB, Change::Attributes),
            (ReadFlags::DELETE, Change::Removed),
            (ReadFlags::MOVED_FROM, Change::MovedFrom),
            (ReadFlags::MOVED_TO, Change::MovedTo),
        ];
        for (flag, change) in changes {
            if events.contains(flag) {
                self.tell(change, &path, is_directory)?;
            }
        }
        if self.recursive && is_directory {
            if events.contains(ReadFlags::MOVED_FROM) {
                self.forget_below(&path);
            }
            if events.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
                match self.add(&path) {
                    Ok(_) => self.add_below(&path, Told::Yes, 0)?,
                    Err(Errno::NOENT | Errno::NOTDIR) => {}
                    Err(_) => self.not_watched(&path)?,
                }
            }
        }
        Ok(())
    }

    /// A directory was renamed: events under its old path would be wrong.
    fn forget_below(&mut self, path: &[u8]) {
        let inside = |known: &[u8]| {
            known.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
        };
        let gone: Vec<i32> =
            self.paths.iter().filter(|(_, known)| inside(known)).map(|(number, _)| *number).collect();
        for number in gone {
            self.paths.remove(&number);
            // The kernel may have removed the watch already.
            let _ = inotify::remove_watch(&self.queue, number);
        }
    }
}

fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let directory = directory.strip_suffix(b"/").unwrap_or(directory);
    [directory, b"/", name].concat()
}
