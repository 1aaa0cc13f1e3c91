//! A query whose values are bytes: a name in a guest need not be UTF-8. Unknown and repeated keys are rejected.

use std::ops::RangeInclusive;

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use engine::GuestPath;

use crate::http::error::ApiError;

/// The most pairs in a query.
const PAIRS_MAX: usize = 256;

/// How many characters of a wrong value a message repeats.
const GIVEN_SHOWN_MAX: usize = 64;

/// The pairs that no call has taken yet.
#[derive(Debug)]
pub struct Params {
    pairs: Vec<(String, Vec<u8>)>,
}

impl<S: Send + Sync> FromRequestParts<S> for Params {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Self::parse(parts.uri.query().unwrap_or_default())
    }
}

impl Params {
    fn parse(query: &str) -> Result<Self, ApiError> {
        let wrong = |why: &str| ApiError::new(StatusCode::BAD_REQUEST, "invalid_query", why);
        let mut pairs = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            if pairs.len() >= PAIRS_MAX {
                return Err(wrong("the query has too many parts"));
            }
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let decoded =
                |text| decode(text).ok_or_else(|| wrong("the query has a `%` that does not begin an escape"));
            let name =
                String::from_utf8(decoded(name)?).map_err(|_| wrong("a name in the query is not UTF-8"))?;
            pairs.push((name, decoded(value)?));
        }
        Ok(Self { pairs })
    }

    /// All values of a name.
    pub fn all(&mut self, name: &str) -> Vec<Vec<u8>> {
        let (taken, left) = std::mem::take(&mut self.pairs).into_iter().partition(|(key, _)| key == name);
        self.pairs = left;
        let taken: Vec<(String, Vec<u8>)> = taken;
        taken.into_iter().map(|(_, value)| value).collect()
    }

    /// The value of a name. A second value stays, and [`Self::finish`] rejects it.
    pub fn bytes(&mut self, name: &str) -> Option<Vec<u8>> {
        let at = self.pairs.iter().position(|(key, _)| key == name)?;
        Some(self.pairs.remove(at).1)
    }

    /// A required path.
    pub fn path(&mut self, name: &str) -> Result<Vec<u8>, ApiError> {
        let path = self.bytes(name).ok_or_else(|| ApiError::must(name, "be given"))?;
        let Err(must) = GuestPath::check(&path) else { return Ok(path) };
        let message = format!("`{name}` must {must}");
        Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_path", message).detail("field", name))
    }

    /// Text.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let text = self.bytes(name).map(String::from_utf8).transpose();
        text.map_err(|_| ApiError::must(name, "be UTF-8"))
    }

    /// `true` or `false`.
    pub fn flag(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.bytes(name).as_deref() {
            None => Ok(default),
            Some(b"true" | b"1") => Ok(true),
            Some(b"false" | b"0") => Ok(false),
            Some(other) => {
                let given = shown(&String::from_utf8_lossy(other));
                Err(ApiError::must(name, format!("be `true` or `false`, got `{given}`")))
            }
        }
    }

    /// A number.
    pub fn number(&mut self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match text.parse().ok().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let (least, most) = range.into_inner();
                Err(ApiError::must(name, format!("be between {least} and {most}, got `{}`", shown(&text))))
            }
        }
    }

    /// Permissions in octal.
    pub fn mode(&mut self, name: &str) -> Result<Option<u32>, ApiError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let digits = text.strip_prefix("0o").unwrap_or(&text);
        let plain = (1..=5).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
        match u32::from_str_radix(digits, 8).ok().filter(|mode| plain && *mode <= 0o7777) {
            Some(mode) => Ok(Some(mode)),
            None => Err(ApiError::must(
                name,
                format!("be permissions in octal such as 0644, got `{}`", shown(&text)),
            )),
        }
    }

    /// Checks that no pair is left.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.pairs.first() {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::new(
                StatusCode::BAD_REQUEST,
                "invalid_query",
                format!("`{}` is unknown, or given more than once", shown(name)),
            )),
        }
    }
}

/// The beginning of the given value, for a message.
fn shown(text: &str) -> String {
    text.chars().take(GIVEN_SHOWN_MAX).collect()
}

/// Decodes percent-encoding, and `+` as a space, as in forms.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                (digit(rest.next()?)? * 16 + digit(rest.next()?)?) as u8
            }
            byte => byte,
        });
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(query: &str) -> Params {
        Params::parse(query).expect("it is a query")
    }

    #[test]
    fn any_byte_can_be_said() {
        let mut query = params("path=/a%FF%00+b%2B&user=me");
        assert_eq!(query.bytes("path").as_deref(), Some(&b"/a\xff\0 b+"[..]));
        assert_eq!(query.text("user").expect("it is text").as_deref(), Some("me"));
        query.finish().expect("nothing is left");
    }

    #[test]
    fn mistakes_are_refused() {
        for query in ["path=%", "path=%g0", "path=%f", "%ff=1"] {
            assert!(Params::parse(query).is_err(), "{query}");
        }
        assert!(Params::parse(&"a=1&".repeat(PAIRS_MAX + 1)).is_err());
        for path in ["", "path=", "path=a", "path=/%00", &format!("path=/{}", "a".repeat(5000))] {
            assert!(params(path).path("path").is_err(), "{path:.20}");
        }
        let mut twice = params("path=/a&path=/b");
        twice.path("path").expect("the first is fine");
        assert!(twice.finish().is_err());
        assert!(params("x=1").finish().is_err());
        assert!(params("f=yes").flag("f", true).is_err());
        assert!(params("user=%ff").text("user").is_err());
        for number in ["n=0", "n=-1", "n=x", "n=11", "n=1e3"] {
            assert!(params(number).number("n", 1..=10).is_err(), "{number}");
        }
    }

    #[test]
    fn modes_are_octal() {
        for (text, expected) in
            [("m=644", Some(0o644)), ("m=0644", Some(0o644)), ("m=0o755", Some(0o755)), ("", None)]
        {
            assert_eq!(params(text).mode("m").expect("it is a mode"), expected, "{text}");
        }
        for wrong in ["m=", "m=999", "m=10000", "m=rw", "m=-1", "m=%2B644", "m=000644"] {
            assert!(params(wrong).mode("m").is_err(), "{wrong}");
        }
    }
}
