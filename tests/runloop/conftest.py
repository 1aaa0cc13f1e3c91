"""What tests are given: a daemon, a client that two variables made, and devboxes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients"))

from daemon import a_daemon, leave_on_sigterm  # noqa: E402
from raw import Daemon, variables  # noqa: E402

os.environ["NO_PROXY"] = "127.0.0.1"


def pytest_configure(config: pytest.Config) -> None:
    """Before any test."""
    leave_on_sigterm()


def settings(daemon: Daemon, key: str | None = None) -> Any:
    """The two variables that switch the client over."""
    return variables(RUNLOOP_BASE_URL=f"{daemon.url}/runloop", RUNLOOP_API_KEY=key or daemon.key)


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
def sdk(switched: Daemon) -> Any:
    """A client, made from the two variables."""
    from runloop_api_client import RunloopSDK

    return RunloopSDK()


@pytest.fixture
def box(sdk: Any) -> Iterator[Any]:
    """A fresh devbox."""
    box = sdk.devbox.create()
    yield box
    box.shutdown()
