//! A guest's bytes in JSON: neither names nor output need be UTF-8.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

/// Bytes as text with replacement characters, and in base64 if they are not valid text.
pub fn text_and_base64(bytes: &[u8]) -> (String, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (text.to_owned(), None),
        Err(_) => (String::from_utf8_lossy(bytes).into_owned(), Some(BASE64.encode(bytes))),
    }
}

/// Text if the bytes are valid text. If the cut splits a character, the whole character is dropped.
pub fn text_or_base64(mut bytes: Vec<u8>, cut: bool) -> (Option<String>, Option<String>) {
    if cut
        && let Err(error) = std::str::from_utf8(&bytes)
        && error.error_len().is_none()
    {
        bytes.truncate(error.valid_up_to());
    }
    match String::from_utf8(bytes) {
        Ok(text) => (Some(text), None),
        Err(error) => (None, Some(BASE64.encode(error.as_bytes()))),
    }
}

/// A path below another.
pub fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    [directory.strip_suffix(b"/").unwrap_or(directory), b"/", name].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_text_where_it_is_text() {
        assert_eq!(text_or_base64(b"abc".to_vec(), false), (Some("abc".into()), None));
        assert_eq!(text_or_base64(vec![0xff, 0], false), (None, Some("/wA=".into())));
        let half = "aä".as_bytes()[..2].to_vec();
        assert_eq!(text_or_base64(half.clone(), true), (Some("a".into()), None));
        assert_eq!(text_or_base64(half, false).0, None, "what was not cut is not made shorter");
    }
}
