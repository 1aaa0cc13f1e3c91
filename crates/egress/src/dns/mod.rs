//! Names: the answers to a sandbox, the synthetic address of each name, and the questions to upstream resolvers.

mod answer;
mod budget;
mod pool;
mod upstream;

pub use answer::{Asked, NoPlace, Outcome, QUESTION_BYTES_MAX, Transport, Zone, answer, fuzz_packet};
pub use budget::{Budget, NAMES_PER_SUFFIX_MAX, NEW_NAMES_PER_MINUTE, SUFFIXES_MAX};
pub use pool::{Meaning, NAMES_MAX, Names, Pool};
pub use upstream::{Answer, ResolveError, Resolver, SERVERS_MAX, Upstream};
