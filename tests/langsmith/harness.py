"""Raw requests to a daemon, and a proxy that cuts connections.

How a daemon is started and ended is said in tests/clients/daemon.py. Nothing here uses a client of ours: what is tested is
someone else's.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients"))

import daemon  # noqa: E402
from daemon import a_daemon, leave_on_sigterm, wait_until  # noqa: E402, F401

#: What clients hard-code, and what it is here: the machine itself.
ALIAS = "python:3.12-slim"


class Daemon(daemon.Daemon):
    """A daemon that is asked by raw requests, and has the image that clients name."""

    arguments = ("--spares", "2")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.ask("PUT", f"/v1/image-aliases/{quote(ALIAS, safe='')}", {"target": "host"})

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
        if not self.runs:
            self.start()
        for pool in self.ask("GET", "/v1/pools")["pools"]:
            self.ask("DELETE", f"/v1/pools/{quote(pool['name'], safe='')}")
        while sandboxes := self.ask("GET", "/v1/sandboxes?limit=500")["sandboxes"]:
            for sandbox in sandboxes:
                self.answer("DELETE", f"/v1/sandboxes/{sandbox['id']}")
        self.stop()
        shutil.rmtree(self.directory)


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
