"""Deletes the sandboxes that a program owns when the program is gone, however it went.

A process of its own (``python -m shoal._guard``) reads lines of JSON from its stdin: first where the daemon is, then which
sandboxes are owned and which are not any more. The end of its stdin is the end of the program; then it deletes what is
still owned, and ends. It leads a session of its own, so that what is sent to the program's group does not reach it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

from ._find import Endpoint
from ._sync.client import SandboxClient
from .errors import SandboxClientError

#: How long the guard tries to reach the daemon for each of its requests.
TIMEOUT_SECONDS = 60.0


class Guard:
    """The program's end of a guard, which is started with the first sandbox that it is to watch over."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def own(self, sandbox_id: str) -> None:
        """The sandbox is to be deleted when this program is gone."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                # It needs nothing of our environment, other than what Python needs to find this package.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    start_new_session=True,
                )
                self._tell({"url": self._endpoint.url, "key": self._endpoint.key})
            self._tell({"own": sandbox_id})

    def free(self, sandbox_id: str) -> None:
        """The sandbox is deleted, or somebody else's business."""
        with self._lock:
            if self._process is not None:
                self._tell({"free": sandbox_id})

    def _tell(self, what: dict[str, str]) -> None:
        assert self._process is not None and self._process.stdin is not None, "it was started with a pipe"
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            # Somebody ended the guard. The sandbox's lifetime is the guard that is left.
            pass


def main() -> None:
    """Listens until the program is gone."""
    where = json.loads(sys.stdin.readline() or "{}")
    owned: set[str] = set()
    for line in sys.stdin:
        said = json.loads(line)
        owned.add(said["own"]) if "own" in said else owned.discard(said["free"])
    if owned:
        with SandboxClient(where["url"], where["key"], timeout=TIMEOUT_SECONDS) as client:
            for sandbox_id in owned:
                try:
                    client.delete_sandbox(sandbox_id)
                except SandboxClientError:
                    # Gone already, or out of reach: nobody is left to be told.
                    continue


if __name__ == "__main__":
    main()
