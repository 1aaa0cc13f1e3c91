"""Volumes: storage that outlives sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal import (
    AsyncSandboxClient,
    ResourceInUseError,
    ResourceNameConflictError,
    ResourceNotFoundError,
    SandboxClient,
    SandboxClientError,
    ValidationError,
    VolumeMountSpec,
)


def test_a_volume_is_made_found_changed_and_deleted(client: SandboxClient) -> None:
    made = client.create_volume(name="my-data", size="16Mi")
    assert (made.name, made.size, made.size_bytes, made.mounted_by) == ("my-data", "16Mi", 16 << 20, [])
    assert made.id and made.created_at and made.updated_at
    found = client.get_volume("my-data")
    assert (found.id, found.name) == (made.id, "my-data") and isinstance(found.used_bytes, int)
    assert [volume.name for volume in client.list_volumes()] == ["my-data"]
    with pytest.raises(ResourceNameConflictError) as taken:
        client.create_volume("my-data", "16Mi")
    assert taken.value.resource_type == "volume"
    changed = client.update_volume("my-data", new_name="data v2 é", size="32Mi")
    assert (changed.id, changed.name, changed.size) == (made.id, "data v2 é", "32Mi")
    assert client.update_volume("data v2 é", size="16Mi").size == "16Mi"
    client.create_volume("other", "16Mi")
    with pytest.raises(ResourceNameConflictError) as taken:
        client.update_volume("other", new_name="data v2 é")
    assert taken.value.resource_type == "volume"
    client.delete_volume("other")
    client.delete_volume("data v2 é")
    for call in (client.get_volume, client.delete_volume):
        with pytest.raises(ResourceNotFoundError) as gone:
            call("data v2 é")
        assert gone.value.resource_type == "volume"


@pytest.mark.parametrize(("name", "size"), [("", "1Gi"), ("a/b", "1Gi"), ("x", "1Q"), ("x", "-1"), ("x", "1")])
def test_what_cannot_be_taken_is_named(client: SandboxClient, name: str, size: str) -> None:
    with pytest.raises(ValidationError) as caught:
        client.create_volume(name, size)
    assert caught.value.field in ("name", "size")


def test_what_is_in_a_volume_outlives_sandboxes(client: SandboxClient) -> None:
    client.create_volume("kept", "64Mi")
    mount = VolumeMountSpec(volume_name="kept", mount_path="/data")
    template = client.create_template(name="stateful", image="host", volume_mounts=[mount])
    assert template.volume_mounts == [mount]
    with client.sandbox(template_name="stateful") as sb:
        assert sb.volume_mounts == [mount]
        sb.write("/data/state.txt", "persistent data")
        (holder,) = client.get_volume("kept").mounted_by
        assert (holder.sandbox_id, holder.path, holder.read_only) == (sb.id, "/data", False)
        with pytest.raises(ResourceInUseError) as used:
            client.delete_volume("kept")
        assert used.value.resource_type == "volume"
    with client.sandbox(template_name="stateful") as sb:
        assert sb.read("/data/state.txt") == b"persistent data"
    with client.sandbox(volume_mounts=[VolumeMountSpec("kept", "/mnt/look", read_only=True)]) as sb:
        assert sb.read("/mnt/look/state.txt") == b"persistent data"
        assert not sb.run("touch /mnt/look/x").success
    client.delete_template("stateful")
    client.delete_volume("kept")
    with pytest.raises(ResourceNotFoundError) as gone, client.sandbox(volume_mounts=[mount]):
        pass
    assert gone.value.resource_type == "volume"


def test_one_that_would_be_too_small_stays_as_it_is(client: SandboxClient) -> None:
    client.create_volume("full", "64Mi")
    with client.sandbox(volume_mounts=[VolumeMountSpec("full", "/data")]) as sb:
        sb.write("/data/large", b"x" * (32 << 20))
        sb.run("sync")
    with pytest.raises(ValidationError) as caught:
        client.update_volume("full", size="8Mi")
    assert (caught.value.error_type, caught.value.field) == ("VolumeResize", "size")
    assert client.get_volume("full").size == "64Mi"
    client.delete_volume("full")


def test_volumes_are_filled_and_fetched_without_a_sandbox(client: SandboxClient, tmp_path: Path) -> None:
    (tmp_path / "up" / "sub").mkdir(parents=True)
    (tmp_path / "up" / "sub" / "file").write_text("hello")
    client.create_volume("moved", "16Mi")
    assert client.upload_to_volume("moved", tmp_path / "up", "/there").entries == 2
    client.download_from_volume("moved", tmp_path / "down")
    assert (tmp_path / "down" / "there" / "sub" / "file").read_text() == "hello"
    try:
        copy = client.create_volume("copied", "16Mi", copy_of="moved")
    except SandboxClientError as error:
        # A store of plain directories has no copies.
        assert error.code == "copies_not_supported"
    else:
        client.download_from_volume(copy.name, tmp_path / "again", "/there/sub")
        assert (tmp_path / "again" / "file").read_text() == "hello"
        client.delete_volume("copied")
    client.delete_volume("moved")


async def test_volumes_for_asyncio(async_client: AsyncSandboxClient, tmp_path: Path) -> None:
    client = async_client
    await client.create_volume("async-data", "16Mi")
    async with await client.sandbox(volume_mounts=[VolumeMountSpec("async-data", "/data")]) as sb:
        await sb.write("/data/x", "1")
    assert (await client.update_volume("async-data", new_name="async-2", size="32Mi")).size == "32Mi"
    assert [volume.name for volume in await client.list_volumes()] == ["async-2"]
    await client.download_from_volume("async-2", tmp_path / "down")
    assert (tmp_path / "down" / "x").read_text() == "1"
    await client.delete_volume("async-2")
