"""A registry on loopback with an image in it, so that ``python:3.12-slim`` is an image and not this machine.

The registry is Debian's ``docker-registry``. The image is made of programs and the Python of this machine, with the
libraries that they are linked with and nothing else. Nothing of either is left behind.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import platform
import subprocess
import tarfile
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import wait_until

#: What the documents call images, on Docker Hub.
IMAGES = ("python:3.12-slim", "node:20-slim", "ubuntu:24.04")
#: A file that is in the image alone.
MARK = "/etc/shoal-test-image"
#: What examples and agents use in a sandbox.
PROGRAMS = """bash sh awk base64 cat chmod cp cut date dd dirname basename echo env expr false find grep head id ln ls make mkdir
mktemp mv od printf pgrep pwd python3 readlink realpath rm rmdir sed seq sleep sort stat stty tail tee test touch tr true uname
uniq wc xargs""".split()
#: Of Python's own library: large, and used by no program here.
LEFT_OUT = {"__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "tkinter", "dist-packages"}


def output(*command: str) -> str:
    """What a program says."""
    return subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


def libraries(files: list[str]) -> set[str]:
    """What programs and libraries are linked with, the loader included."""
    words = output("ldd", *files).split()
    return {word for word in words if word.startswith("/") and not word.endswith(":")}


def layer() -> bytes:
    """A root filesystem as a tar stream."""
    library = output("/usr/bin/python3", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))").strip()
    modules = [str(path) for path in Path(library, "lib-dynload").glob("*.so")]
    programs = {name: f"/usr/bin/{name}" for name in PROGRAMS}
    files = {path: path for path in libraries([*programs.values(), *modules])}
    files.update((path, path) for path in programs.values())
    for directory, below, names in os.walk(library):
        below[:] = [name for name in below if name not in LEFT_OUT and not name.startswith("config-")]
        files.update((path, path) for path in (f"{directory}/{name}" for name in names) if os.path.isfile(path))
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:

        def add(name: str, content: bytes = b"", **said: Any) -> None:
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.size, entry.mode = len(content), 0o755
            for key, value in said.items():
                setattr(entry, key, value)
            tar.addfile(entry, io.BytesIO(content))

        # Where Debian has them, so that a program is found under both of its names.
        for name in ("bin", "lib", "lib64"):
            add(name, type=tarfile.SYMTYPE, linkname=f"usr/{name}")
        for name, mode in (("etc", 0o755), ("root", 0o700), ("tmp", 0o1777), ("var", 0o755), ("var/tmp", 0o1777)):
            add(name, type=tarfile.DIRTYPE, mode=mode)
        add("etc/passwd", b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/sh\n", mode=0o644)
        add("etc/group", b"root:x:0:\nnogroup:x:65534:\n", mode=0o644)
        add(MARK, b"an image\n", mode=0o644)
        add("usr/bin/python", type=tarfile.SYMTYPE, linkname="python3")
        for path in sorted(files):
            place = path if path.startswith("/usr/") else f"/usr{path}"
            add(place, Path(path).read_bytes(), mode=os.stat(path).st_mode & 0o755)
    return whole.getvalue()


def digest(content: bytes) -> str:
    """As registries write it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Registry:
    """Images under the names that people write, on an address of its own."""

    def __init__(self, url: str) -> None:
        self.url = url

    def fill(self) -> None:
        """Pushes one image under all names."""
        plain = layer()
        packed = gzip.compress(plain, 1)
        config = {
            "os": "linux",
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
            "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "Cmd": ["python3"]},
            "rootfs": {"type": "layers", "diff_ids": [digest(plain)]},
        }
        for image in IMAGES:
            name, tag = image.split(":")
            described = [
                {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest(blob), "size": len(blob)}
                for kind, blob in [
                    ("config.v1+json", json.dumps(config).encode()),
                    ("layer.v1.tar+gzip", packed),
                ]
            ]
            for blob in (json.dumps(config).encode(), packed):
                place = self._ask("POST", f"/v2/library/{name}/blobs/uploads/")["Location"]
                place += ("&" if "?" in place else "?") + f"digest={urllib.parse.quote(digest(blob))}"
                self._ask("PUT", place, blob, "application/octet-stream")
            kind = "application/vnd.oci.image.manifest.v1+json"
            manifest = {"schemaVersion": 2, "mediaType": kind, "config": described[0], "layers": described[1:]}
            self._ask("PUT", f"/v2/library/{name}/manifests/{tag}", json.dumps(manifest).encode(), kind)

    def _ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> Any:
        """The headers of an answer with 2xx."""
        url = path if path.startswith("http") else self.url + path
        request = urllib.request.Request(url, body, {"Content-Type": kind}, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            return response.headers


@contextlib.contextmanager
def a_registry() -> Iterator[Registry]:
    """A registry with its images, and nothing of it afterwards."""
    with tempfile.TemporaryDirectory(prefix=f"shoal-test-{os.getpid()}-", dir="/var/tmp") as directory:
        settings, log = Path(directory, "config.yml"), Path(directory, "registry.log")
        settings.write_text(
            "version: 0.1\nlog: {level: info, formatter: text}\nstorage:\n"
            f"  filesystem: {{rootdirectory: {directory}/storage}}\nhttp: {{addr: '127.0.0.1:0'}}\n"
        )
        with log.open("w") as said:
            process = subprocess.Popen(
                ["docker-registry", "serve", str(settings)],
                env={**os.environ, "OTEL_TRACES_EXPORTER": "none"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        try:
            address: list[str] = []

            def listens() -> bool:
                assert process.poll() is None, log.read_text()
                _, found, rest = log.read_text().partition("listening on ")
                if found and "\n" in rest:
                    address.append(rest.split()[0].strip('",'))
                return bool(address)

            wait_until(listens)
            registry = Registry(f"http://{address[0]}")
            registry.fill()
            yield registry
        finally:
            process.kill()
            process.wait(60)
