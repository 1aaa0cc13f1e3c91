"""A real daemon for the tests, raw requests to it, and a proxy that cuts connections.

Nothing here uses a client of ours: what is tested is someone else's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

#: What clients hard-code, and what it is here: the machine itself.
ALIAS = "python:3.12-slim"


class Daemon:
    """A daemon on a data directory and port of its own, which can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key = f"test-{secrets.token_hex(24)}"
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self.start()
        self.ask("PUT", f"/v1/image-aliases/{quote(ALIAS, safe='')}", {"target": "host"})

    def start(self, listen: str = "127.0.0.1:0") -> None:
        """Starts it, and waits until it says that it is ready."""
        command = [os.environ["SHOAL_BINARY"], "serve", "--data-dir", str(self.directory / "data"), "--listen", listen]
        with (self.directory / "daemon.log").open("a") as log:
            self._process = subprocess.Popen(
                [*command, "--spares", "2"],
                env={"SHOAL_STORE": "directory", **os.environ, "SHOAL_API_KEY": self.key},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "ready at " in line:
                self.url = line.rsplit(" ", 1)[1].strip()
                return
        raise RuntimeError(f"the daemon did not start:\n{(self.directory / 'daemon.log').read_text()}")

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def kill(self) -> None:
        """Ends it as a crash would; sandboxes go on."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kills it and starts another on the same address and data."""
        host, port = self.address
        self.kill()
        self.start(f"{host}:{port}")

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """A raw request, answered with 2xx."""
        status, answer = self.answer(method, path, body, key)
        assert 200 <= status < 300, f"{method} {path}: {status} {answer}"
        return answer

    def answer(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Status and body of a raw request, whatever they are."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-Api-Key": self.key if key is None else key}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as response:
                status, raw = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw

    def remove(self) -> None:
        """Deletes all that it made, ends it, and removes its directory."""
        if self._process is None:
            self.start()
        for pool in self.ask("GET", "/v1/pools")["pools"]:
            self.ask("DELETE", f"/v1/pools/{quote(pool['name'], safe='')}")
        while sandboxes := self.ask("GET", "/v1/sandboxes?limit=500")["sandboxes"]:
            for sandbox in sandboxes:
                self.answer("DELETE", f"/v1/sandboxes/{sandbox['id']}")
        self._end(signal.SIGTERM)
        shutil.rmtree(self.directory)


@contextlib.contextmanager
def a_daemon() -> Iterator[Daemon]:
    """A daemon, and nothing of it afterwards."""
    # Sockets have short names, so this is not in pytest's own deep directories. If these tests are killed, it is removed by
    # what `cargo xtask test` runs for directories of this name.
    daemon = Daemon(Path(tempfile.mkdtemp(prefix=f"shoal-test-{os.getpid()}-", dir="/var/tmp")))
    try:
        yield daemon
    finally:
        daemon.remove()


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def read_head(source: socket.socket, ahead: bool = False) -> bytes:
    """The first lines of a message, and what came with them if it is to be read ahead."""
    head = b""
    while b"\r\n\r\n" not in head:
        piece = source.recv(65536 if ahead else 1)
        if not piece:
            break
        head += piece
    return head


class Proxy:
    """Passes connections on to a daemon, and cuts those that are WebSockets after so many bytes behind the handshake.

    ``cuts`` is used up from its front, one for each WebSocket; without one, a connection is left alone. ``opened`` counts
    WebSockets.
    """

    def __init__(self, daemon: Daemon, cuts: list[int]) -> None:
        self.daemon = daemon
        self.cuts = cuts
        self.opened = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self.daemon.address) as server:
            head = read_head(client, ahead=True)
            left = None
            if b"upgrade: websocket" in head.lower():
                with self._lock:
                    self.opened += 1
                    left = self.cuts.pop(0) if self.cuts else None
            server.sendall(head)
            threading.Thread(target=self._copy, args=(client, server, None), daemon=True).start()
            if left is not None:
                answer = read_head(server)
                client.sendall(answer)
            self._copy(server, client, left)
            # At once, in both directions, also under the thread that waits for more.
            for end in (client, server):
                end.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while left != 0:
                piece = source.recv(65536)
                if not piece:
                    break
                if left is not None:
                    piece, left = piece[:left], left - len(piece[:left])
                target.sendall(piece)
            if left == 0:
                return
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
