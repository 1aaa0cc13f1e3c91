//! Turns the entries of a layer into files, over the files of the layers below.
//!
//! - Names are relative to the layer's root, whatever they begin with. Names with `..` are rejected.
//! - Parent directories are opened one by one. A link among them leads where it would lead in the image, and never beyond
//!   its root; the last name of an entry is never followed.
//! - A directory that has no entry looks like the one below, or belongs to root with mode 0755 if there is none.
//! - An entry replaces an earlier one of the same name. A directory stays if the new entry is a directory too.
//! - A whiteout hides what is below, and nothing of its own layer. An opaque directory hides everything that the one below
//!   contains, by a whiteout for each name, since the attribute for that needs the host's root.
//! - Devices are left out: sandboxes have their own. Owners beyond 65,535 do not exist in a sandbox and become `nobody`.
//! - Extended attributes that mean something in a sandbox are kept; those of overlayfs itself never are.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use archive::{DEPTH_MAX, Entries, Entry, EntryKind, UnpackError};
use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags, chownat, fchmod,
    fchown, fgetxattr, flistxattr, fsetxattr, fstat, ftruncate, futimens, linkat, mkdirat, mknodat, openat,
    readlinkat, statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use wire::launch::{LayerFacts, LayerFault};

/// Limits of one layer.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The whole tar stream.
    pub bytes_max: u64,
    /// Files, links, directories and whiteouts.
    pub entries_max: u64,
}

/// The largest layers of machine learning images have some ten gigabytes and half a million files.
impl Default for Limits {
    fn default() -> Self {
        Self { bytes_max: 256 << 30, entries_max: 2_000_000 }
    }
}

/// Longest path, as the kernel allows.
const PATH_MAX: usize = 4096;
/// Longest name in a path, as file systems allow.
const NAME_MAX: usize = 255;
/// Most links on the way to one entry, as in the kernel.
const LINKS_MAX: usize = 40;
/// Size of the copy buffer, and of the smallest hole that is left in a file.
const BUFFER: usize = 64 * 1024;
/// Most directories whose times are set at the end, since their contents change them. Others keep the time of
/// unpacking.
const TIMES_MAX: usize = 262_144;
/// Number of ids in a sandbox.
const IDS: u64 = 65_536;
/// Owner of files whose owner id does not exist in a sandbox.
const NOBODY: u32 = 65_534;
/// Longest list of attributes that is read when a file is copied from below.
const ATTRIBUTE_NAMES_MAX: usize = 64 * 1024;

/// Prefix of a whiteout's name.
const WHITEOUT: &[u8] = b".wh.";
/// Name of the entry that makes its directory opaque.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Prefix of names that an old union file system reserved for itself.
const UNION_PRIVATE: &[u8] = b".wh..wh.";

pub(super) const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const LOOK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The merged view of the layers below, if there are any. It is only read.
pub type Below<'a> = Option<BorrowedFd<'a>>;

/// Unpacks all entries.
pub(super) fn unpack<R: Read>(
    entries: &mut Entries<R>,
    top: BorrowedFd<'_>,
    below: Below<'_>,
    limits: &Limits,
) -> Result<LayerFacts, LayerFault> {
    let mut layer = Layer::new(top, below, limits)?;
    while let Some(entry) = entries.next_entry().map_err(damaged)? {
        layer.entry(&entry, entries)?;
    }
    layer.finish()
}

/// A layer under construction.
pub(super) struct Layer<'a> {
    root: Place,
    limits: &'a Limits,
    /// The directory of the last entry, with its names: usually the next entry is in it too.
    last: Option<(Vec<CString>, Place)>,
    /// Opaque directories by inode, with their paths.
    opaque: HashMap<u64, Vec<u8>>,
    /// Directories and the times that they get at the end.
    times: Vec<(Vec<u8>, i64)>,
    pub buffer: Vec<u8>,
    pub facts: LayerFacts,
}

