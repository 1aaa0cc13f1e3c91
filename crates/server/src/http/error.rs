//! Every failure as the native API reports it: a status, a stable code, a sentence, a hint.
//!
//! [`ApiError::from`] an [`EngineError`] is the only place that turns engine errors into HTTP. The caller gets the
//! sentence; the chain of causes is attached to the response for the log, in [`Chain`].

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::EngineError;
use engine::image::{ArchiveError, BuildError, ImageFault, RegistryError};
use runtime::BackendError;
use serde_json::{Map, Value};
use wire::api::ErrorBody;
use wire::files::{FileError, FileErrorKind};
use wire::guest::StartError;
use wire::launch::LayerFault;
use wire::network::NetworkFault;

use super::text::text_and_base64;
use crate::observe::log::chain_of;

/// The error response of a request.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    body: Box<ErrorBody>,
    chain: Option<Chain>,
}

/// Why, down to the cause: for the log, never for the caller.
#[derive(Debug, Clone)]
pub struct Chain(pub String);

/// The code of an error response, for the metrics.
#[derive(Debug, Clone)]
pub struct Code(pub String);

impl ApiError {
    /// An error without causes.
    pub fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let body = ErrorBody { code: code.into(), message: message.into(), hint: None, details: Map::new() };
        Self { status, body: Box::new(body), chain: None }
    }

    /// What to do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.body.hint = Some(hint.into());
        self
    }

    /// Adds a detail for programs.
    pub fn detail(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.body.details.insert(key.into(), value.into());
        self
    }

    /// The body, for places that do not send an HTTP response.
    pub fn into_body(self) -> ErrorBody {
        *self.body
    }

    /// Status, body and causes, for places that respond in another shape.
    pub fn into_parts(self) -> (StatusCode, ErrorBody, Option<Chain>) {
        (self.status, *self.body, self.chain)
    }

    /// The causes, if there are any.
    pub fn chain(&self) -> Option<&Chain> {
        self.chain.as_ref()
    }

    /// A field of a request that is not acceptable.
    pub fn invalid(field: &str, why: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", format!("`{field}` is not valid: {why}"))
            .detail("field", field)
    }

    /// A field of a request that breaks a rule. `rule` continues "must", and ends with the given value.
    pub fn must(field: &str, rule: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", format!("`{field}` must {rule}"))
            .detail("field", field)
    }

    /// The path does not exist.
    pub fn no_route() -> Self {
        Self::new(StatusCode::NOT_FOUND, "route_not_found", "no route has this path")
            .hint("GET /v1/openapi.json lists all routes")
    }

    /// The path exists, for another method.
    pub fn wrong_method() -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
            "this path does not support this method",
        )
        .hint("see the `Allow` header of this response, or GET /v1/openapi.json")
    }

    /// The daemon is stopping.
    pub fn stopping() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "the daemon is stopping")
            .hint("sandboxes and commands keep running; retry when the daemon is back")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(&*self.body)).into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            // A second is longer than a restart of the daemon takes.
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.status == StatusCode::RANGE_NOT_SATISFIABLE
            && let Some(size) = self.body.details.get("size")
            && let Ok(range) = HeaderValue::from_str(&format!("bytes */{size}"))
        {
            response.headers_mut().insert(header::CONTENT_RANGE, range);
        }
        response.extensions_mut().insert(Code(self.body.code));
        if let Some(chain) = self.chain {
            response.extensions_mut().insert(chain);
        }
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        use EngineError::*;
        let chain = Chain(chain_of(&error));
        let message = error.to_string();
        let say = |status, code| Self::new(status, code, message.as_str());
        let mut api = match error {
            SandboxNotFound { .. } => say(StatusCode::NOT_FOUND, "sandbox_not_found")
                .hint("GET /v1/sandboxes lists the sandboxes of this key's owner"),
            CommandNotFound { .. } => say(StatusCode::NOT_FOUND, "command_not_found")
                .hint("GET /v1/sandboxes/{sandbox}/commands lists the commands of a sandbox"),
            SnapshotNotFound { .. } => say(StatusCode::NOT_FOUND, "snapshot_not_found")
                .hint("GET /v1/snapshots lists the snapshots of this key's owner"),
            Snapshot { source, .. } => backend(&source, &message, "snapshot_failed"),
            NotAncestor { .. } => say(StatusCode::CONFLICT, "not_an_ancestor")
                .hint("create a sandbox from the snapshot: name it as `template`"),
            OtherImage { .. } => say(StatusCode::CONFLICT, "other_image")
                .hint("compare sandboxes and snapshots of one family"),
            NoParent { .. } => say(StatusCode::CONFLICT, "no_parent")
                .hint("GET /v1/sandboxes/{sandbox}/tree shows where a sandbox comes from"),
            SnapshotNotReady { state, .. } => {
                say(StatusCode::CONFLICT, "snapshot_not_ready").detail("state", state)
            }
            HostUsr { .. } => say(StatusCode::CONFLICT, "usr_not_included")
                .hint("pass `usr=include` (`--usr include`) to include it"),
            NotExportable { .. } => say(StatusCode::CONFLICT, "not_exportable")
                .hint("change that in a sandbox, and take another snapshot"),
            SnapshotsUnsupported { .. } => say(StatusCode::CONFLICT, "snapshots_not_supported")
                .hint("set up a store on btrfs: see `shoal doctor`"),
            CommandExpired { .. } => say(StatusCode::GONE, "command_expired"),
            TemplateNotFound { .. } => {
                say(StatusCode::NOT_FOUND, "template_not_found")
                    .hint("GET /v1/templates lists the templates of this key's owner; `default` is always there")
            }
            TemplateNameTaken { .. } => say(StatusCode::CONFLICT, "name_taken")
                .hint("choose another name, or replace the template with PUT"),
            TemplateInUse { sandboxes, pools, .. } => say(StatusCode::CONFLICT, "template_in_use")
                .hint(match pools {
                    0 => "delete the sandboxes that were made from it first",
                    _ => "delete its pools and the sandboxes that were made from it first",
                })
                .detail("sandboxes", sandboxes as u64)
                .detail("pools", pools as u64),
            PoolNotFound { .. } => say(StatusCode::NOT_FOUND, "pool_not_found")
                .hint("GET /v1/pools lists the pools of this key's owner"),
            PoolNameTaken { .. } => {
                say(StatusCode::CONFLICT, "name_taken").hint("choose another name, or PATCH that pool")
            }
            PoolGoing { .. } => say(StatusCode::CONFLICT, "pool_deleting")
                .hint("its sandboxes are still being removed; GET it until it is gone"),
            PoolVolumes { template } => say(StatusCode::BAD_REQUEST, "pool_has_volumes")
                .hint("make a template without `mounts` for the pool")
                .detail("template", template),
            TemplateFailed { reason, .. } => say(StatusCode::CONFLICT, "template_failed")
                .hint("fix the cause, then retry with POST /v1/templates/{template}/prepare")
                .detail("reason", reason),
            TemplateBuiltIn => say(StatusCode::CONFLICT, "template_built_in").hint("make one under another name"),
            SecretNotFound { name } => say(StatusCode::NOT_FOUND, "secret_not_found")
                .hint("GET /v1/secrets lists the secrets of this key's owner; `shoal secret set` keeps one")
                .detail("secret", name),
            VolumeNotFound { name } => say(StatusCode::NOT_FOUND, "volume_not_found")
                .hint("GET /v1/volumes lists the volumes of this key's owner")
                .detail("volume", name),
            VolumeNameTaken { .. } => {
                say(StatusCode::CONFLICT, "name_taken").hint("choose another name, or use that volume")
            }
            VolumeInUse { holders, .. } => say(StatusCode::CONFLICT, "volume_in_use")
                .hint("delete the sandboxes that mount it first")
                .detail("sandboxes", holders),
            VolumeTooSmall { used_bytes, .. } => say(StatusCode::CONFLICT, "volume_too_small")
                .hint("choose a larger size, or delete files first")
                .detail("used_bytes", used_bytes),
            CopiesUnsupported => say(StatusCode::CONFLICT, "copies_not_supported")
                .hint("export one volume and import it into another, or set up a store: see `shoal doctor`"),
            DiskLimitsUnsupported => say(StatusCode::CONFLICT, "disk_limits_not_supported")
                .hint("leave `disk` out, or set up a store with disk limits: see `shoal doctor`"),
            Volume { .. } => say(StatusCode::INTERNAL_SERVER_ERROR, "volume_failed")
                .hint("see the daemon's log for the cause; the daemon undoes what is incomplete at its next start"),
            KeyNotFound { .. } => {
                say(StatusCode::NOT_FOUND, "key_not_found").hint("GET /v1/keys lists all keys")
            }
            NameTaken { .. } => {
                say(StatusCode::CONFLICT, "name_taken").hint("choose another name, or delete that sandbox")
            }
            CommandIdReused { .. } => {
                say(StatusCode::CONFLICT, "command_id_reused").hint("choose another id, or leave it out")
            }
            IdempotencyKeyReused => say(StatusCode::CONFLICT, "idempotency_key_reused")
                .hint("use a new Idempotency-Key for a new request"),
            WrongState { state: "paused", .. } => say(StatusCode::CONFLICT, "wrong_state")
                .detail("state", "paused")
                .hint("resume it with POST /v1/sandboxes/{sandbox}/resume, or leave out `resume=never`"),
            WrongState { state, .. } => say(StatusCode::CONFLICT, "wrong_state").detail("state", state),
            SandboxFailed { reason, .. } => say(StatusCode::CONFLICT, "sandbox_failed")
                .detail("state", "failed")
                .detail("reason", reason)
                .hint("resume it to start again over its files, or delete it"),
            Invalid { field, .. } => {
                say(StatusCode::BAD_REQUEST, "invalid_request").detail("field", field.word())
            }
            Quota { resource, limit } => say(StatusCode::TOO_MANY_REQUESTS, "quota_exceeded")
                .detail("resource", resource.word())
                .detail("limit", limit)
                .hint("delete sandboxes of this owner, or ask the operator for a larger limit"),
            Full { .. } => say(StatusCode::SERVICE_UNAVAILABLE, "no_capacity").hint(FULL_HINT),
            StdinClosed { .. } => say(StatusCode::CONFLICT, "stdin_closed")
                .hint("start the command with `\"stdin\": true` to write to it"),
            StdinStalled { .. } => say(StatusCode::SERVICE_UNAVAILABLE, "stdin_stalled")
                .hint("send the same bytes again with the same `offset`"),
            CommandEnded { .. } => say(StatusCode::CONFLICT, "command_ended"),
            NoTerminal { .. } => say(StatusCode::CONFLICT, "no_terminal")
                .hint("start the command with `terminal` to give it one"),
            Unresponsive { .. } => say(StatusCode::SERVICE_UNAVAILABLE, "sandbox_unresponsive")
                .hint("try again, or delete the sandbox"),
            Create { source, .. } => backend(&source, &message, "create_failed"),
            Delete { source, .. } => backend(&source, &message, "delete_failed"),
            Pause { source, .. } => backend(&source, &message, "pause_failed"),
            Resume { source, .. } => backend(&source, &message, "resume_failed"),
            Network { source, .. } => backend(&source, &message, "network_failed"),
            SandboxTooOld { .. } => say(StatusCode::CONFLICT, "sandbox_too_old").hint("create another sandbox"),
            Policy { .. } => say(StatusCode::BAD_REQUEST, "invalid_network_policy")
                .detail("field", "network")
                .hint("the policy before stays in force; the order of rules is in docs/guides/network.md"),
            Store { ref source, .. } if source.is_disk_full() => disk_full(&message),
            Usage { .. } | Store { .. } | Log { .. } | Clock { .. } => say(StatusCode::INTERNAL_SERVER_ERROR, "internal")
                .hint("see the daemon's log for the cause, under this response's x-request-id"),
            File { source } => file(&source, &message),
            FileNotStarted { why: StartError::UnknownUser { user } } => {
                say(StatusCode::BAD_REQUEST, "unknown_user").detail("user", user)
            }
            FileNotStarted { why: StartError::NoRoom { .. } } => {
                say(StatusCode::SERVICE_UNAVAILABLE, "sandbox_exhausted").hint(EXHAUSTED_HINT)
            }
            FileNotStarted { .. } => say(StatusCode::CONFLICT, "file_failed"),
            FileOutOfMemory { .. } => say(StatusCode::INSUFFICIENT_STORAGE, "out_of_memory")
                .hint("give the sandbox more memory, or free some: files in /tmp and /dev/shm count"),
            FileKilled { .. } => say(StatusCode::CONFLICT, "file_operation_killed")
                .hint("something in the sandbox ended it; try again"),
            FileStrange { .. } => say(StatusCode::BAD_GATEWAY, "sandbox_strange")
                .hint("the first process of the sandbox may be damaged: create another sandbox"),
            FileStalled => say(StatusCode::REQUEST_TIMEOUT, "download_stalled"),
            WatchNotFound { .. } => say(StatusCode::NOT_FOUND, "watch_not_found"),
            InitTooOld { .. } => say(StatusCode::CONFLICT, "sandbox_too_old").hint("create another sandbox"),
            ImageNotFound { .. } => say(StatusCode::NOT_FOUND, "image_not_found")
                .hint("GET /v1/images lists the images that are here; POST /v1/images/pull gets others"),
            ImageInUse { sandboxes, templates, .. } => say(StatusCode::CONFLICT, "image_in_use")
                .detail("templates", templates as u64)
                .hint("delete them, or remove the name anyway with --force (`force=true`): they keep the layers they need")
                .detail("sandboxes", sandboxes as u64),
            AliasNotFound { .. } => {
                say(StatusCode::NOT_FOUND, "alias_not_found").hint("GET /v1/image-aliases lists all aliases")
            }
            Image { source, .. } => image(&source, &message),
            BuildNotFound { .. } => {
                say(StatusCode::NOT_FOUND, "build_not_found").hint("GET /v1/builds lists the builds that are remembered")
            }
            Build { source } => build(&source),
            AdminOnly { .. } => say(StatusCode::FORBIDDEN, "admin_required")
                .hint("use the key that the daemon made at its first start"),
            NoCommonVersion { theirs, ours, .. } => {
                let code = if theirs.max < ours.min { "sandbox_too_old" } else { "sandbox_too_new" };
                say(StatusCode::CONFLICT, code)
                    .hint("a daemon of its version can use it; under this one it can be deleted")
            }
            PortClosed { port, .. } => say(StatusCode::BAD_GATEWAY, "port_closed")
                .detail("port", port)
                .hint("start a server on that port in the sandbox; it may listen on 127.0.0.1 only"),
            PortStuck { port, .. } => say(StatusCode::GATEWAY_TIMEOUT, "port_stuck")
                .detail("port", port)
                .hint("the server may be busy or stopped; see what it does in the sandbox"),
            PortConnect { port, .. } => say(StatusCode::BAD_GATEWAY, "port_failed").detail("port", port),
            PortSockets { source, .. } => backend(&source, &message, "port_failed"),
            PortConnections { limit, .. } => say(StatusCode::TOO_MANY_REQUESTS, "port_connections_max")
                .detail("limit", limit as u64)
                .hint("close some connections first"),
            PortWait { port, .. } => say(StatusCode::GATEWAY_TIMEOUT, "port_closed")
                .detail("port", port)
                .hint("start a server on that port in the sandbox, or wait longer"),
            HookFailed { .. } => say(StatusCode::CONFLICT, "hook_failed")
                .hint("look at `hook_runs` of the sandbox; `hooks` with `required` set to false lets it pass"),
            WebhookNotFound { .. } => say(StatusCode::NOT_FOUND, "webhook_not_found"),
            LinkNotFound { .. } => say(StatusCode::NOT_FOUND, "link_not_found")
                .hint("GET /v1/sandboxes/{sandbox}/links lists the links of a sandbox"),
            Stopping => Self::stopping(),
        };
        api.chain = Some(chain);
        api
    }
}

