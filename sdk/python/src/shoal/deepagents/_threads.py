"""Calls that wait, made where an event loop runs.

Deep Agents Code makes its sandbox and runs its set-up script in the thread of a server's event loop, and the server refuses
calls there that would block on a socket. A thread of its own may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def off_loop(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Calls the function: here, or in another thread if this one runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*arguments, **named)
    with ThreadPoolExecutor(1, thread_name_prefix="shoal") as pool:
        return pool.submit(function, *arguments, **named).result()
