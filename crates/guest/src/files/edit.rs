//! Replacing text in one file.
//!
//! The new bytes go to an unnamed file, which replaces the old one: a reader sees one or the other, and an aborted
//! edit leaves the old one. Where a replacement would change more than the bytes, the edit writes into the existing
//! file: if it has other names, if its owner cannot be given to another file, if it is a mount point, or if its
//! directory is not writable.
//!
//! Edits of one file lock it, so that concurrent edits are not lost. If another program writes to it meanwhile, the
//! edit notices and starts again.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use memchr::memmem::Finder;
use rustix::fs::{Access, AtFlags, FallocateFlags, FlockOperation, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;
use wire::files::{EDIT_FILE_MAX, Edit, FileDone, FileError, FileErrorKind, LineEnds};

use super::place::{Parents, Place};
use super::transfer::{Draft, MODE_KEPT, check, need_regular};
use super::{At, failure, refused, stat_of, words, write_all};

/// How often an edit starts again because the file changed. Each time, another writer made progress.
const TRIES_MAX: usize = 256;
/// How long an edit waits for others of the same file. A program of the guest may hold a lock for ever.
const HOLD_MAX: Duration = Duration::from_secs(2);
/// How often it checks whether they are done.
const HOLD_STEP: Duration = Duration::from_millis(2);
/// How to open a file that may not be the one that was checked.
const CAREFULLY: OFlags =
    OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// Replaces text.
pub fn edit(path: &[u8], wish: &Edit) -> Result<FileDone, FileError> {
    if wish.old.is_empty() {
        return Err(failure(FileErrorKind::InvalidPattern, path, "the text to find must not be empty"));
    }
    for _ in 0..TRIES_MAX {
        if let Some(done) = attempt(path, wish)? {
            return Ok(done);
        }
    }
    Err(failure(FileErrorKind::Changed, path, "it changed during every attempt"))
}

/// `None`: the file changed meanwhile.
fn attempt(path: &[u8], wish: &Edit) -> Result<Option<FileDone>, FileError> {
    let place = Place::followed(path, Parents::Need)?;
    let there = place.stat().at(path)?.ok_or_else(|| refused(path, Errno::NOENT))?;
    need_regular(&there, path)?;
    // A file that is not writable is not replaced either, even if its directory would allow that.
    rustix::fs::accessat(&place.parent, &place.name, Access::WRITE_OK, AtFlags::EACCESS).at(path)?;
    let file = match rustix::fs::openat(&place.parent, &place.name, OFlags::RDONLY | CAREFULLY, Mode::empty())
    {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::LOOP) => return Ok(None), // Something else replaced it.
        Err(errno) => return Err(refused(path, errno)),
    };
    hold(&file);
    let stat = rustix::fs::fstat(&file).at(path)?;
    need_regular(&stat, path)?;
    if !is_as_it_was(&place, &stat, path)? {
        return Ok(None); // The previous lock holder replaced the file.
    }
    check(&wish.condition, Some(&stat), path)?;
    let before = contents(&file, path)?;
    let (after, replaced) = replace(&before, wish).map_err(|kind| failure(kind, path, detail(kind)))?;
    let stat = if stat.st_nlink == 1 {
        match replacement(&place, &stat, &after) {
            Ok(draft) => {
                if !is_as_it_was(&place, &stat, path)? {
                    return Ok(None);
                }
                match draft.publish(&place, false) {
                    Ok(file) => Some(rustix::fs::fstat(&file).at(path)?),
                    Err(errno) if is_of_the_place(errno) => in_place(&place, &stat, &before, &after, path)?,
                    Err(errno) => return Err(refused(path, errno)),
                }
            }
            Err(errno) if is_of_the_place(errno) => in_place(&place, &stat, &before, &after, path)?,
            Err(errno) => return Err(refused(path, errno)),
        }
    } else {
        in_place(&place, &stat, &before, &after, path)?
    };
    Ok(stat.map(|stat| FileDone::Edited { stat: stat_of(&stat, None), replaced }))
}

/// Waits until no other edit holds the file. The lock ends with this process.
fn hold(file: &OwnedFd) {
    let until = Instant::now() + HOLD_MAX;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(HOLD_STEP),
            Err(Errno::INTR) => {}
            // A file system without locks, or a program that holds a lock: a change is still detected, only later.
            Ok(()) | Err(_) => return,
        }
    }
}

/// Whether the path still leads to the file that was opened, with the same contents.
fn is_as_it_was(place: &Place, stat: &Stat, path: &[u8]) -> Result<bool, FileError> {
    let now = place.stat().at(path)?;
    Ok(now.is_some_and(|now| {
        now.st_dev == stat.st_dev && stat_of(&now, None).version() == stat_of(stat, None).version()
    }))
}