const FULL_HINT: &str = "delete sandboxes, or try again when others have ended";

const EXHAUSTED_HINT: &str =
    "the sandbox is out of processes, descriptors or memory: end some of its commands";

/// An error about a file: the details have the path, and its bytes if they are not text.
fn file(error: &FileError, message: &str) -> ApiError {
    use FileErrorKind::*;
    let (status, code) = match error.kind {
        NotFound => (StatusCode::NOT_FOUND, "file_not_found"),
        PermissionDenied => (StatusCode::FORBIDDEN, "permission_denied"),
        IsDirectory => (StatusCode::CONFLICT, "is_directory"),
        NotADirectory => (StatusCode::CONFLICT, "not_a_directory"),
        AlreadyExists => (StatusCode::CONFLICT, "already_exists"),
        DirectoryNotEmpty => (StatusCode::CONFLICT, "directory_not_empty"),
        InvalidPath => (StatusCode::BAD_REQUEST, "invalid_path"),
        TooManyLinks => (StatusCode::CONFLICT, "too_many_links"),
        NoSpace => (StatusCode::INSUFFICIENT_STORAGE, "no_space"),
        NotARegularFile => (StatusCode::CONFLICT, "not_a_regular_file"),
        Changed => (StatusCode::CONFLICT, "file_changed"),
        TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "file_too_large"),
        TooDeep => (StatusCode::CONFLICT, "too_deep"),
        ReadOnly => (StatusCode::CONFLICT, "read_only"),
        Busy => (StatusCode::CONFLICT, "file_busy"),
        RangeNotSatisfiable { .. } => (StatusCode::RANGE_NOT_SATISFIABLE, "range_not_satisfiable"),
        ConditionFailed => (StatusCode::PRECONDITION_FAILED, "condition_failed"),
        InvalidPattern => (StatusCode::BAD_REQUEST, "invalid_pattern"),
        InvalidArchive => (StatusCode::BAD_REQUEST, "invalid_archive"),
        Incomplete => (StatusCode::BAD_REQUEST, "body_incomplete"),
        NoRoom => (StatusCode::SERVICE_UNAVAILABLE, "sandbox_exhausted"),
        IntoItself => (StatusCode::CONFLICT, "into_itself"),
        Other => (StatusCode::CONFLICT, "file_failed"),
        NotText => (StatusCode::CONFLICT, "not_text"),
        NoMatch => (StatusCode::CONFLICT, "no_match"),
        SeveralMatches { .. } => (StatusCode::CONFLICT, "several_matches"),
    };
    let hint = match error.kind {
        IsDirectory => Some("use the routes `files/list` and `files/tar` for directories"),
        DirectoryNotEmpty => Some("give `recursive=true` to remove it with everything in it"),
        AlreadyExists => Some("give `overwrite=true` to replace it"),
        PermissionDenied => Some("choose another `user`, or leave it out for root"),
        NoRoom => Some(EXHAUSTED_HINT),
        NotText => Some("read the file, and write it whole"),
        NoMatch => Some("read the file again: it has to have the text to the byte"),
        SeveralMatches { .. } => Some("give more of the text around it, or `\"all\": true`"),
        _ => None,
    };
    let mut api = ApiError::new(status, code, message);
    if let Some(hint) = hint {
        api = api.hint(hint);
    }
    if let RangeNotSatisfiable { size } = error.kind {
        api = api.detail("size", size);
    }
    if let SeveralMatches { count } = error.kind {
        api = api.detail("matches", count);
    }
    let (path, path_base64) = text_and_base64(&error.path);
    if let Some(path_base64) = path_base64 {
        api = api.detail("path_base64", path_base64);
    }
    api.detail("path", path)
}

