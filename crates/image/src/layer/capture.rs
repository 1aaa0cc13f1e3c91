//! Turns what a sandbox has written into a layer.
//!
//! The guest controls the tree: no link in it is followed, and only opened files are read. The tree is read twice,
//! directly on disk and through an overlay over the layers below. The first view shows which names were touched, the
//! second what they are now, including the effect of overlayfs's own attributes, which only the host's root may read.
//! A name below that is missing in the second view was hidden, by whatever means, and becomes a whiteout.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use archive::DEPTH_MAX;
use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Uid, chownat, fstatvfs, ftruncate, futimens, linkat,
    mkdirat, mknodat, openat, readlinkat, statat, symlinkat, utimensat,
};
use rustix::io::Errno;
use wire::launch::{LayerFacts, LayerFault};

use super::unpack::{
    DIRECTORY, Layer, Limits, Place, directory_at, directory_in, kernel, make_whiteout, new_file, refused,
    times, write_at,
};
use crate::blobs::FREE_MIN;

/// Most files with several names that are remembered, so that they stay one file. Beyond that, each name becomes a
/// file.
const LINKED_MAX: usize = 262_144;
/// After this many bytes, check again whether the disk has room.
const ROOM_STEP: u64 = 64 << 20;

/// Views of one part of the tree that a sandbox has written.
#[derive(Debug)]
pub struct Written<'a> {
    /// Path of the part; `""` is the root, which comes first.
    pub at: &'a str,
    /// The writable layer alone.
    pub upper: OwnedFd,
    /// All layers, as the sandbox saw them.
    pub merged: OwnedFd,
    /// All layers but the writable one.
    pub below: Option<OwnedFd>,
}

/// Creates a layer in the empty directory `top` from what was written.
pub fn capture(
    written: Vec<Written<'_>>,
    top: BorrowedFd<'_>,
    limits: &Limits,
) -> Result<LayerFacts, LayerFault> {
    let others: Vec<Vec<u8>> = written.iter().map(|part| part.at.as_bytes().to_vec()).collect();
    let mut facts = LayerFacts::default();
    for Written { at, upper, merged, below } in written {
        let failed = |errno| kernel("create", at.as_bytes(), errno);
        let inner = match at {
            "" => None,
            at => {
                mkdirat(top, at, Mode::from_raw_mode(0o755)).map_err(failed)?;
                Some(openat(top, at, DIRECTORY, Mode::empty()).map_err(failed)?)
            }
        };
        let top = inner.as_ref().map_or(top, AsFd::as_fd);
        let layer = Layer::new(top, below.as_ref().map(AsFd::as_fd), limits)?;
        // What other parts cover is not visible here.
        let covered = if at.is_empty() { others.as_slice() } else { &[] };
        let mut capture = Capture { layer, linked: HashMap::new(), limits, covered };
        let root = capture.layer.place(Vec::new())?;
        capture.directory(&Views { upper, merged }, &root, 0)?;
        let part = capture.layer.finish()?;
        facts.entries += part.entries;
        facts.bytes += part.bytes;
        facts.devices_skipped += part.devices_skipped;
        facts.owners_changed += part.owners_changed;
        facts.attributes_dropped += part.attributes_dropped;
    }
    Ok(facts)
}

struct Views {
    upper: OwnedFd,
    merged: OwnedFd,
}

struct Capture<'a> {
    layer: Layer<'a>,
    /// Paths of files with several names, by device and inode.
    linked: HashMap<(u64, u64), (Vec<u8>, CString)>,
    limits: &'a Limits,
    /// Names in the root that belong to other parts.
    covered: &'a [Vec<u8>],
}

