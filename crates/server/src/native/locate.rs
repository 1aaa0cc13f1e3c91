//! How each native route determines its daemon.

use axum::http::Method;

use crate::http::locate::{self, Place, Row, Whose};

/// Every route of `all`. A test compares it with the description of the API.
pub const ROUTES: &[Row] = &[
    ("/metrics", &[], Whose::Daemon),
    ("/v1/health", &[], Whose::Daemon),
    ("/v1/ready", &[], Whose::Daemon),
    ("/v1/version", &[], Whose::Daemon),
    ("/v1/openapi.json", &[], Whose::Daemon),
    // For one sandbox or for all.
    ("/v1/events", &[], Whose::InQuery),
    ("/v1/stats", &[], Whose::Daemon),
    ("/v1/sandboxes", &[Method::GET], Whose::Daemon),
    // Created here, claimed from a pool, or found by labels.
    ("/v1/sandboxes", &[Method::POST], Whose::InBody),
    ("/v1/sandboxes/{sandbox}", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/stats", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/touch", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/explain", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/pause", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/resume", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/network", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/network/rules", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/network/explain", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/network/events", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/snapshots", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/rollback", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/fork", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/tree", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/promote", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/history", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/undo", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/commands", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/commands/stream", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/commands/{command}", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/commands/{command}/events", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/commands/{command}/stream", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/commands/{command}/stdin", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/commands/{command}/stdin/end", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/commands/{command}/signal", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/commands/{command}/kill", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/commands/{command}/resize", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files/stat", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files/list", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files/mkdir", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files/move", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files/copy", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files/edit", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files/glob", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files/grep", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files/watch", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/files/tar", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/ports", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/ports/{port}/{path}", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/tunnels/{port}", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/links", &[], Whose::ById),
    ("/v1/sandboxes/{sandbox}/links/{link}", &[], Whose::ById),
    ("/v1/images", &[], Whose::Daemon),
    ("/v1/images/pull", &[], Whose::Daemon),
    ("/v1/images/import", &[], Whose::Daemon),
    ("/v1/images/gc", &[], Whose::Daemon),
    ("/v1/images/{image}", &[], Whose::Daemon),
    ("/v1/image-aliases", &[], Whose::Daemon),
    ("/v1/image-aliases/{alias}", &[], Whose::Daemon),
    ("/v1/templates", &[], Whose::Daemon),
    ("/v1/templates/{template}", &[], Whose::Daemon),
    ("/v1/templates/{template}/prepare", &[], Whose::Daemon),
    ("/v1/templates/{template}/events", &[], Whose::Daemon),
    ("/v1/secrets", &[], Whose::Daemon),
    ("/v1/secrets/{secret}", &[], Whose::Daemon),
    ("/v1/ledger", &[], Whose::Daemon),
    ("/v1/ledger/verify", &[], Whose::Daemon),
    ("/v1/volumes", &[], Whose::Daemon),
    ("/v1/volumes/{volume}", &[], Whose::Daemon),
    ("/v1/volumes/{volume}/tar", &[], Whose::Daemon),
    ("/v1/pools", &[], Whose::Daemon),
    ("/v1/pools/{pool}", &[], Whose::Daemon),
    ("/v1/webhooks", &[], Whose::Daemon),
    ("/v1/webhooks/{webhook}", &[], Whose::Daemon),
    ("/v1/webhooks/{webhook}/test", &[], Whose::Daemon),
    ("/v1/webhooks/{webhook}/dead-letters", &[], Whose::Daemon),
    ("/v1/builds", &[], Whose::Daemon),
    ("/v1/builds/{build}", &[], Whose::Daemon),
    ("/v1/builds/{build}/log", &[], Whose::Daemon),
    ("/v1/network/presets", &[], Whose::Daemon),
    ("/v1/snapshots", &[], Whose::Daemon),
    ("/v1/snapshots/{snapshot}", &[], Whose::Daemon),
    ("/v1/snapshots/{snapshot}/export", &[], Whose::Daemon),
    ("/v1/tree", &[], Whose::Daemon),
    ("/v1/diff", &[], Whose::Daemon),
    ("/v1/admin/sandboxes", &[], Whose::Daemon),
    ("/v1/admin/sandboxes/{sandbox}", &[], Whose::ById),
    ("/v1/keys", &[], Whose::Daemon),
    ("/v1/keys/{key}", &[], Whose::Daemon),
];

/// Where a request goes; `None` if it is not for the native API.
pub fn locate<'a>(method: &Method, path: &'a str) -> Option<Place<'a>> {
    locate::locate(ROUTES, method, path)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::native::openapi;

    #[test]
    fn every_route_says_whose_it_is() {
        let description: serde_json::Value = serde_json::from_str(&openapi::json()).expect("it is JSON");
        let paths = description["paths"].as_object().expect("it has paths");
        let described: BTreeSet<&str> = paths.keys().map(String::as_str).collect();
        let listed: BTreeSet<&str> = ROUTES.iter().map(|(template, ..)| *template).collect();
        assert_eq!(listed, described);
        for (path, methods) in paths {
            for method in methods.as_object().expect("it has methods").keys() {
                let method: Method = method.to_uppercase().parse().expect("a method");
                let asked = path.replace("{sandbox}", "an-id").replace(['{', '}'], "");
                let place = locate(&method, &asked);
                match path.contains("{sandbox}") {
                    true => assert_eq!(place, Some(Place::Id("an-id")), "{method} {path}"),
                    false => assert!(!matches!(place, None | Some(Place::Id(_))), "{method} {path}"),
                }
            }
        }
        for path in ["", "/", "/a", "/a/b/", "//a"] {
            let path = format!("/v1/sandboxes/an-id/ports/80{path}");
            assert_eq!(locate(&Method::PUT, &path), Some(Place::Id("an-id")), "{path}");
        }
        assert_eq!(locate(&Method::POST, "/v1/sandboxes"), Some(Place::Body));
        assert_eq!(locate(&Method::GET, "/v1/sandboxes"), Some(Place::Daemon));
        assert_eq!(locate(&Method::GET, "/v1/nothing"), None);
    }
}
