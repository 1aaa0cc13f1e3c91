//! The response of a refused request: why it was refused and which command opens the destination.
//!
//! Package managers and Git show the reason phrase or the body; NXDOMAIN makes them retry for many seconds. HTTP/1
//! only, since HTTP/2 has no reason phrase.

/// A refusal, ready to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// `403` or `502`.
    pub status: u16,
    /// One line, without control characters: it becomes the reason phrase.
    pub reason: String,
    /// How to fix it.
    pub hint: String,
}

impl Page {
    /// Policy refuses the destination.
    pub fn refused(what: &str, sandbox: &str, opener: Option<&str>) -> Self {
        let hint = match opener {
            Some(opener) => format!("Open it with: shoal net allow {sandbox} {opener}"),
            None => "No rule can open it.".to_owned(),
        };
        Self { status: 403, reason: format!("Refused by Shoal: {what}"), hint }
    }

    /// The destination is allowed, but could not be reached.
    pub fn unreachable(what: &str) -> Self {
        let hint = "The policy allows this destination, but it could not be reached.".to_owned();
        Self { status: 502, reason: format!("Shoal could not connect: {what}"), hint }
    }

    /// The whole response.
    pub fn bytes(&self) -> Vec<u8> {
        let reason = one_line(&self.reason);
        let body = format!("{reason}\n{}\n", one_line(&self.hint));
        let mark = if self.status == 403 { "Shoal-Policy: denied\r\n" } else { "" };
        format!(
            "HTTP/1.1 {} {reason}\r\n{mark}Content-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n\
             Cache-Control: no-store\r\nConnection: close\r\n\r\n{body}",
            self.status,
            body.len()
        )
        .into_bytes()
    }
}

/// Keeps a text on one line: it may contain bytes that a guest sent.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).take(500).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_says_why_and_what_opens_it() {
        let page = Page::refused("example.com is not in the policy", "3f2b", Some("example.com"));
        let text = String::from_utf8(page.bytes()).expect("text");
        assert!(
            text.starts_with("HTTP/1.1 403 Refused by Shoal: example.com is not in the policy\r\n"),
            "{text}"
        );
        assert!(text.contains("\r\nShoal-Policy: denied\r\n"));
        assert!(text.ends_with("Open it with: shoal net allow 3f2b example.com\n"));
    }

    #[test]
    fn nothing_breaks_out_of_the_reason() {
        let page = Page::refused("a\r\nSet-Cookie: x\r\n\r\n<b>", "id", None);
        let text = String::from_utf8(page.bytes()).expect("text");
        assert!(!text.contains("\r\nSet-Cookie"), "{text}");
        assert_eq!(text.matches("\r\n\r\n").count(), 1);
    }
}
