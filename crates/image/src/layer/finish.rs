//! The uppermost layer of every image: what a sandbox needs and an image may not have.
//!
//! Made once per image, so that no create pays for it. Mount points must be directories; files about names and
//! addresses belong to the sandbox, as in other container runtimes; the rest is created only if missing.

use std::ffi::{CStr, CString};
use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, Mode, fchmod, statat};
use rustix::io::Errno;
use wire::Digest;
use wire::launch::{Finish, LayerFacts, LayerFault};
use wire::network::{HOST_DIRECTORY, HOSTS, RESOLV_CONF};

use super::unpack::{Below, Layer, Limits, kernel, names, new_file};
use crate::hash::digest_of;

/// Increases when the lists below change, so that images are finished again.
const VERSION: u32 = 3;

/// Mount points: each becomes a directory, whatever the image has.
const PLACES: [(&str, u32); 3] = [("dev", 0o755), ("proc", 0o555), ("sys", 0o555)];
/// Created if missing.
const DIRECTORIES: [(&str, u32); 5] =
    [("etc", 0o755), ("tmp", 0o1777), ("run", 0o755), ("root", 0o700), (WORKSPACE, 0o755)];
/// Where commands run by default.
const WORKSPACE: &str = "workspace";
/// The sandbox's own files. Images contain those of another machine, or none.
const FILES: [(&str, &str); 3] =
    [("etc/hosts", HOSTS), ("etc/hostname", "sandbox\n"), ("etc/resolv.conf", RESOLV_CONF)];

/// Name of the finishing layer over `below`.
pub fn finish_digest(below: Option<Digest>, wanted: &Finish) -> Digest {
    let below = below.map(|below| below.to_string()).unwrap_or_default();
    let Finish { open_workspace, working_directory } = wanted;
    digest_of(format!("shoal finish {VERSION} {below} {open_workspace} {working_directory:?}").as_bytes())
}

/// Makes the finishing layer in the empty directory `top`.
pub fn finish(top: BorrowedFd<'_>, below: Below<'_>, wanted: &Finish) -> Result<LayerFacts, LayerFault> {
    let limits = Limits::default();
    let mut layer = Layer::new(top, below, &limits)?;
    let exists = |name: &CStr| match below.map(|below| statat(below, name, AtFlags::SYMLINK_NOFOLLOW)) {
        None | Some(Err(Errno::NOENT)) => Ok(None),
        Some(Ok(stat)) => Ok(Some(rustix::fs::FileType::from_raw_mode(stat.st_mode))),
        Some(Err(errno)) => Err(kernel("look at", name.to_bytes(), errno)),
    };
    for (name, mode) in PLACES.into_iter().chain(DIRECTORIES) {
        let single = CString::new(name).expect("our own names have no NUL");
        let there = exists(&single)?;
        let must = PLACES.iter().any(|(place, _)| *place == name);
        let fits = match there {
            Some(rustix::fs::FileType::Directory) => true,
            Some(_) => !must,
            None => false,
        };
        if fits {
            continue;
        }
        let root = layer.place(Vec::new())?;
        let directory = layer.make_directory(&root, &single)?;
        let mode = if name == WORKSPACE && wanted.open_workspace { 0o777 } else { mode };
        fchmod(&directory, Mode::from_raw_mode(mode))
            .map_err(|e| kernel("set the mode of", name.as_bytes(), e))?;
    }
    for (path, text) in FILES {
        let mut names = names(path.as_bytes())?;
        let name = names.pop().expect("our own paths have a name");
        // An image whose `/etc` is not a directory cannot use these.
        let place = match layer.place(names) {
            Ok(place) => place,
            Err(LayerFault::Name { .. }) => continue,
            Err(fault) => return Err(fault),
        };
        layer.clear(&place, &name)?;
        let failed = |doing: &'static str| move |errno| kernel(doing, path.as_bytes(), errno);
        let file = new_file(&place, &name).map_err(failed("create"))?;
        rustix::io::write(&file, text.as_bytes()).map_err(failed("write"))?;
        fchmod(&file, Mode::from_raw_mode(0o644)).map_err(failed("set the mode of"))?;
    }
    // If one cannot be created because something else is there, a sandbox starts without it, and a command that runs in it fails.
    for path in std::iter::once(HOST_DIRECTORY).chain(wanted.working_directory.as_deref()) {
        match names(path.as_bytes()).and_then(|names| layer.place(names)) {
            Ok(_) | Err(LayerFault::Name { .. }) => {}
            Err(fault) => return Err(fault),
        }
    }
    layer.finish()
}
