//! Why a network policy is rejected.

use egress::policy::PolicyError;

/// What is wrong with a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyFault {
    /// A rule is wrong, or rules contradict each other.
    #[error(transparent)]
    Rules(#[from] PolicyError),
    /// Each block of addresses needs a route.
    #[error("a policy opens at most {most} blocks of addresses, got {given}")]
    Blocks {
        /// How many.
        given: usize,
        /// The limit.
        most: usize,
    },
}
