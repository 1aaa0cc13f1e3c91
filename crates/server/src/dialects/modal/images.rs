//! Apps, environments, images and secrets: what a client asks for before it makes a sandbox. None has a row.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde_json::json;

use super::Call;
use super::grpc::Status;
use super::messages::*;
use super::names::{self, AppId, ImageId, SecretId};

/// A version of the vendor's recipes for images that every client from 1.1 on knows.
const BUILDER: &str = "2025.06";
/// As above, for clients before that.
const BUILDER_OLD: &str = "2024.10";
/// How long a client keeps its token. Nothing depends on it: each call carries the key too.
const TOKEN_SECONDS: u64 = 86_400;
/// What `object_creation_type` says of a secret that has no name.
const ANONYMOUS: i32 = 4;
/// What `namespace` says of the vendor's own images.
const GLOBAL: i32 = 3;
/// The status of an image that is there.
const SUCCESS: i32 = 1;
/// The status of one that cannot be made.
const FAILURE: i32 = 2;
/// The most bytes of variables in one secret: its id is sent in every call that names it.
const SECRET_BYTES_MAX: usize = 16 << 10;

fn builder(call: &Call) -> String {
    let version = call.headers.get("x-modal-client-version").and_then(|version| version.to_str().ok());
    let old = version.is_some_and(|version| version.starts_with("1.0.") || version.starts_with("0."));
    if old { BUILDER_OLD.into() } else { BUILDER.into() }
}

/// Who asks was checked before.
pub async fn hello(call: &Call, _: Empty) -> Result<ClientHelloResponse, Status> {
    Ok(ClientHelloResponse { image_builder_version: builder(call) })
}

/// An app is a name, and every name is one: the documents look apps up without making them.
pub async fn app(call: &Call, wish: AppGetOrCreateRequest) -> Result<AppGetOrCreateResponse, Status> {
    if wish.app_name.is_empty() {
        return Err(Status::invalid("the name of an app must not be empty"));
    }
    let app_id = names::keep(&call.app.engine, &call.key, &AppId { name: wish.app_name });
    Ok(AppGetOrCreateResponse { app_id })
}

/// There is one environment, whatever it is called.
pub async fn environment(
    call: &Call,
    wish: EnvironmentGetOrCreateRequest,
) -> Result<EnvironmentGetOrCreateResponse, Status> {
    let settings = EnvironmentSettings { image_builder_version: builder(call) };
    let name = if wish.name.is_empty() { "main".to_owned() } else { wish.name };
    Ok(EnvironmentGetOrCreateResponse {
        environment_id: "en-main".into(),
        metadata: Some(EnvironmentMetadata { name, settings: Some(settings) }),
    })
}

/// A token in the form that clients read: its middle part says when it ends.
pub async fn auth_token(_: &Call, _: Empty) -> Result<AuthTokenGetResponse, Status> {
    let end = SystemTime::now() + Duration::from_secs(TOKEN_SECONDS);
    let end = end.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let part = |value: serde_json::Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
    let token = format!("{}.{}.{}", part(json!({"alg": "none"})), part(json!({"exp": end})), "shoal");
    Ok(AuthTokenGetResponse { token })
}

/// Variables that a client sends ahead of the sandbox that gets them.
pub async fn secret(
    call: &Call,
    wish: SecretGetOrCreateRequest,
) -> Result<SecretGetOrCreateResponse, Status> {
    if wish.object_creation_type != ANONYMOUS {
        let name = names::shown(&wish.deployment_name);
        return Err(Status::not_found(format!(
            "secret '{name}' not found: this server keeps no named secrets; use Secret.from_dict"
        )));
    }
    let size: usize = wish.env_dict.iter().map(|(name, value)| name.len() + value.len()).sum();
    if size > SECRET_BYTES_MAX {
        let message = format!("a secret must have at most {SECRET_BYTES_MAX} bytes, got {size}");
        return Err(Status::invalid(message));
    }
    let secret_id = names::keep(&call.app.engine, &call.key, &SecretId { env: wish.env_dict });
    Ok(SecretGetOrCreateResponse { secret_id })
}

