//! What people install: a Debian package, a tarball with `install.sh`, and a Python wheel, with their checksums.
//!
//! Owns what is in each and under which names. The same commit and program give the same bytes: times are those of the
//! commit, owners are root, and names are sorted.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{cargo, printed, root, step};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// What builds the wheel, pinned, in an environment of its own.
const WHEEL_TOOLS: [&str; 2] = ["hatchling==1.33.0", "pip==26.1"];
/// Where shells look for completions, below a prefix; and what each is called in the tarball.
const COMPLETIONS: [(&str, &str, &str); 3] = [
    ("bash", "share/bash-completion/completions/shoal", "shoal.bash"),
    ("zsh", "share/zsh/site-functions/_shoal", "_shoal"),
    ("fish", "share/fish/vendor_completions.d/shoal.fish", "shoal.fish"),
];
/// Pages at the root of the repository that go with the documents.
const PAGES: [&str; 4] = ["README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"];
/// A glibc before this one has nothing that any program of today asks for.
const GLIBC_MINOR_MIN: u32 = 17;

/// What to make, and from what.
#[derive(Debug, PartialEq, Eq)]
struct Wish {
    /// A program that was built already; a release build if there is none.
    program: Option<PathBuf>,
    out: PathBuf,
    wheel: bool,
    /// Compress little, for tests.
    quick: bool,
}

impl Wish {
    fn parse(words: &[String]) -> Result<Self> {
        let mut wish = Self { program: None, out: root().join("target/dist"), wheel: true, quick: false };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut path = || {
                let path = words.next().with_context(|| format!("{word} needs a path"))?;
                std::path::absolute(path).with_context(|| format!("cannot find `{path}`"))
            };
            match word.as_str() {
                "--program" => wish.program = Some(path()?),
                "--out" => wish.out = path()?,
                "--no-wheel" => wish.wheel = false,
                "--quick" => wish.quick = true,
                other => bail!(
                    "`{other}` is not an option of dist; there are: --program, --out, --no-wheel, --quick"
                ),
            }
        }
        Ok(wish)
    }
}

/// Makes everything. The last line is where it is.
pub fn make(words: &[String]) -> Result<()> {
    let wish = Wish::parse(words)?;
    let built = match &wish.program {
        Some(program) => program.clone(),
        None => {
            let mut build = cargo();
            build.args(["build", "--release", "--locked", "--package", "shoal", "--bin", "shoal"]);
            step("build the program", build)?;
            root().join("target/release/shoal")
        }
    };
    fs::create_dir_all(&wish.out).with_context(|| format!("cannot create `{}`", wish.out.display()))?;
    let stage = Stage::new(wish.out.join("stage"), &built)?;
    let mut made = vec![tarball(&wish, &stage)?, deb(&wish, &stage)?];
    if wish.wheel {
        made.push(wheel(&wish, &stage)?);
    }
    fs::remove_dir_all(&stage.place).context("cannot remove the files in between")?;
    made.sort();
    let sums = printed(Command::new("sha256sum").current_dir(&wish.out).args(&made))?;
    fs::write(wish.out.join("SHA256SUMS"), sums).context("cannot write SHA256SUMS")?;
    for name in &made {
        let size = fs::metadata(wish.out.join(name)).with_context(|| format!("cannot look at {name}"))?.len();
        println!("xtask: {name}: {:.1} MiB", size as f64 / f64::from(1 << 20));
    }
    println!("xtask: all of it, and SHA256SUMS, is in {}", wish.out.display());
    Ok(())
}

/// The program as it is shipped, and what is made from it once for all packages.
struct Stage {
    place: PathBuf,
    program: PathBuf,
    machine: Machine,
    /// Seconds since 1970 of the commit.
    epoch: String,
}

/// Where the program runs, in the words of each package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Machine {
    /// As `uname -m` says it.
    processor: &'static str,
    /// As Debian does.
    debian: &'static str,
    /// The minor version of the C library that it needs, of version 2.
    glibc_minor: u32,
}

impl Stage {
    fn new(place: PathBuf, built: &Path) -> Result<Self> {
        if place.exists() {
            fs::remove_dir_all(&place).context("cannot remove what an earlier run left")?;
        }
        fs::create_dir_all(&place).with_context(|| format!("cannot create `{}`", place.display()))?;
        let program = place.join("shoal");
        let mut strip = Command::new("strip");
        // Names of functions are for debuggers; a panic says its file and line without them.
        strip.arg("--strip-all").arg("-o").arg(&program).arg(built);
        step("strip the program", strip)?;
        let bytes = fs::read(&program).with_context(|| format!("cannot read `{}`", program.display()))?;
        let machine = machine(&bytes)?;
        let epoch = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(epoch) => epoch,
            Err(_) => {
                let mut git = Command::new("git");
                git.args(["log", "-1", "--format=%ct"]).current_dir(root());
                String::from_utf8(printed(&mut git)?).context("git printed no text")?.trim().to_owned()
            }
        };
        Ok(Self { place, program, machine, epoch })
    }

    fn completions(&self, shell: &str) -> Result<Vec<u8>> {
        printed(Command::new(&self.program).args(["completions", shell]))
    }
}

