//! Where a sandbox is in its life, and what it works towards. What may be asked of it there is decided in `sandbox::lifecycle`.

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Being made.
    Creating,
    /// Takes commands.
    Running,
    /// Kept, and not running.
    Paused(Kept),
    /// Going.
    Deleting,
    /// Broken; the reason is beside it.
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
    /// That it takes commands.
    Running,
    /// That it is kept and does not run.
    Paused(Kept),
    /// That nothing of it is left.
    Gone,
}

impl State {
    /// What [`Self::word`] may say.
    pub(crate) const WORDS: [&str; 5] = ["creating", "running", "paused", "deleting", "failed"];

    /// Whether commands may be started in it.
    pub fn takes_commands(self) -> bool {
        match self {
            Self::Running => true,
            Self::Creating | Self::Paused(_) | Self::Deleting | Self::Failed { .. } => false,
        }
    }

    /// One word for it, the same in rows, errors and logs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Paused(_) => "paused",
            Self::Deleting => "deleting",
            Self::Failed { .. } => "failed",
        }
    }
}
