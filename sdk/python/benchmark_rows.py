"""Measures what the SDK adds to the HTTP API, and what Deep Agents gains from native calls, with what is installed here.

``benchmark.py`` runs this in environments of its own, and writes the page. Every two that are compared are measured in turns,
in the same minutes, and the medians are reported. The raw requests are sent by httpx over one connection that stays open, so the
difference is the SDK's own. ``SHOAL_BINARY`` names the program to measure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from deepagents.backends.sandbox import BaseSandbox

from shoal import AsyncSandboxClient, Sandbox, SandboxClient
from shoal.deepagents import ShoalSandbox

HERE = Path(__file__).resolve().parent
#: How often each thing is done. The median of so many is steady to a few per cent on a quiet machine.
ROUNDS = 200
#: Helpers start Python in the sandbox, so fewer do.
HELPER_ROUNDS = 40
WARM_UP_ROUNDS = 10

Work = Callable[[], object]


def main() -> None:
    """Measures the parts that are named, and writes their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("sdk", "helpers", "suite"), help="what to measure")
    parser.add_argument("--to", required=True, type=Path, help="the file that the rows are written to")
    arguments = parser.parse_args()
    rows: list[str] = []
    with SandboxClient.local() as client, client.sandbox() as sandbox:
        if "sdk" in arguments.parts:
            rows += sdk_rows(client, sandbox)
        if "helpers" in arguments.parts:
            rows += helper_rows(sandbox)
    if "suite" in arguments.parts:
        rows.append(suite_row())
    versions = {"Python": platform.python_version(), **{name: version(name) for name in ("httpx", "deepagents")}}
    arguments.to.write_text(json.dumps({"versions": versions, "rows": rows}))


def sdk_rows(client: SandboxClient, sandbox: Sandbox) -> list[str]:
    """The SDK beside the same requests without it."""
    endpoint = client._transport.endpoint
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    base = f"{endpoint.url}/v1/sandboxes/{sandbox.id}"
    content = b"x" * 1024
    with httpx.Client(headers=headers, trust_env=False) as raw:

        def sent(method: str, url: str, **more: Any) -> None:
            raw.request(method, url, **more).raise_for_status()

        def raw_life() -> None:
            made = raw.post(f"{endpoint.url}/v1/sandboxes", json={}).raise_for_status().json()
            sent("POST", f"{endpoint.url}/v1/sandboxes/{made['id']}/commands", json={"argv": ["true"]})
            sent("DELETE", f"{endpoint.url}/v1/sandboxes/{made['id']}")

        def life() -> None:
            with client.sandbox() as own:
                own.run(["true"])

        command, files = {"argv": ["true"]}, f"{base}/files?path=/workspace/file"
        pairs: list[tuple[str, Work, Work]] = [
            ("`run` of `true`", lambda: sandbox.run(["true"]), lambda: sent("POST", f"{base}/commands", json=command)),
            ("create, `run`, delete", life, raw_life),
            (
                "write of 1 KiB",
                lambda: sandbox.write("/workspace/file", content),
                lambda: sent("PUT", files, content=content),
            ),
            ("read of 1 KiB", lambda: sandbox.read("/workspace/file"), lambda: sent("GET", files)),
        ]
        rows = [row(what, "the request alone", *in_turns(ours, bare, ROUNDS)) for what, ours, bare in pairs]
        rows.append(asyncio.run(async_row(endpoint.url, endpoint.key, sandbox.id, command)))
    return rows


async def async_row(url: str, key: str, sandbox_id: str, command: dict[str, Any]) -> str:
    """The same for asyncio."""
    headers = {"Authorization": f"Bearer {key}"}
    async with AsyncSandboxClient(url, key) as client, httpx.AsyncClient(headers=headers, trust_env=False) as raw:
        sandbox = await client.get_sandbox(sandbox_id)
        ours: list[float] = []
        bare: list[float] = []
        for number in range(WARM_UP_ROUNDS + ROUNDS):
            began = time.perf_counter()
            await sandbox.run(["true"])
            middle = time.perf_counter()
            (await raw.post(f"{url}/v1/sandboxes/{sandbox_id}/commands", json=command)).raise_for_status()
            if number >= WARM_UP_ROUNDS:
                ours.append(middle - began)
                bare.append(time.perf_counter() - middle)
    return row("`run` of `true`, asyncio", "the request alone", statistics.median(ours), statistics.median(bare))


