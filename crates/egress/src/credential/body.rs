//! Bodies that are changed while they pass, with bounded memory.
//!
//! [`Replaced`] puts values where placeholders are, and fails when it finds a placeholder that must not leave. [`Masked`]
//! covers values in answers with `*`, so that a host that repeats a request does not show them. A text may be spread over
//! pieces: the end of a piece that could begin one is held back until the next piece.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use memchr::memmem;

use super::{Refusal, Value};

/// A body whose placeholders are replaced keeps its `Content-Length` up to this size; a longer one is sent in chunks.
pub const BODY_BUFFER_MAX: usize = 256 * 1024;

/// The first place of one of some texts: where, and which. Earlier places come first.
pub fn find_any(bytes: &[u8], texts: &[&[u8]]) -> Option<(usize, usize)> {
    let found = texts.iter().enumerate().filter(|(_, text)| !text.is_empty());
    found.filter_map(|(which, text)| memmem::find(bytes, text).map(|at| (at, which))).min()
}

/// Replaces every occurrence of a text; `None` if there is none.
pub(super) fn replace_all(bytes: &[u8], text: &[u8], by: &[u8]) -> Option<Vec<u8>> {
    find_any(bytes, &[text])?;
    let (mut replaced, mut rest) = (Vec::with_capacity(bytes.len() + by.len()), bytes);
    while let Some((at, _)) = find_any(rest, &[text]) {
        replaced.extend_from_slice(&rest[..at]);
        replaced.extend_from_slice(by);
        rest = &rest[at + text.len()..];
    }
    replaced.extend_from_slice(rest);
    Some(replaced)
}

/// How many bytes at the end could be the beginning of one of some texts.
fn held_back(bytes: &[u8], texts: &[&[u8]]) -> usize {
    let beginning = |text: &&[u8]| {
        let longest = bytes.len().min(text.len().saturating_sub(1));
        (1..=longest).rev().find(|length| bytes.ends_with(&text[..*length])).unwrap_or(0)
    };
    texts.iter().map(beginning).max().unwrap_or(0)
}

/// Why a body stops.
#[derive(Debug, thiserror::Error)]
pub enum BodyError<E> {
    /// The body itself broke.
    #[error(transparent)]
    Body(E),
    /// A placeholder would leave.
    #[error(transparent)]
    Refused(Refusal),
}

/// A body in which placeholders are replaced.
#[derive(Debug)]
pub struct Replaced<B> {
    body: B,
    replace: Vec<(Vec<u8>, Value)>,
    refuse: Vec<(Vec<u8>, String)>,
    replaced: Arc<[AtomicBool]>,
    held: Vec<u8>,
    trailers: Option<Frame<Bytes>>,
    ended: bool,
    exact: bool,
}

impl<B> Replaced<B> {
    /// Replaces and refuses these texts. Without any, the body passes as it is.
    pub fn new(body: B, replace: Vec<(Vec<u8>, Value)>, refuse: Vec<(Vec<u8>, String)>) -> Self {
        let exact = replace.is_empty();
        let replaced = replace.iter().map(|_| AtomicBool::new(false)).collect();
        Self { body, replace, refuse, replaced, held: Vec::new(), trailers: None, ended: false, exact }
    }

    /// Which texts were replaced so far, in the order that they were given.
    pub fn replaced(&self) -> Arc<[AtomicBool]> {
        Arc::clone(&self.replaced)
    }

