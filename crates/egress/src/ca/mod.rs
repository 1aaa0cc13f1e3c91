//! The certificate authority of an installation. Sandboxes trust it, so that a refusal over HTTPS can carry an
//! explanation, and so that credentials can be added to requests over HTTPS.
//!
//! Its key is in egress's own directory, readable by egress alone, and is in no image, snapshot or export. Leaf
//! certificates are made for one name at a time, are valid for a few days, and are served only inside sandboxes.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::policy::Name;

/// How many leaf certificates are kept.
const LEAVES_MAX: usize = 1000;
/// How long a leaf is valid. A new one is made well before.
const LEAF_DAYS: i64 = 7;
/// A leaf is replaced after this long.
const LEAF_FRESH_DAYS: i64 = 3;
/// How long the authority is valid; long, since images carry it.
const CA_DAYS: i64 = 3650;
/// Clocks in and around sandboxes differ.
const SKEW_DAYS: i64 = 1;
const KEY_FILE: &str = "ca.key";
const CERTIFICATE_FILE: &str = "ca.pem";
const COMMON_NAME: &str = "Shoal egress";
const DAY_SECONDS: i64 = 86_400;

/// The start of a day, in the type that `rcgen` requires but does not export.
macro_rules! date {
    ($day:expr) => {{
        let (year, month, day) = civil($day);
        rcgen::date_time_ymd(year, month, day)
    }};
}

/// Why the authority cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// A file.
    #[error("cannot use `{}`", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A certificate cannot be made.
    #[error("cannot make a certificate")]
    Certificate(#[from] rcgen::Error),
    /// TLS rejects the certificate.
    #[error("cannot use a certificate")]
    Tls(#[from] rustls::Error),
}

/// The protocol that a leaf is served for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Speaks {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2.
    Http2,
}

impl Speaks {
    /// Its name in a TLS hello.
    pub fn alpn(self) -> &'static [u8] {
        match self {
            Self::Http1 => b"http/1.1",
            Self::Http2 => b"h2",
        }
    }
}

/// Leaves by name and protocol, each with the day on which it was made.
type Leaves = HashMap<(Name, Speaks), (i64, Arc<ServerConfig>)>;

/// The authority and the leaves that it has made.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    /// One key for all leaves of this process.
    leaf_key: KeyPair,
    leaves: Mutex<Leaves>,
}

impl Ca {
    /// Opens the authority in `directory`, and creates it if it does not exist.
    pub fn open(directory: &Path, installation: &str) -> Result<Self, CaError> {
        let (key_path, certificate_path) = (directory.join(KEY_FILE), directory.join(CERTIFICATE_FILE));
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| CaError::File { path, source }
        };
        let params = authority(installation);
        // The certificate is written after the key: if it is missing, both are created again.
        let (key, pem) = match fs::read_to_string(&certificate_path) {
            Ok(pem) => {
                let key = fs::read_to_string(&key_path).map_err(file(&key_path))?;
                (KeyPair::from_pem(&key)?, pem)
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let key = KeyPair::generate()?;
                let pem = params.self_signed(&key)?.pem();
                write(&key_path, key.serialize_pem().as_bytes(), 0o600).map_err(file(&key_path))?;
                write(&certificate_path, pem.as_bytes(), 0o644).map_err(file(&certificate_path))?;
                (key, pem)
            }
            Err(e) => return Err(file(&certificate_path)(e)),
        };
        let (issuer, leaf_key) = (Issuer::new(params, key), KeyPair::generate()?);
        Ok(Self { issuer, pem, leaf_key, leaves: Mutex::default() })
    }

    /// The certificate, for images and sandboxes.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// The TLS configuration to serve a name with, over HTTP/1.1.
    pub fn config(&self, name: &Name) -> Result<Arc<ServerConfig>, CaError> {
        self.config_for(name, Speaks::Http1)
    }

    /// The TLS configuration to serve a name with.
    pub fn config_for(&self, name: &Name, speaks: Speaks) -> Result<Arc<ServerConfig>, CaError> {
        let today = today();
        let mut leaves = self.leaves.lock().expect("nobody panics while holding it");
        if let Some((made, config)) = leaves.get(&(name.clone(), speaks))
            && today - made < LEAF_FRESH_DAYS
        {
            return Ok(config.clone());
        }
        let config = self.make_leaf(name, speaks, today)?;
        if leaves.len() >= LEAVES_MAX {
            leaves.clear();
        }
        leaves.insert((name.clone(), speaks), (today, config.clone()));
        Ok(config)
    }

    fn make_leaf(&self, name: &Name, speaks: Speaks, today: i64) -> Result<Arc<ServerConfig>, CaError> {
        let mut params = CertificateParams::new(vec![name.to_string()])?;
        params.distinguished_name = DistinguishedName::new();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = (date!(today - SKEW_DAYS), date!(today + LEAF_DAYS));
        let leaf = params.signed_by(&self.leaf_key, &self.issuer)?;
        let key = PrivateKeyDer::Pkcs8(self.leaf_key.serialize_der().into());
        let chain: Vec<CertificateDer<'static>> = vec![leaf.der().clone()];
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![speaks.alpn().to_vec()];
        Ok(Arc::new(config))
    }
}