/// A directory of the layer, and the one below it.
#[derive(Debug)]
pub(super) struct Place {
    pub top: OwnedFd,
    pub below: Option<OwnedFd>,
    /// From the root, without links.
    pub path: Vec<u8>,
}

impl Place {
    fn duplicate(&self) -> Result<Self, Errno> {
        let copy = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, 0);
        let below = self.below.as_ref().map(|below| copy(below.as_fd())).transpose()?;
        Ok(Self { top: copy(self.top.as_fd())?, below, path: self.path.clone() })
    }

    pub fn join(&self, name: &CStr) -> Vec<u8> {
        let mut path = self.path.clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name.to_bytes());
        path
    }
}

/// What a name is, seen from a directory.
enum Seen {
    /// A directory of this layer.
    Directory(OwnedFd),
    /// A directory below, and nothing of this layer.
    DirectoryBelow(OwnedFd),
    Link(Vec<u8>),
    /// Nothing, and nothing below either.
    Nothing,
    /// Hidden by this layer.
    Whiteout,
    Other,
}

/// What to do about missing directories.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    Make,
    Refuse,
}

impl<'a> Layer<'a> {
    pub fn new(top: BorrowedFd<'_>, below: Below<'_>, limits: &'a Limits) -> Result<Self, LayerFault> {
        let open = |fd: BorrowedFd<'_>| {
            openat(fd, c".", DIRECTORY, Mode::empty()).map_err(|errno| kernel("open", b"/", errno))
        };
        let root = Place { top: open(top)?, below: below.map(open).transpose()?, path: Vec::new() };
        Ok(Self {
            root,
            limits,
            last: None,
            opaque: HashMap::new(),
            times: Vec::new(),
            buffer: vec![0; BUFFER],
            facts: LayerFacts::default(),
        })
    }

    fn entry<R: Read>(&mut self, entry: &Entry, contents: &mut Entries<R>) -> Result<(), LayerFault> {
        let mut names = names(&entry.path)?;
        // The root itself belongs to the sandbox.
        let Some(name) = names.pop() else { return Ok(()) };
        self.count()?;
        if name.to_bytes().starts_with(WHITEOUT) {
            return self.whiteout(names, &name, entry);
        }
        if entry.kind == EntryKind::Other {
            self.facts.devices_skipped += 1;
            return Ok(());
        }
        let place = self.place(names)?;
        let failed = |doing: &'static str| move |errno| kernel(doing, &entry.path, errno);
        match entry.kind {
            EntryKind::File => {
                self.clear(&place, &name)?;
                let file = new_file(&place, &name).map_err(failed("create"))?;
                self.fill(&file, entry, contents)?;
                self.dress(&file, entry)?;
            }
            EntryKind::Directory => {
                let directory = self.make_directory(&place, &name)?;
                self.dress(&directory, entry)?;
                self.remember_time(place.join(&name), entry.modified);
            }
            EntryKind::Symlink => {
                self.clear(&place, &name)?;
                symlinkat(entry.link.as_slice(), &place.top, &name).map_err(failed("link"))?;
                let (uid, gid) = self.owner(entry);
                chownat(&place.top, &name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(failed("give away"))?;
                let times = times(entry.modified);
                // A time that the file system cannot store is no reason to fail.
                let _ = utimensat(&place.top, &name, &times, AtFlags::SYMLINK_NOFOLLOW);
                self.facts.attributes_dropped += entry.attributes.len() as u64;
            }
            EntryKind::HardLink => self.hard_link(&place, &name, entry)?,
            EntryKind::Fifo => {
                self.clear(&place, &name)?;
                mknodat(&place.top, &name, FileType::Fifo, Mode::RWXU, 0).map_err(failed("create"))?;
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let fifo = openat(&place.top, &name, flags, Mode::empty()).map_err(failed("open"))?;
                self.dress(&fifo, entry)?;
            }
            EntryKind::Other => unreachable!("it was left out above"),
        }
        Ok(())
    }

    /// Counts an inode.
    pub fn count(&mut self) -> Result<(), LayerFault> {
        self.facts.entries += 1;
        match self.facts.entries > self.limits.entries_max {
            true => Err(LayerFault::TooLarge { what: "entries".into(), limit: self.limits.entries_max }),
            false => Ok(()),
        }
    }

    /// Its root.
    pub fn root(&self) -> &OwnedFd {
        &self.root.top
    }

    // Ways.

    /// The directory of entries with these parent names.
    pub fn place(&mut self, names: Vec<CString>) -> Result<Place, LayerFault> {
        let failed = |errno| kernel("open", b"/", errno);
        if let Some((known, place)) = &self.last
            && *known == names
        {
            return place.duplicate().map_err(failed);
        }
        let place = self.walk(&names, Missing::Make)?;
        self.last = Some((names, place.duplicate().map_err(failed)?));
        Ok(place)
    }

    fn walk(&mut self, names: &[CString], missing: Missing) -> Result<Place, LayerFault> {
        let mut root = self.root.duplicate().map_err(|errno| kernel("open", b"/", errno))?;
        if self.opaque.values().any(Vec::is_empty) {
            root.below = None;
        }
        let mut way = vec![root];
        let mut names: VecDeque<CString> = names.iter().cloned().collect();
        let mut links = 0;
        while let Some(name) = names.pop_front() {
            if name.to_bytes() == b".." {
                // Only links lead up. Above the root is the root.
                if way.len() > 1 {
                    way.pop();
                }
                continue;
            }
            let here = way.last().expect("the root is never taken off");
            let path = here.join(&name);
            if way.len() > DEPTH_MAX {
                return Err(refused(&path, "it is nested too deep"));
            }
            let next = match self.look(here, &name)? {
                Seen::Directory(top) => {
                    let below = self.over(here, &name, &top)?;
                    Place { top, below, path }
                }
                Seen::DirectoryBelow(below) => self.raise(here, &name, below)?,
                Seen::Link(target) => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(refused(&path, "too many links are on the way to it"));
                    }
                    if target.starts_with(b"/") {
                        way.truncate(1);
                    }
                    for part in target.split(|byte| *byte == b'/').rev() {
                        if !matches!(part, b"" | b".") {
                            // The kernel returns the target of a link without a NUL.
                            let part = CString::new(part).map_err(|_| refused(&path, "it leads nowhere"))?;
                            names.push_front(part);
                        }
                    }
                    continue;
                }
                Seen::Nothing | Seen::Whiteout if missing == Missing::Refuse => {
                    return Err(refused(&path, "it does not exist"));
                }
                Seen::Nothing | Seen::Whiteout => {
                    self.count()?;
                    let top = self.make_directory(here, &name)?;
                    let mode = Mode::from_raw_mode(0o755);
                    fchmod(&top, mode).map_err(|errno| kernel("set the mode of", &path, errno))?;
                    Place { top, below: None, path }
                }
                Seen::Other => return Err(refused(&path, "it is not a directory")),
            };
            way.push(next);
        }
        Ok(way.pop().expect("the root is never taken off"))
    }

    fn look(&self, here: &Place, name: &CStr) -> Result<Seen, LayerFault> {
        let failed = |errno| kernel("open", &here.join(name), errno);
        match openat(&here.top, name, DIRECTORY, Mode::empty()) {
            Ok(top) => return Ok(Seen::Directory(top)),
            Err(Errno::NOENT) => {}
            Err(Errno::NOTDIR | Errno::LOOP) => {
                let found = openat(&here.top, name, LOOK, Mode::empty()).map_err(failed)?;
                return see(found).map_err(failed);
            }
            Err(errno) => return Err(failed(errno)),
        }
        let Some(below) = &here.below else { return Ok(Seen::Nothing) };
        match openat(below, name, LOOK, Mode::empty()) {
            Ok(found) => match see(found).map_err(failed)? {
                Seen::Directory(found) => Ok(Seen::DirectoryBelow(found)),
                other => Ok(other),
            },
            Err(Errno::NOENT) => Ok(Seen::Nothing),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// The directory below a directory of this layer, unless it is hidden.
    fn over(&self, here: &Place, name: &CStr, top: &OwnedFd) -> Result<Option<OwnedFd>, LayerFault> {
        let Some(below) = &here.below else { return Ok(None) };
        let failed = |errno| kernel("open", &here.join(name), errno);
        if !self.opaque.is_empty() && self.opaque.contains_key(&fstat(top).map_err(failed)?.st_ino) {
            return Ok(None);
        }
        directory_in(below.as_fd(), name).map_err(failed)
    }

    /// Creates a directory that looks like the one below.
    fn raise(&mut self, here: &Place, name: &CStr, below: OwnedFd) -> Result<Place, LayerFault> {
        let path = here.join(name);
        let failed = |doing: &'static str| {
            let path = path.clone();
            move |errno| kernel(doing, &path, errno)
        };
        self.count()?;
        mkdirat(&here.top, name, Mode::RWXU).map_err(failed("create"))?;
        let top = openat(&here.top, name, DIRECTORY, Mode::empty()).map_err(failed("open"))?;
        // The descriptor was opened with O_PATH.
        let below = openat(&below, c".", DIRECTORY, Mode::empty()).map_err(failed("open"))?;
        let stat = fstat(&below).map_err(failed("look at"))?;
        self.look_alike(&top, &below, &stat, &path)?;
        self.remember_time(path.clone(), stat.st_mtime);
        Ok(Place { top, below: Some(below), path })
    }

    // Things.

    /// The directory of this name, created if missing.
    pub fn make_directory(&mut self, place: &Place, name: &CStr) -> Result<OwnedFd, LayerFault> {
        let path = place.join(name);
        let failed = |doing: &'static str| {
            let path = path.clone();
            move |errno| kernel(doing, &path, errno)
        };
        let hides = match mkdirat(&place.top, name, Mode::RWXU) {
            Ok(()) => false,
            Err(Errno::EXIST) => {
                let stat = statat(&place.top, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("look at"))?;
                let there = FileType::from_raw_mode(stat.st_mode);
                if there != FileType::Directory {
                    unlinkat(&place.top, name, AtFlags::empty()).map_err(failed("replace"))?;
                    mkdirat(&place.top, name, Mode::RWXU).map_err(failed("create"))?;
                }
                // The previous entry, a whiteout or a file, had hidden a directory below.
                there != FileType::Directory
            }
            Err(errno) => return Err(failed("create")(errno)),
        };
        let top = openat(&place.top, name, DIRECTORY, Mode::empty()).map_err(failed("open"))?;
        if hides {
            self.hide_below(&top, path)?;
        }
        Ok(top)
    }

    fn hide_below(&mut self, top: &OwnedFd, path: Vec<u8>) -> Result<(), LayerFault> {
        if self.root.below.is_some() {
            let stat = fstat(top).map_err(|errno| kernel("look at", &path, errno))?;
            self.opaque.insert(stat.st_ino, path);
            self.last = None; // It may refer to what is below.
        }
        Ok(())
    }

    /// Removes what is in the way of something that is not a directory.
    pub fn clear(&mut self, place: &Place, name: &CStr) -> Result<(), LayerFault> {
        let failed = |errno| kernel("replace", &place.join(name), errno);
        match unlinkat(&place.top, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::ISDIR) => {
                remove_directory(place.top.as_fd(), name, 0).map_err(failed)?;
                let gone = place.join(name);
                let below = |path: &[u8]| {
                    path.strip_prefix(gone.as_slice())
                        .is_some_and(|rest| rest.first().is_none_or(|b| *b == b'/'))
                };
                self.opaque.retain(|_, path| !below(path));
                self.times.retain(|(path, _)| !below(path));
                self.last = None;
                Ok(())
            }
            Err(errno) => Err(failed(errno)),
        }
    }

    fn whiteout(&mut self, names: Vec<CString>, name: &CStr, entry: &Entry) -> Result<(), LayerFault> {
        let failed = |doing: &'static str| move |errno| kernel(doing, &entry.path, errno);
        if name.to_bytes() == OPAQUE {
            let place = self.place(names)?;
            return self.hide_below(&place.top, place.path.clone());
        }
        if name.to_bytes().starts_with(UNION_PRIVATE) {
            return Ok(());
        }
        let hidden = &name.to_bytes()[WHITEOUT.len()..];
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(refused(&entry.path, "its whiteout names nothing"));
        }
        let hidden = CString::new(hidden).map_err(|_| refused(&entry.path, "it contains a NUL byte"))?;
        // A whiteout in a missing directory hides nothing, and creates none.
        let place = match self.walk(&names, Missing::Refuse) {
            Ok(place) => place,
            Err(LayerFault::Name { .. }) => return Ok(()),
            Err(fault) => return Err(fault),
        };
        match openat(&place.top, &hidden, DIRECTORY, Mode::empty()) {
            Ok(own) => return self.hide_below(&own, place.join(&hidden)),
            Err(Errno::NOENT) => {}
            // A file of this layer hides what is below already.
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(()),
            Err(errno) => return Err(failed("open")(errno)),
        }
        let Some(below) = &place.below else { return Ok(()) };
        match statat(below, &hidden, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => make_whiteout(place.top.as_fd(), &hidden).map_err(failed("hide")),
            Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(failed("look at")(errno)),
        }
    }

    fn hard_link(&mut self, place: &Place, name: &CStr, entry: &Entry) -> Result<(), LayerFault> {
        let failed = |doing: &'static str| move |errno| kernel(doing, &entry.path, errno);
        let mut target = names(&entry.link)?;
        let Some(target_name) = target.pop() else {
            return Err(refused(&entry.link, "the target of a hard link must be a file"));
        };
        let from = self.walk(&target, Missing::Refuse)?;
        match self.look(&from, &target_name)? {
            Seen::Other | Seen::Link(_) => {}
            Seen::Directory(_) | Seen::DirectoryBelow(_) => {
                return Err(refused(&entry.link, "the target of a hard link must be a file"));
            }
            Seen::Nothing | Seen::Whiteout => {
                return Err(refused(&entry.link, "it is the target of a hard link and does not exist"));
            }
        }
        let own = match statat(&from.top, &target_name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => {
                self.raise_file(&from, &target_name)?;
                statat(&from.top, &target_name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("look at"))?
            }
            Err(errno) => return Err(failed("look at")(errno)),
        };
        let there = statat(&place.top, name, AtFlags::SYMLINK_NOFOLLOW);
        if there.is_ok_and(|there| (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)) {
            return Ok(()); // It is that file already.
        }
        self.clear(place, name)?;
        linkat(&from.top, &target_name, &place.top, name, AtFlags::empty()).map_err(failed("link"))
    }

    /// Copies a file from below, since a layer cannot link into another.
    fn raise_file(&mut self, place: &Place, name: &CStr) -> Result<(), LayerFault> {
        let path = place.join(name);
        let failed = |doing: &'static str| {
            let path = path.clone();
            move |errno| kernel(doing, &path, errno)
        };
        let below = place.below.as_ref().ok_or_else(|| refused(&path, "it does not exist"))?;
        let stat = statat(below, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("look at"))?;
        self.count()?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {}
            FileType::Symlink => {
                let target = readlinkat(below, name, Vec::new()).map_err(failed("read"))?;
                symlinkat(&target, &place.top, name).map_err(failed("link"))?;
                let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
                return chownat(&place.top, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(failed("give away"));
            }
            _ => return Err(refused(&path, "the target of a hard link must be a file")),
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let from = openat(below, name, flags, Mode::empty()).map_err(failed("open"))?;
        let to = new_file(place, name).map_err(failed("create"))?;
        let mut at = 0;
        loop {
            let length = match rustix::io::read(&from, &mut self.buffer[..]) {
                Ok(0) => break,
                Ok(length) => length,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(failed("read")(errno)),
            };
            write_at(&to, &self.buffer[..length], at).map_err(failed("write"))?;
            at += length as u64;
        }
        ftruncate(&to, at).map_err(failed("write"))?;
        self.look_alike(&to, &from, &stat, &path)?;
        let _ = futimens(&to, &times(stat.st_mtime)); // As above.
        Ok(())
    }

    /// Writes the content of an entry. Zeroes become holes, so that a disk image or a bomb takes no more room than
    /// necessary.
    fn fill<R: Read>(
        &mut self,
        file: &OwnedFd,
        entry: &Entry,
        contents: &mut Entries<R>,
    ) -> Result<(), LayerFault> {
        let failed = |errno| kernel("write", &entry.path, errno);
        let mut at = 0;
        loop {
            let mut filled = 0;
            while filled < self.buffer.len() {
                match contents.read_contents(&mut self.buffer[filled..]).map_err(damaged)? {
                    0 => break,
                    length => filled += length,
                }
            }
            if filled == 0 {
                break;
            }
            write_at(file, &self.buffer[..filled], at).map_err(failed)?;
            at += filled as u64;
        }
        self.facts.bytes += at;
        ftruncate(file, at).map_err(failed)
    }

    /// Owner, permissions, attributes and time, in this order: a change of owner clears setuid and capabilities.
    fn dress(&mut self, file: &OwnedFd, entry: &Entry) -> Result<(), LayerFault> {
        let failed = |doing: &'static str| move |errno| kernel(doing, &entry.path, errno);
        let (uid, gid) = self.owner(entry);
        fchown(file, Some(uid), Some(gid)).map_err(failed("give away"))?;
        fchmod(file, Mode::from_raw_mode(entry.mode & 0o7777)).map_err(failed("set the mode of"))?;
        for (name, value) in &entry.attributes {
            let set = CString::new(name.as_slice())
                .ok()
                .filter(|name| is_kept(name.to_bytes()))
                .is_some_and(|name| fsetxattr(file, name, value, XattrFlags::empty()).is_ok());
            // Not every file system supports every attribute, and few programs need one; the loss is counted and
            // shown.
            self.facts.attributes_dropped += u64::from(!set);
        }
        let _ = futimens(file, &times(entry.modified)); // A time that cannot be stored is no reason to fail.
        Ok(())
    }

    fn owner(&mut self, entry: &Entry) -> (Uid, Gid) {
        let inside = |id: u64| if id < IDS { id as u32 } else { NOBODY };
        self.facts.owners_changed += u64::from(entry.uid >= IDS || entry.gid >= IDS);
        (Uid::from_raw(inside(entry.uid)), Gid::from_raw(inside(entry.gid)))
    }

    pub fn look_alike(
        &self,
        own: &OwnedFd,
        below: &OwnedFd,
        stat: &Stat,
        path: &[u8],
    ) -> Result<(), LayerFault> {
        let failed = |doing: &'static str| move |errno| kernel(doing, path, errno);
        let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        fchown(own, Some(uid), Some(gid)).map_err(failed("give away"))?;
        fchmod(own, Mode::from_raw_mode(stat.st_mode & 0o7777)).map_err(failed("set the mode of"))?;
        let mut names = vec![0; ATTRIBUTE_NAMES_MAX];
        let length = match flistxattr(below, names.as_mut_slice()) {
            Ok(length) => length,
            Err(Errno::NOTSUP | Errno::RANGE) => 0,
            Err(errno) => return Err(failed("read the attributes of")(errno)),
        };
        let mut value = vec![0; ATTRIBUTE_NAMES_MAX];
        for name in names[..length].split(|byte| *byte == 0).filter(|name| is_kept(name)) {
            // It existed a moment ago; an attribute that cannot be copied is treated as above.
            if let Ok(length) = fgetxattr(below, name, value.as_mut_slice()) {
                let _ = fsetxattr(own, name, &value[..length], XattrFlags::empty());
            }
        }
        Ok(())
    }

    pub fn remember_time(&mut self, path: Vec<u8>, modified: i64) {
        if self.times.len() < TIMES_MAX {
            self.times.push((path, modified));
        }
    }

    // The end.

    /// Hides what opaque directories hide, and sets the times of directories, now that nothing is added any more.
    pub fn finish(mut self) -> Result<LayerFacts, LayerFault> {
        let opaque: Vec<Vec<u8>> = self.opaque.values().cloned().collect();
        for path in opaque {
            let failed = |errno| kernel("hide what is below", &path, errno);
            let Some(below) = &self.root.below else { break };
            if let Some(top) = directory_at(self.root.top.as_fd(), &path).map_err(failed)?
                && let Some(below) = directory_at(below.as_fd(), &path).map_err(failed)?
            {
                self.hide_names(top, below, 0, &path)?;
            }
        }
        for (path, modified) in std::mem::take(&mut self.times) {
            let failed = |errno| kernel("open", &path, errno);
            if let Some(directory) = directory_at(self.root.top.as_fd(), &path).map_err(failed)? {
                let _ = futimens(&directory, &times(modified)); // As above.
            }
        }
        Ok(self.facts)
    }

    fn hide_names(
        &mut self,
        top: OwnedFd,
        below: OwnedFd,
        depth: usize,
        path: &[u8],
    ) -> Result<(), LayerFault> {
        let failed = |errno| kernel("hide what is below", path, errno);
        if depth > DEPTH_MAX {
            return Err(refused(path, "it is nested too deep"));
        }
        for entry in Dir::read_from(&below).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            match statat(&top, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => {
                    self.count()?;
                    make_whiteout(top.as_fd(), name).map_err(failed)?;
                }
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                    // Another opaque directory has its own turn, and doing it twice changes nothing.
                    if let Some(inner) = directory_in(below.as_fd(), name).map_err(failed)? {
                        let own = openat(&top, name, DIRECTORY, Mode::empty()).map_err(failed)?;
                        self.hide_names(own, inner, depth + 1, path)?;
                    }
                }
                Ok(_) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        Ok(())
    }
}

