//! The fields, rules and resources that errors name.

use std::fmt;

use super::EngineError;

/// The rule that a part of a request must satisfy. The text continues "must", and ends with the given value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Must(String);

impl Must {
    /// For example "be an absolute path, got `tmp`".
    pub fn new(rule: impl Into<String>) -> Self {
        Self(rule.into())
    }

    /// The error for a field that breaks the rule.
    pub fn of(self, field: Field) -> EngineError {
        EngineError::Invalid { field, must: self }
    }
}

impl fmt::Display for Must {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($variant:ident = $word:literal,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs)] // The words say what they are.
        pub enum $name {
            $($variant,)*
        }

        impl $name {
            /// The name that clients see. These names are part of the API.
            pub fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }
    };
}

words! {
    /// Which part of a request.
    Field {
        Alias = "alias",
        ApiKey = "api key",
        Argv = "argv",
        Command = "command",
        Cpu = "cpu",
        Cursor = "cursor",
        Cwd = "cwd",
        Disk = "disk",
        Count = "count",
        Env = "env",
        GraceSeconds = "grace_seconds",
        History = "history",
        Hooks = "hooks",
        IdempotencyKey = "Idempotency-Key",
        Image = "image",
        Inject = "inject",
        Label = "label",
        Labels = "labels",
        Lifetime = "lifetime",
        Limit = "limit",
        MatchLabels = "match_labels",
        Memory = "memory",
        Methods = "methods",
        Mounts = "mounts",
        Name = "name",
        New = "new",
        Note = "note",
        Notes = "notes",
        Old = "old",
        OutputKeptMax = "output_kept_max",
        Owner = "owner",
        Path = "path",
        Pool = "pool",
        Port = "port",
        Preset = "preset",
        Replicas = "replicas",
        Rules = "rules",
        Script = "script",
        Secrets = "secrets",
        Signal = "signal",
        Size = "size",
        Steps = "steps",
        StdinOffset = "stdin offset",
        Tag = "tag",
        To = "to",
        Ttl = "ttl_seconds",
        User = "user",
        Value = "value",
        Variables = "variables",
        Wait = "wait_seconds",
    }
}

impl Field {
    /// The error for this field. `rule` continues "must", and ends with the given value.
    pub fn must(self, rule: impl Into<String>) -> EngineError {
        Must::new(rule).of(self)
    }
}

words! {
    /// Resources that a quota limits.
    Resource {
        Sandboxes = "sandboxes",
        Cpu = "thousandths of a processor",
        Links = "links to ports",
        Webhooks = "webhooks",
        Memory = "bytes of memory",
        Pools = "pools",
        Templates = "templates",
        Volumes = "volumes",
        Secrets = "secrets",
        Disk = "bytes of disk",
        VolumeBytes = "bytes of volumes",
        Snapshots = "snapshots",
        Builds = "builds at the same time",
        Connections = "connections",
    }
}

/// The beginning of the given value, for an error message.
pub fn shown(text: &str) -> String {
    const SHOWN_MAX: usize = 64;
    match text.char_indices().nth(SHOWN_MAX) {
        None => text.into(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
