//! Words that only this installation can have said: what a link carries as its own proof.
//!
//! HMAC (RFC 2104) with SHA-256 over a secret that was made with the database and never leaves it.

use sha2::{Digest as _, Sha256};

/// In bytes, as the hash has it.
pub const TAG_LENGTH: usize = 32;
const BLOCK_LENGTH: usize = 64;

/// The secret of one installation.
pub(crate) struct Signer([u8; TAG_LENGTH]);

impl Signer {
    pub fn new(secret: [u8; TAG_LENGTH]) -> Self {
        Self(secret)
    }

    fn tag(&self, message: &[u8]) -> [u8; TAG_LENGTH] {
        hmac(&self.0, message)
    }
}

fn hmac(secret: &[u8; TAG_LENGTH], message: &[u8]) -> [u8; TAG_LENGTH] {
    let pad = |byte: u8| {
        let mut block = [byte; BLOCK_LENGTH];
        block.iter_mut().zip(secret).for_each(|(pad, secret)| *pad ^= secret);
        block
    };
    let inner = Sha256::new().chain_update(pad(0x36)).chain_update(message).finalize();
    Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize().into()
}

impl crate::Engine {
    /// What proves that this installation has said `message`.
    pub fn sign(&self, message: &[u8]) -> [u8; TAG_LENGTH] {
        self.shared().signer.tag(message)
    }

    /// Whether this installation has said `message`. Takes as long for a tag that is wrong in its first byte as in its last.
    pub fn has_signed(&self, message: &[u8], tag: &[u8]) -> bool {
        let own = self.sign(message);
        own.len() == tag.len()
            && own.iter().zip(tag).fold(0, |wrong, (own, given)| wrong | (own ^ given)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_is_the_one_that_the_standard_says() {
        // RFC 4231, case 1 and 2, whose keys are shorter and filled with zeros.
        let mut secret = [0; TAG_LENGTH];
        secret[..20].fill(0x0b);
        let hex = |tag: [u8; TAG_LENGTH]| tag.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let expected = "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7";
        assert_eq!(hex(hmac(&secret, b"Hi There")), expected);
        let mut secret = [0; TAG_LENGTH];
        secret[..4].copy_from_slice(b"Jefe");
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(hex(hmac(&secret, b"what do ya want for nothing?")), expected);
    }
}
