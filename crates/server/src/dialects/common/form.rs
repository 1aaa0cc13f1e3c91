//! A form as it comes: its parts one after the other, however long they are, in bounded memory and time.
//!
//! The parser keeps whatever its stream has until it finds the boundary or the end of a part's headers, and takes all that has come
//! whenever it is asked. So it is given a stream that hands out one piece at a time, only once what came before was not enough, and
//! that fails when too much was not enough.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::BoxError;
use axum::body::{Body, BodyDataStream};
use axum::extract::multipart::{Field, MultipartError, MultipartRejection};
use axum::extract::{FromRequest, Multipart, Request};
use bytes::Bytes;
use futures_util::Stream;

/// How much is read in search of a part's beginning, or of the end of its headers. Clients send a few hundred bytes.
const FORM_HEAD_MAX: usize = 64 << 10;
/// How long a client may take for a part's headers, or send nothing of its contents.
pub const FORM_IDLE_MAX: Duration = Duration::from_secs(60);

/// Why there is no more of a form.
#[derive(Debug, thiserror::Error)]
pub enum FormError {
    /// It is no form, or it was cut.
    #[error("{}", .0.body_text())]
    Broken(MultipartError),
    /// Nothing in it is a part's beginning.
    #[error("{FORM_HEAD_MAX} bytes came in which no part begins")]
    Shapeless,
    /// The client sends nothing.
    #[error("nothing of the form came for {} s", FORM_IDLE_MAX.as_secs())]
    Late,
}

/// A form that is being sent.
pub struct Form {
    parts: Multipart,
    pace: Arc<Pace>,
}

impl Form {
    /// The form that is a request's body.
    pub async fn of(request: Request) -> Result<Self, MultipartRejection> {
        let pace = Arc::new(Pace::default());
        let metered = |body: Body| Metered { body: body.into_data_stream(), pace: Arc::clone(&pace) };
        let request = request.map(|body| Body::from_stream(metered(body)));
        Ok(Self { parts: Multipart::from_request(request, &()).await?, pace })
    }

    /// The next part. What was left of the one before must not be much: `FORM_HEAD_MAX` holds for it too.
    pub async fn next(&mut self) -> Result<Option<Part<'_>>, FormError> {
        let part = self.pace.step(self.parts.next_field()).await?;
        Ok(part.map(|field| Part { field, pace: Arc::clone(&self.pace) }))
    }
}

/// A part of a form.
pub struct Part<'f> {
    field: Field<'f>,
    pace: Arc<Pace>,
}

impl Part<'_> {
    /// What it is called.
    pub fn name(&self) -> Option<&str> {
        self.field.name()
    }

    /// What its sender calls the file.
    pub fn file_name(&self) -> Option<&str> {
        self.field.file_name()
    }

    /// The next piece of its contents, `None` after the last.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, FormError> {
        self.pace.step(self.field.chunk()).await
    }
}

/// Whose turn it is: the parser's, with what it has, or the stream's.
#[derive(Default)]
struct Pace(Mutex<Turn>);

enum Turn {
    /// One step of the parser.
    Reading {
        /// What the parser has was not enough.
        hungry: bool,
        /// What it got in this step.
        taken: usize,
    },
    /// It has all that it gets, and looks at it once more: it may not have done so since the last piece.
    Sated,
    /// It got as much as it may, and that was not enough.
    Shapeless,
}

impl Default for Turn {
    fn default() -> Self {
        Self::Reading { hungry: false, taken: 0 }
    }
}

impl Pace {
    fn turn(&self) -> MutexGuard<'_, Turn> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One step of the parser.
    async fn step<T>(
        &self,
        reading: impl Future<Output = Result<T, MultipartError>>,
    ) -> Result<T, FormError> {
        *self.turn() = Turn::default();
        let read = tokio::time::timeout(FORM_IDLE_MAX, reading).await.map_err(|_| FormError::Late)?;
        read.map_err(|error| match *self.turn() {
            Turn::Shapeless => FormError::Shapeless,
            Turn::Reading { .. } | Turn::Sated => FormError::Broken(error),
        })
    }
}

/// A body at that pace.
struct Metered {
    body: BodyDataStream,
    pace: Arc<Pace>,
}

