//! Puts credentials into the head of a request, and refuses a request that would carry a placeholder out.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, HeaderName};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderValue, Method, Uri};
use zeroize::Zeroizing;

use super::body::replace_all;
use super::{Credential, CredentialRule, How, MASKED_BYTES_MIN, Value, Vault};
use crate::policy::Name;

/// What was done to a request.
#[derive(Debug, Default)]
pub struct Applied {
    /// The credentials that its head carries.
    pub used: Vec<Arc<Credential>>,
    /// The credentials that its body may carry, in the order of `in_body`.
    pub perhaps: Vec<Arc<Credential>>,
    /// Placeholders to replace in the body, with their values.
    pub in_body: Vec<(Vec<u8>, Value)>,
    /// What must not appear in the body: placeholders that are not replaced there.
    pub not_in_body: Vec<(Vec<u8>, String)>,
    /// What must not appear in the answer.
    pub masked: Vec<Value>,
}

/// Why a request is stopped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The placeholder is where no rule replaces it.
    #[error(
        "the placeholder of secret `{0}` would leave unreplaced: no rule of the secret covers this request"
    )]
    Unreplaced(String),
    /// The daemon could not read the value.
    #[error("the value of secret `{0}` is not available")]
    NoValue(String),
    /// The value does not fit where it should go.
    #[error("the value of secret `{0}` cannot be sent there")]
    Unfit(String),
    /// The answer to these methods repeats the request.
    #[error("`{0}` requests to a host with credentials are refused: the answer would repeat them")]
    Method(String),
    /// A compressed body cannot be searched.
    #[error("a compressed body cannot be searched for the placeholder of secret `{0}`: send it uncompressed")]
    Compressed(String),
}

impl Vault {
    /// Changes the head of a request to `name` that travels over verified TLS.
    pub fn apply(&self, name: &Name, port: u16, parts: &mut Parts) -> Result<Applied, Refusal> {
        if parts.method == Method::TRACE || parts.method.as_str() == "TRACK" {
            return Err(Refusal::Method(parts.method.to_string()));
        }
        let mut matching: Vec<(&Arc<Credential>, &CredentialRule)> = self
            .rules()
            .filter(|(_, rule)| rule.is_for(name, port) && rule.matches(&parts.method, &parts.uri))
            .collect();
        matching.sort_by_key(|(_, rule)| std::cmp::Reverse(rule.rank()));
        let mut applied = Applied::default();
        let mut taken: Vec<Slot> = Vec::new();
        let encoded = parts.headers.contains_key(CONTENT_ENCODING);
        for (credential, rule) in matching {
            let value = credential.value.as_ref().ok_or_else(|| Refusal::NoValue(credential.name.clone()))?;
            let unfit = || Refusal::Unfit(credential.name.clone());
            let used = match &rule.how {
                How::Placeholder { header, query, body } => {
                    let placeholder = credential.placeholder.as_bytes();
                    let mut used = false;
                    if *header {
                        used |= in_headers(parts, placeholder, value).ok_or_else(unfit)?;
                    }
                    if *query {
                        used |= in_query(parts, placeholder, value).ok_or_else(unfit)?;
                    }
                    if *body {
                        if encoded {
                            return Err(Refusal::Compressed(credential.name.clone()));
                        }
                        applied.in_body.push((placeholder.to_vec(), value.clone()));
                        applied.perhaps.push(Arc::clone(credential));
                    }
                    used
                }
                How::Query { name } => {
                    let slot = Slot::Query(name.clone());
                    let free = !taken.contains(&slot);
                    if free {
                        set_query(parts, name, value).ok_or_else(unfit)?;
                        taken.push(slot);
                    }
                    free
                }
                How::Header { .. } | How::Bearer | How::Basic { .. } => {
                    let (header, text) = header_of(&rule.how, value).ok_or_else(unfit)?;
                    let slot = Slot::Header(header.clone());
                    let free = !taken.contains(&slot);
                    if free {
                        parts.headers.insert(header, text);
                        taken.push(slot);
                    }
                    free
                }
            };
            if used && !applied.used.iter().any(|known| Arc::ptr_eq(known, credential)) {
                applied.used.push(Arc::clone(credential));
            }
        }
        self.check_head(parts)?;
        for credential in &self.all {
            let placeholder = credential.placeholder.as_bytes();
            if !applied.in_body.iter().any(|(replaced, _)| replaced == placeholder) {
                applied.not_in_body.push((placeholder.to_vec(), credential.name.clone()));
            }
        }
        if !applied.used.is_empty() || !applied.perhaps.is_empty() {
            // A compressed answer could carry the value back unseen.
            parts.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            let carried = applied.used.iter().chain(&applied.perhaps);
            applied.masked = carried.filter_map(|used| used.value.clone()).collect();
            applied.masked.dedup();
            applied.masked.retain(|value| value.bytes().len() >= MASKED_BYTES_MIN);
            let authorization = parts.headers.get(AUTHORIZATION).filter(|value| value.is_sensitive());
            if let Some(basic) = basic_text(authorization) {
                applied.masked.push(Value::new(basic));
            }
        }
        Ok(applied)
    }

