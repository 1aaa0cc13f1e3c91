//! Starts the egress process: the daemon's own program, without any privilege, under the installation's own user id.
//!
//! Like an init, egress is a child of the launcher but outlives it: nothing ends egress when the launcher or the daemon
//! ends, and the next daemon finds it through a socket in its directory. Egress runs in the machine's own mount and
//! network namespaces.

use std::ffi::CStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, fchmod, fchown, openat};
use rustix::process::{Gid, Resource, Rlimit, Uid, getrlimit, setrlimit, setsid};
use rustix::thread::{
    CapabilitySet, LinkNameSpaceType, move_into_link_name_space, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use wire::launch::{Answer, Failure, from_packet, to_packet};

use super::{Launcher, failure, refused};
use crate::backend::EGRESS_DIRECTORY;
use crate::ns::enter;
use crate::ns::ranges::OWN_IDS;
use crate::sys::{self, CloneOptions, Cloned};

/// The first of its descriptors, after the standard ones.
const FIRST_DESCRIPTOR: i32 = 3;

impl Launcher {
    pub(super) fn start_egress(&self, id: u32, given: Vec<OwnedFd>) -> Result<Answer, Failure> {
        if !OWN_IDS.contains(&id) {
            let doing = format!("start egress as {id}, which is not an id of an installation");
            return Err(Failure { doing, errno: libc::EINVAL });
        }
        let group = self.cgroups.egress().map_err(refused("make the cgroup of egress"))?;
        let (mut errors, mut report) = io::pipe().map_err(refused("make a pipe"))?;
        // Makes it a child of the loop, which reaps it; this walker will have ended.
        let options = CloneOptions { flags: libc::CLONE_PARENT, cgroup: Some(group.as_fd()) };
        match sys::clone_process(&options).map_err(refused("clone egress"))? {
            Cloned::Child => {
                drop(errors);
                let source = self.become_egress(id, &given);
                let failure = failure("start egress", &source);
                // If this cannot be written either, the exit code still reports the failure.
                let _ = report.write_all(&to_packet(&failure));
                sys::exit_now(1)
            }
            Cloned::Parent { pid } => {
                drop((report, given));
                let mut said = Vec::new();
                // Returns when the program is executed, which closes the pipe, or when the process is gone.
                errors.read_to_end(&mut said).map_err(refused("hear of the start of egress"))?;
                match said.as_slice() {
                    [] => Ok(Answer::Launched { pid }),
                    said => Err(from_packet(said).unwrap_or(Failure {
                        doing: "start egress, for an unknown reason".into(),
                        errno: 0,
                    })),
                }
            }
        }
    }

    /// Runs in the new process. Returns only if it fails.
    fn become_egress(&self, id: u32, given: &[OwnedFd]) -> io::Error {
        match self.try_become_egress(id, given) {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    fn try_become_egress(&self, id: u32, given: &[OwnedFd]) -> io::Result<std::convert::Infallible> {
        // The launcher's namespace has only few of the machine's mounts: certificates and resolver settings may be on
        // the others.
        move_into_link_name_space(self.host_mounts.as_fd(), Some(LinkNameSpaceType::Mount))?;
        setsid()?;
        let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
        // Egress cannot reach its directory by path, because the data directory is closed to it; so it starts there.
        let directory = self.egress_directory()?;
        fchown(&directory, Some(uid), Some(gid))?;
        rustix::process::fchdir(&directory)?;
        rustix::process::umask(Mode::from_raw_mode(0o077));
        // A connection takes two descriptors; a core dump would contain the CA's key.
        let most = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?;
        setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
        // Opened before privileges are dropped; the originals may occupy the numbers that are assigned below.
        let above = FIRST_DESCRIPTOR + given.len() as i32;
        let keep = |fd: BorrowedFd<'_>| sys::duplicate_above(fd, above);
        let null = openat(CWD, "/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let (null, program) = (keep(null.as_fd())?, keep(self.program.as_fd())?);
        let kept = given.iter().map(|fd| keep(fd.as_fd())).collect::<io::Result<Vec<OwnedFd>>>()?;

        // Before the ids, whose change removes the privilege to do so.
        enter::bound_capabilities(CapabilitySet::empty())?;
        set_thread_groups(&[])?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        enter::keep_capabilities(CapabilitySet::empty())?;

        // The first one is the socket to the daemon, which egress reads as its standard input.
        let socket = kept.first().unwrap_or(&null);
        sys::inherit_as(socket.as_fd(), 0)?;
        for standard in 1..FIRST_DESCRIPTOR {
            sys::inherit_as(null.as_fd(), standard)?;
        }
        for (number, fd) in kept.iter().skip(1).enumerate() {
            sys::inherit_as(fd.as_fd(), FIRST_DESCRIPTOR + number as i32)?;
        }
        sys::close_on_exec_from(above)?;
        sys::reset_signals();
        const ARGUMENTS: [&CStr; 2] = [c"shoal", c"egress"];
        Err(sys::execute(program.as_fd(), &ARGUMENTS, &[]))
    }

    /// Egress's own directory, made if it is missing.
    fn egress_directory(&self) -> io::Result<OwnedFd> {
        let path = self.places.path().join(EGRESS_DIRECTORY);
        match std::fs::create_dir(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(CWD, &path, flags, Mode::empty())?;
        fchmod(&directory, Mode::from_raw_mode(0o700))?;
        Ok(directory)
    }
}