    /// What can pass of `self.held`; all of it at the end.
    fn pass(&mut self, last: bool) -> Result<Bytes, Refusal> {
        let texts: Vec<&[u8]> = self
            .replace
            .iter()
            .map(|(text, _)| text.as_slice())
            .chain(self.refuse.iter().map(|(text, _)| text.as_slice()))
            .collect();
        let (mut out, mut rest) = (Vec::with_capacity(self.held.len()), self.held.as_slice());
        while let Some((at, which)) = find_any(rest, &texts) {
            match self.replace.get(which) {
                Some((text, value)) => {
                    out.extend_from_slice(&rest[..at]);
                    out.extend_from_slice(value.bytes());
                    rest = &rest[at + text.len()..];
                    self.replaced[which].store(true, Ordering::Relaxed);
                }
                None => {
                    let (_, name) = &self.refuse[which - self.replace.len()];
                    return Err(Refusal::Unreplaced(name.clone()));
                }
            }
        }
        let keep = if last { 0 } else { held_back(rest, &texts) };
        let (now, later) = rest.split_at(rest.len() - keep);
        out.extend_from_slice(now);
        self.held = later.to_vec();
        Ok(out.into())
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Replaced<B> {
    type Data = Bytes;
    type Error = BodyError<B::Error>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        loop {
            if this.ended {
                return Poll::Ready(this.trailers.take().map(Ok));
            }
            let frame = match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Poll::Ready(Some(Err(BodyError::Body(error)))),
                None => {
                    this.ended = true;
                    match this.pass(true) {
                        Ok(bytes) if bytes.is_empty() => continue,
                        Ok(bytes) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                        Err(refusal) => return Poll::Ready(Some(Err(BodyError::Refused(refusal)))),
                    }
                }
            };
            let (bytes, last) = match frame.into_data() {
                Ok(bytes) => (bytes, false),
                // Trailers come after all data.
                Err(trailers) => {
                    this.trailers = Some(trailers);
                    this.ended = true;
                    (Bytes::new(), true)
                }
            };
            this.held.extend_from_slice(&bytes);
            match this.pass(last) {
                Ok(bytes) if bytes.is_empty() => continue,
                Ok(bytes) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Err(refusal) => {
                    this.ended = true;
                    return Poll::Ready(Some(Err(BodyError::Refused(refusal))));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_empty() && self.trailers.is_none() && (self.ended || self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match (self.exact, self.held.is_empty()) {
            (true, true) => self.body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

/// An answer in which values are covered. Its length does not change.
#[derive(Debug)]
pub struct Masked<B> {
    body: B,
    values: Vec<Value>,
    held: Vec<u8>,
    trailers: Option<Frame<Bytes>>,
    ended: bool,
}

impl<B> Masked<B> {
    /// Covers these values.
    pub fn new(body: B, values: Vec<Value>) -> Self {
        Self { body, values, held: Vec::new(), trailers: None, ended: false }
    }

    fn pass(&mut self, last: bool) -> Bytes {
        mask(&mut self.held, &self.values);
        let keep = if last { 0 } else { held_back(&self.held, &texts(&self.values)) };
        let later = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, later).into()
    }
}

fn texts(values: &[Value]) -> Vec<&[u8]> {
    values.iter().map(Value::bytes).collect()
}

/// Covers values in some bytes. Returns whether there was one.
pub(crate) fn mask(bytes: &mut [u8], values: &[Value]) -> bool {
    let texts = texts(values);
    let mut found = false;
    while let Some((at, which)) = find_any(bytes, &texts) {
        bytes[at..at + texts[which].len()].fill(b'*');
        found = true;
    }
    found
}

impl<B: Body<Data = Bytes> + Unpin> Body for Masked<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        if this.values.is_empty() {
            return Pin::new(&mut this.body).poll_frame(cx);
        }
        loop {
            if this.ended {
                return Poll::Ready(this.trailers.take().map(Ok));
            }
            let (bytes, last) = match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => (bytes, false),
                    Err(trailers) => {
                        this.trailers = Some(trailers);
                        (Bytes::new(), true)
                    }
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => (Bytes::new(), true),
            };
            this.ended = last;
            this.held.extend_from_slice(&bytes);
            let now = this.pass(last);
            if !now.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(now))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_empty() && self.trailers.is_none() && (self.ended || self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match self.held.is_empty() {
            true => self.body.size_hint(),
            false => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    fn pieces(bytes: &[u8], size: usize) -> impl Body<Data = Bytes, Error = Infallible> + Unpin + use<> {
        let pieces: Vec<_> = bytes
            .chunks(size.max(1))
            .map(|piece| Ok::<_, Infallible>(Frame::data(Bytes::copy_from_slice(piece))))
            .collect();
        StreamBody::new(futures_util::stream::iter(pieces))
    }

    fn collected<B>(body: B) -> Result<Vec<u8>, String>
    where
        B: Body<Data = Bytes>,
        B::Error: std::fmt::Display,
    {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let body = runtime.block_on(body.collect());
        body.map(|body| body.to_bytes().to_vec()).map_err(|error| error.to_string())
    }

    proptest::proptest! {
        #[test]
        fn placeholders_are_replaced_however_the_body_is_cut(
            text in "(ab|abc|abcab|x|PLACE|PLACEHOLDER|HOLDER){0,20}",
            size in 1usize..20,
        ) {
            let replace = vec![(b"PLACEHOLDER".to_vec(), Value::new(b"v!".to_vec()))];
            let body = Replaced::new(pieces(text.as_bytes(), size), replace, vec![]);
            let got = collected(body).expect("a body");
            proptest::prop_assert_eq!(String::from_utf8(got).expect("text"), text.replace("PLACEHOLDER", "v!"));
        }

        #[test]
        fn values_are_masked_however_the_answer_is_cut(
            text in "(ab|SECRETVALUE|SECRET|VALUE|x){0,20}",
            size in 1usize..20,
        ) {
            let body = Masked::new(pieces(text.as_bytes(), size), vec![Value::new(b"SECRETVALUE".to_vec())]);
            let got = collected(body).expect("a body");
            proptest::prop_assert_eq!(
                String::from_utf8(got).expect("text"),
                text.replace("SECRETVALUE", "***********")
            );
        }

        #[test]
        fn a_placeholder_never_passes(text in "[a-c]{0,12}", size in 1usize..8) {
            let refuse = vec![(b"abca".to_vec(), "api".to_owned())];
            let body = Replaced::new(pieces(text.as_bytes(), size), vec![], refuse);
            match collected(body) {
                Ok(got) => proptest::prop_assert_eq!(got, text.into_bytes()),
                Err(why) => {
                    proptest::prop_assert!(text.contains("abca"));
                    proptest::prop_assert!(why.contains("`api`"));
                }
            }
        }
    }

    #[test]
    fn trailers_stay() {
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
        let frames: Vec<Result<Frame<Bytes>, Infallible>> =
            vec![Ok(Frame::data(Bytes::from_static(b"abP"))), Ok(Frame::trailers(trailers))];
        let body = StreamBody::new(futures_util::stream::iter(frames));
        let replace = vec![(b"PLACE".to_vec(), Value::new(b"v".to_vec()))];
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let got = runtime.block_on(Masked::new(Replaced::new(body, replace, vec![]), vec![]).collect());
        let got = got.unwrap_or_else(|_| panic!("a body"));
        assert_eq!(got.trailers().and_then(|trailers| trailers.get("grpc-status")).expect("a status"), "0");
        assert_eq!(got.to_bytes(), "abP");
    }

    #[test]
    fn a_large_body_is_not_kept() {
        let mut body = Replaced::new((), vec![(b"PLACE".to_vec(), Value::new(b"v".to_vec()))], vec![]);
        for _ in 0..1000 {
            body.held.extend_from_slice(&[b'P'; 4096]);
            let passed = body.pass(false).expect("it passes");
            assert!(passed.len() >= 4095 && body.held.len() < 5);
        }
    }
}
