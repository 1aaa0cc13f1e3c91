"""What tests are given: a daemon, clients, sandboxes."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from harness import Daemon, Registry, a_daemon

from shoal import AsyncSandbox, AsyncSandboxClient, Sandbox, SandboxClient


def pytest_configure(config: pytest.Config) -> None:
    """Whoever ends the tests with SIGTERM wants them to clean up too."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """One for all tests that do not harm it."""
    yield from a_daemon()


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    """One for a test that does."""
    yield from a_daemon()


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
