//! States of builds and snapshots.

/// State of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildState {
    /// Steps are running.
    Running,
    /// The template has the new version.
    Done {
        /// The template's version.
        version: u32,
    },
    /// It failed. The layers of its steps are kept for a while, so that the next attempt is quicker.
    Failed {
        /// Why.
        reason: String,
    },
}

/// State of a snapshot.
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
    /// It is deleted with the last sandbox that was made from it.
    Deleting,
}
