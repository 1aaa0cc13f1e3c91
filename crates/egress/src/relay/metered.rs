//! Streams for the HTTP parser: with bytes that were read before, and with a meter.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::{Meter, Way};

/// A stream whose first bytes were read before.
#[derive(Debug)]
pub struct Prefixed<S> {
    first: Vec<u8>,
    at: usize,
    stream: S,
}

impl<S> Prefixed<S> {
    /// Returns `first`, then the bytes of `stream`.
    pub fn new(first: Vec<u8>, stream: S) -> Self {
        Self { first, at: 0, stream }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefixed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.at < self.first.len() {
            let count = (self.first.len() - self.at).min(buf.remaining());
            buf.put_slice(&self.first[self.at..self.at + count]);
            self.at += count;
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Prefixed<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A stream to upstream whose bytes the meter counts and delays.
#[derive(Debug)]
pub struct Metered<S> {
    stream: S,
    meter: Arc<Meter>,
    wait: Option<Pin<Box<Sleep>>>,
}

impl<S> Metered<S> {
    /// Counts what is written to `stream` as sent and what is read from it as received.
    pub fn new(stream: S, meter: Arc<Meter>) -> Self {
        Self { stream, meter, wait: None }
    }

    fn poll_wait(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(wait) = self.wait.as_mut() {
            ready!(wait.as_mut().poll(cx));
            self.wait = None;
        }
        Poll::Ready(())
    }

    fn count(&mut self, way: Way, bytes: usize) -> io::Result<()> {
        let wait = self.meter.count(way, bytes as u64)?;
        if !wait.is_zero() {
            self.wait = Some(Box::pin(tokio::time::sleep(wait)));
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_wait(cx));
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        Poll::Ready(self.count(Way::In, buf.filled().len() - before))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_wait(cx));
        let count = ready!(Pin::new(&mut self.stream).poll_write(cx, buf))?;
        self.count(Way::Out, count)?;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
