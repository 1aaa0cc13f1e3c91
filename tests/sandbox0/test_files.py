"""Files: read, write, look, move, delete, watch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from daemon import wait_until
from sandbox0 import APIError


def refused(call: Any, *arguments: Any) -> tuple[int, str]:
    with pytest.raises(APIError) as error:
        call(*arguments)
    return error.value.status_code, error.value.message


def test_bytes_come_back_as_they_were(sandbox: Any) -> None:
    for path, content in [("a", b""), ("deep/er/ü.txt", "ünïcode".encode()), ("/var/b", bytes(range(256)) * 8192)]:
        sandbox.write_file(path, content)
        assert sandbox.read_file(path) == content
    assert sandbox.cmd("cat /workspace/deep/er/ü.txt").stdout == "ünïcode"
    sandbox.write_file("json", b'{"success": true}')
    assert sandbox.read_file("json") == b'{"success": true}'


def test_what_files_are(sandbox: Any) -> None:
    sandbox.mkdir("d/e", recursive=True)
    sandbox.write_file("d/f", b"12345")
    sandbox.cmd("ln -s f /workspace/d/link")
    stat = sandbox.stat_file("d/f")
    assert (stat.name, stat.path, stat.size, stat.mode) == ("f", "/workspace/d/f", 5, "0644")
    kinds = {one.name: str(getattr(one.type_, "value", one.type_)) for one in sandbox.list_files("d")}
    assert kinds == {"e": "dir", "f": "file", "link": "symlink"}
    link = next(one for one in sandbox.list_files("/workspace/d") if one.name == "link")
    assert (link.is_link, link.link_target) == (True, "f")


def test_move_and_delete(sandbox: Any) -> None:
    sandbox.write_file("a", b"1")
    sandbox.move_file("a", "new/place/b")
    assert sandbox.read_file("/workspace/new/place/b") == b"1"
    sandbox.delete_file("new")
    assert refused(sandbox.read_file, "new/place/b")[0] == 404
    assert refused(sandbox.delete_file, "new")[0] == 404


def test_failures_have_their_status(sandbox: Any) -> None:
    sandbox.write_file("f", b"")
    sandbox.mkdir("d")
    for call, path, status, code in [
        (sandbox.read_file, "none", 404, "file_not_found"),
        (sandbox.read_file, "d", 409, "path_not_file"),
        (sandbox.list_files, "none", 404, "directory_not_found"),
        (sandbox.list_files, "f", 409, "path_not_directory"),
        (sandbox.stat_file, "none", 404, "file_not_found"),
        (sandbox.mkdir, "f", 409, "path_exists"),
        (sandbox.mkdir, "x/y/z", 404, "file_not_found"),
        (sandbox.read_file, "", 400, "invalid_request"),
    ]:
        got, message = refused(call, path)
        assert (got, code in message) == (status, True), (path, got, message)
    # Of a write, the client tells the status alone.
    assert refused(sandbox.write_file, "d", b"no")[0] == 409
    assert refused(sandbox.write_file, "/proc/version", b"no")[0] == 403


def test_a_file_of_a_gibibyte_is_refused_and_the_sandbox_goes_on(sandbox: Any) -> None:
    assert refused(sandbox.write_file, "large", bytes(1 << 30))[0] == 413
    assert sandbox.cmd("ls /workspace").stdout == ""
    sandbox.write_file("fits", bytes(20 << 20))
    assert sandbox.stat_file("fits").size == 20 << 20


def test_changes_are_told(sandbox: Any) -> None:
    sandbox.mkdir("w/below", recursive=True)
    stream = sandbox.watch_files("w", recursive=True)
    events: list[tuple[str, str]] = []

    def read() -> None:
        try:
            for event in stream.iter_events():
                events.append((event.event, event.path))
        except Exception:  # noqa: BLE001 - the client has no other end of a watch
            return

    reading = threading.Thread(target=read)
    reading.start()
    sandbox.cmd("sh", options("echo 1 > w/below/a; chmod 600 w/below/a; mv w/below/a w/b; rm w/b"))
    for expected in [
        ("create", "/workspace/w/below/a"),
        ("write", "/workspace/w/below/a"),
        ("chmod", "/workspace/w/below/a"),
        ("rename", "/workspace/w/below/a"),
        ("create", "/workspace/w/b"),
        ("remove", "/workspace/w/b"),
    ]:
        wait_until(lambda expected=expected: expected in events)
    stream.unsubscribe()
    reading.join(60)
    assert not reading.is_alive()
    with pytest.raises(APIError, match="watch subscribe failed"):
        sandbox.watch_files("none")


def options(script: str) -> Any:
    from sandbox0 import CmdOptions

    return CmdOptions(command=["sh", "-c", script])
