"""Pools: sandboxes that stand ready before anybody asks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Daemon

from shoal import (
    AsyncSandboxClient,
    QuotaExceededError,
    ResourceAlreadyExistsError,
    ResourceCreationError,
    ResourceInUseError,
    ResourceNameConflictError,
    ResourceNotFoundError,
    ResourceTimeoutError,
    SandboxClient,
    ValidationError,
    VolumeMountSpec,
)


@pytest.fixture
def fast(client: SandboxClient) -> Iterator[str]:
    """A template to have a pool of."""
    client.create_template(name="fast-python", image="host", memory="128Mi", cpu="100m")
    yield "fast-python"
    client.delete_template("fast-python")


def test_a_pool_is_made_scaled_renamed_and_deleted(client: SandboxClient, fast: str) -> None:
    pool = client.create_pool(name="python-pool", template_name=fast, replicas=2)
    assert (pool.name, pool.template_name, pool.replicas, pool.ready, pool.state) == (
        "python-pool",
        fast,
        2,
        2,
        "ready",
    )
    assert pool.id and pool.created_at and pool.updated_at
    assert client.get_pool("python-pool").id == pool.id
    assert [entry.name for entry in client.list_pools()] == ["python-pool"]
    with client.sandbox(template_name=fast) as sb:
        assert sb.info.claimed_from == "python-pool"
        assert sb.run("echo up").stdout == "up\n"
        with client.sandbox(pool_name="python-pool", labels={"a": "b"}, env={"WORD": "hello"}) as named:
            assert named.template_name == fast and named.labels == {"a": "b"}
            assert named.run("echo $WORD").stdout == "hello\n"
    assert client.update_pool("python-pool", replicas=3).replicas == 3
    assert client.wait_for_pool("python-pool").ready == 3
    renamed = client.update_pool("python-pool", new_name="pool v2/é", replicas=0)
    assert (renamed.id, renamed.name, renamed.replicas) == (pool.id, "pool v2/é", 0)
    with pytest.raises(ResourceInUseError) as used:
        client.delete_template(fast)
    assert used.value.resource_type == "template"
    client.delete_pool("pool v2/é")
    for call in (client.get_pool, client.delete_pool, client.wait_for_pool):
        with pytest.raises(ResourceNotFoundError) as gone:
            call("pool v2/é")
        assert gone.value.resource_type == "pool"
    assert client.list_sandboxes() == []


def test_a_short_wait_is_one_question(client: SandboxClient) -> None:
    # A registry that never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client.create_template("late-pool", f"localhost:{silent.getsockname()[1]}/never:1")
        client.create_pool("late", "late-pool", 1, wait_for_ready=False)
        asked: list[str] = []
        call = client._transport.call

        def counted(method: str, path: str, **more: Any) -> Any:
            asked.append(path)
            return call(method, path, **more)

        with pytest.MonkeyPatch.context() as patched, pytest.raises(ResourceTimeoutError):
            patched.setattr(client._transport, "call", counted)
            client.wait_for_pool("late", timeout=0.4)
        assert len(asked) == 1, "its last moments are no loop of requests"
        client.delete_pool("late")
        client.delete_template("late-pool")


def test_what_cannot_be_is_told(client: SandboxClient, fast: str) -> None:
    client.create_pool("one", fast, 0)
    with pytest.raises(ResourceAlreadyExistsError) as there:
        client.create_pool("one", fast, 0)
    assert there.value.resource_type == "pool"
    client.create_pool("two", fast, 0)
    with pytest.raises(ResourceNameConflictError) as taken:
        client.update_pool("two", new_name="one")
    assert taken.value.resource_type == "pool"
    client.delete_pool("one")
    client.delete_pool("two")
    with pytest.raises(ResourceNotFoundError) as missing:
        client.create_pool("three", "no such template", 1)
    assert missing.value.resource_type == "template"
    for name, replicas in (("", 1), ("x", 1_000_000)):
        with pytest.raises(ValidationError):
            client.create_pool(name, fast, replicas)


def test_a_template_with_volumes_has_no_pool(client: SandboxClient) -> None:
    client.create_volume("pooled", "16Mi")
    client.create_template("stateful-pool", volume_mounts=[VolumeMountSpec("pooled", "/data")])
    with pytest.raises(ValidationError) as caught:
        client.create_pool("never", "stateful-pool", 1)
    assert caught.value.code == "pool_has_volumes"
    client.delete_template("stateful-pool")
    client.delete_volume("pooled")


def test_a_pool_that_cannot_fill_says_why(client: SandboxClient) -> None:
    client.create_template("far-pool", "localhost:1/team/app:1")
    with pytest.raises(ResourceCreationError) as caught:
        client.create_pool("far", "far-pool", 1)
    assert caught.value.resource_type == "pool" and "localhost:1" in str(caught.value)
    assert client.get_pool("far").state == "failing"
    client.delete_pool("far")
    client.delete_template("far-pool")


def test_a_wait_for_a_pool_ends(client: SandboxClient, fast: str) -> None:
    with pytest.raises(ResourceTimeoutError) as late:
        client.create_pool("slow", fast, 20, timeout=0)
    assert (late.value.resource_type, late.value.last_status) == ("pool", "filling")
    client.delete_pool("slow")


def test_what_stands_ready_counts_against_the_key(daemon: Daemon, client: SandboxClient) -> None:
    key = client.create_key("pool-guest", sandboxes_max=2)
    with SandboxClient(daemon.url, key.secret) as guest:
        guest.create_template("guests")
        with pytest.raises(QuotaExceededError) as caught:
            guest.create_pool("guests", "guests", 3)
        assert (caught.value.quota_type, caught.value.resource_type) == ("sandbox_count", "pool")
        guest.create_pool("guests", "guests", 1)
        guest.delete_pool("guests")
        guest.delete_template("guests")
    client.delete_key(key.id)


async def test_pools_for_asyncio(async_client: AsyncSandboxClient, fast: str) -> None:
    client = async_client
    pool = await client.create_pool("async-pool", fast, 1, wait_for_ready=False)
    assert pool.state in ("filling", "ready")
    assert (await client.wait_for_pool("async-pool")).ready == 1
    async with await client.sandbox(template_name=fast) as sb:
        assert sb.info.claimed_from == "async-pool"
    assert (await client.update_pool("async-pool", replicas=2)).replicas == 2
    assert [entry.name for entry in await client.list_pools()] == ["async-pool"]
    await client.delete_pool("async-pool")
