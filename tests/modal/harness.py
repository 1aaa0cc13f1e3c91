"""A daemon, and the variables that send Modal's client to it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients"))

from daemon import a_daemon, leave_on_sigterm, wait_until  # noqa: E402, F401
from raw import RawDaemon as Daemon  # noqa: E402, F401

VERSION = tuple(int(part) for part in importlib.metadata.version("modal").split(".")[:2])
#: Whether the client makes the newer calls.
NEWER = VERSION >= (1, 6) and os.environ.get("MODAL_SANDBOX_V2") != "0"


def variables(daemon: Daemon) -> dict[str, str]:
    """What switches a client to a daemon."""
    return {
        "MODAL_SERVER_URL": daemon.url,
        "MODAL_TOKEN_ID": "ak-anything",
        "MODAL_TOKEN_SECRET": daemon.key,
        "MODAL_CONFIG_PATH": "/nonexistent",
    }


@contextlib.contextmanager
def switched_to(daemon: Daemon) -> Iterator[None]:
    """Switches the client in this process, which keeps a connection, to a daemon."""
    from modal.client import Client

    values = variables(daemon)
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    Client.set_env_client(None)
    try:
        yield
    finally:
        Client.set_env_client(None)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
