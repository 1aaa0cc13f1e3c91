"""What tests are given: a daemon, clients, sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from daemon import a_daemon, leave_on_sigterm
from harness import Daemon, Registry

from shoal import AsyncSandbox, AsyncSandboxClient, Sandbox, SandboxClient


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
def registry() -> Iterator[Registry]:
    """A registry of images that has none yet."""
    registry = Registry()
    yield registry
    registry.close()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[SandboxClient]:
    """A client."""
    with daemon.client() as client:
        yield client


@pytest.fixture
def sb(client: SandboxClient) -> Iterator[Sandbox]:
    """A fresh sandbox."""
    with client.sandbox() as sandbox:
        yield sandbox


@pytest.fixture
async def async_client(daemon: Daemon) -> AsyncIterator[AsyncSandboxClient]:
    """A client for asyncio."""
    async with daemon.async_client() as client:
        yield client


@pytest.fixture
async def asb(async_client: AsyncSandboxClient) -> AsyncIterator[AsyncSandbox]:
    """A fresh sandbox, for asyncio."""
    async with await async_client.sandbox() as sandbox:
        yield sandbox
