"""A daemon with clients, a small image, and a registry that has images.

How a daemon is started and ended is said in tests/clients/daemon.py of the repository.
"""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import tarfile
import threading
from pathlib import Path

import daemon
from daemon import wait_until

from shoal import AsyncSandboxClient, SandboxClient
from shoal._local import find_binary, remove_leftover

#: A static program that is a shell and its tools.
BUSYBOX = Path("/bin/busybox")


class Daemon(daemon.Daemon):
    """A daemon with clients."""

    def remove(self) -> None:
        """Ends it, and has a private daemon adopt and remove all that it made, what it kept ready included."""
        self.stop()
        # Of the kind of store that the daemon itself had, and not of the one that private daemons have.
        remove_leftover(find_binary(None), self.directory, "--store", "auto")
        wait_until(lambda: not self.directory.exists())

    def client(self) -> SandboxClient:
        """A client of it."""
        return SandboxClient(self.url, self.key)

    def async_client(self) -> AsyncSandboxClient:
        """A client of it, for asyncio."""
        return AsyncSandboxClient(self.url, self.key)


def tiny(mark: str = "") -> io.BytesIO:
    """A root file system with a shell, as an archive. Another mark makes it another image."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(BUSYBOX, arcname="bin/busybox")
        archive.addfile(tarfile.TarInfo(f"mark{mark}"))
        for name in ("sh", "cat", "echo", "mkdir", "sleep", "wc", "touch"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    file.seek(0)
    return file


class Registry:
    """A registry of images on loopback, with as much of the protocol as a pull needs. It keeps all in memory."""

    def __init__(self) -> None:
        self._blobs: dict[str, tuple[str, bytes]] = {}
        registry = self

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(self.path.split("/v2/")[-1].replace("/manifests/", ":").replace("/blobs/", "@"))

            do_HEAD = do_GET

            def _send(self, name: str) -> None:
                kind, body = registry._blobs.get(name.split("@")[-1], ("", b""))
                found = kind or self.path == "/v2/"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", kind or "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.address = f"localhost:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def push(self, name: str, layer: bytes) -> str:
        """Offers an image of one layer, a tar archive. What it is called."""
        settings = {"architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine], "os": "linux"}
        diff = {"type": "layers", "diff_ids": [self._keep("", layer)]}
        config = json.dumps({**settings, "config": {"Env": ["PATH=/bin"]}, "rootfs": diff}).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self._described("application/vnd.oci.image.config.v1+json", config),
            "layers": [self._described("application/vnd.oci.image.layer.v1.tar", layer)],
        }
        body = json.dumps(manifest).encode()
        self._keep(str(manifest["mediaType"]), body)
        self._blobs[name] = (str(manifest["mediaType"]), body)
        return f"{self.address}/{name}"

    def _described(self, kind: str, blob: bytes) -> dict[str, object]:
        return {"mediaType": kind, "digest": self._keep("application/octet-stream", blob), "size": len(blob)}

    def _keep(self, kind: str, blob: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
        self._blobs[digest] = (kind, blob)
        return digest

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
