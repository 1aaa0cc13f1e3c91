//! Finds the TCP ports that programs of a sandbox listen on, from the host. Init is not asked.
//!
//! The kernel lists sockets of a network namespace by inode, and the descriptors of a process by inode too, so the
//! process that has a port can be found among those of the sandbox's cgroup. Both searches are bounded, since a guest
//! decides how much there is.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wire::SandboxId;

use super::init::{Init, is_gone};
use super::listeners;
use crate::backend::{ListeningPort, PortProcess};
use crate::ns::cgroup::Cgroups;

/// The most bytes of one list of sockets: some 25,000 connections. Listening sockets come first in it.
const LIST_MAX: usize = 4 << 20;
/// The most ports that are reported.
const PORTS_MAX: usize = 1024;
/// The most processes whose descriptors are checked.
const PROCESSES_MAX: usize = 1024;
/// The most descriptors that are checked, of all processes together.
const DESCRIPTORS_MAX: usize = 16 * 1024;
/// The size of a process's status with its name, which the kernel truncates at 15 bytes.
const STATUS_MAX: usize = 8 * 1024;

/// The ports of a sandbox, sorted. `None` if it does not run.
pub fn read(groups: &Cgroups, sandbox: SandboxId) -> io::Result<Option<Vec<ListeningPort>>> {
    let Some(init) = Init::find(groups, sandbox)? else { return Ok(None) };
    let mut sockets = Vec::new();
    for name in ["net/tcp", "net/tcp6"] {
        match init.read(name, LIST_MAX) {
            Ok(text) => sockets.extend(listening(&text)),
            // This kernel has no IPv6, or the process has ended.
            Err(e) if is_gone(&e) && name == "net/tcp6" => {}
            Err(e) if is_gone(&e) => return Ok(None),
            Err(e) => return Err(e),
        }
    }
    sockets.retain(|socket| !listeners::is_ours(socket.address, socket.port));
    sockets.truncate(PORTS_MAX);
    let mut holders = if sockets.is_empty() { HashMap::new() } else { holders(groups, sandbox, &sockets)? };
    let mut ports: Vec<ListeningPort> = sockets
        .into_iter()
        .map(|Socket { address, port, inode }| ListeningPort {
            port,
            address,
            process: holders.remove(&inode),
        })
        .collect();
    ports.sort();
    Ok(Some(ports))
}

/// A line of such a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Socket {
    address: IpAddr,
    port: u16,
    inode: u64,
}

/// The listening sockets, from the text of `/proc/net/tcp` or `tcp6`. Skips a truncated last line.
fn listening(text: &str) -> Vec<Socket> {
    /// TCP_LISTEN.
    const LISTENS: &str = "0A";
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    let socket = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (address, port) = fields.nth(1)?.split_once(':')?;
        if fields.nth(1)? != LISTENS {
            return None;
        }
        let inode = fields.nth(5)?.parse().ok()?;
        Some(Socket { address: address_of(address)?, port: u16::from_str_radix(port, 16).ok()?, inode })
    };
    whole.lines().skip(1).filter_map(socket).collect()
}

/// Written as 32-bit numbers in native byte order.
fn address_of(text: &str) -> Option<IpAddr> {
    let words = |text: &str| -> Option<Vec<u8>> {
        let word = |at: usize| u32::from_str_radix(text.get(at..at + 8)?, 16).ok();
        let words = (0..text.len()).step_by(8).map(word).collect::<Option<Vec<u32>>>()?;
        Some(words.into_iter().flat_map(u32::to_ne_bytes).collect())
    };
    match text.len() {
        8 => Some(IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(words(text)?).ok()?))),
        32 => Some(IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(words(text)?).ok()?))),
        _ => None,
    }
}