/// The whole file, if it is not too large.
fn contents(file: &OwnedFd, path: &[u8]) -> Result<Vec<u8>, FileError> {
    let size = rustix::fs::fstat(file).at(path)?.st_size;
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0).min(EDIT_FILE_MAX as usize) + 1);
    loop {
        if bytes.len() as u64 > EDIT_FILE_MAX {
            return Err(failure(FileErrorKind::TooLarge, path, detail(FileErrorKind::TooLarge)));
        }
        if bytes.len() == bytes.capacity() {
            bytes.reserve(64 * 1024);
        }
        match rustix::io::read(file, rustix::buffer::spare_capacity(&mut bytes)) {
            Ok(0) => return Ok(bytes),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(refused(path, errno)),
        }
    }
}

fn detail(kind: FileErrorKind) -> &'static str {
    if kind == FileErrorKind::TooLarge {
        "an edited file must have at most 16 MiB, before and after the edit"
    } else {
        ""
    }
}

/// The text after the edit, and the number of replaced matches.
fn replace(text: &[u8], wish: &Edit) -> Result<(Vec<u8>, u64), FileErrorKind> {
    if std::str::from_utf8(text).is_err() {
        return Err(FileErrorKind::NotText);
    }
    let attempt = |old: &str, new: &str| {
        let finder = Finder::new(old);
        // Count first: a list of all positions may need more memory than the file.
        let count = finder.find_iter(text).count() as u64;
        (count > 0).then(|| put_at(text, &finder, count, new.as_bytes(), wish.all))
    };
    if let Some(result) = attempt(&wish.old, &wish.new) {
        return result;
    }
    if wish.line_ends == LineEnds::Adapted {
        let (old, new) = (with_lf(&wish.old), with_lf(&wish.new));
        let crlf = (old.replace('\n', "\r\n"), new.replace('\n', "\r\n"));
        for (old, new) in [crlf, (old, new)] {
            if let Some(result) = attempt(&old, &new) {
                return result;
            }
        }
    }
    Err(FileErrorKind::NoMatch)
}

fn with_lf(text: &str) -> String {
    text.replace("\r\n", "\n")
}

fn put_at(
    text: &[u8],
    finder: &Finder<'_>,
    count: u64,
    new: &[u8],
    all: bool,
) -> Result<(Vec<u8>, u64), FileErrorKind> {
    if count > 1 && !all {
        return Err(FileErrorKind::SeveralMatches { count });
    }
    let length = finder.needle().len();
    // Neither product is beyond 2^24 times 2^21.
    let size = text.len() as u64 - count * length as u64 + count * new.len() as u64;
    if size > EDIT_FILE_MAX {
        return Err(FileErrorKind::TooLarge);
    }
    let mut after = Vec::with_capacity(size as usize);
    let mut from = 0;
    for place in finder.find_iter(text) {
        after.extend_from_slice(&text[from..place]);
        after.extend_from_slice(new);
        from = place + length;
    }
    after.extend_from_slice(&text[from..]);
    Ok((after, count))
}

/// A file with these bytes, and with the owner and permissions of the file that it will replace.
fn replacement<'a>(place: &'a Place, stat: &Stat, bytes: &[u8]) -> Result<Draft<'a>, Errno> {
    let draft = Draft::begin(place)?;
    write_all(&draft.file, bytes)?;
    let own = rustix::fs::fstat(&draft.file)?;
    if (own.st_uid, own.st_gid) != (stat.st_uid, stat.st_gid) {
        let owner = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        rustix::fs::fchown(&draft.file, Some(owner.0), Some(owner.1))?;
    }
    // After the owner, since a change of owner clears setuid.
    rustix::fs::fchmod(&draft.file, Mode::from_raw_mode(stat.st_mode & MODE_KEPT))?;
    Ok(draft)
}

/// Whether the file cannot be replaced, or not with this owner, although it may be writable itself.
fn is_of_the_place(errno: Errno) -> bool {
    matches!(errno, Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::BUSY | Errno::XDEV)
}

