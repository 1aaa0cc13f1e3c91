//! Plain HTTP: reading heads, checking requests, refusing with a reason.

mod check;
mod head;
mod page;
mod proxy;

pub use check::{BadRequest, Peer, check};
pub use head::{BadHead, HEAD_BYTES_MAX, Head, Sniff, read_head, sniff};
pub use page::Page;
pub use proxy::{ProxyError, Refused, proxy};