/// Reads what machine a program is for.
fn machine(program: &[u8]) -> Result<Machine> {
    let (processor, debian) = match program.get(..20) {
        Some(head) if head.starts_with(b"\x7fELF\x02") => match u16::from_le_bytes([head[18], head[19]]) {
            62 => ("x86_64", "amd64"),
            183 => ("aarch64", "arm64"),
            other => bail!("the program is for an unknown processor, number {other}"),
        },
        _ => bail!("the program is not a 64-bit program for Linux"),
    };
    Ok(Machine { processor, debian, glibc_minor: glibc_minor(program) })
}

/// The newest version of the C library that a program names: versions are in it as text, `GLIBC_2.34`.
fn glibc_minor(program: &[u8]) -> u32 {
    const NAME: &[u8] = b"GLIBC_2.";
    let mut newest = GLIBC_MINOR_MIN;
    for at in 0..program.len().saturating_sub(NAME.len()) {
        if !program[at..].starts_with(NAME) {
            continue;
        }
        let digits = program[at + NAME.len()..].iter().take_while(|byte| byte.is_ascii_digit());
        let number = String::from_utf8(digits.copied().collect()).ok().and_then(|text| text.parse().ok());
        newest = newest.max(number.unwrap_or(0));
    }
    newest
}

/// `shoal-0.1.0-linux-x86_64.tar.gz`. Returns its name.
fn tarball(wish: &Wish, stage: &Stage) -> Result<String> {
    let name = format!("shoal-{VERSION}-linux-{}", stage.machine.processor);
    let tree = stage.place.join(&name);
    put(&stage.program, &tree.join("bin/shoal"), 0o755)?;
    put(&root().join("dist/install.sh"), &tree.join("install.sh"), 0o755)?;
    put(&root().join("dist/shoal.service"), &tree.join("shoal.service"), 0o644)?;
    for (shell, _, file) in COMPLETIONS {
        write(&stage.completions(shell)?, &tree.join("completions").join(file), 0o644)?;
    }
    documents(&tree.join("doc"))?;
    // For install.sh, beside the sum of the whole.
    let files = files(&tree)?;
    let sums = printed(Command::new("sha256sum").current_dir(&tree).args(&files))?;
    write(&sums, &tree.join("SHA256SUMS"), 0o644)?;
    let whole = format!("{name}.tar.gz");
    let gzip = if wish.quick { "gzip -n -1" } else { "gzip -n -9" };
    let mut tar = Command::new("tar");
    tar.args(["--create", "--sort=name", "--format=gnu", "--owner=0", "--group=0", "--numeric-owner"]);
    tar.arg(format!("--mtime=@{}", stage.epoch)).arg(format!("--use-compress-program={gzip}"));
    tar.arg("--file").arg(wish.out.join(&whole)).arg("-C").arg(&stage.place).arg(&name);
    step("make the tarball", tar)?;
    Ok(whole)
}

