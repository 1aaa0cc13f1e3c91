"""Which daemon a client talks to, as the command line finds it.

The one that the caller names; else that of ``SHOAL_URL`` and ``SHOAL_API_KEY``; else the one that lives in
``SHOAL_DATA_DIR``, in the directory that the machine's configuration file names (``SHOAL_CONFIG``, or
``/etc/shoal/config.toml``), or in ``/var/lib/shoal``. Its lock shows that it runs: the address in ``daemon.json`` of a
daemon that was killed may be someone else's by now, and the key is not for them.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

from .errors import SandboxClientError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DATA_DIR_DEFAULT = "/var/lib/shoal"
CONFIG_DEFAULT = "/etc/shoal/config.toml"


class Endpoint:
    """A daemon's address and its API key."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self.key = key

    def follow(self) -> None:
        """Checks whether a daemon that does not answer has moved to another address."""

    def release(self) -> None:
        """Called when the client is closed."""


class LivingEndpoint(Endpoint):
    """The daemon of a data directory, which may listen elsewhere after a restart."""

    def __init__(self, directory: Path, url: str, key: str) -> None:
        super().__init__(url, key)
        self._directory = directory

    def follow(self) -> None:
        url = living(self._directory)
        if url is not None:
            self.url = url.rstrip("/")


def find(url: str | None, key: str | None) -> Endpoint:
    """Finds the daemon, or raises an error that says how to start one."""
    endpoint = found(url, key)
    if endpoint is None:
        raise SandboxClientError(
            f"no daemon is running on `{data_dir()}`",
            hint="start one with `shoal serve`, set SHOAL_URL and SHOAL_API_KEY, or use `SandboxClient.local()`",
        )
    return endpoint


def found(url: str | None = None, key: str | None = None) -> Endpoint | None:
    """Finds the daemon; ``None`` if no daemon is named and none runs on this machine."""
    url = url or os.environ.get("SHOAL_URL") or None
    key = key or os.environ.get("SHOAL_API_KEY") or None
    if url is not None:
        if key is None:
            raise SandboxClientError(
                f"there is no api key for {url}",
                hint="set SHOAL_API_KEY, or pass api_key; a daemon keeps its first key in `api.key` in its data directory",
            )
        if any(not " " < letter < "\x7f" for letter in key):
            raise SandboxClientError("the api key has characters that no key has")
        return Endpoint(url, key)
    directory = data_dir()
    address = living(directory)
    return None if address is None else LivingEndpoint(directory, address, key or read_key(directory))


def data_dir() -> Path:
    """Where the daemon of this machine keeps its things. What is wrong with its file is for `shoal serve` to say."""
    named = os.environ.get("SHOAL_DATA_DIR")
    if named:
        return Path(named)
    file = Path(os.environ.get("SHOAL_CONFIG") or CONFIG_DEFAULT)
    try:
        said = tomllib.loads(file.read_text("utf-8")).get("data_dir")
    except (OSError, ValueError):
        said = None
    return Path(said if isinstance(said, str) else DATA_DIR_DEFAULT)


def read_key(directory: Path) -> str:
    """The key that a daemon keeps for local clients."""
    try:
        return (directory / "api.key").read_text().strip()
    except OSError as error:
        raise SandboxClientError(
            f"cannot read the api key in `{directory}`: {error.strerror}",
            hint="set SHOAL_API_KEY, or run as the user whom the daemon belongs to",
        ) from error


def living(directory: Path) -> str | None:
    """The address of the daemon that lives in a directory, if one does."""
    try:
        lock = (directory / "lock").open()
    except (FileNotFoundError, PermissionError):
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return None
    try:
        url = json.loads((directory / "daemon.json").read_bytes())["url"]
    except (OSError, ValueError, KeyError):
        # It is starting or stopping.
        return None
    return str(url)
