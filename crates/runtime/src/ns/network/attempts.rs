//! How often programs of a sandbox tried to reach an address without a route. The kernel counts that by itself.
//!
//! Without a network every attempt is counted. Attempts to reach addresses that a policy makes unreachable or
//! prohibited are not counted, since those addresses have a route.

use std::io;

use wire::SandboxId;

use super::init::{Init, is_gone};
use crate::ns::cgroup::Cgroups;

/// Larger than either file.
const FILE_MAX: usize = 16 * 1024;

/// Attempts of a sandbox since it was created, both families together. `None` if it does not run.
pub fn read(groups: &Cgroups, sandbox: SandboxId) -> io::Result<Option<u64>> {
    let Some(init) = Init::find(groups, sandbox)? else { return Ok(None) };
    let counted = init.read("net/snmp", FILE_MAX).and_then(|v4| {
        let v4 = in_snmp(&v4).ok_or_else(|| io::Error::other("no OutNoRoutes in snmp"))?;
        // The file does not exist if the kernel has no IPv6.
        let v6 = match init.read("net/snmp6", FILE_MAX) {
            Ok(text) => in_snmp6(&text).unwrap_or(0),
            Err(e) if e.kind() == io::ErrorKind::NotFound => 0,
            Err(e) => return Err(e),
        };
        Ok(v4.saturating_add(v6))
    });
    match counted {
        Ok(count) => Ok(Some(count)),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(e),
    }
}

/// `/proc/net/snmp`: lines in pairs, names and then values, each with the same first word.
fn in_snmp(text: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, values) = (lines.next()?, lines.next()?);
    let position = names.split(' ').position(|name| name == "OutNoRoutes")?;
    values.split(' ').nth(position)?.parse().ok()
}

/// `/proc/net/snmp6`: a name and a value in each line.
fn in_snmp6(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("Ip6OutNoRoutes"))?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_by_its_name() {
        let snmp = "Ip: Forwarding DefaultTTL OutDiscards OutNoRoutes ReasmTimeout\nIp: 1 64 7 3 0\nIcmp: InMsgs\nIcmp: 9\n";
        assert_eq!(in_snmp(snmp), Some(3));
        assert_eq!(in_snmp("Ip: Forwarding\nIp: 1\n"), None);
        assert_eq!(in_snmp("Ip: OutNoRoutes\n"), None, "without its values");
        assert_eq!(
            in_snmp6("Ip6InNoRoutes                   \t8\nIp6OutNoRoutes                  \t5\n"),
            Some(5)
        );
        assert_eq!(in_snmp6(""), None);
    }

    #[test]
    fn what_this_kernel_says_can_be_read() {
        let text = std::fs::read_to_string("/proc/self/net/snmp").expect("it is readable");
        assert!(in_snmp(&text).is_some(), "{text}");
    }
}
