//! Relays bytes between two connections, counted and limited.
//!
//! Copying uses one buffer per thread, not one per connection: a thousand idle connections cost no buffers. Bytes that
//! one side cannot accept at once are stored separately until it can.

mod metered;

use std::cell::RefCell;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::Shutdown;
use tokio::net::TcpStream;

use crate::limits::Bucket;

pub use metered::{Metered, Prefixed};

/// The buffer of a thread.
const BUFFER_BYTES: usize = 256 * 1024;
/// After this long without a byte, the kernel probes whether the other side is still there.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Counts the bytes of one connection, and applies the limits of its sandbox and its owner.
#[derive(Debug, Default)]
pub struct Meter {
    sent: AtomicU64,
    received: AtomicU64,
    shares: Vec<std::sync::Arc<Share>>,
}

/// Bytes of a sandbox, or of an owner.
#[derive(Debug, Default)]
pub struct Share {
    /// Bytes so far, both directions.
    pub sent: AtomicU64,
    /// Bytes from the network to the sandbox.
    pub received: AtomicU64,
    bytes_max: AtomicU64,
    rate: Mutex<Option<Bucket>>,
}

/// The direction of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the sandbox.
    Out,
    /// To the sandbox.
    In,
}

impl Share {
    /// Sets the limits. Zero means no limit.
    pub fn limit(&self, bytes_per_second: u64, bytes_max: u64) {
        self.bytes_max.store(bytes_max, Ordering::Relaxed);
        let bucket =
            (bytes_per_second > 0).then(|| Bucket::new(bytes_per_second, bytes_per_second, Instant::now()));
        *self.rate.lock().expect("nobody panics while holding it") = bucket;
    }

    /// Whether the limit of bytes is reached.
    pub fn is_used_up(&self) -> bool {
        let max = self.bytes_max.load(Ordering::Relaxed);
        max > 0 && self.sent.load(Ordering::Relaxed) + self.received.load(Ordering::Relaxed) >= max
    }

    fn count(&self, way: Way, bytes: u64) -> Duration {
        match way {
            Way::Out => self.sent.fetch_add(bytes, Ordering::Relaxed),
            Way::In => self.received.fetch_add(bytes, Ordering::Relaxed),
        };
        let mut rate = self.rate.lock().expect("nobody panics while holding it");
        rate.as_mut().map_or(Duration::ZERO, |bucket| bucket.owe(bytes, Instant::now()))
    }
}

impl Meter {
    /// A meter that also counts for `shares`.
    pub fn new(shares: Vec<std::sync::Arc<Share>>) -> Self {
        Self { shares, ..Self::default() }
    }

    /// Bytes from the sandbox so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Bytes to the sandbox so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Counts bytes; the caller must wait for the returned time before it moves more. Fails when a share is used up.
    pub fn count(&self, way: Way, bytes: u64) -> io::Result<Duration> {
        match way {
            Way::Out => self.sent.fetch_add(bytes, Ordering::Relaxed),
            Way::In => self.received.fetch_add(bytes, Ordering::Relaxed),
        };
        let mut wait = Duration::ZERO;
        for share in &self.shares {
            wait = wait.max(share.count(way, bytes));
            if share.is_used_up() {
                return Err(io::Error::new(
                    io::ErrorKind::QuotaExceeded,
                    "the sandbox has used all bytes that it may move",
                ));
            }
        }
        Ok(wait)
    }
}

/// Prepares a connection that may live long: small packets are sent at once, and a dead peer is noticed.
pub fn prepare(stream: &TcpStream) -> io::Result<()> {
    rustix::net::sockopt::set_tcp_nodelay(stream, true)?;
    rustix::net::sockopt::set_socket_keepalive(stream, true)?;
    rustix::net::sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    Ok(())
}

/// Makes the connection end with a reset, so that a cut transfer does not look complete.
pub fn reset_on_close(stream: &TcpStream) {
    // This fails only for a socket that is gone, which needs no reset.
    let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}

