//! The hosts that package managers use by default, and well-known code hosts. Data, in one table.

/// What a host is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Tool {
    /// pip, uv, poetry.
    Python,
    /// npm, yarn, pnpm.
    Node,
    /// cargo.
    Rust,
    /// go.
    Go,
    /// apt.
    Debian,
    /// apk.
    Alpine,
    /// Maven and Gradle.
    Java,
    /// gem and bundler.
    Ruby,
    /// conda and mamba.
    Conda,
    /// Code hosts.
    Git,
    /// The operator's own list.
    Operator,
}

impl Tool {
    /// The name in lists.
    pub fn word(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "node",
            Self::Rust => "rust",
            Self::Go => "go",
            Self::Debian => "apt",
            Self::Alpine => "apk",
            Self::Java => "maven",
            Self::Ruby => "gem",
            Self::Conda => "conda",
            Self::Git => "git",
            Self::Operator => "operator",
        }
    }

    /// Every tool that has defaults.
    pub const ALL: [Self; 10] = [
        Self::Python,
        Self::Node,
        Self::Rust,
        Self::Go,
        Self::Debian,
        Self::Alpine,
        Self::Java,
        Self::Ruby,
        Self::Conda,
        Self::Git,
    ];
}

/// The hosts that a tool uses by default.
pub fn hosts(tool: Tool) -> &'static [&'static str] {
    match tool {
        Tool::Python => &["pypi.org", "files.pythonhosted.org"],
        Tool::Node => &["registry.npmjs.org", "registry.yarnpkg.com"],
        Tool::Rust => &["index.crates.io", "static.crates.io", "crates.io"],
        Tool::Go => &["proxy.golang.org", "sum.golang.org"],
        Tool::Debian => &[
            "deb.debian.org",
            "security.debian.org",
            "archive.ubuntu.com",
            "security.ubuntu.com",
            "ports.ubuntu.com",
        ],
        Tool::Alpine => &["dl-cdn.alpinelinux.org"],
        Tool::Java => {
            &["repo.maven.apache.org", "repo1.maven.org", "plugins.gradle.org", "services.gradle.org"]
        }
        Tool::Ruby => &["rubygems.org", "index.rubygems.org"],
        Tool::Conda => &["repo.anaconda.com", "conda.anaconda.org"],
        Tool::Git => &[
            "github.com",
            "api.github.com",
            "codeload.github.com",
            "raw.githubusercontent.com",
            "objects.githubusercontent.com",
            "release-assets.githubusercontent.com",
            "gitlab.com",
            "bitbucket.org",
            "codeberg.org",
        ],
        Tool::Operator => &[],
    }
}

/// Hosts besides a tool's index that serve what the index names: pip and cargo download from a second host.
pub fn beside(host: &str) -> &'static [&'static str] {
    match host {
        "pypi.org" => &["files.pythonhosted.org"],
        "index.crates.io" => &["static.crates.io"],
        _ => &[],
    }
}

/// Package managers whose mirrors speak plain HTTP: their packages are signed.
pub fn uses_plain_http(tool: Tool) -> bool {
    matches!(tool, Tool::Debian | Tool::Alpine)
}