/// Which processes of a sandbox have these sockets.
fn holders(
    groups: &Cgroups,
    sandbox: SandboxId,
    sockets: &[Socket],
) -> io::Result<HashMap<u64, PortProcess>> {
    let mut found = HashMap::new();
    let mut left = DESCRIPTORS_MAX;
    for pid in groups.all_processes(sandbox, PROCESSES_MAX)? {
        // A process that ends during the check no longer has a port.
        let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        let mut name = None;
        for descriptor in descriptors.flatten() {
            if left == 0 || found.len() == sockets.len() {
                return Ok(found);
            }
            left -= 1;
            let Ok(target) = std::fs::read_link(descriptor.path()) else { continue };
            let Some(inode) = target.to_str().and_then(socket_inode) else { continue };
            if sockets.iter().any(|socket| socket.inode == inode) && !found.contains_key(&inode) {
                let process = name.get_or_insert_with(|| process(pid));
                if let Some(process) = process.clone() {
                    found.insert(inode, process);
                }
            }
        }
    }
    Ok(found)
}

/// From the target of a link in `/proc/<pid>/fd`.
pub(super) fn socket_inode(target: &str) -> Option<u64> {
    target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

fn process(pid: u32) -> Option<PortProcess> {
    use std::io::Read;
    let mut status = Vec::new();
    std::fs::File::open(format!("/proc/{pid}/status"))
        .ok()?
        .take(STATUS_MAX as u64)
        .read_to_end(&mut status)
        .ok()?;
    in_status(&String::from_utf8_lossy(&status))
}

/// The name and the innermost id, from the text of `/proc/<pid>/status`.
fn in_status(status: &str) -> Option<PortProcess> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let name = field("Name:")?.trim().to_owned();
    let pid = field("NSpid:")?.split_ascii_whitespace().last()?.parse().ok()?;
    Some(PortProcess { pid, name })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 020012C6:EE48 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100 0 0 10 0
   2: 0100007F:1F90 0100007F:B2A6 01 00000000:00000000 00:00000000 00000000     0        0 4713 1 0 20 4 30 10 -1
";
    const TCP6: &str = "  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 99 1 0 100 0 0 10 0
   1: 00000000000000000000000001000000:0051 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 98 1 0 100 0 0 10 0
";

    #[test]
    #[cfg(target_endian = "little")]
    fn listening_sockets_are_read_and_connections_are_not() {
        let [first, second] = listening(TCP)[..] else { panic!("two of them listen") };
        assert_eq!(first, Socket { address: Ipv4Addr::LOCALHOST.into(), port: 8080, inode: 4711 });
        assert_eq!((second.address, second.port), ("198.18.0.2".parse().expect("an address"), 61_000));
        assert!(listeners::is_ours(second.address, second.port));
        let six = listening(TCP6);
        assert_eq!((six[0].address, six[0].port), (Ipv6Addr::UNSPECIFIED.into(), 80));
        assert_eq!((six[1].address, six[1].port, six[1].inode), (Ipv6Addr::LOCALHOST.into(), 81, 98));
    }

    #[test]
    fn lists_that_are_cut_off_or_nonsense_give_what_is_whole() {
        for length in 0..TCP.len() {
            assert!(listening(&TCP[..length]).len() <= 2);
        }
        let cut = TCP.find("   1:").expect("it is there") + 40;
        assert_eq!(listening(&TCP[..cut]).len(), 1);
        for text in ["", "\n", "x\ny z\n", "h\n 0: :: : 0A\n", "h\n 0: 0100007F:1F90 0 0A 0 0 0 0 0 x\n"] {
            assert_eq!(listening(text), [], "{text:?}");
        }
        assert_eq!(address_of("€€x"), None);
        assert_eq!(address_of("0100007é"), None);
    }

    #[test]
    fn a_process_is_known_by_the_id_that_it_has_inside() {
        let status = "Name:\tpython3\nUmask:\t0022\nPid:\t4000\nNSpid:\t4000\t17\n";
        assert_eq!(in_status(status), Some(PortProcess { pid: 17, name: "python3".into() }));
        assert_eq!(in_status("Name:\tx\n"), None);
        assert_eq!(
            (socket_inode("socket:[12]"), socket_inode("pipe:[12]"), socket_inode("socket:[]")),
            (Some(12), None, None)
        );
    }
}
