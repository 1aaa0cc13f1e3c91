//! The only way out of a sandbox: DNS and TCP by policy.
//!
//! A sandbox's network namespace has no way out. The launcher opens listeners *inside* it and routes to them what a policy
//! opens; this crate is the process that holds those listeners, decides about every name and every connection, and dials from
//! the host's network. It runs without root and capabilities, outlives the daemon, and fails closed.
//!
//! # Reading order
//!
//! [`policy`] is pure: rules, the one order in which they decide, and the table of closed addresses. [`presets`] finds out
//! which hosts the mode `registries` means. [`dns`] answers names with synthetic addresses. [`dial`] opens connections and checks
//! every address at that moment. [`tls`] and [`http`] read first bytes and requests. [`credential`] puts credentials into
//! requests. [`ca`] signs refusals and the certificates of hosts whose requests are read. [`relay`] and
//! [`limits`] move and count bytes. [`control`] is the protocol with the daemon, [`outbox`] holds the records for it.
//! [`gateway`] serves one sandbox, and [`process`] is the program.
//!
//! # For the launcher
//!
//! Per sandbox, in its network namespace, with the addresses of [`dns::Pool`] (`198.18.0.0/15`, `100:0:0:1::/64`):
//!
//! - own addresses `198.18.0.2` and `100:0:0:1::2`; a local route for the pool, and for what [`policy::Ruleset::routes`] says;
//! - TCP listeners (one per family, `IP_TRANSPARENT`, backlog 4096) that a TPROXY rule sends every TCP connection to. Egress reads
//!   what was meant from the local address of the accepted connection, so it needs no other information;
//! - UDP sockets bound to port 53 of [`control::listen_addresses`], without `SO_REUSEADDR`. DNS over TCP arrives at the TCP listener;
//! - at the refused address (`.3`), only ports 80 and 443 should reach the listener: others are refused by the kernel at once.
//!
//! The descriptors go to the daemon, which passes them on with [`control::Attach`]: one [`control::Listener`] kind for each, in
//! order. The daemon may keep copies; egress gives copies back with [`control::Egress::listeners`].
//!
//! # For the daemon
//!
//! ```text
//! first start   make the directory `egress` (0700, of the installation's own user), socketpair(SEQPACKET),
//!               spawn `shoal egress` with one end as standard input -> Egress::start(our end, &Start { .. })
//!               -> (Egress, Records, Started { ca_pem })
//! next start    Egress::connect(directory) -> (Egress, Records); egress.check_version();
//!               greeting().attached says what it serves; reconcile with the rows: detach what is gone, attach what is missing
//! take-over     new version or new build: listeners(sandbox) of each, start another egress in the same directory,
//!               drain(seconds) the old one, attach each sandbox to the new one. Keep reading the old one's records until it ends
//! create        presets::find + presets::hosts + presets::preset once; Spec::expand(&preset) -> Ruleset;
//!               attach(Attach { names, rules, limits, .. }, descriptors) before guest code runs
//! records       for each (sequence, record): store, then acknowledge(sequence). Record::Name is one row
//!               (sandbox, place) -> name that never changes; the guest's lookup waits for the acknowledgement (3 s).
//!               Records may come twice, so storing must be idempotent
//! PATCH         expand first (a bad policy is refused and the old one stays), then set_policy; cut before the route goes
//! teardown      detach(sandbox): when it returns, egress holds nothing of the namespace
//! fork, resume  attach with the names of the row: addresses that guest programs remember stay valid
//! ```
//!
//! The program's entry is [`process::main`], called from `main` of `shoal egress` before any thread exists. Its log
//! goes to `tracing`; the process that starts it decides where the log goes.
//!
//! # What it never does
//!
//! Trust a guest's byte; dial an address that it has not just checked; ask a resolver about a name that policy refuses; hold a
//! capability; touch the kernel's routes or rules; know rows, owners' names or HTTP of the daemon.

#![forbid(unsafe_code)]

pub mod policy;

pub mod ca;
pub mod control;
pub mod credential;
pub mod dial;
pub mod dns;
pub mod gateway;
pub mod http;
pub mod limits;
pub mod outbox;
pub mod presets;
pub mod process;
pub mod relay;
pub mod tls;
