"""What tests are given: a daemon that the client is switched to, and sandboxes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Daemon, a_daemon, leave_on_sigterm, switched_to

os.environ["NO_PROXY"] = "127.0.0.1"


def pytest_configure(config: pytest.Config) -> None:
    """Before any test."""
    leave_on_sigterm()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """One for all tests that do not harm it."""
    with a_daemon(Daemon) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def switched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clients talk to the daemon of the test."""
    own = "own_daemon" in request.fixturenames
    with switched_to(request.getfixturevalue("own_daemon" if own else "daemon")):
        yield


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    """One for a test that harms it."""
    with a_daemon(Daemon) as daemon:
        yield daemon


@pytest.fixture
def sbx() -> Iterator[Any]:
    """A fresh sandbox."""
    from e2b import Sandbox

    sandbox = Sandbox.create()
    yield sandbox
    sandbox.kill()
