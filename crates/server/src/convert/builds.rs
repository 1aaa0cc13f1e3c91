//! Builds, as they come in and go out.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use engine::images::{BuildInfo, BuildSpec, BuildState, Upload};
use engine::templates::{TemplateName, TemplateSpec};
use wire::api;

use super::template_spec;
use crate::clock::rfc3339;
use crate::error::ApiError;

/// A build that was checked and waits for its context.
pub struct BuildWish {
    template: TemplateName,
    spec: TemplateSpec,
    dockerfile: String,
    target: Option<String>,
    arguments: BTreeMap<String, String>,
    secrets: BTreeMap<String, Vec<u8>>,
}

impl BuildWish {
    /// With its context.
    pub fn with(self, context: Upload) -> BuildSpec {
        let Self { template, spec, dockerfile, target, arguments, secrets } = self;
        BuildSpec { template, spec, context, dockerfile, target, arguments, secrets }
    }
}

/// `POST /v1/builds`
pub fn build_wish(body: api::StartBuild) -> Result<BuildWish, ApiError> {
    let api::StartBuild { template, spec, dockerfile, target, args, secrets } = body;
    if spec.image.is_some() {
        return Err(ApiError::invalid(
            "spec.image",
            "what is built is the image: say FROM in the Dockerfile",
        ));
    }
    let secret = |(id, text): (String, String)| match BASE64.decode(text) {
        Ok(value) => Ok((id, value)),
        Err(_) => Err(ApiError::invalid("secrets", format!("the value of `{id}` is not base64"))),
    };
    Ok(BuildWish {
        template: TemplateName::parse(&template)?,
        spec: template_spec(spec)?,
        dockerfile: dockerfile.unwrap_or_else(|| "Dockerfile".into()),
        target,
        arguments: args,
        secrets: secrets.into_iter().map(secret).collect::<Result<_, _>>()?,
    })
}

/// A build as clients see it.
pub fn build(build: BuildInfo) -> api::Build {
    let (state, reason, version) = match build.state {
        BuildState::Running => (api::BuildState::Running, None, None),
        BuildState::Done { version } => (api::BuildState::Done, None, Some(version)),
        BuildState::Failed { reason } => (api::BuildState::Failed, Some(reason), None),
    };
    api::Build {
        id: build.id.to_string(),
        template: build.template,
        state,
        reason,
        version,
        log_bytes: build.log_bytes,
        created_at: rfc3339(build.created_at),
        ended_at: build.ended_at.map(rfc3339),
    }
}
