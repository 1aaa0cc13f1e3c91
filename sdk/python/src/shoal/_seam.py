"""The few things that differ between sync and async and that token replacement cannot turn into each other.

Each has an async form, whose name begins with ``a``, and a sync form of the same shape.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")

AsyncLock = anyio.Lock
Lock = threading.Lock


async def asleep(seconds: float) -> None:
    """Waits."""
    await anyio.sleep(seconds)


def sleep(seconds: float) -> None:
    """Waits."""
    time.sleep(seconds)


async def aoffload(function: Callable[..., T], *arguments: object) -> T:
    """Calls something that blocks, without blocking the event loop."""
    return await anyio.to_thread.run_sync(functools.partial(function, *arguments))


def offload(function: Callable[..., T], *arguments: object) -> T:
    """Calls something that blocks."""
    return function(*arguments)


async def ashielded(seconds: float, cleaning: Callable[..., Awaitable[T]], *arguments: object) -> T | None:
    """Waits for clean-up even in a task that was cancelled, but not for ever. ``None`` if it took too long."""
    with anyio.move_on_after(seconds, shield=True):
        return await cleaning(*arguments)
    return None


def shielded(seconds: float, cleaning: Callable[..., T], *arguments: object) -> T | None:
    """Cleans up. How long that may take is said by the requests that it makes."""
    return cleaning(*arguments)