/// `shoal_0.1.0_amd64.deb`, by Debian's own tool. Returns its name.
fn deb(wish: &Wish, stage: &Stage) -> Result<String> {
    let tree = stage.place.join("deb");
    put(&stage.program, &tree.join("usr/bin/shoal"), 0o755)?;
    let unit = fs::read_to_string(root().join("dist/shoal.service")).context("cannot read the unit")?;
    let unit = unit.replace("/usr/local/", "/usr/");
    write(unit.as_bytes(), &tree.join("usr/lib/systemd/system/shoal.service"), 0o644)?;
    for (shell, place, _) in COMPLETIONS {
        // Debian has a directory of its own for packages.
        let place = place.replace("zsh/site-functions", "zsh/vendor-completions");
        write(&stage.completions(shell)?, &tree.join("usr").join(place), 0o644)?;
    }
    let doc = tree.join("usr/share/doc/shoal");
    documents(&doc)?;
    fs::rename(doc.join("LICENSE"), doc.join("copyright")).context("cannot rename the licence")?;
    let bytes: u64 =
        files(&tree)?.iter().map(|file| fs::metadata(tree.join(file)).map_or(0, |meta| meta.len())).sum();
    let control =
        fs::read_to_string(root().join("dist/deb/control")).context("cannot read the control file")?;
    let control = control
        .replace("@VERSION@", VERSION)
        .replace("@ARCHITECTURE@", stage.machine.debian)
        .replace("@KIB@", &bytes.div_ceil(1024).to_string())
        .replace("@GLIBC@", &format!("2.{}", stage.machine.glibc_minor));
    write(control.as_bytes(), &tree.join("DEBIAN/control"), 0o644)?;
    for script in ["postinst", "prerm", "postrm"] {
        put(&root().join("dist/deb").join(script), &tree.join("DEBIAN").join(script), 0o755)?;
    }
    let name = format!("shoal_{VERSION}_{}.deb", stage.machine.debian);
    let mut build = Command::new("dpkg-deb");
    build.env("SOURCE_DATE_EPOCH", &stage.epoch).arg("--root-owner-group");
    build.args(if wish.quick { ["-Zgzip", "-z1"] } else { ["-Zxz", "-z6"] });
    build.arg("--build").arg(&tree).arg(wish.out.join(&name));
    step("make the Debian package", build)?;
    Ok(name)
}

/// The wheel with the program inside. Returns its name.
fn wheel(wish: &Wish, stage: &Stage) -> Result<String> {
    let environment = root().join("target/python/dist");
    let python = environment.join("bin/python");
    if !python.exists() {
        let mut make = Command::new("/usr/bin/python3");
        make.args(["-m", "venv"]).arg(&environment);
        step("make an environment for the wheel", make)?;
    }
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(WHEEL_TOOLS);
    step("install what builds the wheel", install)?;
    let place = stage.place.join("wheel");
    let mut build = Command::new(&python);
    build.args(["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]);
    build.arg(&place).arg(root().join("sdk/python"));
    build.env("SHOAL_WHEEL_BINARY", &stage.program).env("SOURCE_DATE_EPOCH", &stage.epoch);
    step("make the wheel", build)?;
    let [name] = &files(&place)?[..] else { bail!("the build made more than one wheel") };
    fs::rename(place.join(name), wish.out.join(name)).context("cannot move the wheel")?;
    Ok(name.clone())
}

/// The documents, with the pages at the root of the repository. Links between them still lead somewhere.
fn documents(to: &Path) -> Result<()> {
    for page in PAGES {
        put(&root().join(page), &to.join(page), 0o644)?;
    }
    let from = root().join("docs");
    for file in files(&from)? {
        put(&from.join(&file), &to.join("docs").join(&file), 0o644)?;
    }
    Ok(())
}

/// All files below a directory, by their paths in it, sorted.
fn files(directory: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(next) = left.pop() {
        let entries = fs::read_dir(&next).with_context(|| format!("cannot read `{}`", next.display()))?;
        for entry in entries {
            let path = entry.with_context(|| format!("cannot read `{}`", next.display()))?.path();
            if path.is_dir() {
                left.push(path);
            } else if let Some(name) =
                path.strip_prefix(directory).ok().map(Path::as_os_str).and_then(OsStr::to_str)
            {
                found.push(name.to_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

fn put(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("cannot read `{}`", from.display()))?;
    write(&bytes, to, mode)
}

/// Writes a file with its directories, whatever the umask is.
fn write(bytes: &[u8], to: &Path, mode: u32) -> Result<()> {
    let doing = || format!("cannot write `{}`", to.display());
    let directory = to.parent().with_context(doing)?;
    fs::create_dir_all(directory).with_context(doing)?;
    fs::write(to, bytes).with_context(doing)?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(doing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_says_what_it_needs() {
        let mut program = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0".to_vec();
        program.extend(b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.17\0GLIBC_PRIVATE\0");
        let expected = Machine { processor: "x86_64", debian: "amd64", glibc_minor: 34 };
        assert_eq!(machine(&program).expect("a program"), expected);
        program[18] = 183;
        assert_eq!(machine(&program).expect("a program").debian, "arm64");
        assert!(machine(b"#!/bin/sh\n").is_err());
    }

    #[test]
    fn options_are_read() {
        let parse =
            |words: &[&str]| Wish::parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        let wish =
            parse(&["--program", "/x/shoal", "--out", "/y", "--no-wheel", "--quick"]).expect("it is valid");
        let expected = Wish { program: Some("/x/shoal".into()), out: "/y".into(), wheel: false, quick: true };
        assert_eq!(wish, expected);
        assert!(parse(&["--out"]).is_err());
        assert!(parse(&["--fast"]).is_err());
    }
}
