//! Whose each route of this dialect is.

use axum::http::Method;

use super::{BASES, PREFIX};
use crate::dialects::ROOT_PATHS;
use crate::http::locate::{self, Place, Row, Whose};

/// Every route below [`PREFIX`] alone. A test compares the tables with the routes.
const PREFIXED: &[Row] = &[
    ("/dl/{name}", &[], Whose::InQuery),
    ("/dp/{sandbox}/upload", &[], Whose::ById),
    ("/dp/{sandbox}/download", &[], Whose::ById),
    ("/dp/{sandbox}/glob", &[], Whose::ById),
    ("/dp/{sandbox}/grep", &[], Whose::ById),
    ("/dp/{sandbox}/execute", &[], Whose::ById),
    ("/dp/{sandbox}/tunnel", &[], Whose::ById),
    ("/dp/{sandbox}/execute/ws", &[], Whose::ById),
    ("/dp/{sandbox}/execute/stream/start", &[], Whose::ById),
    ("/dp/{sandbox}/execute/stream/resume", &[], Whose::ById),
];

/// Requests to services, which match any path.
const SERVICES: &[Row] =
    &[("/svc/{sandbox}/{port}", &[], Whose::ById), ("/svc/{sandbox}/{port}/{path}", &[], Whose::ById)];

/// Every route of the control plane, below a base.
const CONTROL: &[Row] = &[
    ("/boxes", &[Method::GET], Whose::Daemon),
    ("/boxes", &[Method::POST], Whose::InBody),
    ("/boxes/{sandbox}", &[], Whose::ByName),
    ("/boxes/{sandbox}/status", &[], Whose::ByName),
    ("/boxes/{sandbox}/start", &[], Whose::ByName),
    ("/boxes/{sandbox}/stop", &[], Whose::ByName),
    ("/boxes/{sandbox}/snapshot", &[], Whose::ByName),
    ("/boxes/{sandbox}/download-url", &[], Whose::ByName),
    ("/boxes/{sandbox}/service-url", &[], Whose::ByName),
    ("/boxes/{sandbox}/service-urls", &[], Whose::ByName),
    ("/snapshots", &[], Whose::Daemon),
    ("/snapshots/{name}", &[], Whose::Daemon),
    ("/snapshots-by-name/{name}", &[], Whose::Daemon),
    ("/registries", &[], Whose::Daemon),
    ("/registries/{name}", &[], Whose::Daemon),
    ("/usage/costs", &[], Whose::Daemon),
    ("/templates", &[], Whose::Daemon),
    ("/templates/{name}", &[], Whose::Daemon),
    ("/volumes", &[], Whose::Daemon),
    ("/volumes/{name}", &[], Whose::Daemon),
    ("/pools", &[], Whose::Daemon),
    ("/pools/{name}", &[], Whose::Daemon),
];

/// Where a request goes; `None` if it is none of this dialect.
pub fn locate<'a>(method: &Method, path: &'a str) -> Option<Place<'a>> {
    let control = |base: &str, path: &'a str| locate::locate(CONTROL, method, path.strip_prefix(base)?);
    if let Some(path) = path.strip_prefix(PREFIX) {
        let prefixed = locate::locate(PREFIXED, method, path);
        let prefixed = prefixed.or_else(|| locate::locate(SERVICES, method, path));
        return prefixed.or_else(|| BASES.iter().find_map(|base| control(base, path)));
    }
    ROOT_PATHS.iter().find_map(|(base, _)| control(base, path))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The paths of `.route("...")` in the text of the routes.
    fn routes() -> BTreeSet<&'static str> {
        let text = include_str!("mod.rs");
        let paths = text
            .split(".route(")
            .skip(1)
            .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next());
        // A path with a slash at its end, or with more behind it, is the same service.
        let service = |path: &&str| !path.starts_with("/svc/{sandbox}/{port}/");
        paths.filter(service).collect()
    }

    #[test]
    fn every_route_says_whose_it_is() {
        let prefixed = PREFIXED.iter().map(|(template, ..)| template.trim_start_matches("/dp/{sandbox}"));
        let control = CONTROL.iter().chain(&SERVICES[..1]).map(|(template, ..)| *template);
        let listed: BTreeSet<&str> = prefixed.chain(control).collect();
        assert_eq!(listed, routes());
    }

    #[test]
    fn a_sandbox_is_found_under_every_base() {
        for base in [
            "/langsmith/v2/sandboxes",
            "/langsmith/api/v1/v2/sandboxes",
            "/v2/sandboxes",
            "/api/v2/sandboxes",
        ] {
            let path = format!("{base}/boxes/my-box/status");
            assert_eq!(locate(&Method::GET, &path), Some(Place::Name("my-box")), "{path}");
            assert_eq!(locate(&Method::POST, &format!("{base}/boxes")), Some(Place::Body));
            assert_eq!(locate(&Method::GET, &format!("{base}/pools/a")), Some(Place::Daemon));
        }
        assert_eq!(locate(&Method::POST, "/langsmith/dp/an-id/execute"), Some(Place::Id("an-id")));
        for path in ["/langsmith/svc/an-id/80/a/b", "/langsmith/svc/an-id/80/", "/langsmith/svc/an-id/80"] {
            assert_eq!(locate(&Method::GET, path), Some(Place::Id("an-id")), "{path}");
        }
        assert_eq!(locate(&Method::GET, "/langsmith/dl/token"), Some(Place::Query));
        assert_eq!(locate(&Method::GET, "/v1/sandboxes"), None);
    }
}
