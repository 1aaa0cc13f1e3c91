"""LangChain's integration, as it is published: the standard tests of sandboxes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import settings
from daytona import Daytona
from langchain_daytona import DaytonaSandbox
from langchain_tests.integration_tests import SandboxIntegrationTests
from raw import Daemon
from scripted import OF_ANOTHER_MIND


class TestStandard(SandboxIntegrationTests):
    """What every backend of Deep Agents must do: execute, upload, download, read, write, edit, ls, grep, glob; also async."""

    @pytest.fixture(autouse=True)
    def leave_out(self, request: pytest.FixtureRequest) -> None:
        if request.node.originalname in OF_ANOTHER_MIND:
            pytest.skip("this release of Deep Agents does it otherwise")

    @pytest.fixture(scope="class")
    def sandbox(self, daemon: Daemon) -> Iterator[Any]:
        with settings(daemon):
            client = Daytona()
            made = client.create()
            yield DaytonaSandbox(sandbox=made)
            client.delete(made)


def test_a_command_that_takes_too_long(sb: Any) -> None:
    backend = DaytonaSandbox(sandbox=sb)
    began = time.monotonic()
    answer = backend.execute("echo before; sleep 4444", timeout=6)
    assert time.monotonic() - began < 20
    assert answer.exit_code == 124 and "before" in answer.output
    assert backend.execute("pgrep -f 'sleep 444[4]' || echo none").output.strip() == "none"
