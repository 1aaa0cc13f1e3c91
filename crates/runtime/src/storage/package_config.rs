//! The machine's settings of package managers, for the image `host`, without what proves who the machine is.
//!
//! Which mirror a machine installs from is worth taking over; user names, passwords and tokens are not a sandbox's business. Lines
//! that hold one are dropped whole, and addresses lose what stands before their host and behind their path. Pure, but for
//! [`SETTINGS`], which says where such files are.

/// Whose settings a file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manager {
    /// pip and uv: `key = value` in sections.
    Pip,
    /// npm, pnpm and yarn: `key=value`, with keys of a registry after a colon.
    Npm,
    /// cargo: TOML.
    Cargo,
    /// apt: sources and settings.
    Apt,
}

/// Files of the machine, and where they go in the image, relative to its root. Those of root are there for a daemon that was set up
/// by its user.
pub const SETTINGS: &[(Manager, &str, &str)] = &[
    (Manager::Pip, "/etc/pip.conf", "etc/pip.conf"),
    (Manager::Pip, "/root/.config/pip/pip.conf", "root/.config/pip/pip.conf"),
    (Manager::Pip, "/root/.pip/pip.conf", "root/.pip/pip.conf"),
    (Manager::Pip, "/etc/uv/uv.toml", "etc/uv/uv.toml"),
    (Manager::Npm, "/etc/npmrc", "etc/npmrc"),
    (Manager::Npm, "/root/.npmrc", "root/.npmrc"),
    (Manager::Cargo, "/root/.cargo/config.toml", "root/.cargo/config.toml"),
];

/// Files below `/usr` of the same kind. These are covered by copies without credentials.
pub const SETTINGS_USR: &[(Manager, &str)] =
    &[(Manager::Npm, "etc/npmrc"), (Manager::Npm, "local/etc/npmrc")];

/// A file of settings is at most this long; a longer one is none.
pub const SETTINGS_BYTES_MAX: u64 = 1 << 20;

/// The settings without credentials.
pub fn scrub(manager: Manager, text: &str) -> String {
    let mut kept = String::new();
    // Whether the section that a line is in holds credentials and nothing else.
    let mut secret_section = false;
    let mut dropping = false;
    for line in text.lines() {
        let bare = line.trim();
        if let Some(section) = bare.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            secret_section =
                manager == Manager::Cargo && section.trim_start_matches('[').starts_with("credential");
            dropping = secret_section;
        } else if !(line.starts_with([' ', '\t']) && manager == Manager::Pip) {
            dropping = secret_section;
        }
        // Lines that follow and are indented belong to the same value.
        dropping |= is_secret(manager, bare);
        if !dropping {
            kept += &without_userinfo(line);
            kept.push('\n');
        }
    }
    kept
}

/// Names that credentials have, in lower case.
const SECRET_NAMES: &[&str] = &[
    "_auth",
    "_authtoken",
    "_password",
    "auth",
    "authtoken",
    "cert",
    "certfile",
    "client-cert",
    "client_cert",
    "credential-provider",
    "email",
    "global-credential-providers",
    "key",
    "keyfile",
    "keyring-provider",
    "password",
    "secret-key",
    "sslkey",
    "sslcert",
    "token",
    "username",
];
/// For pip, the name of a bundle that it trusts, which is no secret.
const PIP_BUNDLE: &str = "cert";

/// Whether a line gives a credential a value.
fn is_secret(manager: Manager, line: &str) -> bool {
    if line.starts_with(['#', ';']) || line.starts_with("//") && !line.contains('=') {
        // Comments are where people leave what they have taken out.
        return names_secret(manager, line);
    }
    match manager {
        // `Acquire::https::host::SslKey "…";`
        Manager::Apt => line.to_ascii_lowercase().split_whitespace().next().is_some_and(|key| {
            key.rsplit("::").next().is_some_and(|name| SECRET_NAMES.contains(&name) || name == "login")
        }),
        _ => names_secret(manager, line),
    }
}

/// Whether any name before an equals sign in the line is one of credentials. Inline tables have several.
fn names_secret(manager: Manager, line: &str) -> bool {
    let lower = line.to_ascii_lowercase();
    let mut parts = lower.split('=').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            break;
        }
        // The last word before the sign; of `//host/:_authToken`, `registries.mine.token` and `{ index = "…", token` what is last.
        let name = part.rsplit([' ', '\t', ',', '{', ':', '.', '#', ';']).find(|word| !word.is_empty());
        let name = name.unwrap_or_default().trim_matches(['"', '\'']);
        if manager == Manager::Pip && name == PIP_BUNDLE {
            continue;
        }
        if SECRET_NAMES.contains(&name) {
            return true;
        }
    }
    false
}

