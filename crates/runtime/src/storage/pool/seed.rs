//! Creates an empty btrfs, without any program of the host.
//!
//! `seed.txt` holds what `mkfs.btrfs` writes to an image of 64 MiB: a super block and nine tree blocks. Every pool gets
//! these bytes with new ids, so that the kernel and its `/sys/fs/btrfs/<id>` can distinguish two pools. The kernel then
//! grows the file system to the size of the file. `cargo xtask btrfs-seed` creates `seed.txt`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const SEED: &str = include_str!("seed.txt");

/// Where the super block is.
const SUPER_OFFSET: u64 = 64 << 10;
/// How long it is.
const SUPER_BYTES: usize = 4096;
/// A block of a tree.
const NODE_BYTES: usize = 16 << 10;
/// A checksum covers everything in its block but itself and the padding after it.
const SUMMED_FROM: usize = 32;
/// The id of the file system, in every block.
const FILE_SYSTEM_AT: usize = 0x20;
/// The id of the device, in the super block: `dev_item` at 0xc9, `uuid` in it at 0x42.
const DEVICE_AT: usize = 0x10b;
/// The id of the tree of chunks, in every tree block.
const CHUNKS_AT: usize = 0x40;

type Id = [u8; 16];

/// The ids that distinguish file systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ids {
    file_system: Id,
    device: Id,
    chunks: Id,
}

impl Ids {
    fn random() -> io::Result<Self> {
        let id = || {
            let mut bits = Id::default();
            getrandom::fill(&mut bits).map_err(io::Error::other)?;
            // A random UUID, RFC 9562.
            bits[6] = bits[6] & 0x0f | 0x40;
            bits[8] = bits[8] & 0x3f | 0x80;
            io::Result::Ok(bits)
        };
        Ok(Self { file_system: id()?, device: id()?, chunks: id()? })
    }

    /// The ids in a set of blocks.
    fn of(blocks: &BTreeMap<u64, Vec<u8>>) -> Self {
        let id = |bytes: &[u8], at: usize| Id::try_from(&bytes[at..at + 16]).expect("sixteen bytes");
        let first = &blocks[&SUPER_OFFSET];
        let (_, node) = blocks.range(SUPER_OFFSET + 1..).next().expect("the seed has tree blocks");
        Self {
            file_system: id(first, FILE_SYSTEM_AT),
            device: id(first, DEVICE_AT),
            chunks: id(node, CHUNKS_AT),
        }
    }

    fn all(&self) -> [Id; 3] {
        [self.file_system, self.device, self.chunks]
    }
}

/// Writes an empty file system with new ids to the beginning of a file of zeros.
pub(super) fn write(file: &File) -> io::Result<()> {
    let mut blocks = seed();
    renew(&mut blocks, &Ids::random()?);
    blocks.iter().try_for_each(|(offset, bytes)| file.write_all_at(bytes, *offset))
}

