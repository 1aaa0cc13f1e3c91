"""A real daemon for the tests, with a data directory of its own that is removed with all that is in it.

``SHOAL_BINARY`` names the program, or it is found on ``PATH``.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shoal import AsyncSandboxClient, SandboxClient
from shoal._local import find_binary, remove_leftover


class Daemon:
    """A daemon on a data directory and port of its own, which can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key = f"test-{secrets.token_hex(24)}"
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self.start()

    def start(self, listen: str = "127.0.0.1:0") -> None:
        """Starts it, and waits until it says that it is ready."""
        # Plain directories: a store of its own would take a quarter of what is free on the disk.
        environment = {"SHOAL_STORE": "directory", **os.environ, "SHOAL_API_KEY": self.key}
        log = (self.directory / "daemon.log").open("a")
        with log:
            self._process = subprocess.Popen(
                [find_binary(None), "serve", "--data-dir", str(self.directory / "data"), "--listen", listen],
                env=environment,
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
    def address(self) -> str:
        """Host and port."""
        return self.url.removeprefix("http://")

    def kill(self) -> None:
        """Ends it as a crash would; sandboxes go on."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kills it and starts another on the same address and data."""
        address = self.address
        self.kill()
        self.start(address)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()

    def remove(self) -> None:
        """Ends it, and has a private daemon adopt and remove all that it made, what it kept ready included."""
        self._end(signal.SIGTERM)
        remove_leftover(find_binary(None), self.directory)
        wait_until(lambda: not self.directory.exists(), 60)

    def client(self) -> SandboxClient:
        """A client of it."""
        return SandboxClient(self.url, self.key)

    def async_client(self) -> AsyncSandboxClient:
        """A client of it, for asyncio."""
        return AsyncSandboxClient(self.url, self.key)


def a_daemon() -> Iterator[Daemon]:
    """A daemon, and nothing of it afterwards."""
    # Sockets have short names, so this is not in pytest's own deep directories. If these tests are killed, it is removed
    # by what `cargo xtask test` runs for directories of this name.
    daemon = Daemon(Path(tempfile.mkdtemp(prefix=f"shoal-test-{os.getpid()}-", dir="/var/tmp")))
    try:
        yield daemon
    finally:
        daemon.remove()


def wait_until(holds: object, seconds: float = 30.0) -> None:
    """Waits for a condition."""
    assert callable(holds)
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)
