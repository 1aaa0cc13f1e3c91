"""Snapshots, rollbacks, forks, families and history."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest
from daemon import a_daemon
from harness import Daemon

from shoal import (
    AsyncSandbox,
    AsyncSandboxClient,
    ResourceNotFoundError,
    Sandbox,
    SandboxClient,
    SandboxClientError,
    ValidationError,
)


class StoreDaemon(Daemon):
    """One whose store has snapshots."""

    arguments = ("--store", "loop", "--store-size", "512Mi")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Plain directories have neither rollbacks nor history."""
    with a_daemon(StoreDaemon) as daemon:
        yield daemon


def test_a_snapshot_is_taken_found_used_and_deleted(client: SandboxClient, sb: Sandbox) -> None:
    sb.write("/workspace/f", "one")
    taken = sb.snapshot("clean", labels={"k": "v"})
    assert (taken.name, taken.state, taken.sandbox_id, taken.labels) == ("clean", "ready", sb.id, {"k": "v"})
    assert sb.snapshot("clean", labels={"k": "v"}).id == taken.id, "nothing has changed"
    assert client.get_snapshot(taken.id) == client.get_snapshot("clean")
    assert taken.id in [snapshot.id for snapshot in client.list_snapshots()]
    sb.write("/workspace/f", "two")
    assert sb.rollback("clean") is sb and sb.state == "running"
    assert sb.read("/workspace/f") == b"one"
    with client.sandbox(template_name="clean") as other:
        assert other.read("/workspace/f") == b"one"
        with pytest.raises(SandboxClientError):
            other.rollback(other.id)
    client.delete_snapshot(taken.id)
    with pytest.raises(ResourceNotFoundError) as gone:
        client.get_snapshot(taken.id)
    assert gone.value.resource_type == "snapshot"


def test_children_go_on_from_the_same_files(client: SandboxClient, sb: Sandbox) -> None:
    sb.write("/workspace/f", "shared")
    children = [child for child in sb.fork(2, env={"N": "1"}, labels={"try": "x"}) if isinstance(child, Sandbox)]
    assert len(children) == 2
    try:
        for child in children:
            assert child.run("cat /workspace/f; echo $N").stdout == "shared1\n"
            assert child.labels["try"] == "x"
        children[0].write("/workspace/f", "mine")
        assert children[1].read("/workspace/f") == b"shared"
        family = {member.sandbox_id: member for member in sb.tree()}
        assert family[children[0].id].parent == sb.id and family[sb.id].parent is None
        assert sb.id in [member.sandbox_id for member in client.tree()]
        name = sb.name
        assert children[0].promote().name == name
        assert sb.refresh().name != name
    finally:
        for child in children:
            child.delete()
    with pytest.raises(ValidationError):
        sb.fork(0)


def test_two_sandboxes_are_compared(client: SandboxClient, sb: Sandbox) -> None:
    sb.run("mkdir /workspace/d; echo a > /workspace/d/kept; echo b > /workspace/d/gone")
    taken = sb.snapshot("before")
    sb.run("rm /workspace/d/gone; echo c > /workspace/d/kept; echo n > /workspace/d/new")
    found = {entry.path: entry for entry in client.diff(taken.id, sb.id, content=True)}
    assert {path: entry.change for path, entry in found.items()} == {
        "/workspace/d/gone": "removed",
        "/workspace/d/kept": "changed",
        "/workspace/d/new": "added",
    }
    assert (found["/workspace/d/kept"].before, found["/workspace/d/kept"].after) == ("a\n", "c\n")
    client.delete_snapshot(taken.id)


def test_history_is_undone(client: SandboxClient) -> None:
    sb = client.create_sandbox(history=5)
    try:
        assert sb.info.history == 5
        sb.run("echo good > /workspace/f")
        sb.run("rm /workspace/f")
        steps = len(sb.history())
        assert steps >= 1
        sb.undo()
        assert sb.read("/workspace/f") == b"good\n"
        with pytest.raises(ValidationError):
            sb.undo(50)
        assert sb.update(history=0).info.history == 0
    finally:
        sb.delete()


