"""Commands in the foreground and in the background, input, and terminals."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from e2b import AsyncSandbox, Sandbox
from e2b.exceptions import AuthenticationException, InvalidArgumentException, NotFoundException, TimeoutException
from e2b.sandbox.commands.command_handle import CommandExitException, PtySize
from harness import wait_until


def test_a_command_has_two_streams_and_a_code(sbx: Any) -> None:
    done = sbx.commands.run("echo hi")
    assert (done.stdout, done.stderr, done.exit_code) == ("hi\n", "", 0)
    with pytest.raises(CommandExitException) as failed:
        sbx.commands.run("echo o; echo e >&2; exit 3")
    assert (failed.value.exit_code, failed.value.stdout, failed.value.stderr) == (3, "o\n", "e\n")
    with pytest.raises(CommandExitException) as killed:
        sbx.commands.run("kill -9 $$")
    assert killed.value.exit_code == -1 and "killed" in str(killed.value.error)


def test_bytes_come_whole_and_in_order(sbx: Any) -> None:
    assert sbx.commands.run("printf 'a\\0b'").stdout == "a\0b"
    done = sbx.commands.run("seq 1 200000")
    assert done.stdout == "".join(f"{number}\n" for number in range(1, 200_001))
    # A character that comes in two pieces.
    assert sbx.commands.run("printf '\\xe2\\x82'; sleep 0.3; printf '\\xac'").stdout == "€"
    text = "x" * 100_000
    assert sbx.commands.run(f"printf %s '{text}' | wc -c").stdout.strip() == "100000"
    assert sbx.commands.run("cat <<'EOF'\none\n$HOME\nEOF").stdout == "one\n$HOME\n"


def test_callbacks_hear_output_as_it_comes(sbx: Any) -> None:
    heard: list[tuple[str, str]] = []
    sbx.commands.run(
        "echo one; sleep 0.2; echo two >&2",
        on_stdout=lambda text: heard.append(("out", text)),
        on_stderr=lambda text: heard.append(("err", text)),
    )
    assert heard == [("out", "one\n"), ("err", "two\n")]


def test_a_timeout_ends_the_command_too(sbx: Any) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutException):
        sbx.commands.run("exec sleep 987", timeout=1)
    assert time.monotonic() - began < 4
    wait_until(lambda: not sbx.commands.list(), 20)
    assert sbx.commands.run("pgrep -f 'sleep 98[7]' || true").stdout == ""


def test_where_who_and_with_what(sbx: Any) -> None:
    run = sbx.commands.run
    assert run("pwd; echo $HOME; echo $USER").stdout == "/home/user\n/home/user\nuser\n"
    assert run("id -u", user="root").stdout == "0\n" and run("pwd", user="root").stdout == "/root\n"
    assert run("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert run("mkdir -p ~/a && pwd", cwd="~").stdout == "/home/user\n" and run("pwd", cwd="a").stdout == "/home/user/a\n"
    with pytest.raises(InvalidArgumentException):
        run("true", cwd="/no/such")
    with pytest.raises(AuthenticationException):
        run("true", user="nobody-of-that-name")


def test_variables_of_the_sandbox_and_of_the_command() -> None:
    sbx = Sandbox.create(envs={"A": "sandbox", "B": "sandbox"})
    try:
        assert sbx.commands.run("echo $A $B", envs={"B": "command"}).stdout == "sandbox command\n"
        assert sbx.commands.run("echo $B").stdout == "sandbox\n"
    finally:
        sbx.kill()


def test_background_commands_are_found_by_pid(sbx: Any) -> None:
    handle = sbx.commands.run("echo begun; sleep 300", background=True, timeout=0)
    other = Sandbox.connect(sbx.sandbox_id)
    listed = [process for process in other.commands.list() if process.pid == handle.pid]
    assert [(process.cmd, process.args[:2]) for process in listed] == [("/bin/bash", ["-l", "-c"])]
    handle.disconnect()
    attached = other.commands.connect(handle.pid)
    assert attached.pid == handle.pid
    assert sbx.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException):
        attached.wait()
    assert sbx.commands.kill(handle.pid) is False
    with pytest.raises(NotFoundException):
        other.commands.connect(handle.pid)


def test_a_command_outlives_the_client_that_started_it(sbx: Any) -> None:
    handle = sbx.commands.run("sleep 0.5; echo done > /tmp/done", background=True, timeout=0)
    handle.disconnect()
    wait_until(lambda: sbx.files.exists("/tmp/done"), 20)


def test_a_late_wait_gets_everything(sbx: Any) -> None:
    handle = sbx.commands.run("seq 1 30000; exit 5", background=True)
    wait_until(lambda: not sbx.commands.list(), 60)
    with pytest.raises(CommandExitException) as failed:
        handle.wait()
    assert failed.value.exit_code == 5
    assert failed.value.stdout == "".join(f"{number}\n" for number in range(1, 30_001))


def test_stdin_is_written_and_closed(sbx: Any) -> None:
    handle = sbx.commands.run("cat; echo end", background=True, stdin=True)
    sbx.commands.send_stdin(handle.pid, "one ü\n")
    sbx.commands.send_stdin(handle.pid, "two\n")
    if hasattr(sbx.commands, "close_stdin"):
        sbx.commands.close_stdin(handle.pid)
        assert handle.wait().stdout == "one ü\ntwo\nend\n"
    else:
        handle.kill()
    # Without stdin there is nothing to wait for.
    assert sbx.commands.run("cat; echo end").stdout == "end\n"


def test_a_terminal_is_resized_and_killed(sbx: Any) -> None:
    heard = bytearray()
    terminal = sbx.pty.create(PtySize(cols=100, rows=30), timeout=60)
    sbx.pty.send_stdin(terminal.pid, b"stty size\n")
    for _, _, data in terminal:
        heard += data or b""
        if b"30 100" in heard:
            break
    sbx.pty.resize(terminal.pid, PtySize(cols=120, rows=40))
    again = sbx.pty.connect(terminal.pid) if hasattr(sbx.pty, "connect") else terminal
    sbx.pty.send_stdin(terminal.pid, b"stty size; exit 4\n")
    with pytest.raises(CommandExitException) as left:
        again.wait(on_pty=heard.extend)
    assert b"40 120" in heard and left.value.exit_code == 4
    other = sbx.pty.create(PtySize(cols=80, rows=24))
    assert sbx.pty.kill(other.pid) is True
    assert sbx.pty.kill(other.pid) is False


def test_the_same_with_asyncio() -> None:
    async def everything() -> None:
        sbx = await AsyncSandbox.create()
        try:
            done = await asyncio.gather(*(sbx.commands.run(f"echo {number}") for number in range(8)))
            assert [one.stdout for one in done] == [f"{number}\n" for number in range(8)]
            handle = await sbx.commands.run("cat", background=True, stdin=True)
            await sbx.commands.send_stdin(handle.pid, "hello\n")
            assert await handle.kill() is True
            heard = bytearray()

            async def hear(data: bytes) -> None:
                heard.extend(data)

            terminal = await sbx.pty.create(PtySize(cols=90, rows=20), on_data=hear)
            await sbx.pty.send_stdin(terminal.pid, b"stty size; exit\n")
            await terminal.wait()
            assert b"20 90" in heard
        finally:
            await sbx.kill()

    asyncio.run(everything())
