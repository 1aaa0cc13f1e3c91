//! The description of the native API, generated from the routes and the types they carry.

use axum::http::StatusCode;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{Content, ContentBuilder, Ref, RefOr, ResponseBuilder, Server};
use utoipa::{Modify, OpenApi};

use crate::native::{
    self, admin, builds, commands, files, images, keys, metrics, network, pools, ports, sandboxes, secrets,
    snapshots, stats, system, templates, volumes, webhooks,
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Shoal",
        description = "Sandboxes for AI agents. Every route needs an api key, except `/v1/health` and `/v1/ready`. Every error \
            response has an `ErrorBody`.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    paths(
        sandboxes::create,
        sandboxes::list,
        sandboxes::get,
        sandboxes::update,
        sandboxes::delete,
        sandboxes::touch,
        sandboxes::explain,
        sandboxes::pause::pause,
        sandboxes::pause::resume,
        network::get,
        network::allow,
        network::explain,
        network::events,
        network::presets,
        native::events::watch,
        commands::run,
        commands::list,
        commands::stream::start,
        commands::get,
        commands::events::events,
        commands::stream::attach,
        commands::write_stdin,
        commands::end_stdin,
        commands::signal,
        commands::kill,
        commands::resize,
        files::read,
        files::head,
        files::write,
        files::remove,
        files::stat,
        files::list,
        files::make_directory,
        files::rename,
        files::copy,
        files::edit,
        files::glob,
        files::grep,
        files::watch,
        files::pack,
        files::unpack,
        ports::list,
        ports::forward,
        ports::tunnel,
        ports::create_link,
        ports::links,
        ports::revoke_link,
        images::pull,
        images::import,
        images::list,
        images::get,
        images::remove,
        images::collect,
        images::aliases,
        images::set_alias,
        images::delete_alias,
        templates::create,
        templates::list,
        templates::get,
        templates::apply,
        templates::update,
        templates::delete,
        templates::prepare,
        templates::watch,
        snapshots::take,
        snapshots::list,
        snapshots::get,
        snapshots::delete,
        snapshots::export,
        snapshots::import,
        snapshots::rollback,
        snapshots::fork,
        snapshots::trees,
        snapshots::diff,
        snapshots::tree,
        snapshots::delete_tree,
        snapshots::promote,
        snapshots::history,
        snapshots::undo,
        secrets::list,
        secrets::get,
        secrets::set,
        secrets::delete,
        secrets::ledger,
        secrets::verify,
        volumes::create,
        volumes::list,
        volumes::get,
        volumes::update,
        volumes::delete,
        volumes::export,
        volumes::import,
        pools::create,
        pools::list,
        pools::get,
        pools::update,
        pools::delete,
        webhooks::create,
        webhooks::list,
        webhooks::get,
        webhooks::delete,
        webhooks::test,
        webhooks::dead_letters,
        builds::create,
        builds::list,
        builds::get,
        builds::delete,
        builds::log,
        stats::one,
        stats::all,
        metrics::metrics,
        admin::list,
        admin::delete,
        keys::create,
        keys::list,
        keys::delete,
        system::health,
        system::ready,
        system::version,
        system::openapi,
    ),
    components(schemas(
        wire::api::CommandWish,
        wire::api::CommandEvent,
        wire::api::FileEvent,
        wire::api::ImageEvent,
        wire::api::SandboxEvent,
        wire::api::StartBuild,
        wire::api::TemplateEvent
    )),
    security(("bearer" = []), ("api_key" = [])),
    modifiers(&KeySpellings, &Completed),
)]
struct Description;

struct KeySpellings;

impl Modify for KeySpellings {
    fn modify(&self, description: &mut utoipa::openapi::OpenApi) {
        let components = description.components.get_or_insert_default();
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
        let header = ApiKey::Header(ApiKeyValue::new("X-Api-Key"));
        components.add_security_scheme("api_key", SecurityScheme::ApiKey(header));
    }
}

/// Error responses that belong to the layers around all routes or to a group of them, not to one handler.
struct Shared {
    status: u16,
    /// Its name among the components.
    name: &'static str,
    description: &'static str,
    /// Which operations have it.
    of: Group,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    All,
    /// Those that need a key.
    Keyed,
    /// Those with a path that names something.
    Named,
    /// Those with a request body.
    Body,
}

