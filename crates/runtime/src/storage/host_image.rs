//! The image `host`: the machine's own `/usr` with a cleaned `/etc`.
//!
//! ```text
//! <data>/images/host/<generation>/root   what is not /usr: a cleaned /etc, /var/lib/dpkg, directories, links
//!                                /usr    over the machine's /usr: hides what not everyone may read, adds `python`
//!                                /stamp  what the machine looked like when this was made
//! ```
//!
//! Layers are seen through idmapped mounts, which make the host's root the guest's root. A file that only root may read on
//! the host would be readable inside; so whatever is not readable for everyone is hidden by a whiteout.
//! For `/etc` there is a list of files to take, not of files to leave out: an unknown file may hold a secret.
//! A generation never changes. Installing packages on the host leads to a new generation; existing sandboxes keep theirs.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType as NodeType, Mode, mknodat};
use wire::network::{HOSTS, RESOLV_CONF};

use crate::storage::package_config::{Manager, SETTINGS, SETTINGS_BYTES_MAX, SETTINGS_USR, scrub};
use crate::storage::private_files;

/// Where the machine's programs are.
pub const USR: &str = "/usr";

/// Everything that the image is built from.
pub const SOURCES: [&str; 4] = [USR, "/etc", "/root", "/var/lib/dpkg"];

/// Increased when the image is built differently, so that it is rebuilt on machines that have not changed.
const VERSION: u32 = 2;

/// Files that are copied from the machine's `/etc`, if everyone may read them.
const ETC_TAKEN: &[&str] = &[
    "R",
    "X11",
    "alternatives",
    "apt",
    "bash.bashrc",
    "bash_completion.d",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "dpkg",
    "fonts",
    "gai.conf",
    "groff",
    "gss",
    "host.conf",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.gen",
    "localtime",
    "login.defs",
    "lsb-release",
    "magic",
    "magic.mime",
    "mailcap",
    "manpath.config",
    "maven",
    "mime.types",
    "mke2fs.conf",
    "nanorc",
    "netconfig",
    "networks",
    "nsswitch.conf",
    "os-release",
    "pam.conf",
    "pam.d",
    "perl",
    "php",
    "protocols",
    "rpc",
    "ruby",
    "security",
    "services",
    "sgml",
    "shells",
    "skel",
    "ssl",
    "terminfo",
    "timezone",
    "ucf.conf",
    "vim",
    "xattr.conf",
    "xdg",
    "xml",
];
/// Names that begin with one of these are copied too, since they contain a version.
const ETC_TAKEN_PREFIXES: &[&str] = &["java", "python3", "node"];
/// Never copied, wherever they are: credentials of package managers.
const NEVER_TAKEN: &[&str] = &["auth.conf", "auth.conf.d", "private"];

