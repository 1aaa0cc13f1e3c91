//! Whose each route of this dialect is.

use axum::http::Method;

use super::{OLDER, PREFIX};
use crate::http::locate::{self, Place, Row, Whose};

/// The routes that are not about one sandbox. Every other one names it.
const REST: &[Row] = &[
    ("/api/v1/sandboxes", &[Method::GET], Whose::Daemon),
    ("/api/v1/sandboxes", &[Method::POST], Whose::InBody),
    ("/api/v1/sandbox-rootfs-snapshots/{snapshot}", &[], Whose::Daemon),
    ("/api/v1/templates", &[], Whose::Daemon),
    ("/api/v1/templates/from-sandbox", &[], Whose::InBody),
    ("/api/v1/templates/{template}", &[], Whose::Daemon),
    ("/api/v1/quotas", &[], Whose::Daemon),
    ("/api/v1/quotas/{dimension}", &[], Whose::Daemon),
    ("/api/v1/credential-sources", &[], Whose::Daemon),
    ("/api/v1/credential-sources/{name}", &[], Whose::Daemon),
    ("/api/v1/sandboxvolumes", &[], Whose::Daemon),
    ("/api/v1/sandboxvolumes/{volume}", &[], Whose::Daemon),
    ("/api/v1/sandboxvolumes/{volume}/fork", &[], Whose::Daemon),
    ("/api/v1/sandboxvolumes/{volume}/{*path}", &[], Whose::Daemon),
    ("/api/v1/usage/windows", &[], Whose::Daemon),
    ("/api/v1/registry/credentials", &[], Whose::Daemon),
    ("/api-keys", &[], Whose::Daemon),
    ("/api-keys/current", &[], Whose::Daemon),
    ("/api-keys/{*path}", &[], Whose::Daemon),
    ("/auth/{*path}", &[], Whose::Daemon),
    ("/users/{*path}", &[], Whose::Daemon),
    ("/teams", &[], Whose::Daemon),
    ("/teams/{*path}", &[], Whose::Daemon),
    ("/regions", &[], Whose::Daemon),
];

/// Where a request goes; `None` if it is none of this dialect.
pub fn locate<'a>(method: &Method, path: &'a str) -> Option<Place<'a>> {
    let path = path.strip_prefix(PREFIX)?;
    let path = path.strip_prefix(OLDER).unwrap_or(path);
    if let Some(place) = locate::locate(REST, method, path) {
        return Some(place);
    }
    let named = path.strip_prefix("/api/v1/sandboxes/")?.split('/').next();
    named.filter(|name| !name.is_empty()).map(Place::Id)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paths of `.route("...")` in the text of the routes.
    fn routes() -> Vec<&'static str> {
        let text = include_str!("mod.rs");
        let paths = text
            .split(".route(")
            .skip(1)
            .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next());
        paths.collect()
    }

    #[test]
    fn every_route_says_whose_it_is() {
        let routes = routes();
        assert!(routes.len() > 40);
        for route in routes {
            let path = format!("/sandbox0{}", route.replace("{sandbox}", "sb_1").replace("{*path}", "a/b"));
            let place = locate(&Method::GET, &path).unwrap_or_else(|| panic!("{path} is nobody's"));
            assert_eq!(place == Place::Id("sb_1"), route.contains("{sandbox}"), "{path}");
        }
    }

    #[test]
    fn a_claim_goes_where_its_body_says() {
        assert_eq!(locate(&Method::POST, "/sandbox0/api/v1/sandboxes"), Some(Place::Body));
        assert_eq!(locate(&Method::GET, "/sandbox0/api/v1/sandboxes"), Some(Place::Daemon));
        assert_eq!(locate(&Method::POST, "/sandbox0/before-0.10.3/api/v1/sandboxes"), Some(Place::Body));
        assert_eq!(locate(&Method::GET, "/v1/sandboxes"), None);
    }
}
