//! Finds sockets of a sandbox that egress still holds after the sandbox was removed. Each keeps a whole network
//! namespace alive.
//!
//! The kernel lists the sockets of a namespace by inode while the namespace has a process, and the descriptors of
//! egress by inode at any time. So the first list is read before a sandbox is torn down and the second after.

use std::collections::HashSet;
use std::io;

use wire::SandboxId;

use super::init::{Init, is_gone};
use crate::ns::cgroup::Cgroups;

/// The most bytes of one list of sockets that are read. Sockets beyond that are not found.
const LIST_MAX: usize = 4 << 20;
/// The most descriptors of egress that are checked: its limit on a machine with the usual settings.
const DESCRIPTORS_MAX: usize = 1 << 20;

/// The sockets of a sandbox, by inode.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sockets(HashSet<u64>);

impl Sockets {
    /// The sockets that exist now. Empty if the sandbox does not run or there is no egress, so that nothing is read
    /// without need.
    pub fn of(groups: &Cgroups, sandbox: SandboxId) -> io::Result<Self> {
        let mut inodes = HashSet::new();
        if groups.egress_processes()?.is_empty() {
            return Ok(Self(inodes));
        }
        let Some(init) = Init::find(groups, sandbox)? else { return Ok(Self(inodes)) };
        for name in ["net/tcp", "net/tcp6", "net/udp", "net/udp6"] {
            match init.read(name, LIST_MAX) {
                Ok(text) => inodes.extend(listed(&text)),
                Err(e) if is_gone(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(Self(inodes))
    }

    /// How many of them egress holds.
    pub fn held(&self, groups: &Cgroups) -> io::Result<u32> {
        if self.0.is_empty() {
            return Ok(0);
        }
        let mut held = 0;
        for pid in groups.egress_processes()? {
            // A process that ends during the check holds nothing.
            let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
            for descriptor in descriptors.flatten().take(DESCRIPTORS_MAX) {
                let Ok(target) = std::fs::read_link(descriptor.path()) else { continue };
                let inode = target.to_str().and_then(super::ports::socket_inode);
                held += u32::from(inode.is_some_and(|inode| self.0.contains(&inode)));
            }
        }
        Ok(held)
    }
}

/// The inodes in a list of sockets. Skips a truncated last line, and 0, the inode of a connection that no process
/// holds.
fn listed(text: &str) -> impl Iterator<Item = u64> {
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    let inode = |line: &str| line.split_ascii_whitespace().nth(9)?.parse().ok();
    whole.lines().skip(1).filter_map(inode).filter(|inode| *inode != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inodes_are_read_from_lists_of_either_protocol() {
        let text = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 020012C6:EE48 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100 0 0 10 0
   1: 020012C6:C0DE 000112C6:01BB 06 00000000:00000000 03:00000F2A 00000000     0        0 0 3 0
 1203: 010012C6:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4714 2 0 0
   9: cut off here";
        assert_eq!(listed(text).collect::<Vec<_>>(), [4712, 4714]);
        assert_eq!(listed("").count() + listed("nonsense\n\n x\n").count(), 0);
    }
}
