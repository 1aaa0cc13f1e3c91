//! The systems whose clients work with this server, and the variables that switch them over: one table for the command line and
//! the documents.

/// A system whose published clients work with this server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct System {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its name for people.
    pub title: &'static str,
    /// The page about it, below `docs`.
    pub page: &'static str,
    /// Variables of the environment, with [`URL`] and [`KEY`] in their values.
    pub variables: &'static [(&'static str, &'static str)],
}

/// Stands for the daemon's address, without a slash at its end.
pub const URL: &str = "{url}";
/// Stands for a key of the daemon.
pub const KEY: &str = "{key}";

/// All of them, by name.
pub const SYSTEMS: &[System] = &[
    System {
        name: "daytona",
        title: "Daytona",
        page: "dialects/daytona.md",
        variables: &[("DAYTONA_API_URL", "{url}/daytona"), ("DAYTONA_API_KEY", "{key}")],
    },
    System {
        name: "e2b",
        title: "E2B",
        page: "dialects/e2b.md",
        variables: &[
            ("E2B_API_URL", "{url}/e2b"),
            ("E2B_SANDBOX_URL", "{url}/e2b"),
            ("E2B_API_KEY", "{key}"),
        ],
    },
    System {
        name: "langsmith",
        title: "LangSmith",
        page: "dialects/langsmith.md",
        variables: &[("LANGSMITH_ENDPOINT", "{url}"), ("LANGSMITH_API_KEY", "{key}")],
    },
    System {
        name: "modal",
        title: "Modal",
        page: "dialects/modal.md",
        variables: &[
            ("MODAL_SERVER_URL", "{url}"),
            ("MODAL_TOKEN_ID", "anything"),
            ("MODAL_TOKEN_SECRET", "{key}"),
        ],
    },
    System {
        name: "runloop",
        title: "Runloop",
        page: "dialects/runloop.md",
        variables: &[("RUNLOOP_BASE_URL", "{url}/runloop"), ("RUNLOOP_API_KEY", "{key}")],
    },
    System {
        name: "sandbox0",
        title: "Sandbox0",
        page: "dialects/sandbox0.md",
        variables: &[("SANDBOX0_BASE_URL", "{url}/sandbox0"), ("SANDBOX0_TOKEN", "{key}")],
    },
];

impl System {
    /// The variables with their values.
    pub fn variables(&self, url: &str, key: &str) -> Vec<(&'static str, String)> {
        let value = |text: &str| text.replace(URL, url.trim_end_matches('/')).replace(KEY, key);
        self.variables.iter().map(|(name, text)| (*name, value(text))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_values_have_no_gaps() {
        assert!(SYSTEMS.is_sorted_by_key(|system| system.name));
        for system in SYSTEMS {
            let variables = system.variables("http://h:1/", "k");
            assert!(
                variables.iter().any(|(_, value)| value.starts_with("http://h:1") && !value.ends_with('/'))
            );
            assert!(variables.iter().any(|(_, value)| value == "k"), "{}", system.name);
        }
    }

    #[test]
    fn every_page_names_the_variables_of_its_system() {
        for system in SYSTEMS {
            let page = format!("{}/../../docs/{}", env!("CARGO_MANIFEST_DIR"), system.page);
            let page = std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{page}: {error}"));
            for (name, text) in system.variables {
                let line = format!("export {name}={}", text.replace(URL, "http://127.0.0.1:7878"));
                let line = line.strip_suffix(KEY).unwrap_or(&line);
                assert!(page.contains(line), "the page about {} does not say `{line}`", system.title);
            }
        }
    }
}
