//! Ranges of host ids, one per living sandbox, disjoint on the whole machine.
//!
//! Installations claim ranges in blocks. Each claim is a file that names the claimant, written under one lock for the machine, so
//! installations never share a range, and a claim outlives the daemon as its sandboxes do. A claim is void once its data
//! directory is gone or belongs to another installation, and no launcher of the installation lives: a daemon in a mount
//! namespace of its own may have a data directory that others cannot see. Claims are under `/run` and need not survive a reboot: no process does,
//! and files on disk carry guest ids.

use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use wire::InstallationId;

use crate::ns::lock::lock_file;
use crate::ns::slots::IDS;

/// Above what distributions hand out to people and to other container runtimes (systemd takes up to 0x6fff_ffff).
pub(crate) const FIRST: u32 = 0x7000_0000;
/// Ranges in one claim: enough for most installations, few enough for many of them.
const BLOCK: u32 = 64;
/// The first id after all ranges.
pub(crate) const END: u32 = FIRST + BLOCKS * BLOCK * IDS;
/// Blocks on a machine. The last id stays below 0xf000_0000, away from the special ones at the end.
pub(crate) const BLOCKS: u32 = 512;
/// Ids of installations themselves, one for each block: after all ranges, and still away from the special ones at the end. An
/// installation has that of its first block, so no two have the same one.
pub(crate) const OWN_IDS: std::ops::Range<u32> = END..END + BLOCKS;
/// Where claims are.
pub const CLAIMS: &str = "/run/shoal/ranges";

/// Another daemon holds the lock for as long as it takes to read some small files.
const LOCK_DEADLINE: Duration = Duration::from_secs(5);

/// The ranges of one installation.
pub struct Ranges {
    claims: PathBuf,
    claimant: Claimant,
    blocks: BTreeSet<u32>,
    free: BTreeSet<u32>,
    /// Locked for as long as this process lives.
    _alive: File,
}

/// Who claims: the id, and where it can be checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimant {
    /// The id.
    pub installation: InstallationId,
    /// The data directory, which holds a file `installation` with the id.
    pub data_dir: PathBuf,
}

impl Claimant {
    fn text(&self) -> String {
        format!("{} {}\n", self.installation, self.data_dir.display())
    }

    fn parse(text: &str) -> Option<Self> {
        let (id, dir) = text.trim_end_matches('\n').split_once(' ')?;
        Some(Self { installation: id.parse().ok()?, data_dir: dir.into() })
    }

    fn exists(&self) -> bool {
        fs::read_to_string(self.data_dir.join("installation"))
            .is_ok_and(|text| text.trim().parse() == Ok(self.installation))
    }
}

impl Ranges {
    /// The ranges that this installation has claimed before, without those `in_use`.
    pub fn open(claims: &Path, claimant: Claimant, in_use: &HashSet<u32>) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(claims)?;
        // Also if it existed: a process that can open the lock can hold it.
        fs::set_permissions(claims, fs::Permissions::from_mode(0o700))?;
        let alive = open_alive(claims, claimant.installation)?;
        // Shared: a new launcher may start while a walker of the old one still ends.
        flock(&alive, FlockOperation::NonBlockingLockShared)?;
        let (claims, blocks, free) = (claims.into(), BTreeSet::new(), BTreeSet::new());
        let mut ranges = Self { claims, claimant, blocks, free, _alive: alive };
        let _lock = ranges.lock()?;
        for block in 0..BLOCKS {
            if ranges.holder(block)?.as_ref() == Some(&ranges.claimant) {
                ranges.add(block, in_use);
            }
        }
        // Claims of living sandboxes may have been deleted; claim them again.
        for base in in_use {
            let block = (base.saturating_sub(FIRST) / IDS) / BLOCK;
            if *base >= FIRST && block < BLOCKS && !ranges.blocks.contains(&block) {
                ranges.claim(block)?;
                ranges.add(block, in_use);
            }
        }
        Ok(ranges)
    }

    /// A free range, by its first id. `None` when the machine has no more.
    pub fn take(&mut self) -> io::Result<Option<u32>> {
        if self.free.is_empty() {
            self.claim_another()?;
        }
        Ok(self.free.pop_first())
    }

    /// The id of the installation itself, which no sandbox and no other installation has. `None` when the machine has no more.
    pub fn own_id(&mut self) -> io::Result<Option<u32>> {
        if self.blocks.is_empty() {
            self.claim_another()?;
        }
        Ok(self.blocks.first().map(|block| OWN_IDS.start + block))
    }

    /// Claims a block that is free, if there is one.
    fn claim_another(&mut self) -> io::Result<()> {
        let _lock = self.lock()?;
        for block in 0..BLOCKS {
            let void = match self.holder(block)? {
                None => true,
                Some(holder) => {
                    holder != self.claimant
                        && !holder.exists()
                        && !is_alive(&self.claims, holder.installation)?
                }
            };
            if void {
                self.claim(block)?;
                self.add(block, &HashSet::new());
                break;
            }
        }
        Ok(())
    }

    /// Gives a range back.
    pub fn put_back(&mut self, base: u32) {
        self.free.insert(base);
    }

    /// Gives up every claim of an installation that ends.
    pub fn release_all(claims: &Path, installation: InstallationId) -> io::Result<()> {
        if !claims.exists() {
            return Ok(());
        }
        let _lock = lock(claims)?;
        for block in 0..BLOCKS {
            if read_holder(claims, block)?.is_some_and(|holder| holder.installation == installation) {
                fs::remove_file(claims.join(block.to_string()))?;
            }
        }
        match fs::remove_file(alive(claims, installation)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn add(&mut self, block: u32, in_use: &HashSet<u32>) {
        self.blocks.insert(block);
        let bases = (0..BLOCK).map(|n| FIRST + (block * BLOCK + n) * IDS);
        self.free.extend(bases.filter(|base| !in_use.contains(base)));
    }

    /// Written under another name first, so that a claim is never incomplete.
    fn claim(&self, block: u32) -> io::Result<()> {
        let unfinished = self.claims.join(format!("unfinished-{}", self.claimant.installation));
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&unfinished)?;
        file.write_all(self.claimant.text().as_bytes())?;
        fs::rename(unfinished, self.claims.join(block.to_string()))
    }

    fn holder(&self, block: u32) -> io::Result<Option<Claimant>> {
        read_holder(&self.claims, block)
    }

    fn lock(&self) -> io::Result<File> {
        lock(&self.claims)
    }
}

