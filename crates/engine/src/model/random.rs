//! Random ids and secrets.

/// Random bytes from the kernel.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel has random bytes once it has booted");
    bytes
}

pub(crate) fn random_u64() -> u64 {
    u64::from_le_bytes(random())
}

pub(crate) fn random_u128() -> u128 {
    u128::from_le_bytes(random())
}
