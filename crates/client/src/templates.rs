//! Templates: create, change, list, and follow their preparation.

use http::Method;
use http::header::{self, HeaderValue};
use wire::api;

use crate::error::ClientError;
use crate::sse::SseReader;
use crate::transport::Wait;
use crate::{Client, Repeat, in_query, json, plain};

/// Progress of a template's preparation.
pub struct TemplateEvents {
    reader: SseReader,
    over: bool,
}

impl TemplateEvents {
    /// Returns the next event, or `None` after the last. It is an error if the stream breaks before.
    pub async fn next(&mut self) -> Result<Option<api::TemplateEvent>, ClientError> {
        if self.over {
            return Ok(None);
        }
        let strange =
            |reader: &SseReader, what: String| ClientError::Strange { url: reader.url().to_owned(), what };
        let event = loop {
            match self.reader.next().await? {
                Some(Some(event)) => break event,
                Some(None) => {} // A comment: the stream is alive.
                None => return Err(strange(&self.reader, "it ended before the template was ready".into())),
            }
        };
        match serde_json::from_slice(&event.data).map_err(|error| strange(&self.reader, error.to_string()))? {
            api::TemplateEvent::Gone(body) => {
                Err(ClientError::Refused { status: None, body: Box::new(body) })
            }
            event => {
                self.over = !matches!(event, api::TemplateEvent::Progress { .. });
                Ok(Some(event))
            }
        }
    }
}

fn path(name: &str) -> String {
    format!("/v1/templates/{}", in_query(name))
}

impl Client {
    /// Creates a template. Its preparation may still be in progress: see [`Client::template_events`].
    pub async fn create_template(&self, wish: &api::CreateTemplate) -> Result<api::Template, ClientError> {
        self.call(json(Method::POST, "/v1/templates".into(), wish), Repeat::Never).await
    }

    /// Creates a template, or replaces the content of an existing one.
    pub async fn apply_template(
        &self,
        name: &str,
        spec: &api::TemplateSpec,
    ) -> Result<api::Template, ClientError> {
        self.call(json(Method::PUT, path(name), spec), Repeat::Harmless).await
    }

    /// Lists all templates, the built-in one first, then by name.
    pub async fn templates(&self) -> Result<Vec<api::Template>, ClientError> {
        let list: api::TemplateList = self.read("/v1/templates".into()).await?;
        Ok(list.templates)
    }

    /// Returns a template.
    pub async fn template(&self, name: &str) -> Result<api::Template, ClientError> {
        self.read(path(name)).await
    }

    /// Changes a template.
    pub async fn update_template(
        &self,
        name: &str,
        update: &api::UpdateTemplate,
    ) -> Result<api::Template, ClientError> {
        self.call(json(Method::PATCH, path(name), update), Repeat::Never).await
    }

    /// Deletes a template.
    pub async fn delete_template(&self, name: &str) -> Result<(), ClientError> {
        self.act(Method::DELETE, path(name), Repeat::Never).await
    }

    /// Retries a preparation that failed.
    pub async fn prepare_template(&self, name: &str) -> Result<api::Template, ClientError> {
        self.call(plain(Method::POST, format!("{}/prepare", path(name))), Repeat::Harmless).await
    }

    /// Streams the progress of a template until it is ready or has failed.
    pub async fn template_events(&self, name: &str) -> Result<TemplateEvents, ClientError> {
        let mut call = plain(Method::GET, format!("{}/events", path(name)));
        call.wait = Wait::Forever;
        call.headers.push((header::ACCEPT, HeaderValue::from_static("text/event-stream")));
        let response = self.transport.stream(&call, None).await?;
        Ok(TemplateEvents { reader: SseReader::new(response.into_body(), self.url()), over: false })
    }
}
