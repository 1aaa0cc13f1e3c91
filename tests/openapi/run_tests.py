"""Judges the description of the native API by tools that are not ours: is it valid, and does the daemon do what it says?

    python3 tests/openapi/run_tests.py --shoal target/debug/shoal

How environments are made and kept is said in tests/clients/environments.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))

from environments import Environment, main  # noqa: E402

#: A network namespace of its own: whatever names of registries the tool makes up, nobody is asked for them.
ALONE = ("unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$0" "$@"')

ENVIRONMENTS = (
    Environment(
        "openapi",
        ("openapi-spec-validator==0.9.0", "schemathesis==4.32.5"),
        ((*ALONE, "{python}", "conformance.py", "{scratch}"),),
    ),
)

if __name__ == "__main__":
    sys.exit(main(__doc__, ENVIRONMENTS, HERE))
