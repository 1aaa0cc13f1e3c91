//! Whole directories as tar streams. `archive` decides what they may contain.

use std::io::{self, Read, Write};

use archive::{Links, PackError, Packed, UnpackError, Unpacked};
use rustix::io::Errno;
use wire::files::{FileDone, FileError, FileErrorKind};

use super::place::open_directory;
use super::transfer::{is_directory, open_regular};
use super::{At, Broken, Upload, change, failure, refused, write_all};

/// Bytes to buffer before a write: headers are small.
const OUT_BUFFER: usize = 256 * 1024;
/// Size of the read buffer.
const IN_BUFFER: usize = 256 * 1024;

/// Sends a directory's contents, or one file under its own name.
pub fn pack(path: &[u8]) -> Result<FileDone, FileError> {
    let stat = rustix::fs::stat(path).at(path)?;
    let mut out = io::BufWriter::with_capacity(OUT_BUFFER, Stdout);
    let packed = if is_directory(&stat) {
        archive::pack_directory(open_directory(path)?, &mut out)
    } else {
        let (file, _) = open_regular(path)?;
        let slash = path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        archive::pack_file(file, &path[slash + 1..], &mut out)
    };
    let Packed { bytes, skipped, .. } = packed.map_err(|error| pack_error(error, path))?;
    out.flush().map_err(|error| super::unheard(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    Ok(FileDone::Sent { bytes, skipped })
}

fn pack_error(error: PackError, root: &[u8]) -> FileError {
    let below = |path: &[u8]| {
        let root = root.strip_suffix(b"/").unwrap_or(root);
        if path.is_empty() { root.to_vec() } else { [root, b"/", path].concat() }
    };
    match error {
        PackError::Read { path, source } => refused(&below(&path), source),
        PackError::Shrank { path } => failure(FileErrorKind::Changed, &below(&path), "it became shorter"),
        PackError::TooDeep { path } => failure(FileErrorKind::TooDeep, &below(&path), ""),
        PackError::Write { source } => super::unheard(Errno::from_io_error(&source).unwrap_or(Errno::IO)),
    }
}

/// Receives a directory's contents.
pub fn unpack(path: &[u8]) -> Result<FileDone, FileError> {
    change::make_directory(path, true, None)?;
    let root = open_directory(path)?;
    let mut upload = Incoming { upload: Upload::new(), buffer: vec![0; IN_BUFFER], at: 0, end: 0 };
    // Links may lead anywhere, since this process can go nowhere that guest code could not.
    let unpacked = archive::unpack(&mut upload, &root, Links::Any);
    let Unpacked { entries, bytes, skipped } = unpacked.map_err(|error| unpack_error(error, path))?;
    Ok(FileDone::Made { entries, bytes, skipped })
}

fn unpack_error(error: UnpackError, root: &[u8]) -> FileError {
    let detail = error.to_string();
    let below = |path: &[u8]| [root.strip_suffix(b"/").unwrap_or(root), b"/", path].concat();
    match error {
        UnpackError::Read { source } => match Broken::from_io(source) {
            Some(broken) => broken.with(root),
            None => failure(FileErrorKind::InvalidArchive, root, &detail),
        },
        UnpackError::Create { path, source } => refused(&below(&path), source),
        UnpackError::Truncated
        | UnpackError::Header { .. }
        | UnpackError::Name { .. }
        | UnpackError::Unsupported { .. }
        | UnpackError::ThroughLink { .. }
        | UnpackError::InTheWay { .. }
        | UnpackError::TooMany { .. } => failure(FileErrorKind::InvalidArchive, root, &detail),
    }
}

/// Our stdout, without a buffer of its own.
struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write_all(rustix::stdio::stdout(), bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The upload as a reader.
struct Incoming {
    upload: Upload,
    buffer: Vec<u8>,
    at: usize,
    end: usize,
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.at == self.end {
            self.end = self.upload.take(&mut self.buffer).map_err(Broken::into_io)?;
            self.at = 0;
        }
        let length = into.len().min(self.end - self.at);
        into[..length].copy_from_slice(&self.buffer[self.at..self.at + length]);
        self.at += length;
        Ok(length)
    }
}

impl Broken {
    /// Passes the upload's own error through the reader: an aborted upload is not an error of the kernel.
    fn into_io(self) -> io::Error {
        match self {
            Self::Incomplete => io::ErrorKind::ConnectionAborted.into(),
            Self::Kernel(errno) => errno.into(),
        }
    }

    fn from_io(error: io::Error) -> Option<Self> {
        match Errno::from_io_error(&error) {
            Some(errno) => Some(Self::Kernel(errno)),
            None if error.kind() == io::ErrorKind::ConnectionAborted => Some(Self::Incomplete),
            None => None,
        }
    }
}