/// Writes into the existing file, from the first byte that differs. If that fails, restores the old bytes. `None`:
/// the path leads to another file by now.
fn in_place(
    place: &Place,
    stat: &Stat,
    before: &[u8],
    after: &[u8],
    path: &[u8],
) -> Result<Option<Stat>, FileError> {
    let file =
        rustix::fs::openat(&place.parent, &place.name, OFlags::WRONLY | CAREFULLY, Mode::empty()).at(path)?;
    let opened = rustix::fs::fstat(&file).at(path)?;
    if opened.st_dev != stat.st_dev || stat_of(&opened, None).version() != stat_of(stat, None).version() {
        return Ok(None);
    }
    if after.len() > before.len() {
        // Reserve the space first, so that a full disk shows before anything is changed. Not every file system
        // supports this.
        let taken = rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, after.len() as u64);
        if let Err(errno @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) = taken {
            return Err(refused(path, errno));
        }
    }
    let same = before.iter().zip(after).take_while(|(one, other)| one == other).count();
    if let Err(errno) = overwrite(&file, same, after) {
        let mut error = refused(path, errno);
        if let Err(errno) = overwrite(&file, same, before) {
            error.detail = format!("and the old content could not be restored: {}", words(errno));
        }
        return Err(error);
    }
    rustix::fs::fstat(&file).at(path).map(Some)
}

fn overwrite(file: &OwnedFd, from: usize, bytes: &[u8]) -> Result<(), Errno> {
    rustix::fs::seek(file, rustix::fs::SeekFrom::Start(from as u64))?;
    write_all(file, &bytes[from..])?;
    rustix::fs::ftruncate(file, bytes.len() as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use wire::files::Condition;

    use super::*;

    fn wish(old: &str, new: &str) -> Edit {
        Edit {
            path: b"/f".to_vec(),
            old: old.into(),
            new: new.into(),
            all: false,
            line_ends: LineEnds::Exact,
            condition: Condition::None,
        }
    }

    #[track_caller]
    fn check(text: &str, wish: &Edit, expected: Result<(&str, u64), FileErrorKind>) {
        let result = replace(text.as_bytes(), wish);
        let result = result.map(|(text, count)| (String::from_utf8(text).expect("it stays text"), count));
        assert_eq!(result, expected.map(|(text, count)| (text.to_owned(), count)), "{wish:?} in {text:?}");
    }

    #[test]
    fn one_place_is_replaced_or_all() {
        check("a b c", &wish("b", "x"), Ok(("a x c", 1)));
        check("a b c", &wish("d", "x"), Err(FileErrorKind::NoMatch));
        check("", &wish("d", "x"), Err(FileErrorKind::NoMatch));
        check("b b b", &wish("b", "x"), Err(FileErrorKind::SeveralMatches { count: 3 }));
        check("b b b", &Edit { all: true, ..wish("b", "") }, Ok(("  ", 3)));
        check("aaaaa", &Edit { all: true, ..wish("aa", "b") }, Ok(("bba", 2)));
        check("same", &wish("same", "same"), Ok(("same", 1)));
    }

    #[test]
    fn ends_of_lines_are_adapted_where_that_is_asked_for() {
        let lf = wish("a\nb", "c\nd");
        check("a\r\nb\r\n", &lf, Err(FileErrorKind::NoMatch));
        check("a\r\nb\r\n", &Edit { line_ends: LineEnds::Adapted, ..lf.clone() }, Ok(("c\r\nd\r\n", 1)));
        let crlf = Edit { line_ends: LineEnds::Adapted, ..wish("a\r\nb", "c\r\nd") };
        check("a\nb\n", &crlf, Ok(("c\nd\n", 1)));
        check("a\r\nb a\nb", &crlf, Ok(("c\r\nd a\nb", 1)));
        let several = Err(FileErrorKind::SeveralMatches { count: 2 });
        check("a\nb a\nb a\r\nb", &Edit { line_ends: LineEnds::Adapted, ..lf }, several);
    }

    #[test]
    fn what_is_no_text_or_would_be_too_large_is_refused() {
        assert_eq!(replace(b"a\xff", &wish("a", "b")), Err(FileErrorKind::NotText));
        let wide = "x".repeat(wire::files::EDIT_TEXT_MAX);
        let text = "a".repeat(17);
        assert_eq!(
            replace(text.as_bytes(), &Edit { all: true, ..wish("a", &wide) }),
            Err(FileErrorKind::TooLarge)
        );
    }

    proptest! {
        #[test]
        fn it_is_what_the_standard_library_gives(text in "[ab\n]{0,60}", old in "[ab\n]{1,4}", new in "[abc]{0,4}") {
            let count = text.matches(&old).count() as u64;
            let expected = match count {
                0 => Err(FileErrorKind::NoMatch),
                _ => Ok((text.replace(&old, &new).into_bytes(), count)),
            };
            prop_assert_eq!(replace(text.as_bytes(), &Edit { all: true, ..wish(&old, &new) }), expected);
        }
    }
}
