//! Which daemon a request is for: any, or the one that has a certain sandbox, and how the request names that sandbox.
//!
//! Pure, and decided from method and path alone, so that a router in front of several daemons can forward a request
//! without understanding it. The native API and each dialect have a table with all their routes.

use axum::http::Method;

/// How a route determines the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Any daemon can answer: the response is about the daemon itself, or the same for all daemons of an owner.
    Daemon,
    /// The sandbox whose id is at `{sandbox}` in the path.
    ById,
    /// The sandbox whose name or id is at `{sandbox}` in the path.
    ByName,
    /// A sandbox that is created or chosen according to the body.
    InBody,
    /// A sandbox that the query or a signed link names.
    InQuery,
    /// A sandbox that a header names.
    InHeader,
}

/// One path of a table: its template, the methods that it covers (none: all), and how it determines the daemon.
pub type Row = (&'static str, &'static [Method], Whose);

/// Where a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place<'a> {
    /// To this daemon.
    Daemon,
    /// To the daemon that has the sandbox of this id, as written in the path.
    Id(&'a str),
    /// As above, by name or id.
    Name(&'a str),
    /// To the daemon that the body determines.
    Body,
    /// To the daemon that the query or the link determines.
    Query,
    /// To the daemon that a header determines.
    Header,
}

/// Where a request goes, by a table of routes. `None` if it matches none of them.
pub fn locate<'a>(table: &[Row], method: &Method, path: &'a str) -> Option<Place<'a>> {
    table
        .iter()
        .filter(|(_, methods, _)| methods.is_empty() || methods.contains(method))
        .filter_map(|(template, _, whose)| Some((fit(template, path)?, template, *whose)))
        // As in the router, a literal path takes precedence over one with a parameter.
        .min_by_key(|(_, template, _)| template.matches('{').count())
        .map(|(sandbox, _, whose)| match (whose, sandbox) {
            (Whose::ById, Some(id)) => Place::Id(id),
            (Whose::ByName, Some(name)) => Place::Name(name),
            (Whose::InBody, _) => Place::Body,
            (Whose::InQuery, _) => Place::Query,
            (Whose::InHeader, _) => Place::Header,
            (Whose::Daemon | Whose::ById | Whose::ByName, _) => Place::Daemon,
        })
}

/// The last part of a template that matches any path, also none.
const ANY_PATH: &str = "{path}";

/// Whether a path matches a template, and the value of `{sandbox}`.
fn fit<'a>(template: &str, path: &'a str) -> Option<Option<&'a str>> {
    let mut parts = path.split('/');
    let mut sandbox = None;
    for wanted in template.split('/') {
        if wanted == ANY_PATH {
            return Some(sandbox);
        }
        let part = parts.next()?;
        match wanted {
            "{sandbox}" if !part.is_empty() => sandbox = Some(part),
            wanted if wanted.starts_with("{*") && !part.is_empty() => return Some(sandbox),
            wanted if wanted.starts_with('{') && !part.is_empty() => {}
            wanted if wanted == part => {}
            _ => return None,
        }
    }
    parts.next().is_none().then_some(sandbox)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_fits_its_template_and_no_other() {
        assert_eq!(fit("/v1/x", "/v1/x"), Some(None));
        assert_eq!(fit("/v1/{sandbox}/y", "/v1/a/y"), Some(Some("a")));
        for path in ["/v1", "/v1/a", "/v1//y", "/v1/a/y/", "/v1/a/b/y", "v1/a/y"] {
            assert_eq!(fit("/v1/{sandbox}/y", path), None, "{path}");
        }
    }

    #[test]
    fn a_path_that_is_written_out_goes_before_a_parameter() {
        let table: &[Row] = &[("/c/{command}", &[], Whose::Daemon), ("/c/stream", &[], Whose::InBody)];
        assert_eq!(locate(table, &Method::GET, "/c/stream"), Some(Place::Body));
        assert_eq!(locate(table, &Method::GET, "/c/other"), Some(Place::Daemon));
        assert_eq!(locate(table, &Method::GET, "/d"), None);
    }
}