async def test_the_same_with_asyncio(async_client: AsyncSandboxClient, asb: AsyncSandbox) -> None:
    await asb.write("/workspace/f", "one")
    taken = await asb.snapshot()
    await asb.write("/workspace/f", "two")
    await asb.rollback(taken.id)
    assert await asb.read("/workspace/f") == b"one"
    for child in await asb.fork():
        assert isinstance(child, AsyncSandbox)
        assert await child.read("/workspace/f") == b"one"
        await child.delete()
    await async_client.delete_snapshot(taken.id)


def test_hooks_run_and_are_shown(client: SandboxClient) -> None:
    hooks: dict[str, Any] = {
        "after_create": "echo made > /tmp/made",
        "before_pause": {"script": "echo no >&2; exit 3", "required": True},
    }
    with client.sandbox(hooks=hooks) as sb:
        assert sb.run("cat /tmp/made").stdout == "made\n"
        assert sb.refresh().hook_runs["after_create"].failure is None
        with pytest.raises(SandboxClientError, match="before_pause"):
            sb.pause(drop=True)
        failure = sb.refresh().hook_runs["before_pause"].failure
        assert failure is not None and failure.endswith("no")
        assert sb.update(hooks={}).hooks == {}
        sb.pause(drop=True)


def test_a_template_has_hooks_and_a_history(client: SandboxClient) -> None:
    made = client.create_template("hooked", history=3, hooks={"after_create": "true"})
    assert (made.history, list(made.hooks)) == (3, ["after_create"])
    with client.sandbox(template_name="hooked") as sb:
        assert list(sb.refresh().hook_runs) == ["after_create"]
    client.delete_template("hooked")


def test_a_tree_is_deleted(client: SandboxClient) -> None:
    root = client.create_sandbox()
    (child,) = root.fork(1)
    assert isinstance(child, Sandbox)
    assert set(root.delete_tree()) == {root.id, child.id}
    with pytest.raises(ResourceNotFoundError):
        client.get_sandbox(child.id)


def test_a_webhook_is_made_tested_and_deleted(client: SandboxClient) -> None:
    hook = client.create_webhook("http://127.0.0.1:9/nothing", events=["sandbox"])
    assert hook.secret is not None and hook.secret.startswith("whsec_")
    assert [(one.id, one.events) for one in client.list_webhooks()] == [(hook.id, ["sandbox"])]
    test = client.test_webhook(hook.id)
    assert not test.delivered and test.error is not None
    assert client.dead_letters(hook.id) == []
    with pytest.raises(ValidationError):
        client.create_webhook("ftp://example.com")
    client.delete_webhook(hook.id)
    assert client.list_webhooks() == []


def test_a_snapshot_is_exported_and_imported(client: SandboxClient, sb: Sandbox) -> None:
    taken = sb.snapshot("packed")
    with pytest.raises(SandboxClientError) as refused:
        client.export_snapshot(taken.id, io.BytesIO())
    assert "usr" in str(refused.value), "the machine's own files are included only if asked"
    archive = oci_archive({"srv/f": b"from elsewhere"})
    imported = client.import_snapshot(io.BytesIO(archive), "imported", labels={"k": "v"})
    assert (imported.name, imported.labels) == ("imported", {"k": "v"})
    exported = io.BytesIO()
    client.export_snapshot("imported", exported)
    with tarfile.open(fileobj=io.BytesIO(exported.getvalue())) as archived:
        assert "index.json" in archived.getnames()
    for snapshot in (taken, imported):
        client.delete_snapshot(snapshot.id)


def oci_archive(files: dict[str, bytes]) -> bytes:
    """An image with one layer, as a tool would save it."""

    def packed(members: dict[str, bytes]) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for name, contents in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(contents)
                tar.addfile(entry, io.BytesIO(contents))
        return stream.getvalue()

    layer = packed(files)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    config = {"architecture": machine, "os": "linux", "config": {}}
    blobs: dict[str, bytes] = {}

    def put(kind: str, contents: bytes) -> dict[str, object]:
        digest = hashlib.sha256(contents).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = contents
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(contents)}

    listed = put("layer.v1.tar", layer)
    config["rootfs"] = {"type": "layers", "diff_ids": [listed["digest"]]}
    manifest = {
        "schemaVersion": 2,
        "config": put("config.v1+json", json.dumps(config).encode()),
        "layers": [listed],
    }
    index = {"schemaVersion": 2, "manifests": [put("manifest.v1+json", json.dumps(manifest).encode())]}
    layout = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
    return packed({"oci-layout": layout, "index.json": json.dumps(index).encode(), **blobs})
