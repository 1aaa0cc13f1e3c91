"""Puts the program ``shoal`` into the wheel if ``SHOAL_WHEEL_BINARY`` names it.

    SHOAL_WHEEL_BINARY=$PWD/target/release/shoal pip wheel --no-deps -w dist sdk/python

The path must be absolute, because pip runs this hook in another directory. The program becomes a script of the wheel, so it
is on ``PATH`` wherever the package is installed. The wheel's tag says which machines it fits: Linux on the program's
processor, with a C library at least as new as the program needs. Without the variable the wheel is pure Python, for any
machine, to use with a daemon elsewhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "SHOAL_WHEEL_BINARY"
#: ``e_machine`` in the header of an ELF file.
MACHINES = {62: "x86_64", 183: "aarch64"}
#: The oldest C library that wheels have a common name for; also said of programs that need none.
GLIBC_MINOR_MIN = 17


class BinaryHook(BuildHookInterface[Any]):
    """Adds the program and the tag of its machine."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        named = os.environ.get(VARIABLE)
        if not named or version == "editable":
            return
        program = Path(named).resolve()
        if not program.is_file():
            raise FileNotFoundError(f"{VARIABLE} must be the absolute path of a file, got `{named}`")
        build_data["shared_scripts"] = {str(program): "shoal"}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of(program.read_bytes())}"


def platform_of(program: bytes) -> str:
    """The wheel tag for machines that can run a program."""
    if program[:5] != b"\x7fELF\x02":
        raise ValueError(f"{VARIABLE} must name a 64-bit program for Linux")
    machine = MACHINES.get(int.from_bytes(program[18:20], "little"))
    if machine is None:
        raise ValueError(f"{VARIABLE} names a program for an unknown processor")
    # The versions of the C library's functions that a program asks for are in it as text.
    minors = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)(?=[\0.])", program)]
    return f"manylinux_2_{max([GLIBC_MINOR_MIN, *minors])}_{machine}"