impl std::fmt::Debug for Ca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ca").finish_non_exhaustive()
    }
}

/// A bundle for images: the existing roots, the operator's extra ones, and ours, each on separate lines.
pub fn bundle(roots: &str, extra: &[String], ours: &str) -> String {
    let mut text = String::with_capacity(roots.len() + ours.len() + 64);
    for part in [roots].into_iter().chain(extra.iter().map(String::as_str)).chain([ours]) {
        let part = part.trim_end();
        if !part.is_empty() && !text.contains(part) {
            text.push_str(part);
            text.push('\n');
        }
    }
    text
}

fn authority(installation: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, COMMON_NAME);
    params.distinguished_name.push(DnType::OrganizationName, installation);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let today = today();
    (params.not_before, params.not_after) = (date!(today - SKEW_DAYS), date!(today + CA_DAYS));
    params
}

fn write(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let next = path.with_extension("new");
    // A file left behind by a crash would keep its mode.
    match fs::remove_file(&next) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&next)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&next, path)
}

/// Days since 1970.
fn today() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(0) / DAY_SECONDS
}

/// The date of a day since 1970, by the usual arithmetic of the Gregorian calendar: years begin in March, so that the leap day
/// is the last.
fn civil(day: i64) -> (i32, u8, u8) {
    let shifted = day + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year as i32, month as u8, day as u8)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_authority_is_made_once_and_its_key_is_private() {
        let place = tempfile::tempdir().expect("a directory");
        let first = Ca::open(place.path(), "0123456789abcdef").expect("an authority");
        let again = Ca::open(place.path(), "0123456789abcdef").expect("an authority");
        assert_eq!(first.pem(), again.pem());
        let mode = fs::metadata(place.path().join(KEY_FILE)).expect("a key").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn leaves_are_kept_and_verify() {
        let place = tempfile::tempdir().expect("a directory");
        let ca = Ca::open(place.path(), "0123456789abcdef").expect("an authority");
        let name = Name::parse("a.example").expect("a name");
        let config = ca.config(&name).expect("a leaf");
        assert!(Arc::ptr_eq(&config, &ca.config(&name).expect("a leaf")));
        // After a restart the same authority makes other leaves, which verify as well.
        let again = Ca::open(place.path(), "0123456789abcdef").expect("an authority");
        for ca in [&ca, &again] {
            shake_hands(ca, &name);
        }
    }

    /// A client that trusts the authority and a server with a leaf of it, in memory.
    fn shake_hands(ca: &Ca, name: &Name) {
        use rustls::pki_types::pem::PemObject;
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(ca.pem().as_bytes()).expect("pem")).expect("a root");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let server_name = rustls::pki_types::ServerName::try_from(name.to_string()).expect("a name");
        let mut client = rustls::ClientConnection::new(Arc::new(client), server_name).expect("a client");
        let mut server = rustls::ServerConnection::new(ca.config(name).expect("a leaf")).expect("a server");
        while client.is_handshaking() || server.is_handshaking() {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).expect("written");
            }
            server.read_tls(&mut bytes.as_slice()).expect("read");
            server.process_new_packets().expect("processed");
            let mut bytes = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut bytes).expect("written");
            }
            client.read_tls(&mut bytes.as_slice()).expect("read");
            client.process_new_packets().expect("the leaf verifies");
        }
    }

    #[test]
    fn days_become_dates() {
        for (day, date) in [
            (0, (1970, 1, 1)),
            (11_016, (2000, 2, 29)),
            (20_775, (2026, 11, 18)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
        ] {
            assert_eq!(civil(day), date, "{day}");
        }
    }

    #[test]
    fn a_bundle_has_all_roots_once() {
        let text = bundle("A\n\n", &["B\n".to_owned(), "A".to_owned()], "C");
        assert_eq!(text, "A\nB\nC\n");
    }
}