/// One layer of an image. Those that only name an image or set variables are taken; the vendor's own recipe is the
/// built-in template; whatever runs a program is refused.
pub async fn image(call: &Call, wish: ImageGetOrCreateRequest) -> Result<ImageGetOrCreateResponse, Status> {
    let engine = &call.app.engine;
    let layer = wish.image.unwrap_or_default();
    let below = match layer.base_images.as_slice() {
        [] => ImageId::default(),
        [below] => names::kept(engine, &call.key, &below.image_id)?,
        _ => return Ok(refused("this server makes images from one image at a time".into())),
    };
    if layer.gpu_config.is_some_and(|gpu| gpu.count > 0 || gpu.kind > 0 || !gpu.gpu_type.is_empty()) {
        return Ok(refused("this server has no GPUs".into()));
    }
    if !layer.context_files.is_empty() || !layer.context_mount_id.is_empty() || layer.build_function.is_some()
    {
        return Ok(refused(
            "this server does not add local files or functions to images; build a template with `shoal build`".into(),
        ));
    }
    match read(&layer.dockerfile_commands, below, wish.namespace == GLOBAL) {
        Ok(image) => Ok(ImageGetOrCreateResponse {
            image_id: names::keep(engine, &call.key, &image),
            result: Some(GenericResult { status: SUCCESS, ..GenericResult::default() }),
        }),
        Err(why) => Ok(refused(why)),
    }
}

/// An image that exists as an id.
pub async fn image_from_id(call: &Call, wish: ImageFromIdRequest) -> Result<ImageFromIdResponse, Status> {
    names::kept::<ImageId>(&call.app.engine, &call.key, &wish.image_id)?;
    Ok(ImageFromIdResponse { image_id: wish.image_id })
}

/// Clients raise their exception for a failed build.
fn refused(why: String) -> ImageGetOrCreateResponse {
    ImageGetOrCreateResponse {
        image_id: "im-refused".into(),
        result: Some(GenericResult { status: FAILURE, exception: why, exitcode: 1 }),
    }
}

/// What a layer's commands come to.
fn read(commands: &[String], below: ImageId, global: bool) -> Result<ImageId, String> {
    let mut image = below;
    for command in commands {
        let command = command.trim();
        let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match word.to_ascii_uppercase().as_str() {
            "" | "#" | "CMD" | "ENTRYPOINT" | "SHELL" | "LABEL" | "EXPOSE" => {}
            // The vendor's own recipe: a Debian with Python and a compiler.
            "FROM" if global => image = ImageId::default(),
            "FROM" if rest == "base" => {}
            "FROM" => image = ImageId { image: Some(reference(rest).to_owned()), ..ImageId::default() },
            "RUN" | "COPY" | "ADD" | "ARG" | "USER" if global => {}
            "ENV" => variable(rest, &mut image)?,
            "WORKDIR" => image.workdir = Some(unquoted(rest).to_owned()),
            _ => {
                return Err(format!(
                    "this server does not run `{}` in images; build a template with `shoal build`, or run it in the sandbox",
                    names::shown(command)
                ));
            }
        }
    }
    Ok(image)
}

/// Without a flag in front or a name behind.
fn reference(rest: &str) -> &str {
    rest.split_whitespace().find(|word| !word.starts_with("--")).unwrap_or_default()
}

fn unquoted(text: &str) -> &str {
    let inner = |quote: char| text.strip_prefix(quote).and_then(|text| text.strip_suffix(quote));
    inner('\'').or_else(|| inner('"')).unwrap_or(text)
}

/// `NAME=value`, which clients quote for a shell, or `NAME value`.
fn variable(rest: &str, image: &mut ImageId) -> Result<(), String> {
    let pair = rest.split_once('=').or_else(|| rest.split_once(char::is_whitespace));
    let (name, value) = pair.ok_or_else(|| format!("`ENV {}` is no variable", names::shown(rest)))?;
    image.env.insert(name.trim().to_owned(), unquoted(value.trim()).to_owned());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(commands: &[&str], below: ImageId, global: bool) -> Result<ImageId, String> {
        let commands: Vec<String> = commands.iter().map(|command| (*command).to_owned()).collect();
        read(&commands, below, global)
    }

    #[test]
    fn layers_name_an_image_or_say_why_not() {
        let recipe =
            ["FROM python:3.11.7-slim-bookworm", "RUN apt-get update", "CMD [\"sleep\", \"172800\"]"];
        assert_eq!(layer(&recipe, ImageId::default(), true), Ok(ImageId::default()));
        let alpine = layer(&["FROM alpine:3.20"], ImageId::default(), false).expect("it is an image");
        assert_eq!(alpine.image.as_deref(), Some("alpine:3.20"));
        let more = layer(&["FROM base", "ENV A='b c'", "WORKDIR /x"], alpine, false).expect("it is an image");
        assert_eq!((more.env["A"].as_str(), more.workdir.as_deref()), ("b c", Some("/x")));
        let why = layer(&["FROM base", "RUN make"], more, false).expect_err("it runs something");
        assert!(why.contains("RUN make"), "{why}");
    }
}