/// The kind of an open file.
fn see(found: OwnedFd) -> Result<Seen, Errno> {
    let stat = fstat(&found)?;
    Ok(match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Seen::Directory(found),
        FileType::Symlink => Seen::Link(readlinkat(&found, c"", Vec::new())?.into_bytes()),
        FileType::CharacterDevice if stat.st_rdev == 0 => Seen::Whiteout,
        _ => Seen::Other,
    })
}

/// In overlayfs's format: a character device 0,0. Every user may create it (Linux 5.8), and none can open it.
pub(super) fn make_whiteout(directory: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    match mknodat(directory, name, FileType::CharacterDevice, Mode::empty(), 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

pub(super) fn new_file(place: &Place, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(&place.top, name, flags, Mode::RUSR | Mode::WUSR)
}

/// A directory by name, if it is one and not a link.
pub(super) fn directory_in(directory: BorrowedFd<'_>, name: &CStr) -> Result<Option<OwnedFd>, Errno> {
    match openat(directory, name, DIRECTORY, Mode::empty()) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The same along a path of real directories.
pub(super) fn directory_at(root: BorrowedFd<'_>, path: &[u8]) -> Result<Option<OwnedFd>, Errno> {
    let mut here = openat(root, c".", DIRECTORY, Mode::empty())?;
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        let Ok(name) = CString::new(name) else { return Ok(None) };
        match directory_in(here.as_fd(), &name)? {
            Some(next) => here = next,
            None => return Ok(None),
        }
    }
    Ok(Some(here))
}

/// Removes what this layer created under a name. It is no deeper than entries are.
fn remove_directory(parent: BorrowedFd<'_>, name: &CStr, depth: usize) -> Result<(), Errno> {
    if depth > DEPTH_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    let directory = openat(parent, name, DIRECTORY, Mode::empty())?;
    let mut inside = Vec::new();
    for entry in Dir::read_from(&directory)? {
        let name = entry?.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            inside.push(name);
        }
    }
    for name in inside {
        match unlinkat(&directory, &name, AtFlags::empty()) {
            Ok(()) => {}
            Err(Errno::ISDIR) => remove_directory(directory.as_fd(), &name, depth + 1)?,
            Err(errno) => return Err(errno),
        }
    }
    unlinkat(parent, name, AtFlags::REMOVEDIR)
}

/// Attributes that mean something in a sandbox. Those of overlayfs would change the layer; those of security modules
/// belong to the host.
fn is_kept(name: &[u8]) -> bool {
    match name {
        b"security.capability" | b"system.posix_acl_access" | b"system.posix_acl_default" => true,
        name => name.starts_with(b"user.") && !name.starts_with(b"user.overlay."),
    }
}

pub(super) fn write_at(file: &OwnedFd, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(()); // A hole; the end of the file sets the length.
    }
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, at) {
            Ok(length) => {
                bytes = &bytes[length..];
                at += length as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

pub(super) fn times(modified: i64) -> Timestamps {
    let time = Timespec { tv_sec: modified, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

/// The names of a path, checked. Empty for the root itself.
pub(super) fn names(path: &[u8]) -> Result<Vec<CString>, LayerFault> {
    if path.len() > PATH_MAX {
        return Err(refused(path, "it is too long"));
    }
    let mut names = Vec::new();
    for name in path.split(|byte| *byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => return Err(refused(path, "it contains `..`")),
            name if name.len() > NAME_MAX => return Err(refused(path, "it is too long")),
            name => names.push(CString::new(name).map_err(|_| refused(path, "it contains a NUL byte"))?),
        }
    }
    if names.len() > DEPTH_MAX {
        return Err(refused(path, "it is nested too deep"));
    }
    Ok(names)
}

/// How much of a foreign name is shown.
const SHOWN_MAX: usize = 200;

fn shown(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(&path[..path.len().min(SHOWN_MAX)]);
    let more = if path.len() > SHOWN_MAX { "…" } else { "" };
    format!("{}{more}", text.escape_debug())
}

pub(super) fn refused(path: &[u8], why: &str) -> LayerFault {
    LayerFault::Name { path: shown(path), why: why.into() }
}

pub(super) fn kernel(doing: &str, path: &[u8], errno: Errno) -> LayerFault {
    // A name that is too long for the file system is a fault of the layer, not of the machine.
    match errno {
        Errno::NAMETOOLONG => refused(path, "it is too long"),
        errno => LayerFault::Kernel { doing: doing.into(), path: shown(path), errno: errno.raw_os_error() },
    }
}

fn damaged(error: UnpackError) -> LayerFault {
    match error {
        // Our own limits, passed through the reader.
        UnpackError::Read { source } => match source.downcast::<LayerFault>() {
            Ok(fault) => fault,
            Err(source) => match source.raw_os_error() {
                Some(errno) => kernel("read", b"the blob", Errno::from_raw_os_error(errno)),
                None => LayerFault::Damaged { why: source.to_string() },
            },
        },
        UnpackError::TooMany { limit } => LayerFault::TooLarge { what: "headers".into(), limit },
        UnpackError::Unsupported { what } => LayerFault::Unsupported { what: what.into() },
        other => LayerFault::Damaged { why: other.to_string() },
    }
}
