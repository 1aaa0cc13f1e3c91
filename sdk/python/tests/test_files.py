"""Files: every operation, names that are not text, what is refused, directories both ways, watching."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from harness import Daemon

from shoal import (
    AsyncSandbox,
    ResourceAlreadyExistsError,
    ResourceNotFoundError,
    Sandbox,
    SandboxClient,
    SandboxClientError,
    SandboxOperationError,
    ValidationError,
)
from shoal._archive import unpack


def test_text_bytes_and_open_files_are_written_and_read(sb: Sandbox) -> None:
    sb.write("/workspace/deep/down/text", "grüße\n")
    assert sb.read("/workspace/deep/down/text") == "grüße\n".encode()
    every = bytes(range(256)) * 5000
    assert sb.files.write("/workspace/bytes", every, mode="0755").mode == "0755"
    assert sb.read("/workspace/bytes") == every
    assert sb.files.read("/workspace/bytes", offset=250, length=10) == every[250:260]
    assert sb.files.read("/workspace/bytes", offset=len(every) - 3) == every[-3:]
    assert sb.files.read("/workspace/bytes", length=0) == b""
    sb.files.write("/workspace/stream", io.BytesIO(every))
    assert sb.read("/workspace/stream") == every
    sb.write("/workspace/empty", "")
    assert sb.read("/workspace/empty") == b""


def test_a_write_may_depend_on_what_is_there(sb: Sandbox) -> None:
    first = sb.files.write("/workspace/shared", "one")
    second = sb.files.write("/workspace/shared", "two", if_match=first.etag)
    with pytest.raises(SandboxOperationError) as late:
        sb.files.write("/workspace/shared", "three", if_match=first.etag)
    assert late.value.code == "condition_failed"
    assert sb.files.stat("/workspace/shared").etag == second.etag
    assert sb.read("/workspace/shared") == b"two"


def test_text_is_replaced_in_one_place_or_in_all(sb: Sandbox) -> None:
    first = sb.files.write("/workspace/f", "one two two\r\nend", mode="0600")
    edited = sb.files.edit("/workspace/f", "one", "ünö", if_match=first.etag)
    assert (edited.replaced, edited.mode, edited.path) == (1, "0600", "/workspace/f")
    assert edited.etag == sb.files.stat("/workspace/f").etag
    with pytest.raises(SandboxOperationError) as several:
        sb.files.edit("/workspace/f", "two", "2")
    assert (several.value.code, several.value.details["matches"]) == ("several_matches", 2)
    assert sb.files.edit("/workspace/f", "two", "2", all=True).replaced == 2
    for wish, code in [(("none", "x"), "no_match"), (("2\nend", "3\nEnd"), "no_match")]:
        with pytest.raises(SandboxOperationError) as unmade:
            sb.files.edit("/workspace/f", *wish)
        assert unmade.value.code == code
    sb.files.edit("/workspace/f", "2\nend", "3\nEnd", adapt_line_ends=True)
    assert sb.read("/workspace/f") == "ünö 2 3\r\nEnd".encode()
    with pytest.raises(SandboxOperationError) as late:
        sb.files.edit("/workspace/f", "3", "4", if_match=first.etag)
    assert late.value.code == "condition_failed"
    with pytest.raises(ResourceNotFoundError):
        sb.files.edit("/workspace/none", "a", "b")
    with pytest.raises(ValidationError) as nothing:
        sb.files.edit("/workspace/f", "", "b")
    assert nothing.value.field == "old"
    sb.write("/workspace/.git/f", "End")
    found = sb.files.grep("End", hidden=True, exclude_directories=".git", carriage_returns=True)
    assert [match.path for match in found] == ["/workspace/f"] and found.mixed == 0


def test_what_cannot_be_read_says_why(sb: Sandbox) -> None:
    with pytest.raises(ResourceNotFoundError) as missing:
        sb.read("/workspace/none")
    assert (missing.value.resource_type, missing.value.code) == ("file", "file_not_found")
    assert missing.value.details["path"] == "/workspace/none"
    with pytest.raises(SandboxOperationError) as directory:
        sb.read("/workspace")
    assert (directory.value.error_type, directory.value.operation) == ("is_directory", "file")
    with pytest.raises(ValidationError) as relative:
        sb.read("relative")
    assert relative.value.code == "invalid_path"
    sb.files.write("/workspace/secret", "x", mode="0600")
    with pytest.raises(SandboxOperationError) as denied:
        sb.files.read("/workspace/secret", user="1000")
    assert denied.value.code == "permission_denied"


def test_list_stat_exists(sb: Sandbox) -> None:
    sb.write("/workspace/a/file", "12345")
    sb.files.mkdir("/workspace/a/directory")
    sb.run("ln -s file /workspace/a/link")
    assert [(entry.name, entry.kind) for entry in sb.files.list("/workspace/a")] == [
        ("directory", "directory"),
        ("file", "file"),
        ("link", "symlink"),
    ]
    assert sb.files.stat("/workspace/a/link").size == 5
    link = sb.files.stat("/workspace/a/link", follow=False)
    assert (link.kind, link.target) == ("symlink", "file")
    assert sb.files.stat("/workspace/a").is_dir and sb.files.stat("/workspace/a/file").is_file
    assert sb.files.exists("/workspace/a/link") and not sb.files.exists("/workspace/b")


def test_a_directory_of_many_pages(sb: Sandbox) -> None:
    sb.run("mkdir many; cd many; seq -f %05g 1 2500 | xargs touch", cwd="/workspace")
    names = [entry.name for entry in sb.files.list("/workspace/many")]
    assert names == [f"{n:05}" for n in range(1, 2501)]


def test_move_copy_delete(sb: Sandbox) -> None:
    sb.write("/workspace/one", "1")
    sb.files.move("/workspace/one", "/workspace/new/two")
    made = sb.files.copy("/workspace/new", "/workspace/copy", recursive=True)
    assert (made.entries, made.bytes) == (2, 1)
    assert sb.read("/workspace/copy/two") == b"1"
    with pytest.raises(ResourceAlreadyExistsError):
        sb.files.copy("/workspace/new/two", "/workspace/copy/two")
    sb.files.copy("/workspace/new/two", "/workspace/copy/two", overwrite=True)
    with pytest.raises(SandboxOperationError) as full:
        sb.files.delete("/workspace/copy")
    assert full.value.code == "directory_not_empty"
    sb.files.delete("/workspace/copy", recursive=True)
    with pytest.raises(ResourceNotFoundError):
        sb.files.delete("/workspace/copy")


def test_glob_and_grep(sb: Sandbox) -> None:
    sb.write("/workspace/src/a.py", "import os\nprint(os.name)\n")
    sb.write("/workspace/src/deep/b.py", "x = 'import'\n")
    sb.write("/workspace/src/c.txt", "IMPORT\n")
    found = sb.files.glob("**/*.py", "/workspace/src")
    assert [file.path for file in found] == ["/workspace/src/a.py", "/workspace/src/deep/b.py"]
    assert found.cut is None and len(found) == 2
    assert sb.files.glob("**/*.py", "/workspace/src", limit=1).cut == "matches"
    lines = sb.files.grep("import", "/workspace/src", include=["*.py", "*.txt"], ignore_case=True)
    assert [(match.path, match.line, match.column) for match in lines] == [
        ("/workspace/src/a.py", 1, 0),
        ("/workspace/src/c.txt", 1, 0),
        ("/workspace/src/deep/b.py", 1, 5),
    ]
    assert [match.text for match in sb.files.grep(r"os\.\w+", "/workspace/src", regex=True)] == ["print(os.name)"]
    with pytest.raises(ValidationError) as broken:
        sb.files.grep("(", "/workspace/src", regex=True)
    assert broken.value.code == "invalid_pattern"


def test_names_that_are_not_text(sb: Sandbox) -> None:
    sb.run("printf x > \"$(printf '/workspace/odd-\\377')\"")
    (entry,) = sb.files.list("/workspace")
    assert os.fsencode(entry.name) == b"odd-\xff"
    assert sb.read(entry.path) == b"x"
    (found,) = sb.files.glob("odd*")
    assert found.path == entry.path
    strange = "/workspace/a b&c=d?e#f%20ü\n"
    sb.write(strange, "y")
    assert sb.read(strange) == b"y"


def test_directories_up_and_down(sb: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/run.sh")
    os.mkfifo(source / "fifo")
    (source / "long").write_bytes(os.urandom(3_000_000))
    made = sb.files.upload(source, "/workspace/up")
    assert made.entries == 4
    assert sb.run("./sub/run.sh && ./link && test ! -e fifo", cwd="/workspace/up").stdout == "ran\nran\n"
    sb.run("ln -s /etc/passwd out; ln -s ../../.. up; echo new > new", cwd="/workspace/up")
    target = tmp_path / "target"
    sb.files.download("/workspace/up", target)
    assert sorted(path.name for path in target.iterdir()) == ["link", "long", "new", "sub"]
    assert (target / "long").read_bytes() == (source / "long").read_bytes()
    assert (target / "link").readlink() == Path("sub/run.sh")
    assert os.access(target / "sub" / "run.sh", os.X_OK)


def test_single_files_up_and_down(sb: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "tool"
    source.write_text("#!/bin/sh\necho tool\n")
    source.chmod(0o755)
    assert sb.files.upload(source, "/workspace/bin/tool").entries == 1
    assert sb.run("bin/tool").stdout == "tool\n"
    sb.files.download("/workspace/bin/tool", tmp_path / "new" / "copy")
    assert (tmp_path / "new" / "copy").read_text() == source.read_text()
    with pytest.raises(ResourceNotFoundError):
        sb.files.download("/workspace/none", tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        sb.files.upload(tmp_path / "none", "/workspace/none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "tool"]


def archive_of(*entries: tuple[str, str, str]) -> io.BytesIO:
    """Names, kinds (file, link, hard, dir, fifo) and what they hold or lead to."""
    kinds = {"file": tarfile.REGTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "dir": tarfile.DIRTYPE}
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, kind, text in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.uid = kinds.get(kind, tarfile.FIFOTYPE), 0o6777, 12345
            if kind == "file":
                entry.size = len(text)
            elif kind in ("link", "hard"):
                entry.linkname = text
            archive.addfile(entry, io.BytesIO(text.encode()) if kind == "file" else None)
    return file


def test_nothing_that_is_unpacked_lands_outside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    for number, entries in enumerate(
        [
            [("../outside", "file", "evil")],
            [(str(outside), "file", "evil")],
            [("a/../../outside", "file", "evil")],
            [("link", "link", ".."), ("link/outside", "file", "evil")],
            [("link", "link", str(tmp_path)), ("link/outside", "file", "evil")],
            [("d", "dir", ""), ("d/up", "link", ".."), ("d/up/up", "link", ".."), ("d/up/up/outside", "file", "evil")],
            [("a", "link", "b"), ("b", "link", "a"), ("a/outside", "file", "evil")],
            [("out", "link", "../outside"), ("out", "file", "evil")],
            [("out", "hard", "../outside"), ("out", "file", "evil")],
            [
                ("deep/er", "dir", ""),
                ("a", "link", "deep/er"),
                ("x", "link", "a/../.."),
                ("a", "dir", ""),
                ("x/outside", "file", "evil"),
            ],
        ]
    ):
        target = tmp_path / f"target{number}"
        with contextlib.suppress(SandboxClientError, OSError):
            unpack(archive_of(*entries), target)
        assert outside.read_text() == "untouched", entries
        assert {path.name for path in tmp_path.iterdir()} - {"outside"} <= {f"target{n}" for n in range(number + 1)}


def test_what_is_unpacked_is_ours_and_plain(tmp_path: Path) -> None:
    entries = [("d", "dir", ""), ("d/f", "file", "text"), ("l", "link", "d/f"), ("h", "hard", "d/f"), ("p", "fifo", "")]
    unpack(archive_of(*entries), tmp_path / "t")
    assert sorted(path.name for path in (tmp_path / "t").rglob("*")) == ["d", "f", "h", "l"]
    for name in ("d", "d/f", "h"):
        about = (tmp_path / "t" / name).stat()
        assert (about.st_uid, oct(about.st_mode & 0o7777)) == (os.geteuid(), "0o755")
    assert (tmp_path / "t" / "l").read_text() == (tmp_path / "t" / "h").read_text() == "text"
    # Again over what is there.
    unpack(archive_of(*entries), tmp_path / "t")
    with pytest.raises(SandboxClientError, match="cannot be unpacked"):
        unpack(io.BytesIO(b"no archive" * 100), tmp_path / "t")


UPLOAD = """
import resource
import sys
from shoal import SandboxClient, SandboxClientError
with SandboxClient() as client:
    sb = client.get_sandbox(sys.argv[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        print(sb.files.upload(sys.argv[2], sys.argv[3]).bytes)
    except SandboxClientError as error:
        print(error.code)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.disk_usage("/var/tmp").free < 16 << 30, reason="the disk has not got 16 GiB to spare")
def test_five_gibibytes_go_up_with_constant_memory(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(5 << 30)
        file.seek(-4, os.SEEK_END)
        file.write(b"end\n")
    # A private daemon keeps files in plain directories, with as much room as the disk has.
    with SandboxClient.local() as client, client.sandbox() as sb:
        endpoint = client._transport.endpoint
        environment = {**os.environ, "SHOAL_URL": endpoint.url, "SHOAL_API_KEY": endpoint.key}
        # What does not fit is refused, and nothing of it stays; what fits is there to its last byte.
        for target, expected in (("/dev/shm/large", "no_space"), ("/workspace/large", str(5 << 30))):
            done = subprocess.run(
                [sys.executable, "-c", UPLOAD, sb.name, large, target], env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            said, grown_mib = done.stdout.split()
            assert said == expected
            assert int(grown_mib) < 64
        assert sb.run("ls -A /dev/shm; tail -c 4 large; stat -c %s large").stdout == f"end\n{5 << 30}\n"


def test_a_watch_tells_what_changes(sb: Sandbox) -> None:
    sb.files.mkdir("/workspace/watched")
    with sb.files.watch("/workspace/watched", recursive=True) as events:
        assert next(events).type == "ready"
        sb.run("echo x > watched/file", cwd="/workspace")
        for event in events:
            if (event.path, event.change) == ("/workspace/watched/file", "written"):
                break
        sb.files.delete("/workspace/watched", recursive=True)
        assert [event.type for event in events][-1] == "gone"
    with pytest.raises(ResourceNotFoundError):
        next(sb.files.watch("/workspace/none"))


def test_a_watch_goes_on_after_a_restart(own_daemon: Daemon) -> None:
    with own_daemon.client() as client, client.sandbox() as sb, sb.files.watch("/workspace") as events:
        assert next(events).type == "ready"
        own_daemon.restart()
        assert next(events).type == "overflow"
        sb.write("/workspace/after", "x")
        assert any(event.path == "/workspace/after" for event in events)


async def test_the_async_client_does_the_same(asb: AsyncSandbox, tmp_path: Path) -> None:
    await asb.write("/workspace/a", "1")
    assert await asb.read("/workspace/a") == b"1"
    assert [entry.name for entry in await asb.files.list("/workspace")] == ["a"]
    async with asb.files.watch("/workspace") as events:
        assert (await events.__anext__()).type == "ready"
        await asb.files.write("/workspace/b", io.BytesIO(b"x" * 2_000_000))
        async for event in events:
            if event.path == "/workspace/b":
                break
    await asb.files.download("/workspace", tmp_path / "down")
    assert (tmp_path / "down" / "b").stat().st_size == 2_000_000
    await asb.files.upload(tmp_path / "down", "/workspace/up")
    assert [file.name for file in await asb.files.glob("up/*")] == ["a", "b"]
    assert [match.line for match in await asb.files.grep("1", "/workspace/up")] == [1]