/// The blocks of the seed by their offset.
fn seed() -> BTreeMap<u64, Vec<u8>> {
    let mut blocks = BTreeMap::new();
    for line in SEED.lines().filter(|line| !line.starts_with('#')) {
        let (offset, bytes) = stretch(line).expect("seed.txt is made by `cargo xtask btrfs-seed`");
        let start = offset / NODE_BYTES as u64 * NODE_BYTES as u64;
        let length = if start == SUPER_OFFSET { SUPER_BYTES } else { NODE_BYTES };
        let block = blocks.entry(start).or_insert_with(|| vec![0; length]);
        let at = (offset - start) as usize;
        block[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    blocks
}

/// One line of the seed: an offset, and the bytes there.
fn stretch(line: &str) -> Option<(u64, Vec<u8>)> {
    let (offset, hex) = line.split_once(' ')?;
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = hex.as_bytes().chunks(2).map(byte).collect();
    Some((u64::from_str_radix(offset, 16).ok()?, bytes?))
}

/// Replaces every id, and computes the checksums again.
fn renew(blocks: &mut BTreeMap<u64, Vec<u8>>, new: &Ids) {
    let old = Ids::of(blocks);
    for block in blocks.values_mut() {
        for (old, new) in old.all().iter().zip(new.all()) {
            let mut from = 0;
            while let Some(found) = block[from..].windows(old.len()).position(|window| window == old) {
                let at = from + found;
                block[at..at + new.len()].copy_from_slice(&new);
                from = at + new.len();
            }
        }
        let sum = crc32c(&block[SUMMED_FROM..]);
        block[..4].copy_from_slice(&sum.to_le_bytes());
    }
}

/// The checksum of btrfs: CRC-32 with the polynomial of Castagnoli. Runs over 160 KiB once per pool, so no table is needed.
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut sum = u32::MAX;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = if sum & 1 == 1 { sum >> 1 ^ POLYNOMIAL } else { sum >> 1 };
        }
    }
    !sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets of an id in a block.
    fn places(block: &[u8], id: &Id) -> Vec<usize> {
        let found = block.windows(id.len()).enumerate().filter(|(_, window)| window == id);
        found.map(|(at, _)| at).collect()
    }

    fn check_sums(blocks: &BTreeMap<u64, Vec<u8>>) {
        for (offset, block) in blocks {
            let sum = u32::from_le_bytes(block[..4].try_into().expect("four bytes"));
            assert_eq!(sum, crc32c(&block[SUMMED_FROM..]), "the block at {offset:#x}");
        }
    }

    #[test]
    fn the_checksum_is_that_of_castagnoli() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn the_seed_is_a_whole_file_system() {
        let blocks = seed();
        let first = &blocks[&SUPER_OFFSET];
        assert_eq!(&first[0x40..0x48], b"_BHRfS_M");
        assert_eq!(&first[0x12b..0x131], b"shoal\0");
        assert_eq!(
            blocks.len(),
            10,
            "the super block, and trees: roots, chunks, extents, devices, files, sums, space, ids, moves"
        );
        let number =
            |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        for (offset, node) in blocks.iter().filter(|(offset, _)| **offset != SUPER_OFFSET) {
            assert_eq!(number(node, 48), *offset, "a tree block says where it is");
        }
        for root in [number(first, 0x50), number(first, 0x58)] {
            assert!(blocks.contains_key(&root), "the super block names the tree at {root:#x}");
        }
        let ids = Ids::of(&blocks);
        for (offset, block) in &blocks {
            assert_eq!(
                places(block, &ids.file_system).first(),
                Some(&FILE_SYSTEM_AT),
                "the block at {offset:#x}"
            );
        }
    }

    #[test]
    fn new_ids_replace_the_old_ones_everywhere_and_nothing_else_changes() {
        let before = seed();
        let old = Ids::of(&before);
        for _ in 0..64 {
            let new = Ids::random().expect("the kernel has random bits");
            let mut after = before.clone();
            renew(&mut after, &new);
            assert_eq!(Ids::of(&after), new);
            check_sums(&after);
            for (offset, block) in &after {
                // Put the old values back: the result must be the seed.
                let mut restored = block.clone();
                for (old, new) in old.all().iter().zip(new.all()) {
                    assert!(places(block, old).is_empty(), "an old id is left at {offset:#x}");
                    for at in places(block, &new) {
                        restored[at..at + 16].copy_from_slice(old);
                    }
                }
                restored[..4].copy_from_slice(&before[offset][..4]);
                assert!(restored == before[offset], "other bytes changed at {offset:#x}");
            }
        }
    }

    #[test]
    fn what_is_written_is_what_was_made() {
        let file = tempfile::tempfile().expect("a temporary file");
        write(&file).expect("it can be written");
        let mut written = seed();
        for (offset, block) in &mut written {
            file.read_exact_at(block, *offset).expect("it can be read");
        }
        check_sums(&written);
        assert_ne!(Ids::of(&written), Ids::of(&seed()));
    }

    #[test]
    fn btrfs_progs_find_nothing_wrong_with_it() {
        let checker = "/usr/bin/btrfs";
        if !std::path::Path::new(checker).exists() {
            eprintln!("skipped: btrfs-progs is not installed; `cargo xtask test` installs it");
            return;
        }
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        write(file.as_file()).expect("it can be written");
        file.as_file().set_len(64 << 20).expect("it can be made longer");
        let check =
            std::process::Command::new(checker).args(["check", "--readonly"]).arg(file.path()).output();
        let check = check.expect("it starts");
        let said =
            String::from_utf8_lossy(&check.stderr).into_owned() + &String::from_utf8_lossy(&check.stdout);
        assert!(check.status.success() && said.contains("no error found"), "{said}");
    }
}