fn backend(error: &BackendError, message: &str, code: &'static str) -> ApiError {
    let cause = error.to_string();
    let say = |status, code| ApiError::new(status, code, format!("{message}: {cause}"));
    match error {
        BackendError::Full { .. } => say(StatusCode::SERVICE_UNAVAILABLE, "no_capacity").hint(FULL_HINT),
        BackendError::LauncherGone { .. } | BackendError::Late { .. } => {
            say(StatusCode::SERVICE_UNAVAILABLE, code).hint("try again")
        }
        BackendError::Layer { source, .. } => layer(source, message),
        BackendError::Network { source, .. } => network(source, message, code),
        BackendError::Refused { .. } | BackendError::Gone => say(StatusCode::INTERNAL_SERVER_ERROR, code)
            .hint("see the daemon's log for the cause, under this response's x-request-id"),
    }
}

/// Why a sandbox has no network. The response includes the cause, which is about the machine or the sandbox.
fn network(fault: &NetworkFault, message: &str, code: &'static str) -> ApiError {
    let say = |status, code| ApiError::new(status, code, format!("{message}: {fault}"));
    match fault {
        NetworkFault::NoNfTables | NetworkFault::NoTproxy => {
            say(StatusCode::CONFLICT, "network_not_supported")
                .hint("use the policy `none`, or a machine whose kernel has it")
        }
        NetworkFault::TooOld => say(StatusCode::CONFLICT, "sandbox_too_old").hint("create another sandbox"),
        NetworkFault::PortTaken { .. } => say(StatusCode::CONFLICT, "network_port_taken")
            .hint("end the program that listens there, then set the policy again"),
        NetworkFault::NotRunning | NetworkFault::Routes { .. } | NetworkFault::Kernel { .. } => {
            say(StatusCode::INTERNAL_SERVER_ERROR, code)
                .hint("see the daemon's log for the cause, under this response's x-request-id")
        }
    }
}

