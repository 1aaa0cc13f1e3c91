//! Generations of the image `host`. It is built from the machine's own files, which change with its packages, so each change leads to
//! a new generation; a sandbox keeps the generation that it was created with.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::storage::directories::names;
use crate::storage::host_image::{self, ImageError};
use crate::storage::remove::remove_tree;

/// Begins the name of a generation that is being built.
const UNFINISHED: &str = "unfinished-";

/// The directory of generations, held open.
pub struct HostImages {
    dir: OwnedFd,
    path: PathBuf,
}

impl HostImages {
    pub(super) fn new(dir: OwnedFd, path: PathBuf) -> Self {
        Self { dir, path }
    }

    /// Where a generation is.
    pub fn path(&self, generation: u64) -> PathBuf {
        self.path.join(generation.to_string())
    }

    /// The newest generation.
    pub fn current(&self) -> io::Result<Option<u64>> {
        Ok(self.list()?.into_iter().max())
    }

    fn list(&self) -> io::Result<Vec<u64>> {
        Ok(names(self.dir.as_fd())?.iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// Removes unfinished generations of a launcher that was killed. Its walkers died with it.
    pub fn sweep(&self) -> io::Result<()> {
        let unfinished = names(self.dir.as_fd())?.into_iter().filter(|name| name.starts_with(UNFINISHED));
        unfinished.into_iter().try_for_each(|name| remove_tree(self.dir.as_fd(), &name))
    }

    /// The newest generation, built if the machine has changed since the last. `thorough` also looks for files below `/usr` that
    /// became private, which reads all of it.
    pub(super) fn prepare(&self, thorough: bool) -> Result<u64, PrepareError> {
        let stamp = host_image::stamp().map_err(cannot("look at the machine"))?;
        let current = self.current().map_err(cannot("list generations"))?;
        let same = |file: &str, now: &str| {
            let then = current.and_then(|current| fs::read_to_string(self.path(current).join(file)).ok());
            then.is_some_and(|then| then == now)
        };
        let unchanged = same("stamp", &stamp);
        if let Some(current) = current.filter(|_| unchanged && !thorough) {
            return Ok(current);
        }
        let hidden = host_image::hidden().map_err(PrepareError::Build)?;
        if let Some(current) = current.filter(|_| unchanged && same("hidden", &host_image::as_lines(&hidden)))
        {
            return Ok(current);
        }
        let next = current.map_or(1, |current| current + 1);
        // Two walkers may build at once; each has its own name, and the rename of one of them wins.
        let unfinished = format!("{UNFINISHED}{}", rustix::process::getpid().as_raw_nonzero());
        remove_tree(self.dir.as_fd(), &unfinished).map_err(cannot("remove an unfinished image"))?;
        let built = build(&self.path.join(&unfinished), &stamp, &hidden, &self.path(next));
        let cleaned =
            remove_tree(self.dir.as_fd(), &unfinished).map_err(cannot("remove an unfinished image"));
        built.and(cleaned)?;
        Ok(next)
    }

    /// Removes generations that nothing uses. Keeps the newest, and the one before: a launch may just now be reading it.
    pub(super) fn drop_old(&self, newest: u64, used: &[u64]) -> io::Result<()> {
        for generation in self.list()? {
            if generation + 1 < newest && !used.contains(&generation) {
                remove_tree(self.dir.as_fd(), &generation.to_string())?;
            }
        }
        Ok(())
    }
}

/// Builds a generation and gives it its name, unless another process was quicker.
fn build(building: &Path, stamp: &str, hidden: &[PathBuf], finished: &Path) -> Result<(), PrepareError> {
    fs::create_dir(building).map_err(cannot("make a directory for the image"))?;
    host_image::build(building, hidden).map_err(PrepareError::Build)?;
    fs::write(building.join("stamp"), stamp).map_err(cannot("write the image's stamp"))?;
    match fs::rename(building, finished) {
        Err(e) if e.raw_os_error() == Some(libc::ENOTEMPTY) || e.kind() == io::ErrorKind::AlreadyExists => {
            Ok(())
        }
        other => other.map_err(cannot("name the image")),
    }
}

/// Why the image `host` could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The kernel refused something.
    #[error("cannot {doing}")]
    Io {
        /// As it reads after "cannot".
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The image could not be built.
    #[error("cannot build the image `host`")]
    Build(#[source] ImageError),
}

pub(super) fn cannot(doing: &'static str) -> impl FnOnce(io::Error) -> PrepareError {
    move |source| PrepareError::Io { doing, source }
}