/// Copies both ways until both sides have ended, or one breaks.
pub async fn relay(client: &TcpStream, server: &TcpStream, meter: &Meter) -> io::Result<()> {
    tokio::try_join!(one_way(client, server, meter, Way::Out), one_way(server, client, meter, Way::In))?;
    Ok(())
}

/// Copies one way until `from` ends, and then ends that direction of `to`.
pub async fn one_way(from: &TcpStream, to: &TcpStream, meter: &Meter, way: Way) -> io::Result<()> {
    let mut rest = Vec::new();
    loop {
        from.readable().await?;
        let count = match BUFFER.with_borrow_mut(|buffer| read_and_write(from, to, buffer, &mut rest)) {
            Ok(0) => break,
            Ok(count) => count,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
            Err(e) => return Err(e),
        };
        if !rest.is_empty() {
            write_all(to, &rest).await?;
            rest = Vec::new();
        }
        let wait = meter.count(way, count as u64)?;
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
    match rustix::net::shutdown(to, Shutdown::Write) {
        // The other side has closed first.
        Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn read_and_write(
    from: &TcpStream,
    to: &TcpStream,
    buffer: &mut Vec<u8>,
    rest: &mut Vec<u8>,
) -> io::Result<usize> {
    buffer.resize(BUFFER_BYTES, 0);
    let count = from.try_read(buffer)?;
    let written = match to.try_write(&buffer[..count]) {
        Ok(written) => written,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
        Err(e) => return Err(e),
    };
    rest.extend_from_slice(&buffer[written..count]);
    Ok(count)
}

/// Writes all of `bytes`.
pub async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        to.writable().await?;
        match to.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let address = listener.local_addr().expect("an address");
        let (a, b) = tokio::join!(TcpStream::connect(address), listener.accept());
        (a.expect("a stream"), b.expect("a stream").0)
    }

    #[tokio::test]
    async fn bytes_and_half_closes_pass_both_ways() {
        let ((mut guest, client), (server, mut upstream)) = (pair().await, pair().await);
        let meter = Arc::new(Meter::default());
        let counts = meter.clone();
        let relayed = tokio::spawn(async move { relay(&client, &server, &meter).await });
        let sent = vec![7u8; 3 << 20];
        let writing = async {
            guest.write_all(&sent).await.expect("written");
            guest.shutdown().await.expect("half closed");
            let mut answer = Vec::new();
            guest.read_to_end(&mut answer).await.expect("read");
            answer
        };
        let reading = async {
            let mut got = Vec::new();
            upstream.read_to_end(&mut got).await.expect("read");
            upstream.write_all(b"after the end").await.expect("written");
            upstream.shutdown().await.expect("closed");
            got.len()
        };
        let (answer, got) = tokio::join!(writing, reading);
        assert_eq!((got, answer.as_slice()), (sent.len(), &b"after the end"[..]));
        relayed.await.expect("no panic").expect("relayed");
        assert_eq!((counts.sent(), counts.received()), (sent.len() as u64, 13));
    }

    #[tokio::test]
    async fn a_share_that_is_used_up_ends_the_relay() {
        let ((mut guest, client), (server, mut upstream)) = (pair().await, pair().await);
        let share = Arc::new(Share::default());
        share.limit(0, 1000);
        let meter = Meter::new(vec![share]);
        let relayed = tokio::spawn(async move { relay(&client, &server, &meter).await });
        guest.write_all(&[0; 2000]).await.expect("written");
        let mut got = Vec::new();
        let _ = upstream.read_to_end(&mut got).await;
        let error = relayed.await.expect("no panic").expect_err("used up");
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
    }

    #[tokio::test]
    async fn a_broken_side_ends_both_directions() {
        let ((guest, client), (server, mut upstream)) = (pair().await, pair().await);
        let relayed = tokio::spawn(async move { relay(&client, &server, &Meter::default()).await });
        reset_on_close(&guest);
        drop(guest);
        let mut got = Vec::new();
        let _ = upstream.read_to_end(&mut got).await;
        relayed.await.expect("no panic").expect_err("the guest reset the connection");
    }
}