/// Addresses without user, password and query.
fn without_userinfo(line: &str) -> String {
    let mut result = String::new();
    let mut rest = line;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        result += before;
        let end = after
            .find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | ';' | ')' | ']' | '}' | '>'));
        let (address, next) = after.split_at(end.unwrap_or(after.len()));
        let path = address.find(['/', '?', '#']).unwrap_or(address.len());
        let (authority, path) = address.split_at(path);
        result += authority.rsplit('@').next().unwrap_or_default();
        result += path.split(['?', '#']).next().unwrap_or_default();
        rest = next;
    }
    result + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(manager: Manager, text: &str, expected: &str) {
        assert_eq!(scrub(manager, text), expected);
    }

    #[test]
    fn mirrors_stay_and_who_asks_them_goes() {
        check(
            Manager::Pip,
            "[global]\nindex-url = https://ada:s3cret@pypi.corp/simple\nextra-index-url =\n    https://token@a.corp/x\n    https://b.corp/y?key=1\ncert = /etc/ssl/corp.pem\nclient-cert = /root/me.pem\ntimeout = 60\n",
            "[global]\nindex-url = https://pypi.corp/simple\nextra-index-url =\n    https://a.corp/x\n    https://b.corp/y\ncert = /etc/ssl/corp.pem\ntimeout = 60\n",
        );
        check(
            Manager::Npm,
            "registry=https://npm.corp/\n//npm.corp/:_authToken=npm_abc\n_auth = YWRhOng=\n@corp:registry=https://u:p@npm.corp/c/\nemail=ada@corp\ncafile=/etc/ca.crt\nalways-auth=true\n",
            "registry=https://npm.corp/\n@corp:registry=https://npm.corp/c/\ncafile=/etc/ca.crt\nalways-auth=true\n",
        );
        check(
            Manager::Cargo,
            "[source.crates-io]\nreplace-with = \"corp\"\n[registries.corp]\nindex = \"sparse+https://me:pw@cargo.corp/\"\ntoken = \"abc\"\n[registries]\nother = { index = \"https://x\", token = \"abc\" }\n[credential-alias]\nmine = [\"/bin/secrets\"]\n[net]\nretry = 3\n",
            "[source.crates-io]\nreplace-with = \"corp\"\n[registries.corp]\nindex = \"sparse+https://cargo.corp/\"\n[registries]\n[net]\nretry = 3\n",
        );
        check(
            Manager::Apt,
            "deb [signed-by=/usr/share/k.gpg] https://bearer:tok@deb.corp/debian stable main\nAcquire::http::Proxy \"http://u:p@proxy.corp:3128/\";\nAcquire::https::deb.corp::SslKey \"/etc/me.key\";\nURIs: https://x@deb.corp/debian\n",
            "deb [signed-by=/usr/share/k.gpg] https://deb.corp/debian stable main\nAcquire::http::Proxy \"http://proxy.corp:3128/\";\nURIs: https://deb.corp/debian\n",
        );
    }

    #[test]
    fn a_credential_that_was_commented_out_goes_too() {
        check(
            Manager::Npm,
            "#//npm.corp/:_authToken=old\n; _password=x\n# registry=https://a:b@c/\n",
            "# registry=https://c/\n",
        );
    }

    #[test]
    fn an_address_may_have_signs_that_confuse() {
        for (address, bare) in [
            ("https://a:b@c@host/x", "https://host/x"),
            ("https://host/p@th", "https://host/p@th"),
            ("https://user@", "https://"),
            ("https://h?u=p@x", "https://h"),
            ("no address at all @ all", "no address at all @ all"),
            ("a https://x@b/ c ftp://y:z@d", "a https://b/ c ftp://d"),
            ("ünï://ü:ß@hôst/ß", "ünï://hôst/ß"),
        ] {
            assert_eq!(without_userinfo(address), bare);
        }
    }

    #[test]
    fn no_token_survives_wherever_it_stands() {
        for line in [
            "token=\"s3cret\"",
            "  token = 's3cret'",
            "registries.mine.token = \"s3cret\"",
            "x = { token=\"s3cret\" }",
            "\"token\" = \"s3cret\"",
            "//h/:_authToken=s3cret",
            "//h/:username=s3cret",
            "_password=s3cret",
            "index = \"https://s3cret@h/\"",
            "index = \"https://u:s3cret@h/\"",
        ] {
            for manager in [Manager::Npm, Manager::Cargo, Manager::Pip] {
                assert!(!scrub(manager, line).contains("s3cret"), "{manager:?}: {line}");
            }
        }
    }
}
