//! Whose each route of this dialect is.

use axum::http::Method;

use super::PREFIX;
use crate::http::locate::{self, Place, Row, Whose};

/// The routes that are not about one devbox. Every other one names it.
const OTHERS: &[Row] = &[
    ("/v1/devboxes", &[Method::GET], Whose::Daemon),
    ("/v1/devboxes", &[Method::POST], Whose::InBody),
    ("/v1/devboxes/create_and_await_running", &[], Whose::InBody),
    ("/v1/devboxes/disk_snapshots", &[], Whose::Daemon),
    ("/v1/devboxes/disk_snapshots/{name}", &[], Whose::Daemon),
    ("/v1/blueprints", &[], Whose::Daemon),
    ("/v1/blueprints/{name}", &[], Whose::Daemon),
    ("/v1/blueprints/{name}/delete", &[], Whose::Daemon),
    ("/v1/blueprints/{name}/logs", &[], Whose::Daemon),
    ("/v1/blueprints/list_public", &[], Whose::Daemon),
    ("/v1/secrets", &[], Whose::Daemon),
    ("/v1/secrets/{name}", &[], Whose::Daemon),
    ("/v1/objects", &[], Whose::Daemon),
    ("/v1/objects/{name}", &[], Whose::Daemon),
    ("/v1/network-policies", &[], Whose::Daemon),
    ("/v1/network-policies/{name}", &[], Whose::Daemon),
];

/// Where a request goes; `None` if it is none of this dialect. The id of a devbox is in this dialect's own spelling.
pub fn locate<'a>(method: &Method, path: &'a str) -> Option<Place<'a>> {
    let path = path.strip_prefix(PREFIX)?;
    if let Some(place) = locate::locate(OTHERS, method, path) {
        return Some(place);
    }
    let devbox = path.strip_prefix("/v1/devboxes/")?.split('/').next()?;
    Some(devbox).filter(|devbox| !devbox.is_empty()).map(Place::Id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_says_whose_it_is() {
        let text = include_str!("mod.rs");
        let routes = text.split(".route(").skip(1);
        let routes: Vec<&str> =
            routes.filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next()).collect();
        assert!(routes.len() > 30, "{routes:?}");
        for route in routes {
            let path = format!("/runloop{}", route.replace("{sandbox}", "dbx_1"));
            let place = locate(&Method::GET, &path).unwrap_or_else(|| panic!("{path} is nobody's"));
            assert_eq!(place == Place::Id("dbx_1"), route.contains("{sandbox}"), "{path}");
        }
        assert_eq!(locate(&Method::POST, "/runloop/v1/devboxes"), Some(Place::Body));
        assert_eq!(locate(&Method::GET, "/v1/sandboxes"), None);
    }
}
