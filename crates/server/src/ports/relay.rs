//! Bytes between two connections, until both sides have ended or the right to use the port has.

use tokio::io::{AsyncRead, AsyncWrite};

use super::grant::End;
use crate::http::app::App;

/// How much is read at once, in each direction.
pub const CHUNK: usize = 64 << 10;

/// Passes bytes on in both directions. A side that closes its half ends only that direction.
pub async fn copy(
    app: &App,
    mut end: End,
    mut client: impl AsyncRead + AsyncWrite + Unpin,
    mut server: impl AsyncRead + AsyncWrite + Unpin,
) {
    let mut stopping = app.daemon_stopping();
    tokio::select! {
        copied = tokio::io::copy_bidirectional_with_sizes(&mut client, &mut server, CHUNK, CHUNK) => {
            if let Err(error) = copied {
                tracing::debug!(%error, "a connection to a port broke");
            }
        }
        () = end.wait() => {}
        _ = stopping.wait_for(|stopping| *stopping) => {}
    }
}
