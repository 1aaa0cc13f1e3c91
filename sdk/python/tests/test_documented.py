"""The surface that the LangSmith sandbox SDK documents: every row of its reference tables is here, and every way of use.

The tables are held to parameter names, their order and their defaults; the rest of this file uses what they name, as that
document's own examples do, sync and async.
"""

from __future__ import annotations

import functools
import inspect
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Daemon

import shoal
from shoal import (
    AsyncSandboxClient,
    CommandHandle,
    CommandTimeoutError,
    ExecutionResult,
    OutputChunk,
    QuotaExceededError,
    ResourceCreationError,
    ResourceNotFoundError,
    ResourceStatus,
    ResourceTimeoutError,
    Sandbox,
    SandboxClient,
    SandboxClientError,
    SandboxConnectionError,
    SandboxNotReadyError,
    SandboxOperationError,
)

REQUIRED = inspect.Parameter.empty
#: Each method with the parameters that the document names: positional ones, then those that are given by name.
METHODS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "SandboxClient": {
        "sandbox": ({"template_name": None}, {}),
        "create_sandbox": ({"template_name": None}, {"wait_for_ready": True}),
        "get_sandbox": ({"name": REQUIRED}, {}),
        "get_sandbox_status": ({"name": REQUIRED}, {}),
        "wait_for_sandbox": ({"name": REQUIRED}, {"timeout": 120, "poll_interval": 1.0}),
        "list_sandboxes": ({}, {}),
        "update_sandbox": ({"name": REQUIRED}, {"new_name": None}),
        "delete_sandbox": ({"name": REQUIRED}, {}),
        "create_template": (
            {"name": REQUIRED, "image": "host"},
            {"cpu": "500m", "memory": "512Mi", "volume_mounts": None},
        ),
        "list_templates": ({}, {}),
        "get_template": ({"name": REQUIRED}, {}),
        "update_template": ({"name": REQUIRED}, {"new_name": None}),
        "delete_template": ({"name": REQUIRED}, {}),
        "create_volume": ({"name": REQUIRED, "size": REQUIRED}, {}),
        "list_volumes": ({}, {}),
        "update_volume": ({"name": REQUIRED}, {"new_name": None, "size": None}),
        "delete_volume": ({"name": REQUIRED}, {}),
        "create_pool": ({"name": REQUIRED, "template_name": REQUIRED, "replicas": REQUIRED}, {}),
        "list_pools": ({}, {}),
        "update_pool": ({"name": REQUIRED}, {"replicas": None, "new_name": None}),
        "delete_pool": ({"name": REQUIRED}, {}),
    },
    "Sandbox": {
        "run": ({"command": REQUIRED}, {"timeout": 60, "on_stdout": None, "on_stderr": None, "wait": True}),
        "reconnect": ({"command_id": REQUIRED}, {"stdout_offset": 0, "stderr_offset": 0}),
        "write": ({"path": REQUIRED, "content": REQUIRED}, {}),
        "read": ({"path": REQUIRED}, {}),
    },
    "CommandHandle": {
        "kill": ({}, {}),
        "send_input": ({"data": REQUIRED}, {}),
        "reconnect": ({}, {}),
    },
}
PROPERTIES = {
    "Sandbox": ["name", "template_name", "status", "status_message", "dataplane_url", "id"],
    "CommandHandle": ["command_id", "pid", "result"],
    "ExecutionResult": ["stdout", "stderr", "exit_code", "success"],
    "ResourceStatus": ["status", "status_message"],
    "OutputChunk": ["stream", "data", "offset"],
}


@pytest.mark.parametrize("prefix", ["", "Async"])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, rows in METHODS.items() for name in rows])
def test_a_documented_method_takes_what_the_document_says(prefix: str, kind: str, name: str) -> None:
    method = getattr(getattr(shoal, prefix + kind), name)
    positional, by_name = METHODS[kind][name]
    parameters = list(inspect.signature(method).parameters.values())[1:]
    first = [(entry.name, entry.default) for entry in parameters if entry.kind is entry.POSITIONAL_OR_KEYWORD]
    assert first == list(positional.items())
    others = {entry.name: entry.default for entry in parameters if entry.kind is entry.KEYWORD_ONLY}
    assert by_name.items() <= others.items()
    assert REQUIRED not in others.values(), "what the document does not name can be left out"
    assert inspect.iscoroutinefunction(method) == bool(prefix)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, rows in PROPERTIES.items() for name in rows])
