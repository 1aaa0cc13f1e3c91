"""The documented dialect (0.7.8 to 0.7.16): templates, volumes, pools, and the document's examples in their order."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest
from dialect import KILL_CLOSES, LEGACY, SandboxClient, a_client, legacy, sandbox, settings, variables
from harness import ALIAS, Daemon

pytestmark = legacy

if LEGACY:
    from dialect import AsyncSandboxClient
    from langsmith.sandbox import (
        CommandTimeoutError,
        QuotaExceededError,
        ResourceCreationError,
        ResourceNotFoundError,
        ResourceTimeoutError,
        SandboxClientError,
        SandboxConnectionError,
        SandboxNotReadyError,
        VolumeMountSpec,
    )


def test_the_examples_of_the_document_in_their_order(daemon: Daemon, capsys: Any) -> None:
    follow_the_document(daemon)
    assert "Command timed out" in capsys.readouterr().out


def follow_the_document(daemon: Daemon) -> None:
    """Types all examples in their order, whatever the image is here that they name."""
    with settings(daemon):
        client = SandboxClient()
        quick_start(client)
        configuration(daemon)
        streaming(client)
        files(client)
        templates(client)
        volumes(client)
        pools(client)
        reuse(client)
        creation_without_waiting(client)
        asyncio.run(with_asyncio())
        errors(client)


def quick_start(client: Any) -> None:
    client.create_template(name="python-sandbox", image=ALIAS)
    with client.sandbox(template_name="python-sandbox") as sb:
        result = sb.run("python -c 'print(2 + 2)'")
        assert result.stdout == "4\n"
        assert result.success
    sb = client.create_sandbox(template_name="python-sandbox", name="your-sandbox")
    assert sb.run("python -c 'print(2 + 2)'").stdout == "4\n"
    sb = client.get_sandbox(name="your-sandbox")
    assert sb.run("python -c 'print(2 + 2)'").stdout == "4\n"
    client.delete_sandbox(sb.name)


def configuration(daemon: Daemon) -> None:
    client = SandboxClient(api_endpoint=f"{daemon.url}/v2/sandboxes", api_key=daemon.key, timeout=30.0)
    client.create_template(name="my-sandbox", image=ALIAS)
    with client.sandbox(template_name="my-sandbox") as sb:
        result = sb.run("echo 'Hello, World!'")
        assert (result.stdout, result.stderr, result.exit_code, result.success) == ("Hello, World!\n", "", 0, True)
        result = sb.run("exit 1")
        assert (result.success, result.exit_code) == (False, 1)


#: What is built. The examples assume that something is there.
MAKEFILE = "build:\n\t@for step in 1 2 3; do echo step $$step; done; echo warned >&2\n"
BUILT = "step 1\nstep 2\nstep 3\n"


def streaming(client: Any) -> None:
    with client.sandbox(template_name="my-sandbox") as sb:
        sb.write("Makefile", MAKEFILE)
        out: list[str] = []
        err: list[str] = []
        result = sb.run("make build", timeout=600, on_stdout=out.append, on_stderr=err.append)
        assert result.success and "".join(out) == BUILT and "".join(err) == "warned\n"

        handle = sb.run("make build", timeout=600, wait=False)
        assert handle.command_id
        chunks = {"stdout": "", "stderr": ""}
        for chunk in handle:
            chunks[chunk.stream] += chunk.data
        assert chunks == {"stdout": BUILT, "stderr": "warned\n"}
        assert handle.result.exit_code == 0

        handle = sb.run("sleep 3600", timeout=7200, wait=False)
        killer = threading.Thread(target=handle.kill)
        killer.start()
        try:
            for chunk in handle:
                print(chunk.data, end="")
            assert handle.result.exit_code != 0
        except SandboxConnectionError:
            # Not with those that the document is of.
            assert KILL_CLOSES and sb.reconnect(handle.command_id).result.exit_code != 0
        killer.join()

        command = "python -c 'name = input(\"Name: \"); print(f\"Hello {name}\")'"
        handle = sb.run(command, timeout=30, wait=False)
        text = ""
        for chunk in handle:
            if "Name:" in chunk.data:
                handle.send_input("World\n")
            text += chunk.data
        assert text == "Name: Hello World\n" and handle.result.success

        handle = sb.run("make build", timeout=600, wait=False)
        command_id = handle.command_id
        handle = sb.reconnect(command_id)
        assert "".join(chunk.data for chunk in handle if chunk.stream == "stdout") == BUILT
        assert handle.result.success

        sb.write("server.py", "import time\nprint('Ready', flush=True)\ntime.sleep(3600)\n")
        handle = sb.run("python server.py", timeout=0, wait=False)
        for chunk in handle:
            if "Ready" in chunk.data:
                break
        handle.kill()


def files(client: Any) -> None:
    client.create_template(name="my-python", image=ALIAS)
    with client.sandbox(template_name="my-python") as sb:
        sb.write("/app/script.py", "print('Hello from file!')")
        assert sb.run("python /app/script.py").stdout == "Hello from file!\n"
        assert sb.read("/app/script.py").decode() == "print('Hello from file!')"
        sb.write("/app/data.bin", b"\x00\x01\x02\x03")
        assert sb.read("/app/data.bin") == b"\x00\x01\x02\x03"


def templates(client: Any) -> None:
    template = client.create_template(name="my-python-env", image=ALIAS, cpu="1", memory="1Gi")
    assert (template.name, template.image) == ("my-python-env", ALIAS)
    assert (template.resources.cpu, template.resources.memory) == ("1", "1Gi")
    assert template.id and template.created_at and template.updated_at and template.volume_mounts == []
    with client.sandbox(template_name="my-python-env") as sb:
        assert sb.template_name == "my-python-env"
        assert sb.run("python --version").stdout.startswith("Python 3.")
        with pytest.raises(sandbox.ResourceInUseError) as error:
            client.delete_template("my-python-env")
        assert error.value.resource_type == "template"
    assert "my-python-env" in [template.name for template in client.list_templates()]
    assert client.get_template("my-python-env").id == template.id
    usual = client.get_template("my-sandbox").resources
    assert (usual.cpu, usual.memory) == ("500m", "512Mi")
    assert client.update_template("my-python-env", new_name="python-env-v2").id == template.id
    with pytest.raises(sandbox.ResourceNotFoundError) as missing:
        client.delete_template("my-python-env")
    assert missing.value.resource_type == "template"
    with pytest.raises(sandbox.ResourceNameConflictError):
        client.update_template("python-env-v2", new_name="my-sandbox")
    with pytest.raises(sandbox.SandboxClientError):
        client.create_template(name="my-sandbox", image=ALIAS)
    client.delete_template("python-env-v2")
    with pytest.raises(sandbox.ValidationError) as wrong:
        client.create_template(name="odd", image=ALIAS, cpu="many")
    assert wrong.value.field == "cpu"
    # Whether these images come is another question; a template is made all the same.
    for name, image in [("python", "python:3.12-slim"), ("node", "node:20-slim"), ("ubuntu", "ubuntu:24.04")]:
        assert client.create_template(name=name, image=image).image == image
        client.delete_template(name)


def volumes(client: Any) -> None:
    volume = client.create_volume(name="my-data", size="1Gi")
    assert (volume.name, volume.size, volume.storage_class) == ("my-data", "1Gi", "default")
    template = client.create_template(
        name="stateful-sandbox",
        image=ALIAS,
        volume_mounts=[VolumeMountSpec(volume_name="my-data", mount_path="/data")],
    )
    assert [(mount.volume_name, mount.mount_path) for mount in template.volume_mounts] == [("my-data", "/data")]
    with client.sandbox(template_name="stateful-sandbox") as sb:
        sb.write("/data/state.txt", "persistent data")
        with pytest.raises(sandbox.ResourceInUseError) as error:
            client.delete_volume("my-data")
        assert error.value.resource_type == "volume"
    with client.sandbox(template_name="stateful-sandbox") as sb:
        assert sb.read("/data/state.txt").decode() == "persistent data"
    assert [volume.name for volume in client.list_volumes()] == ["my-data"]
    assert client.get_volume("my-data").id == volume.id
    assert client.update_volume("my-data", size="2Gi").size == "2Gi"
    with pytest.raises(sandbox.ValidationError) as shrunk:
        client.update_volume("my-data", size="1Gi")
    assert shrunk.value.error_type == "VolumeResize"
    other = client.create_volume(name="other-data", size="64Mi")
    with pytest.raises(sandbox.ResourceNameConflictError):
        client.update_volume("other-data", new_name="my-data")
    assert client.update_volume("other-data", new_name="third-data").id == other.id
    client.delete_volume("third-data")
    for act in [client.get_volume, client.delete_volume]:
        with pytest.raises(sandbox.ResourceNotFoundError) as missing:
            act("third-data")
        assert missing.value.resource_type == "volume"
    with pytest.raises(sandbox.SandboxClientError):
        client.create_volume(name="my-data", size="1Gi")


def pools(client: Any) -> None:
    client.create_template(name="fast-python", image=ALIAS)
    pool = client.create_pool(name="python-pool", template_name="fast-python", replicas=2)
    assert (pool.name, pool.template_name, pool.replicas) == ("python-pool", "fast-python", 2)
    assert pool.id and pool.created_at
    with client.sandbox(template_name="fast-python") as sb:
        assert sb.template_name == "fast-python" and sb.status == "ready"
        assert sb.run("python --version").success
    assert client.update_pool("python-pool", replicas=3).replicas == 3
    assert client.get_pool("python-pool").replicas == 3
    assert [pool.name for pool in client.list_pools()] == ["python-pool"]
    with pytest.raises(sandbox.ResourceAlreadyExistsError) as twice:
        client.create_pool(name="python-pool", template_name="fast-python", replicas=1)
    assert twice.value.resource_type == "pool"
    with pytest.raises(sandbox.ResourceNotFoundError) as unknown:
        client.create_pool(name="no-pool", template_name="no-such-template", replicas=1)
    assert unknown.value.resource_type == "template"
    with pytest.raises(sandbox.ValidationError):
        client.create_pool(name="no-pool", template_name="stateful-sandbox", replicas=1)
    with pytest.raises(sandbox.ResourceInUseError):
        client.delete_template("fast-python")
    assert client.update_pool("python-pool", new_name="renamed-pool").id == pool.id
    client.delete_pool("renamed-pool")
    for act in [client.get_pool, client.delete_pool]:
        with pytest.raises(sandbox.ResourceNotFoundError) as missing:
            act("renamed-pool")
        assert missing.value.resource_type == "pool"


def reuse(client: Any) -> None:
    client.create_template(name="my-template", image=ALIAS)
    name = client.create_sandbox(template_name="my-template").name
    sb = client.get_sandbox(name)
    assert sb.run("echo 'Still running!'").stdout == "Still running!\n"
    client.delete_sandbox(name)


def creation_without_waiting(client: Any) -> None:
    # A registry that never answers: whatever stands ready, this does not become so.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        image = f"localhost:{silent.getsockname()[1]}/never:1"
        client.create_template(name="never-ready", image=image)
        sb = client.create_sandbox(template_name="never-ready", wait_for_ready=False)
        assert sb.status == "provisioning"
        for act in [lambda: sb.run("true"), lambda: sb.write("/a", "b"), lambda: sb.read("/a")]:
            with pytest.raises(SandboxNotReadyError):
                act()
        client.delete_sandbox(sb.name)
        client.delete_template("never-ready")
    sb = client.create_sandbox(template_name="my-template", wait_for_ready=False)
    sb = client.wait_for_sandbox(sb.name, timeout=120, poll_interval=0.05)
    assert sb.status == "ready" and sb.run("echo hello").stdout == "hello\n"
    client.delete_sandbox(sb.name)
    sb = client.create_sandbox(template_name="my-template", wait_for_ready=False)
    while True:
        status = client.get_sandbox_status(sb.name)
        assert status.status in ("provisioning", "ready"), status.status_message
        if status.status == "ready":
            sb = client.get_sandbox(sb.name)
            break
        time.sleep(0.05)
    client.delete_sandbox(sb.name)


async def with_asyncio() -> None:
    async with AsyncSandboxClient() as client:
        await client.create_template(name="async-python", image=ALIAS)
        async with await client.sandbox(template_name="async-python") as sb:
            result = await sb.run("python -c 'print(1 + 1)'")
            assert result.stdout == "2\n"
            await sb.write("/app/test.txt", "async content")
            assert (await sb.read("/app/test.txt")).decode() == "async content"
            await sb.write("Makefile", MAKEFILE)
            handle = await sb.run("make build", timeout=600, wait=False)
            text = ""
            async for chunk in handle:
                text += chunk.data
            assert "step 3\n" in text and (await handle.result).success
        volume = await client.create_volume(name="async-data", size="64Mi")
        assert (await client.update_volume("async-data", size="128Mi")).id == volume.id
        assert "async-data" in [volume.name for volume in await client.list_volumes()]
        await client.delete_volume("async-data")
        pool = await client.create_pool(name="async-pool", template_name="async-python", replicas=1)
        assert (await client.update_pool("async-pool", replicas=0)).id == pool.id
        assert [pool.name for pool in await client.list_pools()] == ["async-pool"]
        await client.delete_pool("async-pool")
        await client.update_template("async-python", new_name="async-python-2")
        await client.get_template("async-python-2")
        await client.delete_template("async-python-2")


def errors(client: Any) -> None:
    try:
        with client.sandbox(template_name="my-sandbox") as sb:
            sb.run("sleep 999", timeout=1)
    except CommandTimeoutError as e:
        print(f"Command timed out: {e}")
    except (ResourceCreationError, ResourceNotFoundError, ResourceTimeoutError, SandboxConnectionError) as e:
        pytest.fail(f"another error: {e}")
    except SandboxClientError as e:
        pytest.fail(f"another error: {e}")


def test_an_image_that_does_not_come_is_a_failed_creation(client: Any) -> None:
    client.create_template(name="no-image", image="127.0.0.1:1/no/such:image")
    with pytest.raises(ResourceCreationError) as error:
        client.create_sandbox(template_name="no-image")
    assert (error.value.resource_type, error.value.error_type) == ("sandbox", "ImagePull")
    client.delete_template("no-image")
    with pytest.raises(ResourceNotFoundError):
        client.create_sandbox(template_name="no-image")


def test_a_creation_that_fails_behind_the_caller_says_why(client: Any, daemon: Daemon) -> None:
    client.create_template(name="late-failure", image="127.0.0.1:1/no/such:image")
    sb = client.create_sandbox(template_name="late-failure", wait_for_ready=False)
    try:
        with pytest.raises(ResourceCreationError) as error:
            client.wait_for_sandbox(sb.name, timeout=60, poll_interval=0.05)
        assert "127.0.0.1:1" in str(error.value)
    finally:
        client.delete_sandbox(sb.name)
        client.delete_template("late-failure")


def test_a_creation_that_takes_too_long_leaves_nothing(client: Any) -> None:
    # An address that nobody answers at: the image never comes, and never fails.
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        image = f"127.0.0.1:{silent.getsockname()[1]}/slow:image"
        client.create_template(name="slow", image=image)
        with pytest.raises(ResourceTimeoutError) as error:
            client.create_sandbox(template_name="slow", timeout=1, name="too-late")
        assert error.value.resource_type == "sandbox"
        with pytest.raises(ResourceNotFoundError):
            client.get_sandbox("too-late")
        client.delete_template("slow")


def test_a_pool_that_is_not_full_in_time_leaves_nothing(client: Any, daemon: Daemon) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        client.create_template(name="slow-pool", image=f"127.0.0.1:{silent.getsockname()[1]}/slow:image")
        body = {"name": "late-pool", "template_name": "slow-pool", "replicas": 1, "wait_for_ready": True, "timeout": 1}
        status, answer = daemon.answer("POST", "/v2/sandboxes/pools", body)
        assert status == 504, answer
        with pytest.raises(ResourceNotFoundError):
            client.get_pool("late-pool")
        client.delete_template("slow-pool")


def test_quotas_of_pools_are_told_as_such(daemon: Daemon) -> None:
    limited = daemon.ask("POST", "/v1/keys", {"owner": "few-pools", "sandboxes_max": 1})
    with SandboxClient(api_endpoint=daemon.url + "/v2/sandboxes", api_key=limited["secret"]) as client:
        client.create_template(name="t", image="host")
        with pytest.raises(QuotaExceededError):
            client.create_pool(name="p", template_name="t", replicas=2)
        client.delete_template("t")


def test_without_websockets_commands_go_over_plain_requests(daemon: Daemon, monkeypatch: Any) -> None:
    with a_client(daemon) as client, client.sandbox(template_name="for-tests") as sb:
        body = {"command": "echo out; echo err >&2; exit 6", "timeout": 30, "shell": "/bin/bash", "env": {"A": "1"}}
        path = sb.dataplane_url.removeprefix(daemon.url) + "/execute"
        assert daemon.ask("POST", path, body) == {"stdout": "out\n", "stderr": "err\n", "exit_code": 6}
        assert daemon.ask("POST", path, {"command": "cat", "timeout": 30})["stdout"] == "", "stdin is at its end"
        status, answer = daemon.answer("POST", path, {"command": "sleep 300", "timeout": 1})
        assert status == 408 and answer["detail"]["error"] == "CommandError"
        monkeypatch.setattr("langsmith.sandbox._sandbox.Sandbox._run_ws", raise_import_error, raising=False)
        assert sb.run("echo plain").stdout == "plain\n"


def raise_import_error(*_: Any, **__: Any) -> None:
    raise ImportError("no websockets here")


def test_the_endpoint_may_name_the_api(daemon: Daemon) -> None:
    for path in ["/langsmith", "/langsmith/api/v1"]:
        with variables(LANGSMITH_ENDPOINT=daemon.url + path, LANGSMITH_API_KEY=daemon.key):
            from langsmith import utils

            utils.get_env_var.cache_clear()
            with SandboxClient() as client:
                assert client.list_pools() == []
