//! Events of sandboxes, across reconnects.

use std::time::Duration;

use http::header::HeaderName;
use http::{HeaderValue, Method};
use wire::SandboxId;
use wire::api::SandboxEvent;

use crate::error::ClientError;
use crate::sse::SseReader;
use crate::{Client, Patience, plain};

/// The daemon sends something every 15 s; a connection that is silent for longer than this is dead.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Events of sandboxes and their commands.
pub struct SandboxWatch {
    client: Client,
    only: Option<SandboxId>,
    /// The last event that the caller has seen.
    place: Option<String>,
    reader: Option<SseReader>,
    patience: Patience,
}

impl SandboxWatch {
    pub(crate) fn new(client: Client, only: Option<SandboxId>) -> Self {
        let patience = Patience::new(client.patience);
        Self { client, only, place: None, reader: None, patience }
    }

    /// Returns the next event. The first is `Ready`, once. If the connection breaks, another continues after the last event;
    /// `Missed` reports that some events are gone. Nothing follows an error.
    pub async fn next(&mut self) -> Result<SandboxEvent, ClientError> {
        loop {
            let error = match self.try_next().await {
                Ok(Some(event)) => return Ok(event),
                Ok(None) => continue,
                Err(error) => error,
            };
            self.reader = None;
            let again = error.is_passing() && self.client.transport.was_reached();
            if !again {
                return Err(error);
            }
            if !self.patience.pause().await {
                let seconds = self.patience.seconds();
                return Err(ClientError::LostPatience { seconds, source: Box::new(error) });
            }
        }
    }

    /// Reads one piece of one connection. `None` means nothing for the caller.
    async fn try_next(&mut self) -> Result<Option<SandboxEvent>, ClientError> {
        let mut reader = match self.reader.take() {
            Some(reader) => reader,
            None => self.connect().await?,
        };
        let broken =
            |url: &str, why: &'static str| ClientError::Broken { url: url.to_owned(), source: why.into() };
        let piece = match tokio::time::timeout(SILENCE_MAX, reader.next()).await {
            Ok(piece) => piece?,
            Err(_) => return Err(broken(reader.url(), "the daemon was silent for too long")),
        };
        let Some(event) = piece else { return Err(broken(reader.url(), "the daemon ended the stream")) };
        self.patience.renew();
        let first = self.place.is_none();
        let url = reader.url().to_owned();
        self.reader = Some(reader);
        let Some(event) = event else { return Ok(None) };
        let told = serde_json::from_slice(&event.data)
            .map_err(|error| ClientError::Strange { url, what: error.to_string() })?;
        self.place = event.id.or(self.place.take());
        // The caller need not know about a reconnect.
        Ok(Some(told).filter(|told| first || *told != SandboxEvent::Ready))
    }

    async fn connect(&self) -> Result<SseReader, ClientError> {
        let query = self.only.map_or_else(String::new, |id| format!("?sandbox={id}"));
        let mut call = plain(Method::GET, format!("/v1/events{query}"));
        if let Some(place) = &self.place {
            let value = HeaderValue::from_str(place).map_err(|_| ClientError::Strange {
                url: self.client.url(),
                what: "an event has no valid id".into(),
            })?;
            call.headers.push((HeaderName::from_static("last-event-id"), value));
        }
        let response = self.client.transport.stream(&call, None).await?;
        Ok(SseReader::new(response.into_body(), self.client.url()))
    }
}