impl Capture<'_> {
    fn directory(&mut self, views: &Views, place: &Place, depth: usize) -> Result<(), LayerFault> {
        let failed = |errno| kernel("read", &place.path, errno);
        if depth > DEPTH_MAX {
            return Err(refused(&place.path, "it is nested too deep"));
        }
        for name in names_in(&views.upper).map_err(failed)? {
            if depth == 0 && self.covered.iter().any(|covered| covered == name.to_bytes()) {
                continue;
            }
            match statat(&views.merged, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => self.entry(views, place, &name, &stat, depth)?,
                // It is a whiteout, which is found from below.
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        let Some(below) = &place.below else { return Ok(()) };
        for name in names_in(below).map_err(failed)? {
            match statat(&views.merged, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => {}
                Err(Errno::NOENT) => {
                    self.layer.count()?;
                    make_whiteout(place.top.as_fd(), &name).map_err(failed)?;
                }
                Err(errno) => return Err(failed(errno)),
            }
        }
        Ok(())
    }

    fn entry(
        &mut self,
        views: &Views,
        place: &Place,
        name: &CStr,
        stat: &Stat,
        depth: usize,
    ) -> Result<(), LayerFault> {
        let path = place.join(name);
        let failed = |doing: &'static str| {
            let path = path.clone();
            move |errno| kernel(doing, &path, errno)
        };
        self.layer.count()?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let top = self.layer.make_directory(place, name)?;
                let merged = openat(&views.merged, name, DIRECTORY, Mode::empty()).map_err(failed("open"))?;
                self.layer.look_alike(&top, &merged, stat, &path)?;
                self.layer.remember_time(path.clone(), stat.st_mtime);
                let below = place.below.as_ref().map(|below| directory_in(below.as_fd(), name));
                let below = below.transpose().map_err(failed("open"))?.flatten();
                let upper = openat(&views.upper, name, DIRECTORY, Mode::empty()).map_err(failed("open"))?;
                let inner = Place { top, below, path };
                self.directory(&Views { upper, merged }, &inner, depth + 1)
            }
            FileType::RegularFile => self.file(views, place, name, stat),
            FileType::Symlink => {
                let target = readlinkat(&views.merged, name, Vec::new()).map_err(failed("read"))?;
                symlinkat(&target, &place.top, name).map_err(failed("link"))?;
                let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
                chownat(&place.top, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(failed("give away"))?;
                // A time that the file system cannot store is no reason to fail.
                let _ = utimensat(&place.top, name, &times(stat.st_mtime), AtFlags::SYMLINK_NOFOLLOW);
                Ok(())
            }
            FileType::Fifo => {
                mknodat(&place.top, name, FileType::Fifo, Mode::RWXU, 0).map_err(failed("create"))?;
                let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
                let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
                chownat(&place.top, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(failed("give away"))?;
                rustix::fs::chmodat(&place.top, name, mode, AtFlags::empty())
                    .map_err(failed("set the mode of"))
            }
            // A socket is useless without its listener, and a sandbox must not have devices.
            _ => {
                self.layer.facts.devices_skipped += 1;
                Ok(())
            }
        }
    }

    fn file(&mut self, views: &Views, place: &Place, name: &CStr, stat: &Stat) -> Result<(), LayerFault> {
        let path = place.join(name);
        let failed = |doing: &'static str| {
            let path = path.clone();
            move |errno| kernel(doing, &path, errno)
        };
        // From the view on disk: through an overlay, names of one file may look like several.
        let own = statat(&views.upper, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("look at"))?;
        let identity = (own.st_dev, own.st_ino);
        if own.st_nlink > 1
            && let Some((directory, first)) = self.linked.get(&identity)
            && let Some(from) = directory_at(self.layer.root().as_fd(), directory).map_err(failed("open"))?
        {
            return linkat(&from, first, &place.top, name, AtFlags::empty()).map_err(failed("link"));
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let from = openat(&views.merged, name, flags, Mode::empty()).map_err(failed("open"))?;
        let to = new_file(place, name).map_err(failed("create"))?;
        let (mut at, mut room) = (0, 0);
        loop {
            if room < self.layer.buffer.len() as u64 {
                let found = fstatvfs(&to).map_err(failed("look at the disk of"))?;
                let free = found.f_bavail.saturating_mul(found.f_frsize).saturating_sub(FREE_MIN);
                room = free.min(ROOM_STEP);
                if room < self.layer.buffer.len() as u64 {
                    return Err(failed("write")(Errno::NOSPC));
                }
            }
            let length = match rustix::io::read(&from, self.layer.buffer.as_mut_slice()) {
                Ok(0) => break,
                Ok(length) => length,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(failed("read")(errno)),
            };
            write_at(&to, &self.layer.buffer[..length], at).map_err(failed("write"))?;
            at += length as u64;
            room -= length as u64;
            if self.layer.facts.bytes.saturating_add(at) > self.limits.bytes_max {
                return Err(LayerFault::TooLarge { what: "bytes".into(), limit: self.limits.bytes_max });
            }
        }
        ftruncate(&to, at).map_err(failed("write"))?;
        self.layer.facts.bytes += at;
        self.layer.look_alike(&to, &from, stat, &path)?;
        let _ = futimens(&to, &times(stat.st_mtime)); // As above.
        if own.st_nlink > 1 && self.linked.len() < LINKED_MAX {
            self.linked.insert(identity, (place.path.clone(), name.to_owned()));
        }
        Ok(())
    }
}

fn names_in(directory: &OwnedFd) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name);
        }
    }
    Ok(names)
}