impl Stream for Metered {
    type Item = Result<Bytes, BoxError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let body = Pin::new(&mut this.body);
        let mut turn = this.pace.turn();
        match &mut *turn {
            Turn::Reading { hungry: hungry @ false, .. } => {
                // If what it has is enough, it does not come back; if not, it does so at once.
                *hungry = true;
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Turn::Reading { taken, .. } if *taken >= FORM_HEAD_MAX => {
                *turn = Turn::Sated;
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Turn::Sated | Turn::Shapeless => {
                *turn = Turn::Shapeless;
                Poll::Ready(Some(Err("it is too much".into())))
            }
            Turn::Reading { hungry, taken } => {
                let piece = ready!(body.poll_next(context));
                *hungry = false;
                *taken += piece.as_ref().and_then(|piece| piece.as_ref().ok()).map_or(0, Bytes::len);
                Poll::Ready(piece.map(|piece| piece.map_err(Into::into)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::http::header::CONTENT_TYPE;
    use futures_util::stream::{self, StreamExt};

    use super::*;

    const PIECE: usize = 8 << 10;

    /// A form with the boundary `x`, and how many bytes of it were asked for.
    async fn form(pieces: impl Stream<Item = Vec<u8>> + Send + 'static) -> (Form, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let pieces = pieces.map(move |piece| {
            counted.fetch_add(piece.len(), Ordering::Relaxed);
            Ok::<_, BoxError>(Bytes::from(piece))
        });
        let request = Request::builder().header(CONTENT_TYPE, "multipart/form-data; boundary=x");
        let request = request.body(Body::from_stream(pieces)).expect("it is a request");
        (Form::of(request).await.expect("it is a form"), asked)
    }

    fn head(name: &str) -> String {
        format!("--x\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n")
    }

    async fn contents(form: &mut Form) -> Vec<(String, Vec<u8>)> {
        let mut all = Vec::new();
        while let Some(mut part) = form.next().await.expect("there is more, or an end") {
            let (name, mut bytes) = (part.name().unwrap_or_default().to_owned(), Vec::new());
            while let Some(chunk) = part.chunk().await.expect("it is whole") {
                bytes.extend_from_slice(&chunk);
            }
            all.push((name, bytes));
        }
        all
    }

    #[tokio::test]
    async fn parts_are_whole_however_they_come() {
        let long: Vec<u8> = (0..300_000u32).map(|at| if at % 7 == 0 { b'\r' } else { at as u8 }).collect();
        let mut bytes = [head("a").into_bytes(), long.clone(), b"\r\n".to_vec()].concat();
        bytes.extend_from_slice(format!("{}\r\n{}c\r\n--x--\r\n", head("empty"), head("c")).as_bytes());
        for size in [1, 7, 4096, bytes.len()] {
            let pieces: Vec<Vec<u8>> = bytes.chunks(size).map(<[u8]>::to_vec).collect();
            let (mut form, _) = form(stream::iter(pieces)).await;
            let expected = [("a", long.clone()), ("empty", vec![]), ("c", b"c".to_vec())];
            let expected = expected.map(|(name, bytes)| (name.to_owned(), bytes));
            assert_eq!(contents(&mut form).await, expected, "in pieces of {size}");
        }
    }

    #[tokio::test]
    async fn an_endless_search_ends() {
        // Without a boundary, in the middle of a header, and behind the boundary.
        for begun in ["", "--x\r\nContent-Disposition: form-data; name=\"", "--x"] {
            let endless = stream::iter([begun.as_bytes().to_vec()]).chain(stream::repeat(vec![b' '; PIECE]));
            let (mut form, asked) = form(endless).await;
            let error = form.next().await.map(|_| ()).expect_err("there is none");
            assert!(matches!(error, FormError::Shapeless), "{error}");
            let asked = asked.load(Ordering::Relaxed);
            assert!(asked <= FORM_HEAD_MAX + 2 * PIECE, "{asked} bytes after {begun:?}");
        }
    }

    #[tokio::test]
    async fn nothing_is_taken_ahead_of_what_is_read() {
        let small = format!("{}1\r\n", head("a"));
        let (each, count) = (small.len(), PIECE / small.len());
        let (mut form, asked) = form(stream::repeat(small.repeat(count).into_bytes())).await;
        for read in 1..=10 * count {
            let mut part = form.next().await.expect("there is more").expect("and no end");
            while part.chunk().await.expect("it is whole").is_some() {}
            let ahead = asked.load(Ordering::Relaxed) - read * each;
            assert!(ahead <= 2 * PIECE, "{ahead} bytes after {read} parts");
        }
        // A part that nobody ends is handed out as it comes.
        let endless = stream::iter([head("a").into_bytes()]).chain(stream::repeat(vec![b' '; PIECE]));
        let (mut form, asked) = self::form(endless).await;
        let mut part = form.next().await.expect("there is one").expect("and no end");
        let mut read = 0;
        for _ in 0..100 {
            read += part.chunk().await.expect("it goes on").expect("and on").len();
        }
        assert!(asked.load(Ordering::Relaxed) - read <= 2 * PIECE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_sends_nothing_is_not_waited_for() {
        for begun in [String::new(), "--x\r\nContent-Disposition:".into(), head("a")] {
            let stalled = stream::iter([begun.clone().into_bytes()]).chain(stream::pending());
            let (mut form, _) = form(stalled).await;
            let late = match form.next().await {
                Ok(Some(mut part)) => part.chunk().await.map(|_| ()),
                other => other.map(|_| ()),
            };
            assert!(matches!(late, Err(FormError::Late)), "{begun:?}: {late:?}");
        }
    }
}
