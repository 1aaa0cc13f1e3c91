"""LangChain's integration, as it is published: the standard tests of sandboxes, its provider, and the examples of the documents."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import settings
from deepagents import create_deep_agent
from langchain_runloop import RunloopProvider, RunloopSandbox
from langchain_tests.integration_tests import SandboxIntegrationTests
from raw import Daemon
from runloop_api_client import NotFoundError, RunloopSDK
from scripted import HELLO, OF_ANOTHER_MIND, Scripted

#: Where this integration gives no codes of its own: a failed download raises the client's exception, and paths are not checked.
NO_CODES = {
    "test_download_error_file_not_found",
    "test_download_error_is_directory",
    "test_download_error_permission_denied",
    "test_download_error_invalid_path_relative",
    "test_upload_relative_path_returns_invalid_path",
}


class TestStandard(SandboxIntegrationTests):
    """What every backend of Deep Agents must do: execute, upload, download, read, write, edit, ls, grep, glob; also async."""

    @pytest.fixture(autouse=True)
    def leave_out(self, request: pytest.FixtureRequest) -> None:
        if request.node.originalname in OF_ANOTHER_MIND:
            pytest.skip("this release of Deep Agents does it otherwise")
        if request.node.originalname in NO_CODES:
            pytest.skip("this integration raises the client's exceptions")

    @pytest.fixture(scope="class")
    def sandbox(self, daemon: Daemon) -> Iterator[Any]:
        with settings(daemon):
            box = RunloopSDK().devbox.create()
            yield RunloopSandbox(devbox=box)
            box.shutdown()


def test_the_example_of_the_documents(switched: Daemon) -> None:
    client = RunloopSDK(bearer_token=os.environ["RUNLOOP_API_KEY"])
    devbox = client.devbox.create()
    backend = RunloopSandbox(devbox=devbox)
    agent = create_deep_agent(model=Scripted(calls=HELLO), backend=backend)
    try:
        result = agent.invoke({"messages": [{"role": "user", "content": "Create a hello world script and run it"}]})
        assert "Hello, World!" in str(result["messages"][-1].content)
        backend.upload_files([("/src/index.py", b"print('Hello')\n")])
        assert backend.download_files(["/src/index.py"])[0].content == b"print('Hello')\n"
    finally:
        devbox.shutdown()


def test_a_missing_file_raises_the_clients_exception(box: Any) -> None:
    with pytest.raises(NotFoundError):
        RunloopSandbox(devbox=box).download_files(["/none"])


def test_a_command_that_takes_longer_than_the_client_waits(box: Any) -> None:
    began = time.monotonic()
    answer = RunloopSandbox(devbox=box).execute("sleep 125; echo done")
    assert (answer.exit_code, answer.output) == (0, "done\n") and time.monotonic() - began > 120


def test_the_provider(switched: Daemon) -> None:
    provider = RunloopProvider(api_key=os.environ["RUNLOOP_API_KEY"])
    made = provider.get_or_create()
    assert provider.get_or_create(sandbox_id=made.id).execute("echo again").output == "again\n"
    with pytest.raises(KeyError):
        provider.get_or_create(sandbox_id="dbx_missing")
    for _ in range(2):
        from_blueprint = provider.get_or_create(snapshot="for-agents")
        assert from_blueprint.execute("echo here").output == "here\n"
        provider.delete(sandbox_id=from_blueprint.id)
    provider.delete(sandbox_id=made.id)
    with pytest.raises(NotFoundError):
        provider.delete(sandbox_id="dbx_missing")
