"""Commands: streams, input, exit codes, timeouts."""

from __future__ import annotations

import time
from typing import Any

import modal
import pytest
from harness import wait_until


def test_streams_are_read_after_the_end(sb: Any) -> None:
    process = sb.exec("bash", "-c", "echo hi; echo err >&2; exit 3")
    assert process.wait() == 3 and process.returncode == 3
    assert (process.stdout.read(), process.stderr.read()) == ("hi\n", "err\n")


def test_much_output_waits_for_its_reader(sb: Any) -> None:
    process = sb.exec("bash", "-c", "seq 1 1000000")
    assert process.wait() == 0
    assert process.stdout.read() == "".join(f"{number}\n" for number in range(1, 1_000_001))


def test_signals_are_exit_codes(sb: Any) -> None:
    assert sb.exec("bash", "-c", "kill -9 $$").wait() == 137
    assert sb.exec("no-such-program-anywhere").wait() == 127


def test_timeouts(sb: Any) -> None:
    began = time.monotonic()
    process = sb.exec("sleep", "983", timeout=1)
    assert process.wait() == -1 and time.monotonic() - began < 10
    wait_until(lambda: sb.exec("pgrep", "-f", "sleep 98[3]").wait() == 1, 30)
    assert sb.exec("sleep", "2", timeout=0).wait() == 0


def test_bytes_and_lines(sb: Any) -> None:
    raw = sb.exec("printf", "\\xff\\xfe", text=False)
    assert raw.stdout.read() == b"\xff\xfe"
    process = sb.exec("bash", "-c", "echo one; sleep 0.5; echo two", bufsize=1)
    assert [line for line in process.stdout] == ["one\n", "two\n"]
    assert process.poll() in (None, 0)


def test_poll_while_it_runs(sb: Any) -> None:
    process = sb.exec("bash", "-c", "read x; echo $x")
    assert process.poll() is None
    process.stdin.write("go\n")
    process.stdin.write_eof()
    process.stdin.drain()
    assert process.wait() == 0 and process.stdout.read() == "go\n" and process.poll() == 0


def test_input_is_concatenated(sb: Any) -> None:
    process = sb.exec("cat", text=False)
    process.stdin.write(b"one ")
    process.stdin.drain()
    process.stdin.write(b"two")
    process.stdin.write_eof()
    process.stdin.drain()
    assert process.stdout.read() == b"one two"
    much = bytes(range(256)) * 20_000
    process = sb.exec("sha256sum")
    process.stdin.write(much)
    process.stdin.write_eof()
    process.stdin.drain()
    import hashlib

    assert process.stdout.read().split()[0] == hashlib.sha256(much).hexdigest()


def test_the_vendors_helper_for_files(sb: Any) -> None:
    if not hasattr(sb, "filesystem"):
        pytest.skip("this version has no such interface")
    files = sb.filesystem
    files.write_text("text ü\n", "/tmp/new/deep/file.txt")
    assert files.read_text("/tmp/new/deep/file.txt") == "text ü\n"
    data = bytes(range(256)) * 12_000
    files.write_bytes(data, "/tmp/new/bytes")
    assert files.read_bytes("/tmp/new/bytes") == data
    names = {entry.name: entry for entry in files.list_files("/tmp/new")}
    assert set(names) == {"deep", "bytes"} and names["bytes"].size == len(data)
    assert files.stat("/tmp/new/bytes").permissions == "-rw-r--r--"
    files.make_directory("/tmp/new/made")
    files.remove("/tmp/new", recursive=True)
    for wrong, error in [
        (lambda: files.read_text("/tmp/none"), "SandboxFilesystemNotFoundError"),
        (lambda: files.write_text("x", "/tmp"), "SandboxFilesystemIsADirectoryError"),
        (lambda: files.list_files("/tmp/none"), "SandboxFilesystemNotFoundError"),
    ]:
        with pytest.raises(getattr(modal.exception, error)):
            wrong()


def test_the_older_interface_to_files(sb: Any) -> None:
    if not hasattr(sb, "open"):
        pytest.skip("this version has no such interface")
    with sb.open("/tmp/older/file.txt", "w") as file:
        file.write("one\n")
        file.write("two\n")
    with sb.open("/tmp/older/file.txt", "r") as file:
        assert file.readline() == "one\n" and file.read() == "two\n"
        file.seek(0)
        assert file.read(3) == "one"
    with sb.open("/tmp/older/file.txt", "a") as file:
        file.write("three\n")
    with sb.open("/tmp/older/file.txt", "rb") as file:
        assert file.read() == b"one\ntwo\nthree\n"
    assert sb.ls("/tmp/older") == ["file.txt"]
    sb.mkdir("/tmp/older/a/b", parents=True)
    sb.rm("/tmp/older", recursive=True)
    for path, mode, error in [("/tmp/none", "r", FileNotFoundError), ("/tmp", "rb", IsADirectoryError)]:
        with pytest.raises(error):
            sb.open(path, mode)
