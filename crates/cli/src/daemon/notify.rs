//! Tells the service manager how it stands, where one listens: sd_notify(3), without the library.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Says something on the socket that NOTIFY_SOCKET names.
pub fn notify(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        // An abstract name, which has no file.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_sockets_are_reached() {
        let home = tempfile::tempdir().expect("a temporary directory");
        let path = home.path().join("notify");
        let by_path = UnixDatagram::bind(&path).expect("it can be bound");
        let name = format!("shoal-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let by_name = UnixDatagram::bind_addr(&address).expect("it can be bound");
        notify(path.as_os_str(), "READY=1").expect("it is heard");
        notify(OsStr::new(&format!("@{name}")), "READY=1").expect("it is heard");
        for socket in [by_path, by_name] {
            let mut buffer = [0; 16];
            let length = socket.recv(&mut buffer).expect("something came");
            assert_eq!(&buffer[..length], b"READY=1");
        }
        assert!(notify(OsStr::new("/nonexistent/notify"), "READY=1").is_err());
    }
}
