"""Files: contents, names, kinds, and events."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import e2b
import pytest
from e2b import AsyncSandbox
from e2b.exceptions import InvalidArgumentException, NotFoundException, SandboxException
from e2b.sandbox.filesystem.filesystem import FileType
from e2b.sandbox.filesystem.watch_handle import FilesystemEventType
from harness import VERSION, wait_until

#: A subclass of `NotFoundException` in later clients.
FILE_NOT_FOUND = getattr(e2b, "FileNotFoundException", NotFoundException)


def test_contents_go_up_and_come_down(sbx: Any) -> None:
    files = sbx.files
    for path, content in [
        ("/tmp/text", "ünïcode\n"),
        ("/tmp/new/deep/ü b/x y.txt", "spaced"),
        ("relative.txt", "below the home"),
        ("/tmp/empty", ""),
    ]:
        info = files.write(path, content)
        assert info.name == path.rsplit("/", 1)[-1] and files.read(path) == content
    assert files.read("/home/user/relative.txt") == "below the home"
    data = bytes(range(256)) * 4096
    files.write("/tmp/bytes", data)
    assert bytes(files.read("/tmp/bytes", format="bytes")) == data
    assert b"".join(files.read("/tmp/bytes", format="stream")) == data
    files.write("/tmp/bytes", b"short")
    assert files.read("/tmp/bytes") == "short", "what was there is gone"
    files.write("/tmp/object", io.BytesIO(data))
    assert bytes(files.read("/tmp/object", format="bytes")) == data


def test_several_files_at_once(sbx: Any) -> None:
    wanted = {"/tmp/many/one": "1", "/tmp/many/zwei ü": "2", "/tmp/many/deep/three": "3"}
    many = [{"path": path, "data": data} for path, data in wanted.items()]
    write = sbx.files.write_files if hasattr(sbx.files, "write_files") else sbx.files.write
    infos = write(many)
    assert [info.path for info in infos] == list(wanted)
    assert {path: sbx.files.read(path) for path in wanted} == wanted


@pytest.mark.skipif(VERSION < (2, 45), reason="this version does not compress")
def test_compressed_uploads(sbx: Any) -> None:
    data = b"much of the same " * 500_000
    sbx.files.write("/tmp/zipped", data, gzip=True)
    assert bytes(sbx.files.read("/tmp/zipped", format="bytes")) == data


def test_what_cannot_be_read(sbx: Any) -> None:
    with pytest.raises(FILE_NOT_FOUND):
        sbx.files.read("/tmp/none")
    with pytest.raises(InvalidArgumentException):
        sbx.files.read("/tmp")
    with pytest.raises((InvalidArgumentException, SandboxException)):
        sbx.files.write("/tmp", "a directory")


def test_what_is_where(sbx: Any) -> None:
    files = sbx.files
    files.write("/tmp/tree/a/b/c.txt", "12345")
    assert files.exists("/tmp/tree/a") and not files.exists("/tmp/tree/none")
    info = files.get_info("/tmp/tree/a/b/c.txt")
    assert (info.name, info.type, info.size, info.path) == ("c.txt", FileType.FILE, 5, "/tmp/tree/a/b/c.txt")
    assert (info.mode, info.permissions, info.owner) == (0o644, "-rw-r--r--", "root")
    assert abs(info.modified_time.timestamp() - float(sbx.commands.run("date +%s").stdout)) < 60
    assert [entry.path for entry in files.list("/tmp/tree")] == ["/tmp/tree/a"]
    assert {entry.path for entry in files.list("/tmp/tree", depth=2)} == {"/tmp/tree/a", "/tmp/tree/a/b"}
    with pytest.raises(FILE_NOT_FOUND):
        files.list("/tmp/none")
    with pytest.raises(InvalidArgumentException):
        files.list("/tmp/tree/a/b/c.txt")
    moved = files.rename("/tmp/tree/a/b/c.txt", "/tmp/tree/new/d.txt")
    assert moved.path == "/tmp/tree/new/d.txt" and files.read("/tmp/tree/new/d.txt") == "12345"
    assert files.make_dir("/tmp/tree/x/y") is True
    assert files.make_dir("/tmp/tree/x/y") is False
    files.remove("/tmp/tree")
    files.remove("/tmp/tree")
    assert not files.exists("/tmp/tree")


def test_links_are_told_apart(sbx: Any) -> None:
    sbx.commands.run("mkdir -p /tmp/l && echo x > /tmp/l/file && ln -s file /tmp/l/link")
    info = sbx.files.get_info("/tmp/l/link")
    assert info.symlink_target == "/tmp/l/file"
    listed = {entry.name: entry for entry in sbx.files.list("/tmp/l")}
    assert listed["link"].symlink_target == "/tmp/l/file" and listed["file"].symlink_target is None


def test_events_are_asked_for(sbx: Any) -> None:
    sbx.files.make_dir("/tmp/watched/deep")
    handle = sbx.files.watch_dir("/tmp/watched", recursive=True)
    sbx.files.write("/tmp/watched/deep/file", "x")
    seen: list[Any] = []

    def heard(kind: FilesystemEventType, name: str) -> bool:
        seen.extend(handle.get_new_events())
        return any(event.type == kind and event.name == name for event in seen)

    sbx.commands.run("echo y >> /tmp/watched/deep/direct; chmod 600 /tmp/watched/deep/direct; rm /tmp/watched/deep/direct")
    for kind in (FilesystemEventType.CREATE, FilesystemEventType.WRITE, FilesystemEventType.REMOVE):
        wait_until(lambda: heard(kind, "deep/direct"), 20)
    created = [event for event in seen if event.type == FilesystemEventType.CREATE and event.name == "deep/direct"]
    assert len(created) == 1
    handle.stop()
    with pytest.raises(SandboxException):
        handle.get_new_events()
    with pytest.raises(FILE_NOT_FOUND):
        sbx.files.watch_dir("/tmp/none")
    with pytest.raises(InvalidArgumentException):
        sbx.files.watch_dir("/etc/passwd")


def test_events_are_called_back() -> None:
    async def everything() -> None:
        sbx = await AsyncSandbox.create()
        try:
            await sbx.files.make_dir("/tmp/watched")
            heard: asyncio.Queue[Any] = asyncio.Queue()
            handle = await sbx.files.watch_dir("/tmp/watched", on_event=heard.put_nowait)
            await sbx.files.write("/tmp/watched/file", "x")
            event = await asyncio.wait_for(heard.get(), 20)
            assert event.name
            await handle.stop()
            assert await sbx.files.read("/tmp/watched/file") == "x"
        finally:
            await sbx.kill()

    asyncio.run(everything())