const SHARED: [Shared; 12] = [
    Shared {
        status: 400,
        name: "BadRequest",
        description: "The request is malformed: its path, query, headers or body.",
        of: Group::All,
    },
    Shared {
        status: 401,
        name: "Unauthorized",
        description: "The request has no valid api key.",
        of: Group::Keyed,
    },
    Shared {
        status: 403,
        name: "Forbidden",
        description: "The key may not do this, or the `Origin` header names another site.",
        of: Group::All,
    },
    Shared {
        status: 404,
        name: "NotFound",
        description: "The path names something that does not exist or belongs to another owner.",
        of: Group::Named,
    },
    Shared { status: 408, name: "TooSlow", description: "The body did not arrive in time.", of: Group::Body },
    Shared { status: 413, name: "TooLarge", description: "The body is too large.", of: Group::Body },
    Shared {
        status: 414,
        name: "UriTooLong",
        description: "The path and the query are too long.",
        of: Group::All,
    },
    Shared {
        status: 415,
        name: "WrongMediaType",
        description: "The `Content-Type` header is missing or wrong.",
        of: Group::Body,
    },
    Shared {
        status: 421,
        name: "WrongHost",
        description: "The `Host` header names another host.",
        of: Group::All,
    },
    Shared {
        status: 431,
        name: "HeadersTooLarge",
        description: "The headers are too many or too long.",
        of: Group::All,
    },
    Shared {
        status: 500,
        name: "Internal",
        description: "The daemon failed; its log has the cause under the `x-request-id` of the response.",
        of: Group::Keyed,
    },
    Shared {
        status: 503,
        name: "Unavailable",
        description: "The daemon is busy or stopping; try again.",
        of: Group::Keyed,
    },
];

/// Adds what handlers do not repeat: shared error responses, descriptions, unique ids, bodies of plain bytes, the server.
struct Completed;

impl Modify for Completed {
    fn modify(&self, description: &mut utoipa::openapi::OpenApi) {
        let error = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
        let components = description.components.get_or_insert_default();
        for shared in SHARED {
            let response = ResponseBuilder::new()
                .description(shared.description)
                .content("application/json", error.clone())
                .build();
            components.responses.insert(shared.name.into(), RefOr::T(response));
        }
        description.servers = Some(vec![Server::new("/")]);
        for (path, item) in &mut description.paths.paths {
            for operation in operations(item) {
                complete(path, operation);
            }
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    let PathItem { get, put, post, delete, head, patch, .. } = item;
    [get, put, post, delete, head, patch].into_iter().flatten()
}

fn complete(path: &str, operation: &mut Operation) {
    let tag = operation.tags.iter().flatten().next().cloned().unwrap_or_default();
    let id = operation.operation_id.take().unwrap_or_default();
    operation.operation_id = Some(format!("{tag}_{id}"));
    for shared in &SHARED {
        let has = match shared.of {
            Group::All => true,
            Group::Keyed => operation.security.is_none(),
            Group::Named => path.contains('{'),
            Group::Body => operation.request_body.is_some(),
        };
        let responses = &mut operation.responses.responses;
        if has && !responses.contains_key(&shared.status.to_string()) {
            responses.insert(shared.status.to_string(), RefOr::Ref(Ref::from_response_name(shared.name)));
        }
    }
    for (status, response) in &mut operation.responses.responses {
        let RefOr::T(response) = response else { continue };
        if response.description.is_empty() {
            response.description = described(status);
        }
        response.content.iter_mut().for_each(|(media, content)| plain_bytes(media, content));
    }
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        body.content.iter_mut().for_each(|(media, content)| plain_bytes(media, content));
    }
}

/// What a status says by itself: OpenAPI wants a description of every response.
fn described(status: &str) -> String {
    let shared = SHARED.iter().find(|shared| shared.status.to_string() == status);
    let named = || StatusCode::from_bytes(status.as_bytes()).ok()?.canonical_reason();
    match shared {
        Some(shared) => shared.description.into(),
        None => format!("{}.", named().unwrap_or("Another response")),
    }
}

/// A body that is neither JSON nor text is bytes, and no list of numbers.
fn plain_bytes(media: &str, content: &mut RefOr<Content>) {
    let RefOr::T(content) = content else { return };
    if matches!(media, "application/octet-stream" | "application/x-tar") {
        let bytes = ObjectBuilder::new()
            .schema_type(Type::String)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::Binary)));
        content.schema = Some(RefOr::T(Schema::Object(bytes.build())));
    }
}

/// OpenAPI 3.1, as readable JSON that ends with a line break.
pub fn json() -> String {
    let mut text = Description::openapi().to_pretty_json().expect("the description is made of plain data");
    text.push('\n');
    text
}
