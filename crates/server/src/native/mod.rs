//! The native API under `/v1`. A handler has three steps: read the request, call the engine once, convert the result.

mod common;

pub mod admin;
pub mod builds;
pub mod commands;
pub mod events;
pub mod files;
pub mod hooks;
pub mod images;
pub mod keys;
pub mod locate;
pub mod metrics;
pub mod network;
pub mod openapi;
pub mod pools;
pub mod ports;
pub mod sandboxes;
pub mod secrets;
pub mod snapshots;
pub mod stats;
pub mod system;
pub mod templates;
pub mod volumes;
pub mod webhooks;

use axum::Router;
use axum::routing::{any, delete, get, post, put};

use crate::http::app::App;
use crate::http::error::ApiError;

/// Where the metrics are: the path that every scraper tries first.
pub const METRICS: &str = "/metrics";

/// Paths that need no key. They tell everybody the same, and nothing about owners, sandboxes or the machine; load balancers
/// and browsers have no key.
const OPEN: [&str; 3] = ["/", "/v1/health", "/v1/ready"];

/// Whether a path needs no key.
pub fn needs_no_key(path: &str) -> bool {
    OPEN.contains(&path)
}

/// All routes, without the layers around them.
pub fn all() -> Router<App> {
    const COMMANDS: &str = "/v1/sandboxes/{sandbox}/commands";
    const FILES: &str = "/v1/sandboxes/{sandbox}/files";
    let under = |path: &str| format!("{COMMANDS}/{{command}}{path}");
    let file = |path: &str| format!("{FILES}/{path}");
    Router::new()
        .route("/", get(system::welcome))
        .route("/v1/health", get(system::health))
        .route("/v1/ready", get(system::ready))
        .route("/v1/version", get(system::version))
        .route("/v1/openapi.json", get(system::openapi))
        .route("/v1/events", get(events::watch))
        .route("/v1/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route(
            "/v1/sandboxes/{sandbox}",
            get(sandboxes::get).patch(sandboxes::update).delete(sandboxes::delete),
        )
        .route("/v1/sandboxes/{sandbox}/stats", get(stats::one))
        .route("/v1/stats", get(stats::all))
        .route("/v1/sandboxes/{sandbox}/touch", post(sandboxes::touch))
        .route("/v1/sandboxes/{sandbox}/explain", get(sandboxes::explain))
        .route("/v1/sandboxes/{sandbox}/pause", post(sandboxes::pause::pause))
        .route("/v1/sandboxes/{sandbox}/resume", post(sandboxes::pause::resume))
        .route("/v1/sandboxes/{sandbox}/network", get(network::get))
        .route("/v1/sandboxes/{sandbox}/network/rules", post(network::allow))
        .route("/v1/sandboxes/{sandbox}/network/explain", get(network::explain))
        .route("/v1/sandboxes/{sandbox}/network/events", get(network::events))
        .route("/v1/network/presets", get(network::presets))
        .route("/v1/sandboxes/{sandbox}/snapshots", post(snapshots::take))
        .route("/v1/sandboxes/{sandbox}/rollback", post(snapshots::rollback))
        .route("/v1/sandboxes/{sandbox}/fork", post(snapshots::fork))
        .route("/v1/sandboxes/{sandbox}/tree", get(snapshots::tree).delete(snapshots::delete_tree))
        .route("/v1/sandboxes/{sandbox}/promote", post(snapshots::promote))
        .route("/v1/sandboxes/{sandbox}/history", get(snapshots::history))
        .route("/v1/sandboxes/{sandbox}/undo", post(snapshots::undo))
        .route("/v1/snapshots", get(snapshots::list).post(snapshots::import))
        .route("/v1/snapshots/{snapshot}", get(snapshots::get).delete(snapshots::delete))
        .route("/v1/snapshots/{snapshot}/export", get(snapshots::export))
        .route("/v1/tree", get(snapshots::trees))
        .route("/v1/diff", get(snapshots::diff))
        .route(COMMANDS, get(commands::list).post(commands::run))
        .route(&format!("{COMMANDS}/stream"), get(commands::stream::start))
        .route(&under(""), get(commands::get))
        .route(&under("/events"), get(commands::events::events))
        .route(&under("/stream"), get(commands::stream::attach))
        .route(&under("/stdin"), post(commands::write_stdin))
        .route(&under("/stdin/end"), post(commands::end_stdin))
        .route(&under("/signal"), post(commands::signal))
        .route(&under("/kill"), post(commands::kill))
        .route(&under("/resize"), post(commands::resize))
        .route(FILES, get(files::read).head(files::head).put(files::write).delete(files::remove))
        .route(&file("stat"), get(files::stat))
        .route(&file("list"), get(files::list))
        .route(&file("mkdir"), post(files::make_directory))
        .route(&file("move"), post(files::rename))
        .route(&file("copy"), post(files::copy))
        .route(&file("edit"), post(files::edit))
        .route(&file("glob"), get(files::glob))
        .route(&file("grep"), get(files::grep))
        .route(&file("watch"), get(files::watch))
        .route(&file("tar"), get(files::pack).put(files::unpack))
        .route("/v1/sandboxes/{sandbox}/ports", get(ports::list))
        .route("/v1/sandboxes/{sandbox}/ports/{port}", any(ports::forward))
        .route("/v1/sandboxes/{sandbox}/ports/{port}/", any(ports::forward))
        .route("/v1/sandboxes/{sandbox}/ports/{port}/{*path}", any(ports::forward))
        .route("/v1/sandboxes/{sandbox}/tunnels/{port}", get(ports::tunnel))
        .route("/v1/sandboxes/{sandbox}/links", get(ports::links).post(ports::create_link))
        .route("/v1/sandboxes/{sandbox}/links/{link}", delete(ports::revoke_link))
        .route("/v1/images", get(images::list))
        .route("/v1/images/pull", post(images::pull))
        .route("/v1/images/import", post(images::import))
        .route("/v1/images/gc", post(images::collect))
        .route("/v1/images/{image}", get(images::get).delete(images::remove))
        .route("/v1/image-aliases", get(images::aliases))
        .route("/v1/image-aliases/{alias}", put(images::set_alias).delete(images::delete_alias))
        .route("/v1/templates", get(templates::list).post(templates::create))
        .route(
            "/v1/templates/{template}",
            get(templates::get).put(templates::apply).patch(templates::update).delete(templates::delete),
        )
        .route("/v1/templates/{template}/prepare", post(templates::prepare))
        .route("/v1/templates/{template}/events", get(templates::watch))
        .route("/v1/secrets", get(secrets::list))
        .route("/v1/secrets/{secret}", get(secrets::get).put(secrets::set).delete(secrets::delete))
        .route("/v1/ledger", get(secrets::ledger))
        .route("/v1/ledger/verify", get(secrets::verify))
        .route("/v1/volumes", get(volumes::list).post(volumes::create))
        .route("/v1/volumes/{volume}", get(volumes::get).patch(volumes::update).delete(volumes::delete))
        .route("/v1/volumes/{volume}/tar", get(volumes::export).put(volumes::import))
        .route("/v1/pools", get(pools::list).post(pools::create))
        .route("/v1/pools/{pool}", get(pools::get).patch(pools::update).delete(pools::delete))
        .route("/v1/webhooks", get(webhooks::list).post(webhooks::create))
        .route("/v1/webhooks/{webhook}", get(webhooks::get).delete(webhooks::delete))
        .route("/v1/webhooks/{webhook}/test", post(webhooks::test))
        .route("/v1/webhooks/{webhook}/dead-letters", get(webhooks::dead_letters))
        .route("/v1/builds", get(builds::list).post(builds::create))
        .route("/v1/builds/{build}", get(builds::get).delete(builds::delete))
        .route("/v1/builds/{build}/log", get(builds::log))
        .route(METRICS, get(metrics::metrics))
        .route("/v1/admin/sandboxes", get(admin::list))
        .route("/v1/admin/sandboxes/{sandbox}", delete(admin::delete))
        .route("/v1/keys", get(keys::list).post(keys::create))
        .route("/v1/keys/{key}", delete(keys::delete))
        .fallback(async || ApiError::no_route())
        .method_not_allowed_fallback(async || ApiError::wrong_method())
}