    /// Refuses a head that still has a placeholder.
    pub fn check_head(&self, parts: &Parts) -> Result<(), Refusal> {
        let refuse = |credential: &Arc<Credential>| Err(Refusal::Unreplaced(credential.name.clone()));
        let target = parts.uri.path_and_query().map_or("", PathAndQuery::as_str);
        if let Some(found) = self.placeholder_in(target.as_bytes()) {
            return refuse(found);
        }
        if target.contains('%')
            && let Some(found) = self.placeholder_in(&percent_decoded(target.as_bytes()))
        {
            return refuse(found);
        }
        for (name, value) in &parts.headers {
            if let Some(found) = self
                .placeholder_in(name.as_str().as_bytes())
                .or_else(|| self.placeholder_in(value.as_bytes()))
            {
                return refuse(found);
            }
            if let Some(plain) = basic_plain(value)
                && let Some(found) = self.placeholder_in(&plain)
            {
                return refuse(found);
            }
        }
        Ok(())
    }
}

/// A place in a request that holds one credential.
#[derive(PartialEq, Eq)]
enum Slot {
    Header(HeaderName),
    Query(String),
}

fn header_of(how: &How, value: &Value) -> Option<(HeaderName, HeaderValue)> {
    let (name, text) = match how {
        How::Header { name, prefix } => {
            let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
            (name, Zeroizing::new([prefix.as_bytes(), value.bytes()].concat()))
        }
        How::Bearer => (AUTHORIZATION, Zeroizing::new([b"Bearer ", value.bytes()].concat())),
        How::Basic { user } => {
            let pair = Zeroizing::new([user.as_bytes(), b":", value.bytes()].concat());
            (AUTHORIZATION, Zeroizing::new(format!("Basic {}", STANDARD.encode(&*pair)).into_bytes()))
        }
        How::Query { .. } | How::Placeholder { .. } => return None,
    };
    Some((name, sensitive(&text)?))
}

fn sensitive(bytes: &[u8]) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_bytes(bytes).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// The part of `Basic ...` after the word.
fn basic_text(value: Option<&HeaderValue>) -> Option<Vec<u8>> {
    let (word, rest) = value?.as_bytes().split_at_checked(6)?;
    word.eq_ignore_ascii_case(b"basic ").then(|| rest.trim_ascii().to_vec())
}

/// User and password of `Basic ...`.
fn basic_plain(value: &HeaderValue) -> Option<Zeroizing<Vec<u8>>> {
    let text = basic_text(Some(value))?;
    STANDARD.decode(text).ok().map(Zeroizing::new)
}

/// Replaces a placeholder in every header. `None` if the value does not fit into one.
fn in_headers(parts: &mut Parts, placeholder: &[u8], value: &Value) -> Option<bool> {
    let mut used = false;
    for header in parts.headers.values_mut() {
        if let Some(replaced) = replace_all(header.as_bytes(), placeholder, value.bytes()) {
            *header = sensitive(&Zeroizing::new(replaced))?;
            used = true;
        } else if let Some(plain) = basic_plain(header)
            && let Some(replaced) = replace_all(&plain, placeholder, value.bytes())
        {
            let text = Zeroizing::new(format!("Basic {}", STANDARD.encode(Zeroizing::new(replaced))));
            *header = sensitive(text.as_bytes())?;
            used = true;
        }
    }
    Some(used)
}

