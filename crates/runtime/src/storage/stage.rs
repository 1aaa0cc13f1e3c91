//! Names in the staging directory: where the launcher, and whatever it clones, attaches layers before they become one tree.

use std::io;
use std::os::fd::OwnedFd;

use rustix::mount::fsconfig_set_string;

/// Name of the new root in the staging directory.
pub const STAGE_ROOT: &str = "root";
/// Name of the writable tree in the staging directory.
pub const STAGE_WRITABLE: &str = "w";
/// An empty file in the staging directory, to cover others with.
pub const STAGE_EMPTY_FILE: &str = "empty-file";
/// An empty directory in the staging directory, to cover others with.
pub const STAGE_EMPTY_DIRECTORY: &str = "empty-directory";
/// Number of layers that the staging directory has names for.
pub const STAGE_LAYERS: u8 = (wire::launch::LAYERS_MAX + wire::launch::SNAPSHOT_LAYERS_MAX) as u8;

/// The longest text that fsconfig(2) accepts.
const OPTION_MAX: usize = 255;

/// Name of a layer in the staging directory. Short, since all layers of an overlay should fit into one option; made
/// of letters and digits, since guests can read it in `/proc/mounts`.
pub fn layer_name(number: u8) -> String {
    // Without `w`, which is `STAGE_WRITABLE`.
    const LETTERS: &[u8; 61] = b"0123456789abcdefghijklmnopqrstuvxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    assert!(number < STAGE_LAYERS, "a plan has at most as many layers as there are names");
    let letter = |number: usize| char::from(LETTERS[number % LETTERS.len()]);
    match usize::from(number) {
        short @ 0..61 => letter(short).into(),
        long => format!("{}{}", letter(long / LETTERS.len()), letter(long)),
    }
}

/// The layers of an overlay, the uppermost first, in the format of its option.
pub fn lower_layers(layers: &[u8]) -> String {
    layers.iter().map(|number| layer_name(*number)).collect::<Vec<_>>().join(":")
}

/// Sets the lower layers of an overlay. More than about a hundred do not fit into one option; for these there is
/// another one (Linux 6.7).
pub fn set_lower_layers(context: &OwnedFd, lower: &str) -> io::Result<()> {
    if lower.len() <= OPTION_MAX {
        return Ok(fsconfig_set_string(context, "lowerdir", lower)?);
    }
    Ok(lower.split(':').try_for_each(|layer| fsconfig_set_string(context, "lowerdir+", layer))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_has_a_name_of_its_own_that_is_nothing_elses() {
        let mut names: Vec<String> = (0..STAGE_LAYERS).map(layer_name).collect();
        names.extend(
            [STAGE_ROOT, STAGE_WRITABLE, STAGE_EMPTY_FILE, STAGE_EMPTY_DIRECTORY, "dev", "sys"]
                .map(String::from),
        );
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
