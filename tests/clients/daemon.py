"""A real daemon for suites of clients, with a data directory of its own that is removed with all that is in it.

Owns how a daemon is started, killed and started again. How it is talked to, and by whom what it made is deleted, is the
suite's business: each has a ``Daemon`` of its own that says so. Nothing here uses a client.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

#: How long a daemon may take to end.
END_SECONDS_MAX = 60
#: How often a condition is looked at.
LOOK_SECONDS = 0.01


class Daemon:
    """A daemon on a data directory and port of its own, which can be killed and started again.

    ``SHOAL_BINARY`` names the program, or it is found on ``PATH``.
    """

    #: What it is started with, beside where it keeps things and where it listens.
    arguments: tuple[str, ...] = ()

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key = f"test-{secrets.token_hex(24)}"
        self.url = ""
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        """Starts it, and waits until it says that it is ready."""
        host, port = address
        place = ("--data-dir", str(self.directory / "data"), "--listen", f"{host}:{port}")
        with (self.directory / "daemon.log").open("a") as log:
            self._process = subprocess.Popen(
                [os.environ.get("SHOAL_BINARY", "shoal"), "serve", *place, *self.arguments],
                # Plain directories: a store of its own would take a quarter of what is free on the disk.
                env={**os.environ, "SHOAL_STORE": "directory", "SHOAL_CONFIG": "", "SHOAL_API_KEY": self.key},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "ready at " in line:
                self.url = line.rsplit(" ", 1)[1].strip()
                return
        raise RuntimeError(f"the daemon did not start:\n{(self.directory / 'daemon.log').read_text()}")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    @property
    def runs(self) -> bool:
        """Whether it was started, and nobody has ended it here."""
        return self._process is not None

    def kill(self) -> None:
        """Ends it as a crash would; sandboxes go on."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ends it as whoever runs it would; sandboxes go on."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Kills it and starts another on the same address and data."""
        address = self.address
        self.kill()
        self.start(address)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(END_SECONDS_MAX)
            if process.stdout is not None:
                process.stdout.close()

    def remove(self) -> None:
        """Deletes all that it made, ends it, and removes its directory."""
        raise NotImplementedError


OneDaemon = TypeVar("OneDaemon", bound=Daemon)


@contextlib.contextmanager
def a_daemon(kind: Callable[[Path], OneDaemon]) -> Iterator[OneDaemon]:
    """A daemon, and nothing of it afterwards."""
    # Sockets have short names, so this is not in pytest's own deep directories. If these tests are killed, it is removed
    # by what `cargo xtask test` runs for directories of this name.
    daemon = kind(Path(tempfile.mkdtemp(prefix=f"shoal-test-{os.getpid()}-", dir="/var/tmp")))
    try:
        yield daemon
    finally:
        daemon.remove()


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(LOOK_SECONDS)


def leave_on_sigterm() -> None:
    """Whoever ends the tests with SIGTERM wants them to clean up too."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