fn in_query(parts: &mut Parts, placeholder: &[u8], value: &Value) -> Option<bool> {
    let Some(query) = parts.uri.query() else { return Some(false) };
    let encoded = Zeroizing::new(percent_encoded(value.bytes()));
    match replace_all(query.as_bytes(), placeholder, encoded.as_bytes()) {
        Some(replaced) => {
            let replaced = Zeroizing::new(String::from_utf8(replaced).ok()?);
            put_query(parts, &replaced)?;
            Some(true)
        }
        None => Some(false),
    }
}

fn set_query(parts: &mut Parts, name: &str, value: &Value) -> Option<()> {
    let own = |pair: &&str| {
        let key = pair.split_once('=').map_or(*pair, |(key, _)| key);
        percent_decoded(key.as_bytes()) != name.as_bytes()
    };
    let others: Vec<&str> = parts.uri.query().unwrap_or("").split('&').filter(own).collect();
    let mut query = Zeroizing::new(others.join("&"));
    if !query.is_empty() {
        query.push('&');
    }
    query.push_str(name);
    query.push('=');
    query.push_str(&Zeroizing::new(percent_encoded(value.bytes())));
    put_query(parts, &query)
}

fn put_query(parts: &mut Parts, query: &str) -> Option<()> {
    let target = Zeroizing::new(format!("{}?{query}", parts.uri.path()));
    let mut uri = parts.uri.clone().into_parts();
    uri.path_and_query = Some(target.parse().ok()?);
    parts.uri = Uri::from_parts(uri).ok()?;
    Some(())
}

fn percent_encoded(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len()), |mut text, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                text.push(char::from(*byte))
            }
            _ => write!(text, "%{byte:02X}").expect("writing to a string cannot fail"),
        }
        text
    })
}