/// Why an image could not be added. The response includes the causes: they are about the image and its registry, and
/// the caller can act on them.
fn image(fault: &ImageFault, message: &str) -> ApiError {
    let told = format!("{message}: {}", chain_of(fault));
    let say = |status, code| ApiError::new(status, code, told.as_str());
    match fault {
        fault if fault.is_disk_full() => disk_full(&told),
        ImageFault::Registry(error) => registry(error, &told),
        ImageFault::Archive(error) => archive(error, &told),
        ImageFault::Layer { source: BackendError::Layer { source, .. }, .. } => layer(source, &told),
        ImageFault::Layer { source, .. } => backend(source, message, "unpack_failed"),
        ImageFault::Pack { source } => backend(source, message, "export_failed"),
        ImageFault::Removed => say(StatusCode::SERVICE_UNAVAILABLE, "image_removed").hint("try again"),
        ImageFault::Stopping => ApiError::stopping(),
        ImageFault::Store(_) | ImageFault::Keep { .. } => {
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
                .hint("see the daemon's log for the cause, under this response's x-request-id")
        }
    }
}

fn disk_full(told: &str) -> ApiError {
    ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "disk_full", format!("{told}: the daemon's disk is full"))
        .hint("free some of it; `shoal image gc` and `shoal image rm` remove what is not needed")
}

