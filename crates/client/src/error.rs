//! What can go wrong between a client and the daemon.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use wire::api::ErrorBody;

/// A cause from the layers below: the network, TLS, HTTP.
pub type Cause = Box<dyn Error + Send + Sync>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is not the URL of a daemon.
    #[error("`{url}` is not the URL of a daemon")]
    BadUrl {
        /// As it was given.
        url: String,
        /// What is wrong with it.
        source: Cause,
    },
    /// The key cannot be sent in a header.
    #[error("the API key contains characters that are not allowed in a key")]
    BadKey,
    /// The certificates that this machine trusts cannot be read.
    #[error("cannot find the certificates that this machine trusts")]
    Trust {
        /// Why.
        source: Cause,
    },
    /// Nothing listens at this address.
    #[error("cannot reach the daemon at {url}")]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        source: Cause,
    },
    /// The TLS certificate is not trusted.
    #[error("cannot open a secure connection to the daemon at {url}")]
    Insecure {
        /// Where.
        url: String,
        /// Why.
        source: Cause,
    },
    /// The connection broke.
    #[error("the connection to the daemon at {url} broke")]
    Broken {
        /// Where.
        url: String,
        /// Why.
        source: Cause,
    },
    /// No answer in time.
    #[error("the daemon at {url} did not answer within {seconds} s")]
    Late {
        /// Where.
        url: String,
        /// The deadline.
        seconds: u64,
    },
    /// The daemon returned an error.
    #[error("{}", body.message)]
    Refused {
        /// The HTTP status; `None` if the error came on a stream.
        status: Option<u16>,
        /// The error.
        body: Box<ErrorBody>,
    },
    /// The response is not that of a daemon.
    #[error("the response from {url} is not one of a Shoal daemon: {what}")]
    Strange {
        /// Where.
        url: String,
        /// What is wrong with it.
        what: String,
    },
    /// An error on this machine.
    #[error("cannot copy from or to `{}`", path.display())]
    Local {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A stream could not be continued in time.
    #[error("the stream broke and could not be continued within {seconds} s")]
    LostPatience {
        /// How long the client tried.
        seconds: u64,
        /// The error of the last attempt.
        source: Box<ClientError>,
    },
}

impl ClientError {
    /// The daemon's stable code, if it sent one.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Refused { body, .. } => Some(&body.code),
            Self::LostPatience { source, .. } => source.code(),
            Self::BadUrl { .. }
            | Self::BadKey
            | Self::Trust { .. }
            | Self::Unreachable { .. }
            | Self::Insecure { .. }
            | Self::Broken { .. }
            | Self::Late { .. }
            | Self::Local { .. }
            | Self::Strange { .. } => None,
        }
    }

    /// What to do about it, if known.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Refused { body, .. } => body.hint.as_deref(),
            Self::LostPatience { source, .. } => source.hint(),
            Self::Unreachable { .. } => Some("is the daemon running? `shoal serve` starts one"),
            Self::Insecure { .. } => {
                Some("SSL_CERT_FILE may name a file with the certificate that signed the daemon's")
            }
            Self::BadUrl { .. } => Some("write it as http://127.0.0.1:7878"),
            Self::BadKey
            | Self::Trust { .. }
            | Self::Broken { .. }
            | Self::Late { .. }
            | Self::Local { .. }
            | Self::Strange { .. } => None,
        }
    }

    /// Whether the same call may succeed soon, because the daemon is away or stopping.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Broken { .. } | Self::Late { .. } => true,
            Self::Refused { body, .. } => body.code == "stopping",
            Self::BadUrl { .. }
            | Self::BadKey
            | Self::Trust { .. }
            | Self::Insecure { .. }
            | Self::Strange { .. }
            | Self::Local { .. }
            | Self::LostPatience { .. } => false,
        }
    }
}
