"""Run where nothing but the wheel is installed: it must be a complete installation, with no set-up."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from shoal import SandboxClient
from shoal._local import find_binary

assert "SHOAL_BINARY" not in os.environ
assert Path(find_binary(None)).parent == Path(sysconfig.get_path("scripts"))
with SandboxClient.local() as client, client.sandbox() as sb:
    result = sb.run("python3 -c 'print(2 + 2)'")
    assert result.stdout == "4\n", result
    print("the wheel is a complete installation:", client.version())