def test_a_documented_property_is_there(kind: str, name: str) -> None:
    for prefix in ("", "Async") if hasattr(shoal, f"Async{kind}") else ("",):
        known = getattr(shoal, prefix + kind)
        kinds = (property, functools.cached_property)
        assert isinstance(getattr(known, name, None), kinds) or name in known.__dataclass_fields__


def test_the_documented_exceptions_are_kin() -> None:
    for kind in (ResourceCreationError, ResourceNotFoundError, ResourceTimeoutError, QuotaExceededError):
        assert issubclass(kind, SandboxClientError)
        assert kind("x", resource_type="volume").resource_type == "volume"
    for other in (SandboxNotReadyError, SandboxConnectionError, SandboxOperationError):
        assert issubclass(other, SandboxClientError)
    assert issubclass(CommandTimeoutError, SandboxOperationError)
    assert ResourceCreationError("x", error_type="ImagePull").error_type == "ImagePull"


@pytest.fixture(scope="module")
def template(daemon: Daemon) -> Iterator[str]:
    """What the document's examples call ``my-sandbox``, made as they make it."""
    with SandboxClient(api_endpoint=daemon.url, api_key=daemon.key, timeout=30.0) as client:
        client.set_image_alias("python:3.12-slim", "host")
        client.create_template(name="my-sandbox", image="python:3.12-slim")
        yield "my-sandbox"
        client.delete_template("my-sandbox")
        client.delete_image_alias("python:3.12-slim")


def test_commands_and_their_results(client: SandboxClient, template: str) -> None:
    with client.sandbox(template_name=template) as sb:
        result = sb.run("echo 'Hello, World!'")
        assert isinstance(result, ExecutionResult)
        assert (result.stdout, result.stderr, result.exit_code, result.success) == ("Hello, World!\n", "", 0, True)
        result = sb.run("exit 1")
        assert (result.success, result.exit_code) == (False, 1)
        said: list[str] = []
        result = sb.run("echo out; echo err >&2", timeout=600, on_stdout=said.append, on_stderr=said.append)
        assert result.success and sorted(said) == ["err\n", "out\n"]
        name = sb.name
    with pytest.raises(ResourceNotFoundError) as gone:
        client.get_sandbox(name)
    assert gone.value.resource_type == "sandbox"


def test_handles(client: SandboxClient, template: str) -> None:
    with client.sandbox(template_name=template) as sb:
        handle = sb.run("echo out; echo err >&2", timeout=600, wait=False)
        assert isinstance(handle, CommandHandle) and handle.command_id and isinstance(handle.pid, int)
        chunks = sorted(handle, key=lambda chunk: chunk.stream)
        assert all(isinstance(chunk, OutputChunk) for chunk in chunks)
        assert [(chunk.stream, chunk.data, chunk.offset) for chunk in chunks] == [
            ("stderr", "err\n", 0),
            ("stdout", "out\n", 0),
        ]
        assert handle.result.exit_code == 0
        handle = sb.run("echo up; sleep 3600", timeout=7200, wait=False)
        for chunk in handle:
            assert chunk.data == "up\n"
            threading.Thread(target=handle.kill).start()
        assert handle.result.exit_code != 0
        handle = sb.run('python3 -c \'name = input("Name: "); print(f"Hello {name}")\'', timeout=30, wait=False)
        for chunk in handle:
            if "Name:" in chunk.data:
                handle.send_input("World\n")
        assert handle.result.stdout == "Name: Hello World\n"
        again = sb.reconnect(handle.command_id)
        assert "".join(chunk.data for chunk in again) == "Name: Hello World\n"
        again = sb.reconnect(handle.command_id, stdout_offset=6, stderr_offset=0)
        assert again.result.stdout == "Hello World\n"
        assert list(again.reconnect()) == []
        handle = sb.run("echo Ready; sleep 3600", timeout=0, wait=False)
        for chunk in handle:
            if "Ready" in chunk.data:
                break
        handle.kill()
        assert not handle.result.success
        assert sb.run("echo done", timeout=0, on_stdout=lambda text: None).success


def test_files(client: SandboxClient, template: str) -> None:
    with client.sandbox(template_name=template) as sb:
        sb.write("/app/script.py", "print('Hello from file!')")
        assert sb.run("python3 /app/script.py").stdout == "Hello from file!\n"
        assert sb.read("/app/script.py").decode() == "print('Hello from file!')"
        sb.write("/app/data.bin", b"\x00\x01\x02\x03")
        assert sb.read("/app/data.bin") == b"\x00\x01\x02\x03"


