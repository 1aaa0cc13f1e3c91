"""A daemon, and the variables that send E2B's clients to it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients"))

from daemon import a_daemon, leave_on_sigterm, wait_until  # noqa: E402, F401
from raw import RawDaemon  # noqa: E402

VERSION = tuple(int(part) for part in importlib.metadata.version("e2b").split(".")[:2])


class Daemon(RawDaemon):
    """A daemon whose key the installed client takes."""

    def start(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        prefix = os.environ.get("E2B_TEST_KEY", "")
        if prefix and not self.key.startswith(prefix):
            self.key = prefix + secrets.token_hex(20)
        super().start(address)


@contextlib.contextmanager
def switched_to(daemon: Daemon) -> Iterator[None]:
    """The three variables that switch a client to a daemon, and nothing else."""
    values = {
        "E2B_API_URL": f"{daemon.url}/e2b",
        "E2B_SANDBOX_URL": f"{daemon.url}/e2b",
        "E2B_API_KEY": daemon.key,
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
