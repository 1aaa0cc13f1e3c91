//! How far builds and snapshots are.

/// Where a build is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildState {
    /// Steps are done.
    Running,
    /// The template has it.
    Done {
        /// Of the template.
        version: u32,
    },
    /// It broke off. What was done is kept for a while, so that the next try is quicker.
    Failed {
        /// Why.
        reason: String,
    },
}

/// How far a snapshot is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotState {
    /// It is being made.
    Building,
    /// Sandboxes can be made from it.
    Ready,
    /// It could not be made.
    Failed {
        /// Why.
        reason: String,
    },
    /// It goes when the last sandbox that was made from it is gone.
    Deleting,
}
