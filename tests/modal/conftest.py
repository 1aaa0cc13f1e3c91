"""What tests are given: a daemon that the client is switched to, an app, and sandboxes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Daemon, a_daemon, leave_on_sigterm, switched_to

os.environ["NO_PROXY"] = "127.0.0.1"
os.environ["MODAL_DISABLE_API_PROXY"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Before any test."""
    leave_on_sigterm()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """One for all tests that do not harm it."""
    with a_daemon(Daemon) as daemon, switched_to(daemon):
        yield daemon


@pytest.fixture
def app(daemon: Daemon) -> Any:
    """An app."""
    import modal

    return modal.App.lookup("tests", create_if_missing=True)


@pytest.fixture
def sb(app: Any) -> Iterator[Any]:
    """A fresh sandbox."""
    import modal

    sandbox = modal.Sandbox.create(app=app)
    yield sandbox
    sandbox.terminate()
