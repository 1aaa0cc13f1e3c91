"""LangChain's standard tests for sandboxes, all of them.

Those that the installed version of deepagents itself contradicts are strict expected failures: the suite still asserts
what deepagents 0.6 did.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from harness import Daemon
from langchain_tests.integration_tests import SandboxIntegrationTests

from shoal.deepagents import ShoalSandbox

DEEPAGENTS = tuple(int(part) for part in version("deepagents").split(".")[:3])

CONTRADICTED: dict[str, str] = {}
if DEEPAGENTS >= (0, 7, 0):
    CONTRADICTED["test_write_existing_file_fails"] = "deepagents 0.7 overwrites a file that exists"
if DEEPAGENTS >= (0, 7, 7):
    ABSOLUTE = "deepagents 0.7.7 gives absolute paths of regular files where 0.6 gave relative ones and directories"
    for name in (
        "test_glob",
        "test_glob_basic_pattern",
        "test_glob_with_directories",
        "test_glob_hidden_files_explicitly",
        "test_glob_with_character_class",
        "test_glob_with_question_mark",
    ):
        CONTRADICTED[name] = ABSOLUTE


def _expected_to_fail(name: str, reason: str) -> Any:
    original = getattr(SandboxIntegrationTests, name)

    def contradicted(self: Any, sandbox_backend: Any, sandbox_test_root: str) -> None:
        original(self, sandbox_backend, sandbox_test_root)

    contradicted.__name__ = name
    return pytest.mark.xfail(reason=reason, strict=True)(contradicted)


class TestStandard(SandboxIntegrationTests):
    """The suite on a sandbox of Shoal."""

    @pytest.fixture(scope="class")
    @classmethod
    def sandbox(cls, daemon: Daemon) -> Iterator[ShoalSandbox]:
        """The one that all of them use."""
        with daemon.client() as client, client.sandbox() as sandbox:
            yield ShoalSandbox(sandbox)


for _name, _reason in CONTRADICTED.items():
    setattr(TestStandard, _name, _expected_to_fail(_name, _reason))