fn read_holder(claims: &Path, block: u32) -> io::Result<Option<Claimant>> {
    match fs::read_to_string(claims.join(block.to_string())) {
        Ok(text) => Ok(Claimant::parse(&text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// The file that a launcher of an installation holds locked.
fn alive(claims: &Path, installation: InstallationId) -> PathBuf {
    claims.join(format!("alive-{installation}"))
}

fn open_alive(claims: &Path, installation: InstallationId) -> io::Result<File> {
    let path = alive(claims, installation);
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Whether a launcher of an installation lives, wherever its data directory is.
fn is_alive(claims: &Path, installation: InstallationId) -> io::Result<bool> {
    let file = match File::open(alive(claims, installation)) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e),
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(false),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

fn lock(claims: &Path) -> io::Result<File> {
    lock_file(&claims.join("lock"), LOCK_DEADLINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a temporary directory"))
        }

        fn installation(&self, number: u64) -> Claimant {
            let installation = InstallationId::from_random(number);
            let data_dir = self.0.path().join(installation.to_string());
            fs::create_dir_all(&data_dir).expect("it can be made");
            fs::write(data_dir.join("installation"), installation.to_string()).expect("it can be written");
            Claimant { installation, data_dir }
        }

        fn open(&self, claimant: &Claimant, in_use: &[u32]) -> Ranges {
            let in_use = in_use.iter().copied().collect();
            Ranges::open(&self.0.path().join("claims"), claimant.clone(), &in_use).expect("claims open")
        }
    }

    fn take(ranges: &mut Ranges) -> u32 {
        ranges.take().expect("claims work").expect("there is room")
    }

    #[test]
    fn two_installations_never_share_a_range() {
        let machine = Machine::new();
        let (one, two) = (machine.installation(1), machine.installation(2));
        let (mut one, mut two) = (machine.open(&one, &[]), machine.open(&two, &[]));
        let mut all = HashSet::new();
        for _ in 0..150 {
            assert!(all.insert(take(&mut one)));
            assert!(all.insert(take(&mut two)));
        }
    }

    #[test]
    fn an_installation_has_an_id_of_its_own_that_stays() {
        let machine = Machine::new();
        let (one, two) = (machine.installation(1), machine.installation(2));
        let id = |ranges: &mut Ranges| ranges.own_id().expect("claims work").expect("there is room");
        let (mut first, mut second) = (machine.open(&one, &[]), machine.open(&two, &[]));
        let (a, b) = (id(&mut first), id(&mut second));
        assert_ne!(a, b);
        for _ in 0..BLOCK + 1 {
            take(&mut first);
        }
        assert_eq!(id(&mut first), a, "further blocks change nothing");
        assert_eq!(id(&mut machine.open(&one, &[])), a, "nor does a restart");
        assert!([a, b].iter().all(|id| OWN_IDS.contains(id)));
        let highest = FIRST + (BLOCKS * BLOCK - 1) * IDS + (IDS - 1);
        assert!(highest < OWN_IDS.start && OWN_IDS.end < 0xffff_0000, "no sandbox has such an id");
    }

    #[test]
    fn what_is_in_use_after_a_restart_is_not_given_again() {
        let machine = Machine::new();
        let one = machine.installation(1);
        let used = take(&mut machine.open(&one, &[]));
        let mut again = machine.open(&one, &[used]);
        let taken: HashSet<u32> = (0..100).map(|_| take(&mut again)).collect();
        assert!(!taken.contains(&used));
    }

    #[test]
    fn a_claim_of_a_data_directory_that_is_gone_is_void() {
        let machine = Machine::new();
        let (one, two) = (machine.installation(1), machine.installation(2));
        let base = take(&mut machine.open(&one, &[]));
        fs::remove_dir_all(&one.data_dir).expect("it can be removed");
        assert_eq!(take(&mut machine.open(&two, &[])), base);
    }

    #[test]
    fn a_claim_of_a_living_launcher_is_not_void_although_its_directory_cannot_be_seen() {
        let machine = Machine::new();
        let (one, two) = (machine.installation(1), machine.installation(2));
        let mut living = machine.open(&one, &[]);
        let base = take(&mut living);
        fs::remove_dir_all(&one.data_dir).expect("it can be removed");
        assert_ne!(take(&mut machine.open(&two, &[])), base);
        drop(living);
        let third = machine.installation(3);
        assert_eq!(take(&mut machine.open(&third, &[])), base, "it has ended");
    }

    #[test]
    fn a_released_installation_leaves_no_claim() {
        let machine = Machine::new();
        let one = machine.installation(1);
        take(&mut machine.open(&one, &[]));
        let claims = machine.0.path().join("claims");
        Ranges::release_all(&claims, one.installation).expect("it releases");
        let left: Vec<_> =
            fs::read_dir(&claims).expect("readable").map(|e| e.expect("readable").file_name()).collect();
        assert_eq!(left, ["lock"]);
    }
}
