//! Who a command runs as: the guest's own `/etc/passwd` and `/etc/group`, read by hand.
//!
//! A static C library has no name services, and the files belong to the guest, so they are parsed as untrusted bytes.
//! Owns the rules for names, numbers and groups; `spawn` changes the ids.
//!
//! The rules are those of containers, because images are written for them: a name must exist, a number need not; a
//! number without an entry gets group 0; an explicit group replaces the supplementary ones.

use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// No real user database is longer. The rest is ignored.
const FILE_MAX: u64 = 1024 * 1024;
/// The kernel's own limit on supplementary groups (NGROUPS_MAX).
const GROUPS_MAX: usize = 65_536;

/// Who a command runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups, including the main one if the files list it.
    pub groups: Vec<u32>,
    pub name: String,
    pub home: String,
    pub shell: String,
}

/// The two files, as bytes.
#[derive(Debug, Default)]
pub struct Files {
    pub passwd: Vec<u8>,
    pub group: Vec<u8>,
}

impl Files {
    /// The files as they are now. A missing file, or one that is not a regular file, counts as empty.
    pub fn read() -> Self {
        Self { passwd: read_bounded("/etc/passwd"), group: read_bounded("/etc/group") }
    }

    /// Resolves `wish`: a name or a number, optionally with `:group`. `None` if there is no such user or group.
    pub fn resolve(&self, wish: &str) -> Option<User> {
        let (user, group) = match wish.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (wish, None),
        };
        let named = self.users().find(|entry| entry.name == user && !user.is_empty());
        let mut found = match named {
            Some(entry) => self.with_groups(entry),
            None => self.user_by_number(parse_id(user)?),
        };
        if let Some(group) = group {
            found.gid = self.group_number(group)?;
            found.groups = vec![found.gid];
        }
        Some(found)
    }

    /// The user with this number, or one without a name.
    pub fn user_by_number(&self, uid: u32) -> User {
        match self.users().find(|user| user.uid == uid) {
            Some(entry) => self.with_groups(entry),
            None => User {
                uid,
                gid: 0,
                groups: Vec::new(),
                name: if uid == 0 { "root".into() } else { uid.to_string() },
                home: if uid == 0 { "/root".into() } else { "/".into() },
                shell: "/bin/sh".into(),
            },
        }
    }

    fn with_groups(&self, mut user: User) -> User {
        user.groups = self.groups_of(&user.name);
        user
    }

    fn users(&self) -> impl Iterator<Item = User> {
        lines(&self.passwd).filter_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [name, _password, uid, gid, rest @ ..] = fields.as_slice() else { return None };
            let home = rest.get(1).copied().filter(|home| !home.is_empty()).unwrap_or("/");
            let shell = rest.get(2).copied().filter(|shell| !shell.is_empty()).unwrap_or("/bin/sh");
            Some(User {
                uid: parse_id(uid)?,
                gid: parse_id(gid)?,
                groups: Vec::new(),
                name: (*name).into(),
                home: home.into(),
                shell: shell.into(),
            })
        })
    }

    fn groups_of(&self, user: &str) -> Vec<u32> {
        let mine = lines(&self.group).filter_map(|line| {
            let mut fields = line.split(':');
            let (gid, members) = (fields.nth(2)?, fields.next()?);
            if members.split(',').any(|member| member.trim() == user) { parse_id(gid) } else { None }
        });
        mine.take(GROUPS_MAX).collect()
    }

    fn group_number(&self, wish: &str) -> Option<u32> {
        let named = lines(&self.group).find_map(|line| {
            let mut fields = line.split(':');
            let (name, gid) = (fields.next()?, fields.nth(1)?);
            if name == wish && !wish.is_empty() { parse_id(gid) } else { None }
        });
        named.or_else(|| parse_id(wish))
    }
}

/// The lines that are UTF-8. Others cannot be requested by name.
fn lines(file: &[u8]) -> impl Iterator<Item = &str> {
    file.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok())
}

/// A user or group number. The highest one means "leave unchanged" to the kernel, so no user has it.
fn parse_id(text: &str) -> Option<u32> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if plain { text.parse().ok().filter(|id| *id != u32::MAX) } else { None }
}

fn read_bounded(path: &str) -> Vec<u8> {
    // The guest may have put a FIFO or a device here; O_NONBLOCK keeps the open from blocking.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    let Ok(file) = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path) else {
        return Vec::new();
    };
    let Some(metadata) = file.metadata().ok().filter(std::fs::Metadata::is_file) else { return Vec::new() };
    // With room for one extra byte, the end is found without growing the buffer.
    let mut bytes = Vec::with_capacity(metadata.len().min(FILE_MAX) as usize + 1);
    // After a read error, the part before it counts, as if the file ended there.
    let _ = file.take(FILE_MAX).read_to_end(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> Files {
        Files {
            passwd: b"root:x:0:0:root:/root:/bin/bash\n\
                broken line\n\
                nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n\
                \xff\xfe:x:3:3::/:\n\
                ada:x:1000:1001:Ada,,,:/home/ada:/bin/zsh\n\
                bare:x:7:8\n\
                1234:x:50:51::/numeric:/bin/sh\n\
                minus:x:4294967295:0::/:\n"
                .to_vec(),
            group: b"root:x:0:\nadm:x:4:ada,root\nada:x:1001:\nwheel:x:10: ada \nbad:x:zz:ada\n".to_vec(),
        }
    }

    #[track_caller]
    fn check(wish: &str, expected: Option<(u32, u32, &[u32], &str, &str)>) {
        let found = files().resolve(wish);
        let found =
            found.as_ref().map(|u| (u.uid, u.gid, u.groups.as_slice(), u.name.as_str(), u.home.as_str()));
        assert_eq!(found, expected, "for `{wish}`");
    }

    #[test]
    fn users_are_found_by_name_and_by_number() {
        check("root", Some((0, 0, &[4], "root", "/root")));
        check("ada", Some((1000, 1001, &[4, 10], "ada", "/home/ada")));
        check("1000", Some((1000, 1001, &[4, 10], "ada", "/home/ada")));
        check("bare", Some((7, 8, &[], "bare", "/")));
        check("1234", Some((50, 51, &[], "1234", "/numeric")));
    }

    #[test]
    fn a_group_may_be_named_or_numbered_and_replaces_the_others() {
        check("ada:adm", Some((1000, 4, &[4], "ada", "/home/ada")));
        check("ada:77", Some((1000, 77, &[77], "ada", "/home/ada")));
        check("5000:6000", Some((5000, 6000, &[6000], "5000", "/")));
        check("ada:nosuch", None);
        check("ada:", None);
    }

    #[test]
    fn a_number_nobody_has_is_allowed_and_a_name_nobody_has_is_not() {
        check("4242", Some((4242, 0, &[], "4242", "/")));
        for unknown in
            ["grace", "", ":", ":adm", "-1", "+5", "4294967295", "99999999999", "minus", "ada ", "1 2"]
        {
            check(unknown, None);
        }
    }

    #[test]
    fn root_has_a_home_without_any_file() {
        let root = Files::default().user_by_number(0);
        assert_eq!((root.name.as_str(), root.home.as_str(), root.gid), ("root", "/root", 0));
    }
}
