"""What tests are given: a daemon, a client that two variables made, and sandboxes."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients"))

from daemon import a_daemon, leave_on_sigterm  # noqa: E402
from raw import Daemon, variables  # noqa: E402

os.environ["NO_PROXY"] = "127.0.0.1,localhost"


def pytest_configure(config: pytest.Config) -> None:
    """Before any test."""
    leave_on_sigterm()


VERSION = tuple(int(part) for part in importlib.metadata.version("sandbox0").split("."))
#: Where the client's version is served: before 0.10.3, it knew another status for a deleted sandbox.
BASE = "/sandbox0" if VERSION >= (0, 10, 3) else "/sandbox0/before-0.10.3"


def settings(daemon: Daemon, key: str | None = None) -> Any:
    """The two variables that switch the client over."""
    return variables(SANDBOX0_BASE_URL=f"{daemon.url}{BASE}", SANDBOX0_TOKEN=key or daemon.key)


def a_client() -> Any:
    """A client, made from the two variables, as the vendor's examples do."""
    from sandbox0 import Client

    return Client(token=os.environ["SANDBOX0_TOKEN"], base_url=os.environ["SANDBOX0_BASE_URL"])


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """One for all tests that do not harm it."""
    with a_daemon(Daemon) as daemon:
        yield daemon


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    """One for a test that does."""
    with a_daemon(Daemon) as daemon:
        yield daemon


@pytest.fixture
def switched(daemon: Daemon) -> Iterator[Daemon]:
    """The daemon, with the variables set, as the documents have them."""
    with settings(daemon):
        yield daemon


@pytest.fixture
def client(switched: Daemon) -> Iterator[Any]:
    """A client, made from the two variables."""
    with a_client() as client:
        yield client


@pytest.fixture
def sandbox(client: Any) -> Iterator[Any]:
    """A fresh sandbox."""
    with client.sandboxes.open("default") as sandbox:
        yield sandbox
