//! `cargo xtask btrfs-seed`: makes the data file that Shoal creates its storage pools from.
//!
//! Runs `mkfs.btrfs` once on a small sparse file and writes down what is in it, as text that a person can review.
//! What a pool does with it is the business of `runtime::storage::pool::seed`.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Where the data file is, below the root of the repository.
const SEED: &str = "crates/runtime/src/storage/pool/seed.txt";
/// As small as `mkfs.btrfs` allows in whole powers of two. The second copy of the super block would be at 64 MiB, so there is none.
const IMAGE_BYTES: u64 = 64 << 20;
/// The super block, and how long it is.
const SUPER: (usize, usize) = (64 << 10, 4096);
/// A block of a tree.
const NODE: usize = 16 << 10;
/// Earlier roots, for repairs, in the super block: they name blocks that are left out.
const BACKUP_ROOTS: std::ops::Range<usize> = 0xb2b..0xb2b + 4 * 168;
/// Bytes of one line.
const LINE: usize = 48;
/// So many zeros in a row are not written down.
const GAP: usize = 8;

const HEADER: &str = "\
# An empty btrfs of 64 MiB, as `mkfs.btrfs` makes it: the seed of every storage pool of kind `loop`.
#
# Shoal writes these bytes to a sparse file, gives them ids of their own, and lets the kernel grow the file system to the size of
# the pool. So a machine needs no btrfs-progs to have disk limits and snapshots. See seed.rs beside this file.
#
# Each line: the offset in the image in hexadecimal, then the bytes from there on. All other bytes are zero. Only the super block
# and the tree blocks that are in use are here.
#
# Made by `cargo xtask btrfs-seed`, which also writes this header. Do not edit by hand: the blocks carry checksums.
";

/// Makes the data file again.
pub fn make() -> Result<()> {
    let directory = std::env::temp_dir().join(format!("shoal-btrfs-seed-{}", std::process::id()));
    fs::create_dir(&directory).with_context(|| format!("cannot create `{}`", directory.display()))?;
    let image = formatted(&directory.join("image"));
    fs::remove_dir_all(&directory).with_context(|| format!("cannot remove `{}`", directory.display()))?;
    let path = super::root().join(SEED);
    let text = HEADER.to_owned() + &lines(&image?)?;
    fs::write(&path, text).with_context(|| format!("cannot write `{}`", path.display()))
}

fn formatted(path: &Path) -> Result<Vec<u8>> {
    let file = File::create_new(path).with_context(|| format!("cannot create `{}`", path.display()))?;
    file.set_len(IMAGE_BYTES).context("cannot make a sparse file")?;
    let mut program = Command::new("mkfs.btrfs");
    program.args(["-q", "-K", "-L", "shoal", "-s", "4096", "-n", "16384", "-m", "single", "-d", "single"]);
    // By name, so that another version of mkfs.btrfs makes the same: what every kernel since 5.14 can mount.
    program.args(["--csum", "crc32c", "-O", "no-holes", "-R", "free-space-tree"]).arg(path);
    let status =
        program.stdin(Stdio::null()).stdout(Stdio::null()).status().context("cannot start mkfs.btrfs")?;
    ensure!(status.success(), "cannot run mkfs.btrfs: {status}");
    fs::read(path).context("cannot read the image")
}

/// Everything in use, as lines.
fn lines(image: &[u8]) -> Result<String> {
    let (start, length) = SUPER;
    let mut block = image[start..start + length].to_vec();
    ensure!(&block[0x40..0x48] == b"_BHRfS_M", "mkfs.btrfs made no super block");
    block[BACKUP_ROOTS].fill(0);
    let (root, chunks) = (number(&block, 0x50), number(&block, 0x58));
    let mut trees = vec![root, chunks];
    trees.extend(roots(node(image, root)?)?);
    trees.sort_unstable();
    trees.dedup();
    let mut text = String::new();
    write_down(&mut text, start, &block);
    for tree in trees {
        let node = node(image, tree)?;
        ensure!(node[100] == 0, "a tree at {tree:#x} has more than one block: use a smaller image");
        write_down(&mut text, usize::try_from(tree)?, node);
    }
    Ok(text)
}

/// A tree block by its address, which is also its place in a new image with one device.
fn node(image: &[u8], at: u64) -> Result<&[u8]> {
    let start = usize::try_from(at)?;
    let node = image.get(start..start + NODE).with_context(|| format!("no tree block at {at:#x}"))?;
    ensure!(number(node, 48) == at, "the tree block at {at:#x} is elsewhere");
    Ok(node)
}

/// The addresses of all trees that a leaf of the tree of roots names (`struct btrfs_leaf`, `struct btrfs_root_item`).
fn roots(leaf: &[u8]) -> Result<Vec<u64>> {
    const ROOT_ITEM: u8 = 132;
    let items = u32::from_le_bytes(leaf[96..100].try_into()?) as usize;
    let mut found = Vec::new();
    for item in leaf[101..].chunks_exact(25).take(items) {
        let at = 101 + u32::from_le_bytes(item[17..21].try_into()?) as usize;
        if item[8] == ROOT_ITEM {
            found.push(number(leaf, at + 176));
        }
    }
    Ok(found)
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Writes what is not zero, a line for each stretch.
fn write_down(text: &mut String, start: usize, bytes: &[u8]) {
    let mut at = 0;
    while let Some(first) = bytes[at..].iter().position(|byte| *byte != 0) {
        let begin = at + first;
        let rest = &bytes[begin..bytes.len().min(begin + LINE)];
        let gap = rest.windows(GAP).position(|window| window.iter().all(|byte| *byte == 0));
        let stretch = &rest[..gap.unwrap_or(rest.len())];
        let hex: String = stretch.iter().map(|byte| format!("{byte:02x}")).collect();
        *text += &format!("{:x} {hex}\n", start + begin);
        at = begin + stretch.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_not_zero_is_written_down() {
        let mut bytes = vec![0; 200];
        bytes[3] = 0xab;
        bytes[5] = 1;
        bytes[100..160].fill(7);
        let mut text = String::new();
        write_down(&mut text, 0x1000, &bytes);
        assert_eq!(text, format!("1003 ab0001\n1064 {}\n1094 {}\n", "07".repeat(48), "07".repeat(12)));
    }
}
