//! Whose each route of this dialect is.

use axum::http::Method;

use super::PREFIX;
use crate::http::locate::{self, Place, Row, Whose};

/// The routes of the control plane that are not about one sandbox. Every other one names it.
const CONTROL: &[Row] = &[
    ("/config", &[], Whose::Daemon),
    ("/sandbox", &[Method::GET], Whose::Daemon),
    ("/sandbox", &[Method::POST], Whose::InBody),
    ("/sandbox/paginated", &[], Whose::Daemon),
    ("/snapshots", &[], Whose::Daemon),
    ("/snapshots/{name}", &[], Whose::Daemon),
    ("/volumes", &[], Whose::Daemon),
    ("/volumes/{name}", &[], Whose::Daemon),
    ("/volumes/by-name/{name}", &[], Whose::Daemon),
];

/// Where a request goes; `None` if it is none of this dialect.
pub fn locate<'a>(method: &Method, path: &'a str) -> Option<Place<'a>> {
    let path = path.strip_prefix(PREFIX)?;
    if let Some(place) = locate::locate(CONTROL, method, path) {
        return Some(place);
    }
    let named = |path: &'a str| path.split('/').next().filter(|name| !name.is_empty());
    match path.strip_prefix("/toolbox/") {
        Some(rest) => named(rest).map(Place::Id),
        None => named(path.strip_prefix("/sandbox/")?).map(Place::Name),
    }
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
        let toolbox = ["/work-dir", "/user-home-dir", "/version", "/process/", "/files"];
        let (mut inside, mut outside) = (0, 0);
        for route in routes() {
            if toolbox.iter().any(|front| route.starts_with(front)) {
                inside += 1;
                let path = format!("/daytona/toolbox/an-id{route}");
                assert_eq!(locate(&Method::POST, &path), Some(Place::Id("an-id")), "{path}");
            } else {
                outside += 1;
                let path = format!("/daytona{}", route.replace("{sandbox}", "a-name"));
                let place = locate(&Method::GET, &path).unwrap_or_else(|| panic!("{path} is nobody's"));
                assert_eq!(place == Place::Name("a-name"), route.contains("{sandbox}"), "{path}");
            }
        }
        assert!(inside > 20 && outside > 20);
    }

    #[test]
    fn a_create_goes_where_its_body_says() {
        assert_eq!(locate(&Method::POST, "/daytona/sandbox"), Some(Place::Body));
        assert_eq!(locate(&Method::GET, "/daytona/sandbox"), Some(Place::Daemon));
        assert_eq!(locate(&Method::GET, "/v1/sandboxes"), None);
    }
}