const DIRECTORIES: &[(&str, u32)] = &[
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("home/user", 0o755),
    ("media", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("run/lock", 0o1777),
    ("run/shoal", 0o755),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var", 0o755),
    ("var/cache", 0o755),
    ("var/cache/apt", 0o755),
    ("var/cache/apt/archives", 0o755),
    ("var/cache/apt/archives/partial", 0o700),
    ("var/cache/debconf", 0o755),
    ("var/cache/ldconfig", 0o700),
    ("var/lib", 0o755),
    ("var/lib/apt", 0o755),
    ("var/lib/apt/lists", 0o755),
    ("var/lib/apt/lists/partial", 0o700),
    ("var/local", 0o755),
    ("var/log", 0o755),
    ("var/log/apt", 0o755),
    ("var/mail", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
    ("workspace", 0o755),
    ("etc/profile.d", 0o755),
];

/// Our own files. The accounts are those of a bare Debian; accounts of the machine's packages are added, those of its
/// people are not.
const FILES: &[(&str, u32, &str)] = &[
    (
        "etc/passwd",
        0o644,
        "\
root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
bin:x:2:2:bin:/bin:/usr/sbin/nologin
sys:x:3:3:sys:/dev:/usr/sbin/nologin
sync:x:4:65534:sync:/bin:/bin/sync
games:x:5:60:games:/usr/games:/usr/sbin/nologin
man:x:6:12:man:/var/cache/man:/usr/sbin/nologin
lp:x:7:7:lp:/var/spool/lpd:/usr/sbin/nologin
mail:x:8:8:mail:/var/mail:/usr/sbin/nologin
news:x:9:9:news:/var/spool/news:/usr/sbin/nologin
uucp:x:10:10:uucp:/var/spool/uucp:/usr/sbin/nologin
proxy:x:13:13:proxy:/bin:/usr/sbin/nologin
www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin
backup:x:34:34:backup:/var/backups:/usr/sbin/nologin
list:x:38:38:Mailing List Manager:/var/list:/usr/sbin/nologin
irc:x:39:39:ircd:/run/ircd:/usr/sbin/nologin
_apt:x:42:65534::/nonexistent:/usr/sbin/nologin
user:x:1000:1000:user:/home/user:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
",
    ),
    (
        "etc/group",
        0o644,
        "\
root:x:0:
daemon:x:1:
bin:x:2:
sys:x:3:
adm:x:4:
tty:x:5:
disk:x:6:
lp:x:7:
mail:x:8:
news:x:9:
uucp:x:10:
man:x:12:
proxy:x:13:
kmem:x:15:
dialout:x:20:
fax:x:21:
voice:x:22:
cdrom:x:24:
floppy:x:25:
tape:x:26:
sudo:x:27:
audio:x:29:
dip:x:30:
www-data:x:33:
backup:x:34:
operator:x:37:
list:x:38:
irc:x:39:
src:x:40:
shadow:x:42:
utmp:x:43:
video:x:44:
sasl:x:45:
plugdev:x:46:
staff:x:50:
games:x:60:
users:x:100:
user:x:1000:
nogroup:x:65534:
",
    ),
    (
        "etc/shadow",
        0o640,
        "root:*:19000:0:99999:7:::\nuser:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n",
    ),
    ("etc/gshadow", 0o640, "root:*::\nuser:*::\nnogroup:*::\n"),
    ("etc/hostname", 0o644, "sandbox\n"),
    ("etc/hosts", 0o644, HOSTS),
    ("etc/resolv.conf", 0o644, RESOLV_CONF),
    ("etc/machine-id", 0o444, ""),
    ("etc/environment", 0o644, ""),
    (
        "etc/profile",
        0o644,
        "\
# Quiet on purpose: what a login shell prints would end up in a command's output.
if [ -z \"$PATH\" ]; then
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  export PATH
fi
for script in /etc/profile.d/*.sh; do
  [ -r \"$script\" ] && . \"$script\"
done
unset script
",
    ),
    ("root/.profile", 0o644, "[ -n \"$BASH_VERSION\" ] && [ -r ~/.bashrc ] && . ~/.bashrc\ntrue\n"),
    ("root/.bashrc", 0o644, "case $- in *i*) PS1='\\u@\\h:\\w\\$ ' ;; esac\n"),
    ("home/user/.profile", 0o644, "[ -n \"$BASH_VERSION\" ] && [ -r ~/.bashrc ] && . ~/.bashrc\ntrue\n"),
    ("home/user/.bashrc", 0o644, "case $- in *i*) PS1='\\u@\\h:\\w\\$ ' ;; esac\n"),
];

/// Files and directories of the guest's own unprivileged account.
const OWNED_BY_USER: [&str; 3] = ["home/user", "home/user/.profile", "home/user/.bashrc"];
/// Its id, as on a machine with one person.
const USER_ID: u32 = 1000;
/// The group `shadow`, as on Debian.
const SHADOW_ID: u32 = 42;

const LINKS: &[(&str, &str)] =
    &[("etc/mtab", "/proc/self/mounts"), ("var/run", "/run"), ("var/lock", "/run/lock")];

/// Directories at the top that a machine with a merged `/usr` has as links.
const MERGED: [&str; 6] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// A summary of what the image depends on: cheap to compute, and different after any package was installed or removed.
pub fn stamp() -> io::Result<String> {
    let mut text = format!("version {VERSION}\n");
    let settings = SETTINGS.iter().map(|(_, path, _)| *path);
    let settings_usr = SETTINGS_USR.iter().map(|(_, path)| format!("{USR}/{path}"));
    let settings: Vec<String> = settings.map(str::to_owned).chain(settings_usr).collect();
    let fixed = [
        "/var/lib/dpkg/status",
        "/etc/apt/sources.list",
        "/etc/apt/sources.list.d",
        "/etc",
        "/usr",
        "/usr/bin",
        "/usr/sbin",
        "/usr/lib",
        "/usr/local/bin",
        "/usr/share",
    ];
    for path in fixed.into_iter().chain(settings.iter().map(String::as_str)) {
        let Some(meta) = found(fs::symlink_metadata(path))? else { continue };
        text += &format!("{path} {} {} {}.{}\n", meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec());
    }
    Ok(text)
}

/// The names to hide below `/usr`: scans all of it. A file whose mode was changed by hand shows up here and not in the
/// [`stamp`].
pub fn hidden() -> Result<Vec<PathBuf>, ImageError> {
    private_files::find(Path::new(USR)).map_err(|error| ImageError::Io {
        doing: "look at",
        path: error.path,
        source: error.source,
    })
}

/// Names as a list to store and to compare, one per line.
pub fn as_lines(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| format!("{}\n", path.display())).collect()
}

/// Builds a generation in `target`, which must not exist. `hidden` are the names from [`hidden`].
pub fn build(target: &Path, hidden: &[PathBuf]) -> Result<(), ImageError> {
    let root = target.join("root");
    make_dir(&root, 0o755)?;
    for (name, mode) in DIRECTORIES {
        make_dir(&root.join(name), *mode)?;
    }
    for name in MERGED {
        let host = Path::new("/").join(name);
        match found(fs::symlink_metadata(&host)).map_err(failed("look at", &host))? {
            None => {}
            Some(meta) if meta.is_symlink() => {
                let to = fs::read_link(&host).map_err(failed("read", &host))?;
                symlink(to, root.join(name)).map_err(failed("link", &root.join(name)))?;
            }
            Some(_) => return Err(ImageError::NotMerged { path: host }),
        }
    }
    take_etc(&root.join("etc"))?;
    take_settings(&root)?;
    for (name, mode, text) in FILES {
        let path = root.join(name);
        fs::write(&path, text).map_err(failed("write", &path))?;
        set_mode(&path, *mode)?;
    }
    add_package_accounts(&root.join("etc"))?;
    for name in OWNED_BY_USER {
        let path = root.join(name);
        std::os::unix::fs::chown(&path, Some(USER_ID), Some(USER_ID)).map_err(failed("give away", &path))?;
    }
    for name in ["etc/shadow", "etc/gshadow"] {
        let path = root.join(name);
        std::os::unix::fs::chown(&path, Some(0), Some(SHADOW_ID)).map_err(failed("give away", &path))?;
    }
    for (name, to) in LINKS {
        symlink(to, root.join(name)).map_err(failed("link", &root.join(name)))?;
    }
    let dpkg = Path::new("/var/lib/dpkg");
    if dpkg.is_dir() {
        take_tree(dpkg, &root.join("var/lib/dpkg"), Take::Link)?;
    }
    cover_usr(&target.join("usr"), hidden)?;
    let list = target.join("hidden");
    fs::write(&list, as_lines(hidden)).map_err(failed("write", &list))
}

/// Adds the accounts that the machine's packages made: package managers refuse to work without the accounts that own
/// their files. Fields that people wrote (full names, shells, members of groups) are left out.
fn add_package_accounts(etc: &Path) -> Result<(), ImageError> {
    for name in ["passwd", "group"] {
        let (host, ours) = (Path::new("/etc").join(name), etc.join(name));
        let theirs = found(fs::read_to_string(&host)).map_err(failed("read", &host))?.unwrap_or_default();
        let mut text = fs::read_to_string(&ours).map_err(failed("read", &ours))?;
        for line in theirs.lines().filter_map(|line| package_account(line, name == "passwd")) {
            let taken = text.lines().any(|known| same_account(known, &line));
            if !taken {
                text += &line;
                text.push('\n');
            }
        }
        fs::write(&ours, text).map_err(failed("write", &ours))?;
    }
    Ok(())
}

/// On Debian and similar systems, lower ids belong to packages, and ids from here on belong to people.
const FIRST_PERSON_ID: u32 = 1000;

/// A line of `/etc/passwd` or `/etc/group` as a bare account, if it is a package's.
fn package_account(line: &str, user: bool) -> Option<String> {
    let fields: Vec<&str> = line.split(':').collect();
    let id: u32 = fields.get(2)?.parse().ok()?;
    let plain =
        |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if !(1..FIRST_PERSON_ID).contains(&id) || fields[0].is_empty() || !plain(fields[0]) {
        return None;
    }
    match (user, fields.as_slice()) {
        (true, [name, _, uid, gid, ..]) => {
            Some(format!("{name}:x:{uid}:{gid}::/nonexistent:/usr/sbin/nologin"))
        }
        (false, [name, _, gid, _]) => Some(format!("{name}:x:{gid}:")),
        _ => None,
    }
}

/// Whether two lines have the same name or the same id.
fn same_account(one: &str, other: &str) -> bool {
    let key = |line: &str| {
        let mut fields = line.split(':');
        (fields.next().map(str::to_owned), fields.nth(1).map(str::to_owned))
    };
    let ((name, id), (other_name, other_id)) = (key(one), key(other));
    name == other_name || id == other_id
}

fn take_etc(etc: &Path) -> Result<(), ImageError> {
    let host = Path::new("/etc");
    for entry in fs::read_dir(host).map_err(failed("list", host))? {
        let entry = entry.map_err(failed("list", host))?;
        let name = entry.file_name();
        let Some(text) = name.to_str() else { continue };
        let taken = ETC_TAKEN.contains(&text) || ETC_TAKEN_PREFIXES.iter().any(|p| text.starts_with(p));
        if taken {
            take_tree(&entry.path(), &etc.join(&name), Take::Copy)?;
        }
    }
    Ok(())
}

/// Copies the settings of package managers, without credentials.
fn take_settings(root: &Path) -> Result<(), ImageError> {
    for (manager, from, to) in SETTINGS {
        let Some(text) = settings_text(Path::new(from))? else { continue };
        let to = root.join(to);
        for parent in to.ancestors().skip(1).take_while(|path| *path != root).collect::<Vec<_>>().iter().rev()
        {
            if found(fs::symlink_metadata(parent)).map_err(failed("look at", parent))?.is_none() {
                make_dir(parent, 0o755)?;
            }
        }
        fs::write(&to, scrub(*manager, &text)).map_err(failed("write", &to))?;
        set_mode(&to, 0o644)?;
    }
    for place in ["sources.list", "sources.list.d", "apt.conf", "apt.conf.d"] {
        scrub_apt(&root.join("etc/apt").join(place))?;
    }
    Ok(())
}

/// Removes credentials from a file that was copied from the machine, or from all files in a directory.
fn scrub_apt(path: &Path) -> Result<(), ImageError> {
    let Some(meta) = found(fs::symlink_metadata(path)).map_err(failed("look at", path))? else {
        return Ok(());
    };
    if meta.is_dir() {
        for entry in fs::read_dir(path).map_err(failed("list", path))? {
            scrub_apt(&entry.map_err(failed("list", path))?.path())?;
        }
    } else if meta.is_file() {
        match settings_text(path)? {
            Some(text) => fs::write(path, scrub(Manager::Apt, &text)).map_err(failed("write", path))?,
            None => fs::remove_file(path).map_err(failed("remove", path))?,
        }
    }
    Ok(())
}

/// The text of a settings file. `None` if there is none: missing, not a plain file, too long or not text.
fn settings_text(path: &Path) -> Result<Option<String>, ImageError> {
    let Some(meta) = found(fs::symlink_metadata(path)).map_err(failed("look at", path))? else {
        return Ok(None);
    };
    if !meta.is_file() || meta.len() > SETTINGS_BYTES_MAX {
        return Ok(None);
    }
    let bytes = found(fs::read(path)).map_err(failed("read", path))?;
    Ok(bytes.and_then(|bytes| String::from_utf8(bytes).ok()))
}

/// How files get into the image.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Take {
    Copy,
    /// As a hard link if possible: for large files that are only ever replaced, not changed.
    Link,
}

/// Copies files that everyone may read and skips the rest.
fn take_tree(from: &Path, to: &Path, how: Take) -> Result<(), ImageError> {
    let Some(meta) = found(fs::symlink_metadata(from)).map_err(failed("look at", from))? else {
        return Ok(());
    };
    if from.file_name().is_some_and(|name| NEVER_TAKEN.iter().any(|never| name == OsStr::new(never))) {
        return Ok(());
    }
    if meta.is_symlink() {
        let target = fs::read_link(from).map_err(failed("read", from))?;
        return symlink(target, to).map_err(failed("link", to));
    }
    if !readable_for_everyone(&meta) {
        return Ok(());
    }
    if meta.is_dir() {
        if found(fs::symlink_metadata(to)).map_err(failed("look at", to))?.is_none() {
            make_dir(to, meta.mode() & 0o7777)?;
        }
        for entry in fs::read_dir(from).map_err(failed("list", from))? {
            let name = entry.map_err(failed("list", from))?.file_name();
            take_tree(&from.join(&name), &to.join(&name), how)?;
        }
        return Ok(());
    }
    if meta.is_file() {
        // On another file system, or one that limits links, the file is copied.
        if how == Take::Link && fs::hard_link(from, to).is_ok() {
            return Ok(());
        }
        fs::copy(from, to).map_err(failed("copy", from))?;
        set_mode(to, meta.mode() & 0o777)?;
    }
    Ok(())
}

/// Builds the layer over the machine's `/usr` that hides these names.
fn cover_usr(cover: &Path, hidden: &[PathBuf]) -> Result<(), ImageError> {
    let usr = Path::new(USR);
    copy_dir_shape(usr, cover)?;
    let mut made = HashSet::from([PathBuf::new()]);
    for path in hidden {
        make_parents(path, cover, &mut made)?;
        let at = cover.join(path);
        // A character device 0,0 in an upper layer hides the name.
        mknodat(CWD, &at, NodeType::CharacterDevice, Mode::empty(), 0)
            .map_err(|e| failed("make a whiteout", &at)(e.into()))?;
    }
    // The marker makes pip leave the machine's packages alone; a sandbox's packages are its own.
    let is_hidden = |path: &Path| hidden.iter().any(|hidden| path.starts_with(hidden));
    for marker in externally_managed(usr)?.into_iter().filter(|marker| !is_hidden(marker)) {
        make_parents(&marker, cover, &mut made)?;
        let at = cover.join(&marker);
        mknodat(CWD, &at, NodeType::CharacterDevice, Mode::empty(), 0)
            .map_err(|e| failed("make a whiteout", &at)(e.into()))?;
    }
    for (manager, name) in SETTINGS_USR {
        let path = Path::new(name);
        if is_hidden(path) {
            continue;
        }
        let Some(text) = settings_text(&usr.join(path))? else { continue };
        make_parents(path, cover, &mut made)?;
        let at = cover.join(path);
        fs::write(&at, scrub(*manager, &text)).map_err(failed("write", &at))?;
        set_mode(&at, 0o644)?;
    }
    // Programs and people expect `python`; Debian has only `python3`.
    let python = Path::new("bin/python");
    let has = |name: &str| usr.join("bin").join(name).symlink_metadata().is_ok();
    if has("python3") && !has("python") {
        make_parents(python, cover, &mut made)?;
        let at = cover.join(python);
        symlink("python3", &at).map_err(failed("link", &at))?;
    }
    Ok(())
}

/// The markers of Pythons whose packages another package manager manages (PEP 668), below `usr`.
fn externally_managed(usr: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let mut markers = Vec::new();
    for lib in ["lib", "local/lib"] {
        let dir = usr.join(lib);
        let Some(entries) = found(fs::read_dir(&dir)).map_err(failed("list", &dir))? else { continue };
        for entry in entries {
            let name = entry.map_err(failed("list", &dir))?.file_name();
            let marker = Path::new(lib).join(&name).join("EXTERNALLY-MANAGED");
            let path = usr.join(&marker);
            if name.to_string_lossy().starts_with("python3")
                && fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_file())
            {
                markers.push(marker);
            }
        }
    }
    Ok(markers)
}

fn readable_for_everyone(meta: &Metadata) -> bool {
    let needed = if meta.is_dir() { 0o005 } else { 0o004 };
    meta.mode() & needed == needed
}

fn make_parents(path: &Path, cover: &Path, made: &mut HashSet<PathBuf>) -> Result<(), ImageError> {
    let Some(parent) = path.parent() else { return Ok(()) };
    if made.insert(parent.to_owned()) {
        make_parents(parent, cover, made)?;
        copy_dir_shape(&Path::new(USR).join(parent), &cover.join(parent))?;
    }
    Ok(())
}

/// A directory in an upper layer replaces the one below, so it must look the same.
fn copy_dir_shape(from: &Path, to: &Path) -> Result<(), ImageError> {
    let meta = fs::symlink_metadata(from).map_err(failed("look at", from))?;
    make_dir(to, meta.mode() & 0o7777)?;
    std::os::unix::fs::chown(to, Some(meta.uid()), Some(meta.gid())).map_err(failed("give away", to))
}

fn make_dir(path: &Path, mode: u32) -> Result<(), ImageError> {
    DirBuilder::new().mode(mode).create(path).map_err(failed("make directory", path))?;
    set_mode(path, mode)
}

/// Set separately from the creation, where the umask applies.
fn set_mode(path: &Path, mode: u32) -> Result<(), ImageError> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed("set the mode of", path))
}

fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn failed<'a>(doing: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> ImageError + 'a {
    move |source| ImageError::Io { doing, path: path.to_owned(), source }
}

/// The image could not be built.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// `/bin` or a similar directory is not a link into `/usr`.
    #[error("`{}` is a directory of its own: the image `host` needs a machine with a merged /usr", path.display())]
    NotMerged {
        /// The first such directory.
        path: PathBuf,
    },
    /// The kernel returned an error.
    #[error("cannot {doing} `{}`", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// The error from the kernel.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_of_the_machine_are_not_taken() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("private")).expect("it can be made");
        for (name, mode) in [("open", 0o644), ("secret", 0o600), ("auth.conf", 0o644), ("private/key", 0o644)]
        {
            fs::write(from.join(name), name).expect("it can be written");
            set_mode(&from.join(name), mode).expect("its mode can be set");
        }
        set_mode(&from, 0o755).expect("its mode can be set");
        let to = dir.path().join("to");
        take_tree(&from, &to, Take::Copy).expect("it can be taken");
        let names: Vec<_> =
            fs::read_dir(&to).expect("it is there").map(|e| e.expect("readable").file_name()).collect();
        assert_eq!(names, ["open"]);
    }

    #[test]
    fn the_marker_that_stops_pip_is_found_in_every_python() {
        let usr = tempfile::tempdir().expect("a temporary directory");
        for name in ["lib/python3.11", "local/lib/python3.13", "lib/python3", "lib/perl"] {
            fs::create_dir_all(usr.path().join(name)).expect("it can be made");
        }
        for name in [
            "lib/python3.11/EXTERNALLY-MANAGED",
            "local/lib/python3.13/EXTERNALLY-MANAGED",
            "lib/perl/EXTERNALLY-MANAGED",
        ] {
            fs::write(usr.path().join(name), "").expect("it can be written");
            set_mode(&usr.path().join(name), 0o644).expect("its mode can be set");
        }
        let found = externally_managed(usr.path()).expect("it can be read");
        let expected = ["lib/python3.11/EXTERNALLY-MANAGED", "local/lib/python3.13/EXTERNALLY-MANAGED"];
        assert_eq!(found, expected.map(PathBuf::from));
    }

    #[test]
    fn sources_of_apt_lose_their_passwords() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let list = dir.path().join("a.list");
        fs::write(&list, "deb https://u:s3cret@deb.corp/ stable main\n").expect("it can be written");
        fs::write(dir.path().join("binary"), [0xff, 0xfe]).expect("it can be written");
        scrub_apt(dir.path()).expect("it can be changed");
        assert_eq!(fs::read_to_string(&list).expect("it is there"), "deb https://deb.corp/ stable main\n");
        assert!(!dir.path().join("binary").exists(), "what cannot be read is not taken");
        scrub_apt(&dir.path().join("nothing")).expect("that is fine");
    }

    #[test]
    fn accounts_of_packages_are_taken_and_those_of_people_are_not() {
        let user = |line| package_account(line, true);
        assert_eq!(
            user("postgres:x:106:113:PostgreSQL administrator,,,:/var/lib/postgresql:/bin/bash").as_deref(),
            Some("postgres:x:106:113::/nonexistent:/usr/sbin/nologin")
        );
        assert_eq!(user("ada:x:1000:1000:Ada Lovelace:/home/ada:/bin/zsh"), None);
        assert_eq!(user("root:x:0:0:root:/root:/bin/bash"), None);
        assert_eq!(user("nonsense"), None);
        assert_eq!(package_account("ssl-cert:x:112:ada,postgres", false).as_deref(), Some("ssl-cert:x:112:"));
        assert!(same_account("games:x:60:", "arcade:x:60:"));
    }
}
