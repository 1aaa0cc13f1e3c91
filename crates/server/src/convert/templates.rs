//! Templates, as they come in and go out.

use engine::images::PullProgress;
use engine::templates::{Preparation, Template, TemplateName, TemplateSpec, TemplateUpdate};
use engine::{Labels, TemplateHappened, template as built_in};
use wire::api;

use super::{bytes, check_env, cpu_millis, layer_progress, mount, mount_spec};
use crate::clock::rfc3339;
use crate::error::ApiError;

/// `POST /v1/templates`
pub fn template_create(body: api::CreateTemplate) -> Result<(TemplateName, TemplateSpec), ApiError> {
    let api::CreateTemplate { name, image, cpu, memory, disk, env, cwd, user, command, labels, mounts } =
        body;
    let name = TemplateName::parse(&name)?;
    let spec = api::TemplateSpec { image, cpu, memory, disk, env, cwd, user, command, labels, mounts };
    Ok((name, template_spec(spec)?))
}

/// `PUT /v1/templates/{template}`
pub fn template_spec(body: api::TemplateSpec) -> Result<TemplateSpec, ApiError> {
    let api::TemplateSpec { image, cpu, memory, disk, env, cwd, user, command, labels, mounts } = body;
    check_env(&env)?;
    let usual = TemplateSpec::default();
    Ok(TemplateSpec {
        image: image.unwrap_or(usual.image),
        cpu_millis: cpu_millis(cpu)?.unwrap_or(usual.cpu_millis),
        memory_bytes: bytes("memory", memory)?.unwrap_or(usual.memory_bytes),
        disk_bytes: bytes("disk", disk)?,
        env,
        cwd,
        user,
        command,
        labels: Labels::new(labels)?,
        mounts: mounts.into_iter().map(mount_spec).collect(),
    })
}

/// `PATCH /v1/templates/{template}`
pub fn template_update(body: api::UpdateTemplate) -> Result<TemplateUpdate, ApiError> {
    let api::UpdateTemplate { name, image, cpu, memory, disk, env, cwd, user, command, labels, mounts } =
        body;
    env.as_ref().map(check_env).transpose()?;
    Ok(TemplateUpdate {
        name: name.as_deref().map(TemplateName::parse).transpose()?,
        image,
        cpu_millis: cpu_millis(cpu)?,
        memory_bytes: bytes("memory", memory)?,
        disk_bytes: disk.map(|disk| bytes("disk", disk)).transpose()?,
        env,
        cwd,
        user,
        command,
        labels: labels.map(Labels::new).transpose()?,
        mounts: mounts.map(|mounts| mounts.into_iter().map(mount_spec).collect()),
    })
}

/// A template as clients see it.
pub fn template(template: Template) -> api::Template {
    let (state, reason) = template_state(&template.preparation);
    let (resolved, digest) = match &template.preparation {
        Preparation::Ready(prepared) => (Some(engine::images::familiar(&prepared.resolved)), prepared.image),
        Preparation::Preparing | Preparation::Failed { .. } | Preparation::Replaced => (None, None),
    };
    let built = template.id.is_none();
    let spec = template.spec;
    api::Template {
        id: template.id.map(|id| id.to_string()),
        name: template.name,
        version: template.version,
        state,
        reason,
        image_target: resolved.filter(|resolved| *resolved != spec.image),
        image: spec.image,
        image_digest: digest.map(|digest| digest.to_string()),
        limits: api::SandboxLimits {
            cpu_millis: spec.cpu_millis,
            memory_bytes: spec.memory_bytes,
            pids: built_in::LIMITS.pids,
            disk_bytes: None,
        },
        disk_bytes: spec.disk_bytes,
        env: spec.env,
        cwd: spec.cwd,
        user: spec.user,
        command: spec.command,
        labels: spec.labels.pairs().clone(),
        mounts: spec.mounts.into_iter().map(mount).collect(),
        sandboxes: template.sandboxes as u64,
        built_in: built,
        created_at: (!built).then(|| rfc3339(template.created_at)),
        updated_at: (!built).then(|| rfc3339(template.updated_at)),
    }
}

fn template_state(preparation: &Preparation) -> (api::TemplateState, Option<String>) {
    match preparation {
        // One that was replaced this moment has a successor that is being prepared.
        Preparation::Preparing | Preparation::Replaced => (api::TemplateState::Preparing, None),
        Preparation::Ready(_) => (api::TemplateState::Ready, None),
        Preparation::Failed { reason } => (api::TemplateState::Failed, Some(reason.clone())),
    }
}

/// Something that happened to a template.
pub fn template_event(at: String, what: &TemplateHappened) -> api::SandboxEvent {
    let name = what.name.to_string();
    match &what.preparation {
        Some(preparation) => {
            let (state, reason) = template_state(preparation);
            api::SandboxEvent::Template { at, name, version: what.version, state, reason }
        }
        None => api::SandboxEvent::TemplateDeleted { at, name },
    }
}

/// How far a template's image is.
pub fn template_progress(progress: &PullProgress) -> api::TemplateEvent {
    api::TemplateEvent::Progress { layers: progress.layers.iter().map(layer_progress).collect() }
}