fn registry(error: &RegistryError, told: &str) -> ApiError {
    use RegistryError::*;
    let say = |status, code| ApiError::new(status, code, told);
    match error {
        Unreachable { registry, .. } => say(StatusCode::SERVICE_UNAVAILABLE, "registry_unreachable")
            .detail("registry", registry.as_str())
            .hint(
                "check the name and the network; a registry that speaks plain HTTP must be named in \
                `insecure_registries` of the daemon's configuration, or with --insecure",
            ),
        Forbidden { registry } => say(StatusCode::FORBIDDEN, "registry_not_allowed")
            .detail("registry", registry.as_str())
            .hint("use a registry with a public address, or ask the operator to add it to `image_registries_allowed`"),
        Broken { registry, .. } | Late { registry, .. } | TooSlow { registry, .. } => {
            say(StatusCode::SERVICE_UNAVAILABLE, "registry_unreachable")
                .detail("registry", registry.as_str())
                .hint("try again; what has arrived is kept for an hour")
        }
        Busy { registry } => say(StatusCode::SERVICE_UNAVAILABLE, "registry_busy")
            .detail("registry", registry.as_str())
            .hint("try again later, or with credentials: many registries give more to those they know"),
        Denied { registry, anonymous, helper, .. } => {
            let hint = match (helper, anonymous) {
                (Some(helper), _) => format!(
                    "the Docker configuration leaves these credentials to the program `{helper}`, which Shoal does not \
                     run: give a user name and a password"
                ),
                (None, true) => {
                    "give a user name and a password if the image is private; registries also answer so \
                     when there is no such image"
                        .into()
                }
                (None, false) => {
                    "check the user name and the password, and that they may read this image".into()
                }
            };
            say(StatusCode::BAD_REQUEST, "registry_denied").detail("registry", registry.as_str()).hint(hint)
        }
        NotFound { .. } => say(StatusCode::NOT_FOUND, "image_not_found").hint("check the name and the tag"),
        Strange { registry, status, .. } => say(StatusCode::BAD_GATEWAY, "registry_failed")
            .detail("registry", registry.as_str())
            .detail("status", *status),
        Insecure { registry, .. } => say(StatusCode::BAD_REQUEST, "registry_insecure")
            .detail("registry", registry.as_str())
            .hint("nothing is fetched in the clear from a registry that was not named as insecure"),
        BadImage { source, .. } => match source.as_ref() {
            engine::image::BadImage::WrongPlatform { .. } => {
                say(StatusCode::BAD_REQUEST, "wrong_platform").hint("choose another image or tag")
            }
            _ => say(StatusCode::BAD_REQUEST, "image_invalid"),
        },
        TooLong { .. } | Corrupt { .. } | WrongSize { .. } => say(StatusCode::BAD_REQUEST, "image_invalid")
            .hint("the registry or a mirror does not give what the image says; nothing of it was kept"),
        // A full disk was handled before.
        DiskFull { .. } | Keep { .. } | Tls { .. } => say(StatusCode::INTERNAL_SERVER_ERROR, "internal"),
    }
}

