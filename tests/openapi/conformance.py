"""Validates what a daemon serves at ``/v1/openapi.json``, then sends it requests that schemathesis makes up from it.

python conformance.py SCRATCH

No request may get a 5xx, and no status may come that the description does not list. The exceptions are requests to ports
of a sandbox, where the daemon is a gateway: 502 and 504 say that nothing listens there. The number of requests is bounded
and the seed is fixed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))

import daemon  # noqa: E402
from openapi_spec_validator import OpenAPIV31SpecValidator  # noqa: E402

#: Cases that are made up at random for each operation, beside those that cover its parameters one by one.
EXAMPLES = 20
SEED = 20
#: A bound for all of them.
SECONDS_MAX = 300
#: What never ends by itself: streams, and WebSockets, which the tool does not speak.
ENDLESS = r"/events$|/stream$|/files/watch$|/log$"
#: What asks other machines takes its time to fail: there is no network here.
AWAY = r"/images/pull$"
#: Things that exist, so that requests get further than "not found". Deletes get others.
CONFIG = """\
[parameters]
"path.sandbox" = "{sandbox}"
"path.command" = "{command}"
"path.template" = "default"
"path.image" = "host"

[[operations]]
include-name = "DELETE /v1/sandboxes/{{sandbox}}"
parameters = {{ "path.sandbox" = "00000000-0000-4000-8000-000000000000" }}

[[operations]]
include-name = "GET /v1/sandboxes/{{sandbox}}/ports/{{port}}/{{path}}"
checks = {{ not_a_server_error = {{ expected-statuses = ["2xx", "3xx", "4xx", "502"] }} }}

[[operations]]
include-name = "GET /v1/sandboxes/{{sandbox}}/ports"
checks = {{ not_a_server_error = {{ expected-statuses = ["2xx", "3xx", "4xx", "504"] }} }}
"""
#: A tar stream is sent as the bytes that it is.
HOOKS = """\
import schemathesis

schemathesis.serializer.alias("application/x-tar", "application/octet-stream")
"""


class Daemon(daemon.Daemon):
    """Without sandboxes that are kept ready: what is made here is what was asked for."""

    arguments = ("--spares", "0")

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        """What it answers."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"X-Api-Key": self.key, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def remove(self) -> None:
        """Deletes all that it made, ends it, and removes its directory."""
        for pool in json.loads(self.ask("GET", "/v1/pools"))["pools"]:
            self.ask("DELETE", f"/v1/pools/{quote(pool['name'], safe='')}")
        while sandboxes := json.loads(self.ask("GET", "/v1/sandboxes?limit=500"))["sandboxes"]:
            for sandbox in sandboxes:
                try:
                    self.ask("DELETE", f"/v1/sandboxes/{sandbox['id']}")
                except urllib.error.HTTPError as error:
                    # Some were being deleted.
                    assert error.code == 404, error.read()
        self.stop()
        shutil.rmtree(self.directory)


def main(scratch: str) -> int:
    """Both. The exit code."""
    with daemon.a_daemon(Daemon) as tested:
        path = Path(scratch, "openapi.json")
        path.write_bytes(tested.ask("GET", "/v1/openapi.json"))
        errors = list(OpenAPIV31SpecValidator(json.loads(path.read_bytes())).iter_errors())
        for error in errors:
            print(f"the description is not valid: {error.message}")
        if errors:
            return 1
        sandbox = json.loads(tested.ask("POST", "/v1/sandboxes", {}))["id"]
        run = {"argv": ["sleep", "1000"], "wait": False}
        command = json.loads(tested.ask("POST", f"/v1/sandboxes/{sandbox}/commands", run))["id"]
        Path(scratch, "schemathesis.toml").write_text(CONFIG.format(sandbox=sandbox, command=command))
        hooks = Path(scratch, "hooks.py")
        hooks.write_text(HOOKS)
        began = time.monotonic()
        tool = Path(sys.executable).with_name("schemathesis")
        told = subprocess.run(
            [
                *(str(tool), "run", str(path), "--url", tested.url),
                # Both, since the tool makes up whichever is missing, and two keys that differ are none.
                *(
                    "--header",
                    f"X-Api-Key: {tested.key}",
                    "--header",
                    f"Authorization: Bearer {tested.key}",
                ),
                *(
                    "--checks",
                    "not_a_server_error,status_code_conformance",
                    "--suppress-health-check",
                    "all",
                ),
                *(
                    "--exclude-path-regex",
                    f"{ENDLESS}|{AWAY}",
                    "--phases",
                    "coverage,fuzzing",
                ),
                *(
                    "--max-examples",
                    str(EXAMPLES),
                    "--seed",
                    str(SEED),
                    "--workers",
                    "2",
                ),
                *(
                    "--generation-database",
                    "none",
                    "--request-timeout",
                    "60",
                    "--no-color",
                ),
            ],
            cwd=scratch,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": scratch},
            timeout=SECONDS_MAX,
        )
        print(f"schemathesis ended with {told.returncode} after {time.monotonic() - began:.0f} s")
        return told.returncode


daemon.leave_on_sigterm()
sys.exit(main(*sys.argv[1:]))
