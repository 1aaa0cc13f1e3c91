//! Names of layers that are made here, by build steps and captures, rather than downloaded.
//!
//! Making the same layer again finds it by this name: that is the cache of builds. The name does not depend on the
//! files in the layer, which may depend on secrets and on anything that the owner's own processes did. So the name is
//! a tag under a key that never leaves the database, and the owner is part of what is tagged: an owner finds only
//! layers that they made themselves, and no one can compute a name and claim it. Finishing layers have other names,
//! since no process of an owner has a part in them.

use image::Digest;

use crate::access::signing::Signer;
use crate::model::Owner;

/// The name of the layer that `owner` makes over `below` from `parts`.
pub(crate) fn name(names: &Signer, owner: &Owner, below: Option<Digest>, parts: &[&[u8]]) -> Digest {
    let (owner, below) = (owner.to_string(), below.map(|below| below.to_string()).unwrap_or_default());
    let all = [owner.as_bytes(), below.as_bytes()].into_iter().chain(parts.iter().copied());
    Digest::from_bytes(names.tag_of_list(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_and_installations_share_no_names() {
        let owner = |name: &str| Owner::parse(name).expect("it is one");
        let (names, elsewhere) = (Signer::new([1; 32]), Signer::new([2; 32]));
        let below = Some(Digest::from_bytes([3; 32]));
        let made = name(&names, &owner("ada"), below, &[b"RUN"]);
        assert_eq!(made, name(&names, &owner("ada"), below, &[b"RUN"]));
        assert_ne!(made, name(&names, &owner("bob"), below, &[b"RUN"]));
        assert_ne!(made, name(&elsewhere, &owner("ada"), below, &[b"RUN"]));
        assert_ne!(made, name(&names, &owner("ada"), None, &[b"RUN"]));
        assert_ne!(made, name(&names, &owner("ada"), below, &[b"RUN", b""]));
    }
}
