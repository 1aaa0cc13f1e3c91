//! Tags that only this installation can make: HMAC (RFC 2104) with SHA-256, with secrets that were made with the
//! database and never leave it.
//!
//! Signed links carry one as proof, and the names of layers that are made here are tags too
//! (`crate::image::made::name`).

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Length in bytes, that of the hash.
pub const TAG_LENGTH: usize = 32;

/// One secret of one installation.
pub(crate) struct Signer([u8; TAG_LENGTH]);

impl Signer {
    pub fn new(secret: [u8; TAG_LENGTH]) -> Self {
        Self(secret)
    }

    fn mac(&self) -> Hmac<Sha256> {
        Hmac::new_from_slice(&self.0).expect("HMAC takes keys of any length")
    }

    /// The tag of one message.
    fn tag(&self, message: &[u8]) -> [u8; TAG_LENGTH] {
        self.mac().chain_update(message).finalize().into_bytes().into()
    }

    /// The tag of a list. Each part is preceded by its length, so that no two lists have the same bytes.
    pub fn tag_of_list<'a>(&self, parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; TAG_LENGTH] {
        let mut mac = self.mac();
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac.finalize().into_bytes().into()
    }

    /// Whether `tag` is that of a list. Takes constant time.
    pub fn is_tag_of_list<'a>(&self, parts: impl IntoIterator<Item = &'a [u8]>, tag: &[u8]) -> bool {
        let mut mac = self.mac();
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac.verify_slice(tag).is_ok()
    }

    /// Whether `tag` is that of `message`. Takes constant time.
    fn is_tag(&self, message: &[u8], tag: &[u8]) -> bool {
        self.mac().chain_update(message).verify_slice(tag).is_ok()
    }
}

impl crate::Engine {
    /// A proof that this installation has issued `message`.
    pub fn sign(&self, message: &[u8]) -> [u8; TAG_LENGTH] {
        self.shared().signer.tag(message)
    }

    /// Whether this installation has issued `message`. Takes constant time.
    pub fn has_signed(&self, message: &[u8], tag: &[u8]) -> bool {
        self.shared().signer.is_tag(message, tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_is_the_one_that_the_standard_says() {
        // RFC 4231, cases 1 and 2, whose keys are shorter and padded with zeros.
        let mut secret = [0; TAG_LENGTH];
        secret[..20].fill(0x0b);
        let hex = |tag: [u8; TAG_LENGTH]| tag.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let expected = "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7";
        assert_eq!(hex(Signer::new(secret).tag(b"Hi There")), expected);
        let mut secret = [0; TAG_LENGTH];
        secret[..4].copy_from_slice(b"Jefe");
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        let signer = Signer::new(secret);
        let message = b"what do ya want for nothing?";
        assert_eq!(hex(signer.tag(message)), expected);
        let mut tag = signer.tag(message);
        assert!(signer.is_tag(message, &tag) && !signer.is_tag(message, &tag[..31]));
        tag[31] ^= 1;
        assert!(!signer.is_tag(message, &tag));
    }

    #[test]
    fn lists_with_other_borders_have_other_tags() {
        let signer = Signer::new([7; TAG_LENGTH]);
        let tag = |parts: &[&[u8]]| signer.tag_of_list(parts.iter().copied());
        assert_eq!(tag(&[b"ab", b"c"]), tag(&[b"ab", b"c"]));
        for other in [&[b"a".as_slice(), b"bc"][..], &[b"abc"], &[b"ab", b"c", b""], &[b"", b"ab", b"c"]] {
            assert_ne!(tag(&[b"ab", b"c"]), tag(other), "{other:?}");
        }
        assert_ne!(Signer::new([8; TAG_LENGTH]).tag_of_list([b"ab".as_slice(), b"c"]), tag(&[b"ab", b"c"]));
    }
}
