"""What tests are given: a daemon, clients and sandboxes of whichever version is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Daemon, a_daemon, leave_on_sigterm

os.environ["NO_PROXY"] = "127.0.0.1"
os.environ["LANGSMITH_TRACING"] = "false"


def pytest_configure(config: pytest.Config) -> None:
    """Before any test."""
    leave_on_sigterm()


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
def client(daemon: Daemon) -> Iterator[Any]:
    """A client, as the documents make one: from two variables."""
    from dialect import a_client

    with a_client(daemon) as client:
        yield client


@pytest.fixture
def sb(client: Any) -> Iterator[Any]:
    """A fresh sandbox."""
    from dialect import a_sandbox

    with a_sandbox(client) as sandbox:
        yield sandbox
