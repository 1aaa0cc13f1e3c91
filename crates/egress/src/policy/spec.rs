//! A policy as the user writes it, and the rules that it becomes.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{Action, BadRule, Name, Ports, Protocol, Rule, RuleSpec, Target};

/// The most rules in one policy.
pub const RULES_MAX: usize = 10_000;

/// What is open without any rule, as one word.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// Nothing.
    #[default]
    None,
    /// Package registries and code hosts, as found on this machine and listed by the operator.
    Registries,
    /// Every name on every port, but no literal address. The default of some dialects.
    Names,
    /// Every name and every public address.
    Open,
}

impl Mode {
    /// The word.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Registries => "registries",
            Self::Names => "names",
            Self::Open => "open",
        }
    }

    /// Parses the word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::None, Self::Registries, Self::Names, Self::Open].into_iter().find(|mode| mode.word() == word)
    }
}

/// A policy as the user wrote it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// What is open without any rule.
    pub mode: Mode,
    /// Rules, which take precedence over what the mode opens.
    pub rules: Vec<RuleSpec>,
    /// Let connections pass that the rules refuse, and report them. Closed addresses stay closed.
    pub audit: bool,
}

/// The hosts that `registries` opens. Made by `presets`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preset {
    /// What it opens.
    pub hosts: Vec<PresetHost>,
}

/// One host of a preset.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PresetHost {
    /// The host.
    pub host: Name,
    /// The ports that its use needs.
    pub ports: Vec<u16>,
    /// Only for SSH. Otherwise for any protocol.
    pub ssh: bool,
    /// Whether it has private addresses: a company's own mirror. Found in the configuration of the machine, so its
    /// operator vouches for it.
    pub private: bool,
}

/// The rules of a policy with everything expanded: the form that egress enforces and that is sent to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ruleset {
    /// The mode that it was made from, for messages.
    pub mode: Mode,
    /// The rules that the user wrote, in their order.
    pub rules: Vec<Rule>,
    /// The rules that the mode stands for.
    pub preset: Vec<Rule>,
    /// Let connections pass that the rules refuse, and report them.
    pub audit: bool,
}

/// Why a policy is rejected. The previous one stays in force.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// One rule is wrong.
    #[error("rule {number} (`{to}`): {source}")]
    Rule {
        /// Counted from 1.
        number: usize,
        /// Its target, as written.
        to: String,
        /// What is wrong.
        source: BadRule,
    },
    /// Two rules match the same and decide the opposite.
    #[error("rule {first} and rule {second} contradict each other: both are about `{what}`")]
    Contradiction {
        /// Counted from 1.
        first: usize,
        /// Counted from 1.
        second: usize,
        /// What both match.
        what: String,
    },
    /// Too many rules.
    #[error("a policy has at most {RULES_MAX} rules, got {0}")]
    TooMany(usize),
}

impl Spec {
    /// Checks every rule and expands the mode.
    pub fn expand(&self, registries: &Preset) -> Result<Ruleset, PolicyError> {
        if self.rules.len() > RULES_MAX {
            return Err(PolicyError::TooMany(self.rules.len()));
        }
        let mut rules = Vec::with_capacity(self.rules.len());
        for (at, written) in self.rules.iter().enumerate() {
            let rule = written.check().map_err(|source| PolicyError::Rule {
                number: at + 1,
                to: written.to.chars().take(80).collect(),
                source,
            })?;
            rules.push(rule);
        }
        contradictions(&rules)?;
        let preset = match self.mode {
            Mode::None | Mode::Names | Mode::Open => Vec::new(),
            Mode::Registries => registries.hosts.iter().map(PresetHost::rule).collect(),
        };
        Ok(Ruleset { mode: self.mode, rules, preset, audit: self.audit })
    }
}

impl PresetHost {
    fn rule(&self) -> Rule {
        Rule {
            action: Action::Allow,
            target: Target::Host(self.host.clone()),
            ports: Ports::of(&self.ports),
            protocol: self.ssh.then_some(Protocol::Ssh),
            private: self.private,
        }
    }
}

fn contradictions(rules: &[Rule]) -> Result<(), PolicyError> {
    let mut seen = HashMap::new();
    for (at, rule) in rules.iter().enumerate() {
        let (first, action) = *seen.entry(rule.matches_what()).or_insert((at, rule.action));
        if action != rule.action {
            let text = rule.to_string();
            let what = text.split_once(' ').map_or(text.as_str(), |(_, what)| what).to_owned();
            return Err(PolicyError::Contradiction { first: first + 1, second: at + 1, what });
        }
    }
    Ok(())
}

impl Ruleset {
    /// The mode's decision about names without a rule.
    pub(super) fn default_for_names(&self) -> Action {
        match self.mode {
            Mode::None | Mode::Registries => Action::Deny,
            Mode::Names | Mode::Open => Action::Allow,
        }
    }

    /// The mode's decision about literal addresses without a rule.
    pub(super) fn default_for_addresses(&self) -> Action {
        match self.mode {
            Mode::None | Mode::Registries | Mode::Names => Action::Deny,
            Mode::Open => Action::Allow,
        }
    }

    /// Whether nothing at all can be reached, so that the sandbox needs no route.
    pub fn is_closed(&self) -> bool {
        let allows = |rules: &[Rule]| rules.iter().any(|rule| rule.action == Action::Allow);
        self.default_for_names() == Action::Deny
            && !self.audit
            && !allows(&self.rules)
            && !allows(&self.preset)
    }

    /// The destinations that need a local route in the sandbox's network namespace, besides the pool of synthetic
    /// addresses.
    pub fn routes(&self) -> Routes {
        let everything = self.default_for_addresses() == Action::Allow
            || self.audit
            || self.rules.iter().any(|rule| rule.action == Action::Allow && rule.target == Target::Any);
        let mut blocks: Vec<super::Cidr> = self
            .rules
            .iter()
            .filter(|rule| rule.action == Action::Allow)
            .filter_map(|rule| match rule.target {
                Target::Block(block) => Some(block),
                Target::Host(_) | Target::Suffix(_) | Target::Any => None,
            })
            .collect();
        blocks.sort_unstable();
        blocks.dedup();
        Routes { names: !self.is_closed(), everything, blocks }
    }
}

/// What must be routed to egress.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Routes {
    /// The pool of synthetic addresses and the resolver. Without it the sandbox has no route at all.
    pub names: bool,
    /// A default route: egress decides about literal addresses.
    pub everything: bool,
    /// The blocks that rules open.
    pub blocks: Vec<super::Cidr>,
}
