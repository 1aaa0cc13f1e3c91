"""A private daemon for one program: started when it is asked for, gone when the program is, however it ends.

The daemon lives while somebody holds a lease: a connection to ``lease.sock`` in its data directory, on which it says
where it listens. The kernel closes that connection when the program ends, also by SIGKILL; the daemon then deletes its
sandboxes and its directory. A process that changes the directory holds its lock::

    <base>/lock          held by the process that starts or ends the daemon
    <base>/daemon.log    what the daemon prints
    <base>/data/         its data directory
    <base>/data/lease.sock

If a daemon was killed together with its program, its directory and its sandboxes stay. The next program to start a private
daemon finds them, and has a daemon adopt and remove them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import sysconfig
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ._find import Endpoint, read_key
from .errors import SandboxClientError

#: How long a daemon may take to start; the first start on a cold disk reads much of ``/usr``.
START_SECONDS_MAX = 120.0
#: How long a living daemon may take to give a lease.
GRANT_SECONDS_MAX = 10.0
#: How long a daemon may take to delete its sandboxes and to end.
END_SECONDS_MAX = 60.0
#: Between two looks.
STEP_SECONDS = 0.005
#: How much of the daemon's log is shown when it does not start.
LOG_SHOWN_BYTES_MAX = 4096
#: The longest that a daemon says on a lease.
GRANT_BYTES_MAX = 4096
#: Not ``/tmp``, which may be memory.
PLACE = Path("/var/tmp")

_living: weakref.WeakSet[PrivateDaemon] = weakref.WeakSet()


def start_local(binary: str | None, directory: str | None) -> Endpoint:
    """Starts a private daemon, and has what dead programs left behind removed."""
    program = find_binary(binary)
    daemon = PrivateDaemon(program, Path(directory) if directory else None)
    if directory is None:
        _remove_leftovers(program, daemon.base)
    return daemon


def find_binary(named: str | None) -> str:
    """The program ``shoal``: the one that was named, the one that came with this package, or the one on ``PATH``."""
    named = named or os.environ.get("SHOAL_BINARY") or None
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise SandboxClientError(
                f"`{named}` is not a program", hint="SHOAL_BINARY and `binary` name the program `shoal`"
            )
        return found
    bundled = shutil.which("shoal", path=sysconfig.get_path("scripts"))
    found = bundled or shutil.which("shoal")
    if found is None:
        raise SandboxClientError(
            "the program `shoal` was not found",
            hint="install a wheel that has it, put it on PATH, or set SHOAL_BINARY",
        )
    return found


class PrivateDaemon(Endpoint):
    """A private daemon and our lease of it."""

    def __init__(self, program: str, directory: Path | None) -> None:
        self._program = program
        self._guard = threading.Lock()
        self._lease: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            if directory is None:
                # The directory has mode 0700.
                self.base = Path(tempfile.mkdtemp(prefix=_prefix(), dir=PLACE))
            else:
                directory.mkdir(mode=0o700)
                self.base = directory.absolute()
        except OSError as error:
            raise SandboxClientError(
                f"cannot make the directory `{directory or PLACE}` for a private daemon: {error.strerror}",
                hint="`directory` names one that does not exist, where directories can be made",
            ) from error
        try:
            url = self._obtain()
        except BaseException:
            self._end()
            # What an earlier daemon left is for the next one to adopt; what this one left is nothing.
            shutil.rmtree(self.base, ignore_errors=True)
            raise
        super().__init__(url, read_key(self.base / "data"))
        _living.add(self)

    def follow(self) -> None:
        """If the daemon has died, starts another, which adopts what the dead one left."""
        with self._guard:
            if self._lease is None or not _is_over(self._lease):
                return
            self._lease.close()
            self._lease = None
            self.url = self._obtain().rstrip("/")

    def release(self) -> None:
        """Ends the lease and waits for the daemon to be gone with all that it made."""
        _living.discard(self)
        with self._guard:
            self._end()

    def _end(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(END_SECONDS_MAX if lease is not None else 0)
            except subprocess.TimeoutExpired:
                # Without a lease it ends by itself, whenever it is done.
                pass

    def forget(self) -> None:
        """In a child that was forked: the lease is the parent's."""
        lease, self._lease = self._lease, None
        self._process = None
        if lease is not None:
            lease.close()

    def _obtain(self) -> str:
        """A lease of the daemon that lives here, or of a new one. Its address."""
        with _locked(self.base / "lock"):
            deadline = time.monotonic() + START_SECONDS_MAX
            found = _ask(self.base)
            if found is None:
                self._process = _start(self._program, self.base)
            while found is None:
                found = _ask(self.base)
                if found is not None:
                    break
                assert self._process is not None, "it was just started"
                code = self._process.poll()
                if code is not None:
                    raise self._not_started(f"it ended with {code}")
                if time.monotonic() > deadline:
                    raise self._not_started(f"it was not ready within {START_SECONDS_MAX:g} s")
                time.sleep(STEP_SECONDS)
        self._lease, url = found
        return url

    def _not_started(self, why: str) -> SandboxClientError:
        log = _tail(self.base / "daemon.log").strip()
        return SandboxClientError(
            f"the private daemon did not start: {why}" + (f"\n{log}" if log else ""),
            hint="it needs root and Linux 5.14 or newer; `shoal doctor` says what is missing",
        )


