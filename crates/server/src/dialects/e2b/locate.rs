//! Whose each route of this dialect is.

use axum::http::Method;

use super::PREFIX;
use crate::http::locate::{self, Place, Row, Whose};

/// Every route below [`PREFIX`]. A test compares the table with the routes.
const ROUTES: &[Row] = &[
    ("/sandboxes", &[Method::GET], Whose::Daemon),
    ("/sandboxes", &[Method::POST], Whose::InBody),
    ("/v2/sandboxes", &[Method::GET], Whose::Daemon),
    ("/v2/sandboxes", &[Method::POST], Whose::InBody),
    ("/sandboxes/{sandbox}", &[], Whose::ById),
    ("/sandboxes/{sandbox}/connect", &[], Whose::ById),
    ("/v2/sandboxes/{sandbox}/connect", &[], Whose::ById),
    ("/sandboxes/{sandbox}/resume", &[], Whose::ById),
    ("/sandboxes/{sandbox}/pause", &[], Whose::ById),
    ("/sandboxes/{sandbox}/timeout", &[], Whose::ById),
    ("/sandboxes/{sandbox}/metrics", &[], Whose::ById),
    ("/sandboxes/{sandbox}/network", &[], Whose::ById),
    ("/sandboxes/{sandbox}/snapshots", &[], Whose::ById),
    ("/sandboxes/{sandbox}/fork", &[], Whose::ById),
    ("/snapshots", &[], Whose::Daemon),
    ("/templates", &[], Whose::Daemon),
    ("/templates/{*rest}", &[], Whose::Daemon),
    ("/v2/templates/{*rest}", &[], Whose::Daemon),
    ("/v3/templates", &[], Whose::Daemon),
    ("/volumes", &[], Whose::Daemon),
    ("/volumes/{name}", &[], Whose::Daemon),
    ("/health", &[], Whose::InHeader),
    ("/files", &[], Whose::InHeader),
    ("/process.Process/Start", &[], Whose::InHeader),
    ("/process.Process/Connect", &[], Whose::InHeader),
    ("/process.Process/List", &[], Whose::InHeader),
    ("/process.Process/SendInput", &[], Whose::InHeader),
    ("/process.Process/StreamInput", &[], Whose::InHeader),
    ("/process.Process/SendSignal", &[], Whose::InHeader),
    ("/process.Process/CloseStdin", &[], Whose::InHeader),
    ("/process.Process/Update", &[], Whose::InHeader),
    ("/filesystem.Filesystem/Stat", &[], Whose::InHeader),
    ("/filesystem.Filesystem/ListDir", &[], Whose::InHeader),
    ("/filesystem.Filesystem/MakeDir", &[], Whose::InHeader),
    ("/filesystem.Filesystem/Move", &[], Whose::InHeader),
    ("/filesystem.Filesystem/Remove", &[], Whose::InHeader),
    ("/filesystem.Filesystem/WatchDir", &[], Whose::InHeader),
    ("/filesystem.Filesystem/CreateWatcher", &[], Whose::InHeader),
    ("/filesystem.Filesystem/GetWatcherEvents", &[], Whose::InHeader),
    ("/filesystem.Filesystem/RemoveWatcher", &[], Whose::InHeader),
    ("/execute", &[], Whose::InHeader),
    ("/contexts", &[], Whose::InHeader),
    ("/contexts/{*rest}", &[], Whose::InHeader),
];

/// Where a request goes; `None` if it is none of this dialect.
pub fn locate<'a>(method: &Method, path: &'a str) -> Option<Place<'a>> {
    locate::locate(ROUTES, method, path.strip_prefix(PREFIX)?)
}

/// Whether a path is one of a sandbox's agent, which opens with a token and not with a key.
pub fn is_agent(path: &str) -> bool {
    let Some(rest) = path.strip_prefix(PREFIX) else { return false };
    const AGENT: &[&str] =
        &["/health", "/files", "/execute", "/contexts", "/process.Process", "/filesystem.Filesystem"];
    AGENT
        .iter()
        .any(|prefix| rest.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_route_says_whose_it_is() {
        let text = include_str!("mod.rs");
        let routes = text
            .split(".route(")
            .skip(1)
            .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next());
        let routes: BTreeSet<&str> = routes.collect();
        let listed: BTreeSet<&str> = ROUTES.iter().map(|(template, ..)| *template).collect();
        assert_eq!(listed, routes);
        for (template, _, whose) in ROUTES {
            assert_eq!(is_agent(&format!("{PREFIX}{template}")), *whose == Whose::InHeader, "{template}");
        }
    }

    #[test]
    fn a_sandbox_is_found_in_the_path_or_in_a_header() {
        assert_eq!(locate(&Method::DELETE, "/e2b/sandboxes/abc"), Some(Place::Id("abc")));
        assert_eq!(locate(&Method::POST, "/e2b/v2/sandboxes"), Some(Place::Body));
        assert_eq!(locate(&Method::POST, "/e2b/process.Process/Start"), Some(Place::Header));
        assert_eq!(locate(&Method::GET, "/v1/sandboxes"), None);
    }
}
