//! The keys that encrypt secrets at rest: ChaCha20-Poly1305, in a file that only the daemon can read.
//!
//! The file has one key per line, `ID HEX`. The last one encrypts; the others only decrypt rows that still name them.
//! A value is bound to the id of its secret, so that values cannot be swapped between rows.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::Zeroizing;

use crate::model::random::random;

/// In the data directory.
const FILE: &str = "secrets.key";
/// Bytes of a key.
const KEY_BYTES: usize = 32;

/// All keys of an installation.
pub(crate) struct Keyring {
    keys: Vec<(String, LessSafeKey)>,
}

impl Keyring {
    /// Reads the keys, and makes the first one if there is none. Blocks.
    pub fn open(data_dir: &Path) -> io::Result<Self> {
        let path = data_dir.join(FILE);
        match fs::read_to_string(&path) {
            Ok(text) => {
                let text = Zeroizing::new(text);
                if fs::metadata(&path)?.permissions().mode() & 0o077 != 0 {
                    let why = format!("`{}` must be readable by its owner alone (mode 0600)", path.display());
                    return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
                }
                Self::parse(&text).ok_or_else(|| {
                    io::Error::new(io::ErrorKind::InvalidData, format!("`{}` holds no keys", path.display()))
                })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let line = Zeroizing::new(fresh());
                let next = path.with_extension("new");
                match fs::remove_file(&next) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
                let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&next)?;
                file.write_all(line.as_bytes())?;
                file.sync_all()?;
                fs::rename(&next, &path)?;
                Self::parse(&line).ok_or_else(|| io::ErrorKind::InvalidData.into())
            }
            Err(error) => Err(error),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let key = |line: &str| {
            let (id, hex) = line.split_once(' ')?;
            let bytes = Zeroizing::new(from_hex(hex.trim())?);
            let key = UnboundKey::new(&CHACHA20_POLY1305, &bytes).ok()?;
            Some((id.to_owned(), LessSafeKey::new(key)))
        };
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let keys = lines.map(key).collect::<Option<Vec<_>>>()?;
        (!keys.is_empty()).then_some(Self { keys })
    }

    /// Encrypts a value: the id of the key, and nonce, text and tag.
    pub fn seal(&self, of: u128, value: &[u8]) -> (String, Vec<u8>) {
        let (id, key) = self.keys.last().expect("a keyring has at least one key");
        let nonce: [u8; NONCE_LEN] = random();
        let mut sealed = value.to_vec();
        let about = Aad::from(of.to_be_bytes());
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), about, &mut sealed)
            .expect("a value is far shorter than what the cipher can take");
        (id.clone(), [nonce.as_slice(), &sealed].concat())
    }

    /// Decrypts a value. `None` if the key is gone, or if the row was changed.
    pub fn unseal(&self, of: u128, key: &str, sealed: &[u8]) -> Option<Vec<u8>> {
        let (_, key) = self.keys.iter().find(|(id, _)| id == key)?;
        let (nonce, text) = sealed.split_first_chunk::<NONCE_LEN>()?;
        let mut text = Zeroizing::new(text.to_vec());
        let opened =
            key.open_in_place(Nonce::assume_unique_for_key(*nonce), Aad::from(of.to_be_bytes()), &mut text);
        opened.ok().map(|plain| plain.to_vec())
    }
}

/// A line with a new key.
fn fresh() -> String {
    let (id, key): ([u8; 8], Zeroizing<[u8; KEY_BYTES]>) = (random(), Zeroizing::new(random()));
    format!("{} {}\n", to_hex(&id), to_hex(key.as_slice()))
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.is_ascii() || text.len() != 2 * KEY_BYTES {
        return None;
    }
    (0..KEY_BYTES).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_opens_only_for_its_own_row_and_key() {
        let place = tempfile::tempdir().expect("a directory");
        let keyring = Keyring::open(place.path()).expect("a keyring");
        let (key, sealed) = keyring.seal(1, b"hunter2");
        assert!(!sealed.windows(7).any(|part| part == b"hunter2"));
        let again = Keyring::open(place.path()).expect("the same keyring");
        assert_eq!(again.unseal(1, &key, &sealed).as_deref(), Some(&b"hunter2"[..]));
        assert_eq!(again.unseal(2, &key, &sealed), None, "another row");
        assert_eq!(again.unseal(1, "other", &sealed), None, "another key");
        let mut changed = sealed.clone();
        *changed.last_mut().expect("bytes") ^= 1;
        assert_eq!(again.unseal(1, &key, &changed), None, "a changed row");
        assert_eq!(again.unseal(1, &key, b"short"), None);
        assert_ne!(keyring.seal(1, b"hunter2").1, sealed, "the nonce differs");
    }

    #[test]
    fn the_newest_key_encrypts_and_older_ones_still_decrypt() {
        let place = tempfile::tempdir().expect("a directory");
        let (old, sealed) = Keyring::open(place.path()).expect("a keyring").seal(1, b"hunter2");
        let path = place.path().join(FILE);
        assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        let mut text = fs::read_to_string(&path).expect("text");
        text.push_str(&fresh());
        fs::write(&path, text).expect("written");
        let both = Keyring::open(place.path()).expect("a keyring");
        assert_ne!(both.seal(1, b"x").0, old);
        assert_eq!(both.unseal(1, &old, &sealed).as_deref(), Some(&b"hunter2"[..]));
    }

    #[test]
    fn a_file_that_others_can_read_or_that_holds_no_key_is_refused() {
        let place = tempfile::tempdir().expect("a directory");
        drop(Keyring::open(place.path()).expect("a keyring"));
        let path = place.path().join(FILE);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("changed");
        assert!(Keyring::open(place.path()).is_err());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("changed");
        fs::write(&path, "no key\n").expect("written");
        assert!(Keyring::open(place.path()).is_err());
    }
}
