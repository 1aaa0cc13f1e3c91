//! What a sandbox may reach. Pure: values in, a verdict out.
//!
//! [`Spec`] is a policy as the user wrote it. [`Spec::expand`] checks it and replaces its mode by rules: a [`Ruleset`],
//! which is sent to egress. [`Policy`] is a rule set ready for decisions; [`decide`] documents the order of rules.
//! [`address`] is the table of addresses that stay closed whatever rules say about names.

pub mod address;
mod cidr;
pub mod decide;
mod explain;
mod name;
mod rule;
mod spec;

pub use address::{Addresses, Class, Closed, Named};
pub use cidr::{BadCidr, Cidr};
pub use decide::{Destination, DialDenied, Policy, Query, Verdict, Why};
pub use explain::{Asked, BadDestination, Explanation, destination, opener};
pub use name::{BadName, LABEL_BYTES_MAX, NAME_BYTES_MAX, Name};
pub use rule::{Action, BadRule, PORT_RANGES_MAX, Ports, Protocol, Rule, RuleSpec, Target};
pub use spec::{Mode, PolicyError, Preset, PresetHost, RULES_MAX, Routes, Ruleset, Spec};