fn percent_decoded(bytes: &[u8]) -> Vec<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let (mut plain, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        match bytes[at..] {
            [b'%', high, low, ..] if digit(high).is_some() && digit(low).is_some() => {
                plain.push((digit(high).unwrap_or(0) * 16 + digit(low).unwrap_or(0)) as u8);
                at += 3;
            }
            [byte, ..] => {
                plain.push(byte);
                at += 1;
            }
            [] => break,
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credential::{CredentialRuleSpec, find_any};

    const SECRET: &str = "s3cr3t-value+/=";
    const PLACEHOLDER: &str = "shoal_0123456789abcdef";

    fn vault(how: How) -> Vault {
        vault_for("api.example.com", how, &[], &[])
    }

    fn vault_for(domain: &str, how: How, methods: &[&str], paths: &[&str]) -> Vault {
        let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect();
        let rule = CredentialRuleSpec {
            domain: domain.into(),
            ports: vec![],
            methods: words(methods),
            paths: words(paths),
            how,
        };
        Vault::new(vec![Credential {
            id: 7,
            name: "api".into(),
            value: Some(Value::new(SECRET.into())),
            placeholder: PLACEHOLDER.into(),
            rules: vec![rule.check().expect("a rule")],
        }])
    }

    fn parts(method: &str, target: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = http::Request::builder().method(method).uri(target);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a request").into_parts().0
    }

    fn apply(vault: &Vault, parts: &mut Parts) -> Result<Applied, Refusal> {
        vault.apply(&Name::parse("api.example.com").expect("a name"), 443, parts)
    }

    fn everywhere() -> How {
        How::Placeholder { header: true, query: true, body: true }
    }

    #[track_caller]
    fn check(how: How, headers: &[(&str, &str)], header: &str, expected: &str) {
        let mut parts = parts("GET", "/x", headers);
        let applied = apply(&vault(how), &mut parts).expect("applied");
        assert_eq!(applied.used.len(), 1);
        let value = parts.headers.get(header).expect("the header");
        assert_eq!(value.as_bytes(), expected.as_bytes());
        assert!(value.is_sensitive());
        assert_eq!(parts.headers.get_all(header).iter().count(), 1);
    }

    #[test]
    fn a_credential_takes_the_shape_that_the_rule_says() {
        check(How::Bearer, &[("authorization", "Bearer own")], "authorization", &format!("Bearer {SECRET}"));
        let basic = STANDARD.encode(format!("x-access-token:{SECRET}"));
        check(How::Basic { user: "x-access-token".into() }, &[], "authorization", &format!("Basic {basic}"));
        let header = How::Header { name: "X-Api-Key".into(), prefix: "Token ".into() };
        check(header, &[("x-api-key", "a"), ("x-api-key", "b")], "x-api-key", &format!("Token {SECRET}"));
    }

    #[test]
    fn a_query_parameter_is_set_once_and_encoded() {
        let mut parts = parts("GET", "/x?a=1&key=mine&%6Bey=mine&b=2", &[]);
        apply(&vault(How::Query { name: "key".into() }), &mut parts).expect("applied");
        assert_eq!(parts.uri.query(), Some("a=1&b=2&key=s3cr3t-value%2B%2F%3D"));
    }

    #[test]
    fn placeholders_are_replaced_in_headers_queries_and_basic_authentication() {
        let how = everywhere();
        check(how.clone(), &[("x-a", PLACEHOLDER)], "x-a", SECRET);
        let sent = format!("Basic {}", STANDARD.encode(format!("git:{PLACEHOLDER}")));
        let expected = format!("Basic {}", STANDARD.encode(format!("git:{SECRET}")));
        check(how.clone(), &[("authorization", &sent)], "authorization", &expected);
        let mut parts = parts("GET", &format!("/x?key={PLACEHOLDER}&key2={PLACEHOLDER}"), &[]);
        let applied = apply(&vault(how), &mut parts).expect("applied");
        assert_eq!(parts.uri.query(), Some("key=s3cr3t-value%2B%2F%3D&key2=s3cr3t-value%2B%2F%3D"));
        assert_eq!((applied.in_body.len(), applied.not_in_body.len()), (1, 0));
    }

    #[test]
    fn a_placeholder_that_would_leave_stops_the_request() {
        let header_only = How::Placeholder { header: true, query: false, body: false };
        let basic = format!("Basic {}", STANDARD.encode(format!("git:{PLACEHOLDER}")));
        for (vault, target, header) in [
            (vault(header_only.clone()), format!("/x?key={PLACEHOLDER}"), "none".to_owned()),
            (vault(everywhere()), format!("/{PLACEHOLDER}"), "none".to_owned()),
            (vault(How::Bearer), "/x".to_owned(), PLACEHOLDER.to_owned()),
            (vault(How::Bearer), format!("/x?k=%73{}", &PLACEHOLDER[1..]), "none".to_owned()),
            (vault_for("other.example.com", everywhere(), &[], &[]), "/x".to_owned(), PLACEHOLDER.to_owned()),
            (vault_for("other.example.com", everywhere(), &[], &[]), "/x".to_owned(), basic),
            (vault_for("api.example.com", everywhere(), &["POST"], &[]), "/x".into(), PLACEHOLDER.into()),
            (vault_for("api.example.com", everywhere(), &[], &["/v1"]), "/v2".into(), PLACEHOLDER.into()),
            (
                vault_for("api.example.com", everywhere(), &[], &["/v1"]),
                "/v1/../v2".into(),
                PLACEHOLDER.into(),
            ),
        ] {
            let mut parts = parts("GET", &target, &[("x-a", &header), ("authorization", &header)]);
            // A bearer rule replaces the header itself; another header keeps the placeholder.
            let refused = apply(&vault, &mut parts).expect_err("a placeholder would leave");
            assert_eq!(refused, Refusal::Unreplaced("api".into()), "{target} {header}");
            assert!(!refused.to_string().contains(SECRET));
        }
    }

    #[test]
    fn only_matching_requests_get_a_credential() {
        for (vault, method, target) in [
            (vault_for("api.example.com", How::Bearer, &["POST"], &[]), "GET", "/x"),
            (vault_for("api.example.com", How::Bearer, &[], &["/v1"]), "GET", "/v2"),
            (vault_for("api.example.com", How::Bearer, &[], &["/v1"]), "GET", "/v1/%2e%2e/x"),
            (vault_for("other.example.com", How::Bearer, &[], &[]), "GET", "/x"),
        ] {
            let mut parts = parts(method, target, &[]);
            let applied = apply(&vault, &mut parts).expect("it passes without one");
            assert!(applied.used.is_empty() && parts.headers.is_empty(), "{method} {target}");
        }
        let mut trace = parts("TRACE", "/x", &[]);
        assert!(matches!(apply(&vault(How::Bearer), &mut trace), Err(Refusal::Method(_))));
        let wide = vault_for("*.example.com", How::Bearer, &[], &[]);
        let evil = Name::parse("evilexample.com").expect("a name");
        assert!(!wide.covers(&evil, 443) && !wide.covers(&Name::parse("a.example.com").expect("a name"), 80));
    }

    #[test]
    fn the_most_specific_rule_decides_about_a_header() {
        let one = vault_for("*.example.com", How::Bearer, &[], &[]);
        let other = vault_for("api.example.com", How::Bearer, &[], &["/v1"]);
        let mut second = Credential::clone(&other.all[0]);
        (second.id, second.name, second.placeholder) = (8, "second".into(), "shoal_other".into());
        second.value = Some(Value::new(b"second-value".to_vec()));
        let both = Vault { all: vec![one.all[0].clone(), Arc::new(second)] };
        let mut parts = parts("GET", "/v1/x", &[]);
        let applied = apply(&both, &mut parts).expect("applied");
        assert_eq!(parts.headers.get("authorization").expect("a header"), "Bearer second-value");
        assert_eq!(applied.used.len(), 1);
    }

    #[test]
    fn a_value_that_does_not_fit_or_is_missing_stops_the_request() {
        let mut vault = vault(How::Bearer);
        let mut broken = Credential::clone(&vault.all[0]);
        broken.value = Some(Value::new(b"a\r\nX-Evil: 1".to_vec()));
        vault.all = vec![Arc::new(broken.clone())];
        assert_eq!(
            apply(&vault, &mut parts("GET", "/", &[])).expect_err("unfit"),
            Refusal::Unfit("api".into())
        );
        broken.value = None;
        vault.all = vec![Arc::new(broken)];
        let refused = apply(&vault, &mut parts("GET", "/", &[])).expect_err("no value");
        assert_eq!(refused, Refusal::NoValue("api".into()));
    }

    #[test]
    fn a_compressed_body_is_refused_where_its_placeholder_should_be_replaced() {
        let mut sent = parts("POST", "/", &[("content-encoding", "gzip")]);
        let refused = apply(&vault(everywhere()), &mut sent).expect_err("compressed");
        assert_eq!(refused, Refusal::Compressed("api".into()));
        apply(&vault(How::Bearer), &mut parts("POST", "/", &[("content-encoding", "gzip")])).expect("fine");
    }

    #[test]
    fn answers_are_asked_for_uncompressed_and_masked() {
        let mut sent = parts("GET", "/", &[("accept-encoding", "gzip")]);
        let applied = apply(&vault(How::Basic { user: "u".into() }), &mut sent).expect("applied");
        assert_eq!(sent.headers.get("accept-encoding").expect("a header"), "identity");
        assert_eq!(applied.masked.len(), 2, "the value, and the value in base64");
    }

    proptest::proptest! {
        #[test]
        fn no_head_leaves_with_a_placeholder(
            path in "(/[a-z0-9%._~-]{0,12}){1,3}",
            query in "[a-z0-9%=&._~-]{0,24}",
            before in "[ -~]{0,8}",
            place in 0usize..5,
            how in 0usize..4,
        ) {
            let how = [
                How::Bearer,
                How::Placeholder { header: true, query: false, body: false },
                How::Placeholder { header: false, query: true, body: false },
                everywhere(),
            ][how].clone();
            let with = |at: usize, text: &str| match at == place {
                true => format!("{text}{PLACEHOLDER}"),
                false => text.to_owned(),
            };
            let target = format!("{}?{}", with(0, &path), with(1, &query));
            let header = with(2, &before);
            let basic = format!("Basic {}", STANDARD.encode(with(3, "user:")));
            let mut sent = parts("GET", &target, &[("x-a", &header), ("authorization", &basic)]);
            if let Ok(applied) = apply(&vault(how), &mut sent) {
                let head = format!("{} {:?}", sent.uri, sent.headers);
                proptest::prop_assert!(!head.contains(PLACEHOLDER));
                for value in sent.headers.values() {
                    let plain = basic_plain(value).unwrap_or_default();
                    proptest::prop_assert!(find_any(&plain, &[PLACEHOLDER.as_bytes()]).is_none());
                }
                proptest::prop_assert!(applied.in_body.len() + applied.not_in_body.len() == 1);
            }
        }
    }
}
