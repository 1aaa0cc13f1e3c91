"""Prepares a sandbox with a script, and builds a template that contains the result, for all later sandboxes.

    python3 examples/python/setup_script.py

Uses the daemon that SHOAL_URL names or the one on this machine, or starts a private one.
"""

from __future__ import annotations

from shoal import Sandbox, SandboxClient

SETUP = """
mkdir -p /opt/tools
echo 'echo "hello, $1"' > /opt/tools/greet
chmod +x /opt/tools/greet
"""


def prepare(sandbox: Sandbox, script: str) -> None:
    """Runs a script in a sandbox, and raises an error if it fails."""
    done = sandbox.run(f"set -e\n{script}", timeout=300)
    if not done.success:
        raise SystemExit(f"the setup script failed with {done.exit_code}: {done.stderr}")


with SandboxClient.here() as client:
    with client.sandbox() as sandbox:
        prepare(sandbox, SETUP)
        print(sandbox.run("/opt/tools/greet once").stdout, end="")
    client.build_template("example-prepared", image="host", script=SETUP)
    with client.sandbox(template_name="example-prepared") as sandbox:
        print(sandbox.run("/opt/tools/greet 'every time'").stdout, end="")
    client.delete_template("example-prepared")