def helper_rows(sandbox: Sandbox) -> list[str]:
    """Each file tool of an agent beside the helper that it replaces."""
    backend = ShoalSandbox(sandbox)
    backend.execute(
        "mkdir -p tree; cd tree; for i in $(seq 100); do mkdir -p d$((i % 10)); seq 100 > d$((i % 10))/$i.py; done; "
        "echo a needle >> d3/33.py"
    )
    text = "".join(f"line {number}\n" for number in range(1000))
    backend.upload_files([("/workspace/a.py", text.encode())])
    words = [("line 500\n", "line 5oo\n"), ("line 5oo\n", "line 500\n")]
    turn = {"ours": 0, "theirs": 0}

    def edit(who: str, way: Callable[..., Any]) -> None:
        old, new = words[turn[who] % 2]
        turn[who] += 1
        assert way(f"/workspace/{who}.py", old, new).error is None

    backend.upload_files([(f"/workspace/{who}.py", text.encode()) for who in turn])
    pairs: list[tuple[str, Work, Work]] = [
        ("`ls`", lambda: backend.ls("/workspace"), lambda: BaseSandbox.ls(backend, "/workspace")),
        (
            "`read`, 1000 lines",
            lambda: backend.read("/workspace/a.py"),
            lambda: BaseSandbox.read(backend, "/workspace/a.py"),
        ),
        (
            "`write`",
            lambda: backend.write("/workspace/new.py", text),
            lambda: BaseSandbox.write(backend, "/workspace/new.py", text),
        ),
        (
            "`edit`",
            lambda: edit("ours", backend.edit),
            lambda: edit("theirs", lambda *wish: BaseSandbox.edit(backend, *wish)),
        ),
        (
            "`glob`, 100 files",
            lambda: backend.glob("*.py", "/workspace/tree"),
            lambda: BaseSandbox.glob(backend, "*.py", "/workspace/tree"),
        ),
        (
            "`grep`, 100 files",
            lambda: backend.grep("needle", "/workspace/tree"),
            lambda: BaseSandbox.grep(backend, "needle", "/workspace/tree"),
        ),
    ]
    rounds = HELPER_ROUNDS
    return [row(f"Deep Agents: {what}", "the helper", *in_turns(ours, bare, rounds)) for what, ours, bare in pairs]


def suite_row() -> str:
    """How long LangChain's standard tests take, the start of a daemon included."""
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/deepagents/test_standard.py"]
    began = time.perf_counter()
    done = subprocess.run(suite, cwd=HERE, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    # The suite's own fixtures are warned about.
    count = ", ".join(
        part for part in done.stdout.splitlines()[-1].split(" in ")[0].split(", ") if "warning" not in part
    )
    what = f"LangChain's standard sandbox tests on deepagents {version('deepagents')}: {count}"
    return f"| {what} | {seconds:.1f} s |  |  |"


def in_turns(ours: Work, bare: Work, rounds: int) -> tuple[float, float]:
    """The medians of two things that are done in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(WARM_UP_ROUNDS + rounds):
        for work, kept in zip((ours, bare), times, strict=True):
            began = time.perf_counter()
            work()
            if number >= WARM_UP_ROUNDS:
                kept.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def row(what: str, beside: str, ours: float, bare: float) -> str:
    """A line of the table."""
    return f"| {what} | {ours * 1000:.2f} ms | {beside}: {bare * 1000:.2f} ms | {ours / bare:.2f}x |"


if __name__ == "__main__":
    main()
