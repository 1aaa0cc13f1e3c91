"""A daemon that suites ask by raw requests: for what no client of the tested system can say, and for cleaning up.

Nothing here uses a client: what is tested is someone else's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import daemon

#: Names of images that clients and documents use, and that are the machine itself here.
ALIASES = ("debian:12", "python:3")


class RawDaemon(daemon.Daemon):
    """A daemon that is asked by raw requests."""

    arguments = ("--spares", "2")

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """A raw request, answered with 2xx."""
        status, answer = self.answer(method, path, body, key)
        assert 200 <= status < 300, f"{method} {path}: {status} {answer}"
        return answer

    def answer(
        self,
        method: str,
        path: str,
        body: Any = None,
        key: str | None = None,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and body of a raw request, whatever they are. ``headers`` replace those of a request with a key."""
        data = raw if body is None else json.dumps(body).encode()
        secret = self.key if key is None else key
        usual = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}", "X-Api-Key": secret}
        request = urllib.request.Request(self.url + path, data, usual if headers is None else headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as response:
                status, answer = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, answer = error.code, error.read()
        try:
            return status, json.loads(answer)
        except ValueError:
            return status, answer

    def remove(self) -> None:
        """Deletes all that it made, ends it, and removes its directory."""
        if not self.runs:
            self.start()
        while sandboxes := self.ask("GET", "/v1/sandboxes?limit=500")["sandboxes"]:
            for sandbox in sandboxes:
                self.answer("DELETE", f"/v1/sandboxes/{sandbox['id']}")
        self.stop()
        shutil.rmtree(self.directory)


class Daemon(RawDaemon):
    """A daemon that has the images that other systems' clients and documents name."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        for alias in ALIASES:
            self.ask("PUT", f"/v1/image-aliases/{quote(alias, safe='')}", {"target": "host"})


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