/// Why a build could not start.
fn build(error: &BuildError) -> ApiError {
    match error {
        BuildError::Dockerfile { source } => {
            let message = format!("the Dockerfile is not valid: {source}");
            ApiError::new(StatusCode::BAD_REQUEST, "dockerfile_invalid", message)
                .detail("line", source.line as u64)
                .hint(source.hint())
        }
        BuildError::Context { .. } | BuildError::Step { .. } => {
            ApiError::new(StatusCode::BAD_REQUEST, "context_invalid", error.to_string())
        }
    }
}

fn archive(error: &ArchiveError, told: &str) -> ApiError {
    use ArchiveError::*;
    let say = |status, code| ApiError::new(status, code, told);
    match error {
        // As above.
        Io { .. } | DiskFull { .. } => say(StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        NoName => say(StatusCode::BAD_REQUEST, "name_needed").hint("give `name`"),
        ManyImages { .. } => say(StatusCode::BAD_REQUEST, "image_invalid").hint("leave `name` out"),
        BadImage { source } if matches!(**source, engine::image::BadImage::WrongPlatform { .. }) => {
            say(StatusCode::BAD_REQUEST, "wrong_platform")
        }
        Damaged { .. }
        | Unsupported { .. }
        | OtherFormat { .. }
        | Missing { .. }
        | BadImage { .. }
        | Corrupt { .. } => say(StatusCode::BAD_REQUEST, "image_invalid"),
    }
}

/// An error in a layer. A full disk was handled before.
fn layer(fault: &LayerFault, told: &str) -> ApiError {
    match fault {
        LayerFault::Kernel { .. } => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "unpack_failed", told),
        LayerFault::TooLarge { .. } => ApiError::new(StatusCode::BAD_REQUEST, "image_too_large", told),
        LayerFault::Digest { .. }
        | LayerFault::Damaged { .. }
        | LayerFault::Name { .. }
        | LayerFault::Unsupported { .. } => ApiError::new(StatusCode::BAD_REQUEST, "image_invalid", told),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use engine::{Field, Resource};
    use wire::SandboxId;

    use super::*;

    #[track_caller]
    fn check(error: EngineError, status: u16, code: &str) -> ErrorBody {
        let api = ApiError::from(error);
        assert_eq!((api.status.as_u16(), api.body.code.as_str()), (status, code));
        api.into_body()
    }

    #[test]
    fn what_a_caller_can_act_on_has_a_status_and_a_code() {
        let id = SandboxId::from_random(1);
        check(EngineError::SandboxNotFound { id: id.to_string() }, 404, "sandbox_not_found");
        let body = check(EngineError::WrongState { id, state: "deleting" }, 409, "wrong_state");
        assert_eq!(body.details["state"], "deleting");
        let body =
            check(EngineError::Quota { resource: Resource::Sandboxes, limit: 3 }, 429, "quota_exceeded");
        assert_eq!(body.details["limit"], 3);
        check(EngineError::Full { what: "memory".into() }, 503, "no_capacity");
        check(
            EngineError::Create { id, source: BackendError::Full { what: "id ranges" } },
            503,
            "no_capacity",
        );
        check(Field::Name.must("not be empty"), 400, "invalid_request");
    }

    #[test]
    fn the_chain_goes_to_the_log_and_not_to_the_caller() {
        let source = BackendError::Refused {
            doing: "mount the root".into(),
            source: io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error()),
        };
        let api = ApiError::from(EngineError::Delete { id: SandboxId::from_random(1), source });
        let chain = &api.chain().expect("engine errors have a chain").0;
        assert!(chain.contains("mount the root: No space left"), "{chain}");
        assert!(!api.into_body().message.contains("No space"), "the kernel's words stay in the log");
    }
}
