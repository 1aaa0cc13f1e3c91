//! Images that clients describe by the text of a Dockerfile, without files of their own.
//!
//! Most such texts are one `FROM`, which is an image's name and needs no build.

use std::hash::{DefaultHasher, Hash, Hasher};

use engine::build::{BuildInfo, BuildSpec, BuildState};
use engine::template::{Preparation, TemplateName, TemplateSpec};
use engine::{EngineError, Key};

use crate::http::app::App;

/// The path of the Dockerfile in the context that [`build`] makes.
const DOCKERFILE: &str = "Dockerfile";

/// The image of a Dockerfile that says nothing but `FROM image`.
pub fn only_image(text: &str) -> Option<String> {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let (first, rest) = (lines.next()?, lines.next());
    let words: Vec<&str> = first.split_whitespace().collect();
    match (words.as_slice(), rest) {
        ([from, image], None) | ([from, image, _, _], None)
            if from.eq_ignore_ascii_case("FROM")
                && !image.starts_with("--")
                && !image.contains('$')
                && words.get(2).is_none_or(|word| word.eq_ignore_ascii_case("AS")) =>
        {
            Some((*image).to_owned())
        }
        _ => None,
    }
}

/// The name of the template that is built from a text for a dialect. The same text has the same name, so that it is built once.
pub fn template_name(dialect: &str, text: &str) -> String {
    let hash = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, text).hash(&mut hasher);
        hasher.finish()
    };
    format!("{dialect}-{:016x}{:016x}", hash(1), hash(2))
}

/// Starts to build a template from the text of a Dockerfile.
pub async fn build(
    app: &App,
    key: &Key,
    template: TemplateName,
    spec: TemplateSpec,
    text: &str,
) -> Result<BuildInfo, EngineError> {
    let context = app.engine.dockerfile_context(DOCKERFILE, text).await?;
    let dockerfile = DOCKERFILE.to_owned();
    let (target, arguments, secrets, network) = Default::default();
    let spec = BuildSpec { template, spec, context, dockerfile, target, arguments, secrets, network };
    app.engine.build(key, spec).await
}

/// Waits for the end of a build.
pub async fn built(app: &App, key: &Key, build: &BuildInfo) -> Result<BuildState, EngineError> {
    let mut log = app.engine.build_log(&key.owner, build.id, build.log_bytes)?;
    while log.next(true).await?.is_some() {}
    Ok(app.engine.build_info(&key.owner, build.id)?.state)
}

/// The template of a text, built now unless it was built before.
pub async fn template(app: &App, key: &Key, dialect: &str, text: &str) -> Result<TemplateName, EngineError> {
    let name = TemplateName::parse(&template_name(dialect, text))?;
    if let Ok(template) = app.engine.template(&key.owner, name.as_str())
        && matches!(template.preparation, Preparation::Ready(_))
    {
        return Ok(name);
    }
    let building = build(app, key, name.clone(), TemplateSpec::default(), text).await?;
    match built(app, key, &building).await? {
        BuildState::Done { .. } => Ok(name),
        BuildState::Failed { reason } => Err(EngineError::TemplateFailed { name: name.to_string(), reason }),
        BuildState::Running => Err(EngineError::Stopping),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_from_is_an_image() {
        for (text, image) in [
            ("FROM debian:12\n", Some("debian:12")),
            ("# a comment\n\nfrom python:3 as base\n", Some("python:3")),
            ("FROM debian:12\nRUN true\n", None),
            ("FROM --platform=linux/amd64 debian\n", None),
            ("FROM $BASE\n", None),
            ("FROM a b\n", None),
            ("FROM a b c\n", None),
            ("RUN true\n", None),
            ("", None),
        ] {
            assert_eq!(only_image(text).as_deref(), image, "{text:?}");
        }
    }

    #[test]
    fn a_text_has_one_name() {
        assert_eq!(template_name("x", "FROM a\nRUN b"), template_name("x", "FROM a\nRUN b"));
        assert_ne!(template_name("x", "FROM a\nRUN b"), template_name("x", "FROM a\nRUN c"));
    }
}
