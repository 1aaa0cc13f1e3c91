//! Plain HTTP: parses heads, checks requests, and responds with a reason to those that it rejects.

mod check;
mod head;
mod page;
mod proxy;

pub use check::{BadRequest, Peer, check};
pub use head::{BadHead, HEAD_BYTES_MAX, Head, Sniff, read_head, sniff};
pub use page::Page;
pub use proxy::{ProxyError, Refused, proxy};
