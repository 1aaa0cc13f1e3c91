//! The states of a sandbox, and its goals. `sandbox::lifecycle` decides what a state allows.

/// State of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// It is being created.
    Creating,
    /// It accepts commands.
    Running,
    /// It is kept, but not running.
    Paused(Kept),
    /// It is being deleted.
    Deleting,
    /// It failed; the reason is stored beside it.
    Failed {
        /// Whether it could be made to run again.
        disk: Disk,
    },
}

/// What a pause kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kept {
    /// Everything, in memory.
    Frozen,
    /// Everything, on disk.
    Saved,
    /// The filesystem; processes were ended.
    Dropped,
}

/// What is left of a failed sandbox's filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Disk {
    /// All of it.
    Whole,
    /// Nothing that could be used.
    Lost,
}

/// What the driver works towards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Goal {
    /// It accepts commands.
    Running,
    /// It is kept and does not run.
    Paused(Kept),
    /// Nothing of it is left.
    Gone,
}

impl State {
    /// All values of [`Self::word`].
    pub(crate) const WORDS: [&str; 5] = ["creating", "running", "paused", "deleting", "failed"];

    /// Whether commands may be started in it.
    pub fn takes_commands(self) -> bool {
        match self {
            Self::Running => true,
            Self::Creating | Self::Paused(_) | Self::Deleting | Self::Failed { .. } => false,
        }
    }

    /// Its name in rows, errors and logs.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Paused(_) => "paused",
            Self::Deleting => "deleting",
            Self::Failed { .. } => "failed",
        }
    }
}
