//! The kernel features that a network policy needs. Without them sandboxes have no network, and everything else works.

use std::io;

use rustix::thread::UnshareFlags;
use wire::network::NetworkFault;

use super::finding::Finding;
use super::tries::{AS_ROOT, NEEDS_ROOT, in_child};
use crate::ns::network::{self, Parts};
use crate::sys;

const COST: &str = "sandboxes can have no network: a policy other than `none` is refused";

pub(super) fn network(tries: bool) -> Vec<Finding> {
    let [rules, ipv6] = ["nf_tables", "ipv6"];
    if !tries {
        return vec![
            Finding::unknown(rules, NEEDS_ROOT, AS_ROOT),
            Finding::unknown("nft_tproxy", NEEDS_ROOT, AS_ROOT),
            Finding::unknown(ipv6, NEEDS_ROOT, AS_ROOT),
        ];
    }
    let mut findings = judge_rules(&tried(Parts::Rules));
    findings.push(judge_ipv6(tried(Parts::Ipv6)));
    findings
}

/// Tries a part in a namespace that is removed with the child. A child can only return a number, so the missing part is
/// one.
fn tried(part: Parts) -> io::Result<()> {
    in_child(|| {
        sys::unshare(UnshareFlags::NEWNET)?;
        sys::loopback_up()?;
        network::probe(part).map_err(|fault| {
            io::Error::from_raw_os_error(match fault {
                NetworkFault::NoNfTables => NO_NF_TABLES,
                NetworkFault::NoTproxy => NO_TPROXY,
                NetworkFault::Kernel { errno, .. } => errno,
                _ => libc::EIO,
            })
        })
    })
}

const NO_NF_TABLES: i32 = libc::EPROTONOSUPPORT;
const NO_TPROXY: i32 = libc::ENOPROTOOPT;

fn judge_rules(tried: &io::Result<()>) -> Vec<Finding> {
    let (tables, proxy) = ("nf_tables", "nft_tproxy");
    let get_tables = "use a kernel with CONFIG_NF_TABLES_INET, or load the module `nf_tables`";
    let get_proxy = "use a kernel with CONFIG_NFT_TPROXY, or load the module `nft_tproxy`";
    let Err(error) = tried else {
        return vec![
            Finding::found(tables, "rules can be set"),
            Finding::found(proxy, "connections to any port can be carried"),
        ];
    };
    match error.raw_os_error() {
        Some(NO_NF_TABLES) => vec![
            Finding::limited(tables, "not in this kernel", COST, get_tables),
            Finding::unknown(proxy, "cannot be told without nf_tables", get_tables),
        ],
        Some(NO_TPROXY) => vec![
            Finding::found(tables, "rules can be set"),
            Finding::limited(proxy, "not in this kernel", COST, get_proxy),
        ],
        _ => vec![
            Finding::limited(tables, format!("rules cannot be set: {error}"), COST, get_tables),
            Finding::unknown(proxy, "cannot be told without nf_tables", get_tables),
        ],
    }
}

fn judge_ipv6(tried: io::Result<()>) -> Finding {
    const NAME: &str = "ipv6";
    match tried {
        Ok(()) => Finding::found(NAME, "in sandboxes too"),
        Err(error) => Finding::limited(
            NAME,
            format!("not in new network namespaces: {error}"),
            "sandboxes reach IPv4 addresses only",
            "boot without ipv6.disable=1, with a kernel that has CONFIG_IPV6",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::{Verdict, check};

    #[test]
    fn what_is_missing_is_told_with_its_cost_and_what_cannot_be_told_is_not_claimed() {
        let judged = |errno: i32| {
            let [tables, proxy] = &judge_rules(&Err(io::Error::from_raw_os_error(errno)))[..] else {
                panic!("two findings")
            };
            (tables.clone(), proxy.clone())
        };
        let (tables, proxy) = judged(NO_NF_TABLES);
        check(tables, Verdict::Limited, "not in this kernel");
        check(proxy, Verdict::Unknown, "without nf_tables");
        let (tables, proxy) = judged(NO_TPROXY);
        check(tables, Verdict::Found, "rules");
        check(proxy, Verdict::Limited, "not in this kernel");
        check(judged(libc::EPERM).0, Verdict::Limited, "cannot be set");
        assert!(judge_rules(&Ok(())).iter().all(|finding| finding.verdict == Verdict::Found));
        check(judge_ipv6(Ok(())), Verdict::Found, "sandboxes");
        let without = io::Error::from_raw_os_error(libc::EAFNOSUPPORT);
        check(judge_ipv6(Err(without)), Verdict::Limited, "network namespaces");
    }
}
