"""What the installed version of the client has, and how it makes a sandbox."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Daemon

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import langsmith.sandbox as sandbox
    from langsmith.sandbox import AsyncSandboxClient, SandboxClient

VERSION = tuple(int(part) for part in importlib.metadata.version("langsmith").split(".")[:3])
#: The documented dialect: templates, volumes and pools.
LEGACY = hasattr(SandboxClient, "create_template")
#: Snapshots.
MODERN = hasattr(SandboxClient, "create_snapshot")
#: From 0.7.17 on, a kill closes the connection at once, so that most of the time the client does not hear how it ended.
KILL_CLOSES = "pty" in inspect.signature(sandbox.Sandbox.run).parameters
#: Files with ranges, `close_input`, SSE.
NEWEST = hasattr(sandbox.Sandbox, "read_range")

legacy = pytest.mark.skipif(not LEGACY, reason="this version has no templates")
modern = pytest.mark.skipif(not MODERN, reason="this version has no snapshots")
newest = pytest.mark.skipif(not NEWEST, reason="this version has no file ranges")

#: The template that sandboxes of the documented dialect are made from.
TEMPLATE = "for-tests"


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """Sets variables of the environment for a while."""
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


def settings(daemon: Daemon, url: str | None = None) -> Any:
    """The two lines that switch a client to a daemon."""
    from langsmith import utils

    utils.get_env_var.cache_clear()
    return variables(LANGSMITH_ENDPOINT=url or daemon.url, LANGSMITH_API_KEY=daemon.key)


@contextlib.contextmanager
def a_client(daemon: Daemon, url: str | None = None, **options: Any) -> Iterator[Any]:
    """A client of a daemon, or of a proxy in front of it."""
    with settings(daemon, url), SandboxClient(**options) as client:
        if LEGACY:
            names = [template.name for template in client.list_templates()]
            if TEMPLATE not in names:
                client.create_template(name=TEMPLATE, image="host")
        yield client


def a_sandbox(client: Any, **options: Any) -> Any:
    """A sandbox that is deleted at the end of a `with`."""
    if LEGACY and "snapshot_id" not in options:
        options.setdefault("template_name", TEMPLATE)
    return client.sandbox(**options)


def make(client: Any, **options: Any) -> Any:
    """A sandbox to keep."""
    if LEGACY:
        options.setdefault("template_name", TEMPLATE)
    return client.create_sandbox(**options)


@contextlib.asynccontextmanager
async def an_async_client(daemon: Daemon) -> Any:
    """As `a_client`, for asyncio."""
    with a_client(daemon):
        async with AsyncSandboxClient() as client:
            yield client


async def an_async_sandbox(client: Any, **options: Any) -> Any:
    """As `a_sandbox`, for asyncio."""
    if LEGACY:
        options.setdefault("template_name", TEMPLATE)
    return await client.sandbox(**options)
