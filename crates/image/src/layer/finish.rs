//! The uppermost layer of every image: what a sandbox needs and an image may lack.
//!
//! Made once per image, so that no create pays for it. Places to mount on must be directories and nothing else; what tells of
//! names and addresses is the sandbox's own business, as it is everywhere that images run; the rest is made only where
//! it is missing.

use std::ffi::{CStr, CString};
use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, Mode, fchmod, statat};
use rustix::io::Errno;
use wire::Digest;
use wire::launch::{Finish, LayerFacts, LayerFault};
use wire::network::{HOST_DIRECTORY, HOSTS, RESOLV_CONF};

use super::unpack::{Below, Layer, Limits, kernel, names, new_file};
use crate::hash::digest_of;

/// Counts up when the lists below change, so that images are finished anew.
const VERSION: u32 = 3;

/// Mounted on, so each is a directory, whatever the image has.
const PLACES: [(&str, u32); 3] = [("dev", 0o755), ("proc", 0o555), ("sys", 0o555)];
/// Made where they are missing.
const DIRECTORIES: [(&str, u32); 5] =
    [("etc", 0o755), ("tmp", 0o1777), ("run", 0o755), ("root", 0o700), (WORKSPACE, 0o755)];
/// Where commands run that nobody gave a place.
const WORKSPACE: &str = "workspace";
/// The sandbox's own. Images have other people's in them, or none.
const FILES: [(&str, &str); 3] =
    [("etc/hosts", HOSTS), ("etc/hostname", "sandbox\n"), ("etc/resolv.conf", RESOLV_CONF)];

/// What the finishing layer over `below` is called.
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
        // An image whose `/etc` is no directory has no use for these.
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
    // One that cannot be made, because something else is there, is left out when a sandbox starts, or is told when a command runs
    // in it.
    for path in std::iter::once(HOST_DIRECTORY).chain(wanted.working_directory.as_deref()) {
        match names(path.as_bytes()).and_then(|names| layer.place(names)) {
            Ok(_) | Err(LayerFault::Name { .. }) => {}
            Err(fault) => return Err(fault),
        }
    }
    layer.finish()
}
