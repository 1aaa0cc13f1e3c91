"""A registry of images that does not answer until it is let: what is asked of it hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness import Registry

#: How long a request hangs at most, should a test never let it.
HANG_SECONDS_MAX = 120


@contextmanager
def shut(registry: Registry) -> Iterator[threading.Event]:
    """While this lasts, or until the event is set, nothing is answered."""
    opened = threading.Event()
    answer: Any = registry._server.RequestHandlerClass
    answering = answer.do_GET

    def hanging(self: Any) -> None:
        opened.wait(HANG_SECONDS_MAX)
        answering(self)

    answer.do_GET = answer.do_HEAD = hanging
    try:
        yield opened
    finally:
        opened.set()
        answer.do_GET = answer.do_HEAD = answering
