//! Services that people use by name: their hosts, how they take a key, and the variable that their tools look for.

use egress::presets::{Found, Tool};

use super::{Bindings, RuleText};
use crate::error::{EngineError, Field, shown};
use crate::model::secret::SecretHow;

/// The presets that this version serves.
pub(super) const NAMES: &[&str] = &["anthropic", "gcp", "github", "huggingface", "npm", "openai", "pypi"];
/// Known, and refused by name: requests to it must be signed.
const UNSERVED: &[(&str, &str)] =
    &[("aws", "`aws` needs requests that are signed again (SigV4), which this version does not do")];

/// Host by host: below `googleapis.com` there are also names that customers choose.
const GCP_HOSTS: &[&str] = &[
    "aiplatform.googleapis.com",
    "artifactregistry.googleapis.com",
    "bigquery.googleapis.com",
    "cloudbuild.googleapis.com",
    "cloudresourcemanager.googleapis.com",
    "compute.googleapis.com",
    "container.googleapis.com",
    "firestore.googleapis.com",
    "generativelanguage.googleapis.com",
    "iam.googleapis.com",
    "logging.googleapis.com",
    "pubsub.googleapis.com",
    "run.googleapis.com",
    "secretmanager.googleapis.com",
    "serviceusage.googleapis.com",
    "storage.googleapis.com",
    "www.googleapis.com",
];

/// Whether a name is that of a service.
pub(super) fn is_known(name: &str) -> bool {
    NAMES.contains(&name) || UNSERVED.iter().any(|(unserved, _)| *unserved == name)
}

/// The preset of this name. `registries` are the hosts that the package managers of this machine use.
pub(super) fn find(name: &str, registries: &[Found]) -> Result<Bindings, EngineError> {
    let bearer = |hosts: &[&str]| hosts.iter().map(|host| rule(host, SecretHow::Bearer)).collect::<Vec<_>>();
    let of = |rules, variables: &[&str], prefix: &str| Bindings {
        rules,
        variables: variables.iter().map(|name| (*name).to_owned()).collect(),
        prefix: prefix.to_owned(),
    };
    let found = |tool: Tool, default: &str, how: &SecretHow| {
        let hosts = registries.iter().filter(|found| found.tool == tool);
        let mut rules: Vec<_> = hosts.map(|found| rule(found.host.as_str(), how.clone())).collect();
        rules.dedup();
        if rules.is_empty() { vec![rule(default, how.clone())] } else { rules }
    };
    Ok(match name {
        "anthropic" => {
            let how = SecretHow::Header { name: "x-api-key".into(), prefix: String::new() };
            of(vec![rule("api.anthropic.com", how)], &["ANTHROPIC_API_KEY"], "sk-ant-")
        }
        "gcp" => of(bearer(GCP_HOSTS), &["CLOUDSDK_AUTH_ACCESS_TOKEN"], "ya29."),
        "github" => {
            let mut rules = bearer(&["api.github.com", "uploads.github.com", "raw.githubusercontent.com"]);
            // Git sends a user and a password, and the user does not matter.
            rules.push(rule("github.com", SecretHow::Basic { user: "x-access-token".into() }));
            of(rules, &["GITHUB_TOKEN", "GH_TOKEN"], "ghp_")
        }
        "huggingface" => of(bearer(&["huggingface.co"]), &["HF_TOKEN"], "hf_"),
        "npm" => of(found(Tool::Node, "registry.npmjs.org", &SecretHow::Bearer), &["NPM_TOKEN"], "npm_"),
        "openai" => of(bearer(&["api.openai.com"]), &["OPENAI_API_KEY"], "sk-"),
        "pypi" => {
            let how = SecretHow::Basic { user: "__token__".into() };
            let mut rules = found(Tool::Python, "pypi.org", &how);
            rules.push(rule("upload.pypi.org", how));
            of(rules, &["PYPI_TOKEN"], "pypi-")
        }
        other => {
            let why = match UNSERVED.iter().find(|(unserved, _)| *unserved == other) {
                Some((_, why)) => format!("be one of {}: {why}", NAMES.join(", ")),
                None => format!("be one of {}, got `{}`", NAMES.join(", "), shown(other)),
            };
            return Err(Field::Preset.must(why));
        }
    })
}

fn rule(domain: &str, how: SecretHow) -> RuleText {
    RuleText { domain: domain.to_owned(), ports: vec![], methods: vec![], paths: vec![], how }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_has_rules_that_hold() {
        for name in NAMES {
            let preset = find(name, &[]).expect(name);
            assert!(!preset.variables.is_empty() && is_known(name));
            super::super::checked(&preset).expect(name);
        }
        assert!(find("nothing", &[]).is_err() && !is_known("nothing"));
    }
}
