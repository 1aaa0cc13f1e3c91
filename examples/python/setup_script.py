"""A sandbox that a script prepares before it is used; and a template that has it done already, for all that come after.

    python3 examples/python/setup_script.py

Uses the daemon of SHOAL_URL or of this machine, or starts a private one.
"""

from __future__ import annotations

from shoal import Sandbox, SandboxClient

SETUP = """
mkdir -p /opt/tools
echo 'echo "hello, $1"' > /opt/tools/greet
chmod +x /opt/tools/greet
"""


def prepare(sandbox: Sandbox, script: str) -> None:
    """Runs a script in a sandbox. One that fails says why, and nobody uses the sandbox."""
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
