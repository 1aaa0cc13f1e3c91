//! Names in the staging directory: where the launcher, and whatever it clones, attaches layers before they become one tree.

use std::io;
use std::os::fd::OwnedFd;

use rustix::mount::fsconfig_set_string;

/// The staging directory's own name for the new root.
pub const STAGE_ROOT: &str = "root";
/// The staging directory's own name for the writable tree.
pub const STAGE_WRITABLE: &str = "w";
/// An empty file in the staging directory, to cover others with.
pub const STAGE_EMPTY_FILE: &str = "empty-file";
/// An empty directory in the staging directory, to cover others with.
pub const STAGE_EMPTY_DIRECTORY: &str = "empty-directory";
/// Layers that the staging directory has names for.
pub const STAGE_LAYERS: u8 = wire::launch::LAYERS_MAX as u8;

/// What fsconfig(2) takes as one text.
const OPTION_MAX: usize = 255;

/// The staging directory's own name for a layer. Short, since all of an overlay's layers should fit into one option; made of letters and
/// digits, since guests read it in `/proc/mounts`.
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

/// The layers of an overlay, the uppermost first, in the way of its option.
pub fn lower_layers(layers: &[u8]) -> String {
    layers.iter().map(|number| layer_name(*number)).collect::<Vec<_>>().join(":")
}

/// Tells an overlay in the making what lies below. More than about a hundred layers do not fit into one option; for these there is
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
