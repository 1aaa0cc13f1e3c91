//! HTTP: parses heads, checks requests, and responds with a reason to those that it rejects. `proxy` is for plain HTTP, and
//! `intercept` for requests that are read out of TLS to add credentials or to apply rules.

mod check;
mod head;
mod intercept;
mod page;
mod proxy;

pub use check::{BadRequest, Peer, check};
pub use head::{BadHead, HEAD_BYTES_MAX, Head, Sniff, read_head, sniff};
pub use intercept::{Intercepted, Site, intercept};
pub use page::Page;
pub use proxy::{Guard, ProxyError, Refused, proxy};