def test_a_sandbox_that_is_kept_is_found_renamed_and_deleted(client: SandboxClient, template: str) -> None:
    sb = client.create_sandbox(template_name=template)
    assert client.get_sandbox(name=sb.name).run("echo 'Still running!'").success
    assert (sb.template_name, sb.status, sb.status_message) == (template, "ready", None)
    assert sb.id and sb.dataplane_url.startswith(client.api_endpoint)
    assert sb.name in [entry.name for entry in client.list_sandboxes()]
    renamed = client.update_sandbox(sb.name, new_name="another-name")
    assert (renamed.id, renamed.name) == (sb.id, "another-name")
    client.delete_sandbox("another-name")
    with pytest.raises(ResourceNotFoundError):
        client.delete_sandbox("another-name")


def test_a_sandbox_that_is_not_waited_for(client: SandboxClient, template: str) -> None:
    sb = client.create_sandbox(template_name=template, wait_for_ready=False)
    assert isinstance(sb, Sandbox) and sb.status in ("provisioning", "ready")
    sb = client.wait_for_sandbox(sb.name, timeout=120, poll_interval=1.0)
    assert sb.status == "ready"
    status = client.get_sandbox_status(sb.name)
    assert status == ResourceStatus("ready", None)
    assert sb.run("echo hello").success
    client.delete_sandbox(sb.name)


def test_one_that_is_not_ready_says_so(client: SandboxClient) -> None:
    # Its image never comes, so it never is.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        image = f"localhost:{silent.getsockname()[1]}/team/app:1"
        sb = client.create_sandbox(image=image, wait_for_ready=False)
        assert (sb.status, client.get_sandbox_status(sb.name).status) == ("provisioning", "provisioning")
        for operation in (lambda: sb.run("true"), lambda: sb.read("/x"), lambda: sb.write("/x", "")):
            with pytest.raises(SandboxNotReadyError):
                operation()
        with pytest.raises(ResourceTimeoutError) as late:
            client.wait_for_sandbox(sb.name, timeout=0.1, poll_interval=0.02)
        assert (late.value.resource_type, late.value.last_status) == ("sandbox", "provisioning")
        client.delete_sandbox(sb.name)


def test_one_that_could_not_be_made_says_why(client: SandboxClient) -> None:
    sb = client.create_sandbox(image="localhost:1/team/app:1", wait_for_ready=False)
    with pytest.raises(ResourceCreationError) as caught:
        client.wait_for_sandbox(sb.name)
    assert caught.value.resource_type == "sandbox" and "localhost:1" in str(caught.value)
    failed = client.get_sandbox(sb.name)
    assert failed.status == "failed" and "localhost:1" in str(failed.status_message)
    assert client.get_sandbox_status(sb.name) == ResourceStatus("failed", failed.status_message)
    client.delete_sandbox(sb.name)


async def test_the_same_for_asyncio(async_client: AsyncSandboxClient, template: str) -> None:
    client = async_client
    async with await client.sandbox(template_name=template) as sb:
        assert (await sb.run("python3 -c 'print(1 + 1)'")).stdout == "2\n"
        await sb.write("/app/test.txt", "async content")
        assert (await sb.read("/app/test.txt")).decode() == "async content"
        said: list[str] = []
        await sb.run("echo out; echo err >&2", on_stdout=said.append, on_stderr=said.append)
        assert sorted(said) == ["err\n", "out\n"]
        handle = await sb.run("read line; echo $line", timeout=600, wait=False)
        assert handle.command_id and handle.pid
        await handle.send_input("in\n")
        assert [chunk.data async for chunk in handle] == ["in\n"]
        assert (await handle.result).exit_code == 0
        assert (await (await sb.reconnect(handle.command_id, stdout_offset=1)).result).stdout == "n\n"
        assert (await (await handle.reconnect()).result).stdout == ""
        handle = await sb.run("sleep 3600", timeout=0, wait=False)
        await handle.kill()
        assert not (await handle.result).success
        with pytest.raises(CommandTimeoutError):
            await sb.run("sleep 999", timeout=0.2)
    kept = await client.create_sandbox(template_name=template, wait_for_ready=False)
    kept = await client.wait_for_sandbox(kept.name, timeout=120, poll_interval=1.0)
    assert (await client.get_sandbox_status(kept.name)).status == kept.status == "ready"
    assert (await client.update_sandbox(kept.name, new_name="async-kept")).name == "async-kept"
    assert "async-kept" in [entry.name for entry in await client.list_sandboxes()]
    assert (await client.get_sandbox("async-kept")).id == kept.id
    await client.delete_sandbox("async-kept")
    with pytest.raises(ResourceNotFoundError):
        await client.get_sandbox("async-kept")
