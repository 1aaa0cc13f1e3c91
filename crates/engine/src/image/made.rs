//! The names of layers that are made here, by steps of builds and by captures, rather than fetched.
//!
//! Such a name is found again by whoever makes the same layer: that is the cache of builds. It says nothing about the files in the layer,
//! which may depend on secrets and on anything that the owner's own processes did. So the name is a tag under a key that never
//! leaves the database, and the owner is part of what is tagged: an owner finds only the layers that they made themselves, and nobody
//! can compute a name and claim it. Finishing layers are not among these: no process of an owner has a part in them.

use image::Digest;

use crate::access::signing::Signer;
use crate::model::Owner;

/// The name of the layer that `owner` makes over `below` by what `parts` say.
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