def _prefix() -> str:
    return f"shoal-python-{os.geteuid()}-"


def _start(program: str, base: Path, *arguments: str) -> subprocess.Popen[bytes]:
    # Nothing of the caller's environment is a daemon's business, other than where programs are.
    environment = {name: os.environ[name] for name in ("PATH", "SHOAL_LOG") if name in os.environ}
    log = os.open(base / "daemon.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [program, "serve", "--private", str(base), "--spares", "1", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=environment,
        )
    except OSError as error:
        raise SandboxClientError(f"cannot start `{program}`: {error.strerror}") from error
    finally:
        os.close(log)


def _ask(base: Path) -> tuple[socket.socket, str] | None:
    """A lease and the daemon's address; ``None`` if nobody listens."""
    lease = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lease.settimeout(GRANT_SECONDS_MAX)
        lease.connect(os.fspath(base / "data" / "lease.sock"))
        line = b""
        while not line.endswith(b"\n") and len(line) < GRANT_BYTES_MAX:
            piece = lease.recv(GRANT_BYTES_MAX)
            if not piece:
                # It ended before it could answer.
                lease.close()
                return None
            line += piece
        url = json.loads(line)["url"]
    except (FileNotFoundError, ConnectionError):
        lease.close()
        return None
    except (OSError, ValueError, KeyError) as error:
        lease.close()
        raise SandboxClientError(f"the private daemon in `{base}` does not answer: {error}") from error
    except BaseException:
        lease.close()
        raise
    return lease, str(url)


def _is_over(lease: socket.socket) -> bool:
    """Whether the daemon has ended: it says nothing more on a lease, so anything that comes is its end."""
    lease.setblocking(False)
    try:
        return lease.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with _open_lock(path) as lock:
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SandboxClientError(f"`{path}` was held by another program for too long") from None
                time.sleep(STEP_SECONDS)
        yield


def _open_lock(path: Path) -> IO[str]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "w")


def _remove_leftovers(program: str, own: Path) -> None:
    """Has daemons adopt and remove what was left where a program and its daemon were killed together."""
    for base in PLACE.glob(f"{_prefix()}*"):
        # What cannot be looked at or started now is tried again by the next program.
        with contextlib.suppress(OSError, SandboxClientError):
            about = base.lstat()
            ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and about.st_mode & 0o077 == 0
            if base != own and ours and (base / "lock").exists():
                remove_leftover(program, base)


def remove_leftover(program: str, base: Path, *arguments: str) -> None:
    """Has a daemon with these arguments adopt and remove what is in a directory, unless someone lives there."""
    with _open_lock(base / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Someone is at it.
            return
        data = base / "data"
        if not data.exists():
            # It ended before it made anything; or it begins this moment, and waits for the lock that is held here.
            if time.time() - base.stat().st_mtime > START_SECONDS_MAX:
                shutil.rmtree(base, ignore_errors=True)
            return
        if _is_held(data / "lock"):
            return
        process = _start(program, base, *arguments)
        deadline = time.monotonic() + START_SECONDS_MAX
        while process.poll() is None and time.monotonic() < deadline:
            found = _ask(base)
            if found is not None:
                # The last lease is gone with this one, so the daemon ends.
                found[0].close()
                break
            time.sleep(STEP_SECONDS)
    threading.Thread(target=process.wait, name="shoal-leftovers", daemon=True).start()


def _is_held(path: Path) -> bool:
    try:
        lock = path.open()
    except FileNotFoundError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - LOG_SHOWN_BYTES_MAX))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _end_all() -> None:
    for daemon in list(_living):
        daemon.release()


def _forget_all() -> None:
    for daemon in list(_living):
        daemon.forget()
    _living.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
