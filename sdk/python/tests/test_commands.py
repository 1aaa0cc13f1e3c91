"""Commands: results, streams, stdin, terminals, reconnects, and what happens when somebody dies meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading

import pytest
from daemon import wait_until
from harness import Daemon

from shoal import (
    AsyncSandbox,
    CommandFailedError,
    CommandTimeoutError,
    OutputChunk,
    ResourceAlreadyExistsError,
    ResourceNotFoundError,
    Sandbox,
    SandboxClient,
    SandboxConnectionError,
    SandboxNotReadyError,
    SandboxOperationError,
    TerminalSize,
    ValidationError,
)


def test_a_result_has_both_streams_and_the_exit_code(sb: Sandbox) -> None:
    result = sb.run("echo out; echo err >&2; exit 4")
    assert (result.stdout, result.stderr, result.exit_code, result.success) == ("out\n", "err\n", 4, False)
    assert sb.run("true").success


def test_a_list_is_a_program_with_its_arguments(sb: Sandbox) -> None:
    assert sb.run(["printf", "%s|", "a b", "$HOME"]).stdout == "a b|$HOME|"


def test_environment_directory_and_user(sb: Sandbox) -> None:
    result = sb.run("echo $WORD $PWD $(id -u)", env={"WORD": "hello"}, cwd="/tmp", user="1000:1000")
    assert result.stdout == "hello /tmp 1000\n"


def test_a_program_that_does_not_exist_is_a_result(sb: Sandbox) -> None:
    result = sb.run(["no-such-program"])
    assert (result.exit_code, result.outcome) == (127, "failed_to_start")
    assert "no-such-program" in repr(result)
    with pytest.raises(SandboxOperationError) as caught:
        sb.run("true", user="nobody-of-this-name")
    assert caught.value.error_type == "failed_to_start", "there is no honest number for it"


def test_output_longer_than_an_answer_is_whole(sb: Sandbox) -> None:
    result = sb.run("seq 1 500000")
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 500001))
    assert not result.truncated


def test_output_that_is_not_utf8_is_kept(sb: Sandbox) -> None:
    result = sb.run(r"printf '\377\000x'; printf '\376' >&2")
    assert (result.stdout_bytes, result.stderr_bytes) == (b"\xff\x00x", b"\xfe")
    assert (result.stdout, result.stderr) == ("\ufffd\x00x", "\ufffd")
    chunks = list(sb.run(r"printf '\377\000x'", wait=False))
    assert b"".join(chunk.raw for chunk in chunks) == b"\xff\x00x"


def test_a_character_that_is_cut_in_two_is_one(sb: Sandbox) -> None:
    handle = sb.run(r"printf '\342\202'; sleep 0.3; printf '\254'; sleep 0.3; printf '\342'", wait=False)
    chunks = list(handle)
    assert "".join(chunk.data for chunk in chunks) == "€\ufffd"
    assert handle.result.stdout_bytes == b"\xe2\x82\xac\xe2"


def test_a_timeout_is_an_exception_with_what_was_written(sb: Sandbox) -> None:
    with pytest.raises(CommandTimeoutError) as caught:
        # Long enough for a shell to write something, on a machine that does much else.
        sb.run("echo part; sleep 1000", timeout=5)
    assert (caught.value.stdout, caught.value.timeout) == ("part\n", 5)
    assert isinstance(caught.value, SandboxOperationError)
    handle = sb.run("echo part; sleep 1000", timeout=0.5, wait=False)
    with pytest.raises(CommandTimeoutError):
        _ = handle.result


def test_callbacks_get_output_as_it_comes(sb: Sandbox) -> None:
    # The command goes on only when the callback has seen its first line.
    seen: list[tuple[str, str]] = []

    def on_stdout(text: str) -> None:
        seen.append(("out", text))
        if "one" in text:
            sb.write("/tmp/go", "")

    result = sb.run(
        "echo one; while [ ! -e /tmp/go ]; do sleep 0.01; done; echo two >&2; echo three",
        on_stdout=on_stdout,
        on_stderr=lambda text: seen.append(("err", text)),
    )
    assert sorted(seen) == [("err", "two\n"), ("out", "one\n"), ("out", "three\n")]
    assert (result.stdout, result.stderr) == ("one\nthree\n", "two\n")


def test_a_handle_is_iterated_and_has_a_result(sb: Sandbox) -> None:
    handle = sb.run("echo one; echo two >&2; exit 3", wait=False)
    assert handle.command_id and handle.pid
    chunks = list(handle)
    assert {chunk.stream for chunk in chunks} == {"stdout", "stderr"}
    assert handle.result.exit_code == 3
    assert handle.result.stdout == "one\n"
    assert list(handle) == []
    assert "exited" in repr(handle)


def test_stdin_of_a_handle_is_open_and_can_be_ended(sb: Sandbox) -> None:
    handle = sb.run('python3 -c \'name = input("Name: "); print(f"Hello {name}")\'', wait=False)
    text = ""
    for chunk in handle:
        text += chunk.data
        if chunk.data.endswith("Name: "):
            handle.send_input("World\n")
    assert text == "Name: Hello World\n"
    handle = sb.run("wc -c", wait=False)
    handle.send_input(b"x" * 3_000_000)
    handle.close_stdin()
    assert handle.result.stdout.strip() == "3000000"
    with pytest.raises(SandboxOperationError):
        handle.send_input("more")


def test_a_command_that_is_waited_for_has_no_stdin(sb: Sandbox) -> None:
    assert sb.run("cat; echo end").stdout == "end\n"


def test_input_is_what_the_command_reads(sb: Sandbox) -> None:
    assert sb.run("sort", input="b\na\n").stdout == "a\nb\n"
    assert sb.run(["cat"], input=b"\xff\x00").stdout_bytes == b"\xff\x00"
    assert sb.run("cat; echo end", input="").stdout == "end\n"
    whole = bytes(range(256)) * 8192
    assert sb.run("sha256sum", input=whole).stdout.split()[0] == hashlib.sha256(whole).hexdigest()
    heard: list[str] = []
    sb.run("tr a-z A-Z", input="loud", on_stdout=heard.append)
    assert "".join(heard) == "LOUD"


def test_a_command_need_not_read_its_input(sb: Sandbox) -> None:
    assert sb.run("true", input="unread\n" * 100_000).success
    assert sb.run("exec <&-; echo closed", input="unread").stdout == "closed\n"


def test_input_and_check_say_how_they_are_used(sb: Sandbox) -> None:
    with pytest.raises(TypeError, match="`input`"):
        sb.run("cat", stdin="abc")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="wait"):
        sb.run("cat", input="abc", wait=False)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="stdin"):
        sb.run("cat", input="abc", stdin=False)


def test_check_makes_a_failure_an_exception(sb: Sandbox) -> None:
    assert sb.run("true", check=True).success
    with pytest.raises(CommandFailedError, match="exited with 4: last words") as caught:
        sb.run("echo out; echo first >&2; echo last words >&2; exit 4", check=True)
    assert (caught.value.result.exit_code, caught.value.result.stdout) == (4, "out\n")
    with pytest.raises(CommandFailedError, match="no-such-program"):
        sb.run(["no-such-program"], check=True)


def test_kill_from_another_thread(sb: Sandbox) -> None:
    handle = sb.run("echo up; setsid sleep 3600 & sleep 3600", timeout=0, wait=False)
    assert next(handle).data == "up\n"
    threading.Thread(target=handle.kill).start()
    assert list(handle) == []
    assert (handle.result.exit_code, handle.result.outcome) == (137, "killed")
    handle.kill()


def test_a_signal(sb: Sandbox) -> None:
    handle = sb.run("trap 'echo caught; exit 7' USR1; echo up; while true; do sleep 0.05; done", wait=False)
    assert next(handle).data == "up\n"
    handle.signal("USR1")
    assert handle.result.exit_code == 7


def test_without_a_timeout_one_can_leave_and_come_back(sb: Sandbox) -> None:
    handle = sb.run("echo Ready; read line; echo $line", timeout=0, wait=False)
    for chunk in handle:
        if "Ready" in chunk.data:
            break
    handle.send_input("bye\n")
    assert handle.result.stdout == "Ready\nbye\n"


def test_a_terminal_has_a_size_that_changes(sb: Sandbox) -> None:
    handle = sb.run(
        "stty size; read line; stty size; test -t 0 && echo tty", terminal=TerminalSize(30, 100), wait=False
    )
    text = ""
    for chunk in handle:
        text += chunk.data
        if text.endswith("30 100\r\n"):
            handle.resize(40, 120)
            handle.send_input("\n")
    assert "40 120" in text and text.endswith("tty\r\n")


def test_reconnect_goes_on_at_the_offsets(sb: Sandbox) -> None:
    handle = sb.run("echo one; read line; echo two; echo three >&2", wait=False)
    first = next(handle)
    assert first == OutputChunk("stdout", "one\n", 0, b"one\n")
    again = handle.reconnect()
    again.send_input("go\n")
    assert again.result.stdout == "two\n"
    other = sb.reconnect(handle.command_id, stdout_offset=4, stderr_offset=3)
    assert (other.result.stdout, other.result.stderr) == ("two\n", "ee\n")
    assert handle.result.stdout == "one\ntwo\n"
    with pytest.raises(ResourceNotFoundError) as caught:
        sb.reconnect("another")
    assert caught.value.resource_type == "command"
    with pytest.raises(ValidationError):
        sb.reconnect("../../version")


def test_reconnect_from_another_process(daemon: Daemon, sb: Sandbox) -> None:
    handle = sb.run("echo one; read line; echo two", wait=False)
    program = f"""
from shoal import SandboxClient
with SandboxClient() as client:
    sb = client.get_sandbox({sb.name!r})
    handle = sb.reconnect({handle.command_id!r}, stdout_offset=4)
    handle.send_input("go\\n")
    print(handle.result.stdout, end="")
"""
    environment = {**os.environ, "SHOAL_URL": daemon.url, "SHOAL_API_KEY": daemon.key}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "two\n"
    assert handle.result.stdout == "one\ntwo\n"


def test_a_chosen_id_starts_once(sb: Sandbox) -> None:
    for _ in range(2):
        assert sb.run("echo x >> /tmp/count; wc -l < /tmp/count", command_id="once").stdout == "1\n"
    with pytest.raises(ResourceAlreadyExistsError) as caught:
        sb.run("echo another", command_id="once")
    assert caught.value.resource_type == "command"
    assert [command.id for command in sb.list_commands()] == ["once"]


def test_every_byte_comes_once_while_the_daemon_is_killed(own_daemon: Daemon) -> None:
    with own_daemon.client() as client, client.sandbox() as sb:
        handle = sb.run("for i in $(seq 1 400); do echo line $i; sleep 0.005; done", wait=False)
        text = ""
        kills = 0
        for chunk in handle:
            assert chunk.offset == len(text)
            text += chunk.data
            if kills < 2 and len(text) > 1000 * (kills + 1):
                kills += 1
                own_daemon.restart()
        assert kills == 2
        assert text == "".join(f"line {n}\n" for n in range(1, 401))
        assert handle.result.stdout == text


def test_a_command_that_is_waited_for_survives_a_restart(own_daemon: Daemon) -> None:
    with own_daemon.client() as client, client.sandbox() as sb:
        restart = threading.Thread(target=own_daemon.restart)

        def when_it_runs() -> None:
            wait_until(lambda: any(command.state == "running" for command in sb.list_commands()))
            restart.start()

        watcher = threading.Thread(target=when_it_runs)
        watcher.start()
        result = sb.run("echo x >> /tmp/count; sleep 1; wc -l < /tmp/count")
        watcher.join()
        restart.join()
        assert result.stdout == "1\n", "it ran once, and was found again"


def test_stdin_is_written_once_over_a_restart(own_daemon: Daemon) -> None:
    with own_daemon.client() as client, client.sandbox() as sb:
        handle = sb.run("cat", timeout=0, wait=False)
        for n in range(60):
            handle.send_input(f"{n}\n")
            if n % 20 == 10:
                own_daemon.restart()
        handle.close_stdin()
        assert handle.result.stdout == "".join(f"{n}\n" for n in range(60))


def test_a_daemon_that_stays_away_is_an_error_and_no_hang(own_daemon: Daemon) -> None:
    with own_daemon.client() as client, client.sandbox() as sb:
        client._transport.patience_seconds = 0.5
        handle = sb.run("echo up; sleep 1000", timeout=0, wait=False)
        assert next(handle).data == "up\n"
        waiting: list[BaseException] = []

        def wait() -> None:
            try:
                sb.run("touch /tmp/begun; sleep 1000")
            except SandboxConnectionError as error:
                waiting.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until(lambda: sb.files.exists("/tmp/begun"))
        address = own_daemon.address
        own_daemon.kill()
        with pytest.raises(SandboxConnectionError):
            next(handle)
        waiter.join(30)
        assert len(waiting) == 1
        for call in (
            lambda: sb.run("true"),
            lambda: sb.read("/x"),
            lambda: sb.write("/x", b"x" * 5_000_000),
            sb.refresh,
        ):
            with pytest.raises(SandboxConnectionError):
                call()
        # What was begun goes on without us, and is found again.
        own_daemon.start(address)
        again = sb.reconnect(handle.command_id)
        assert next(again).data == "up\n"
        again.kill()
        assert again.result.outcome == "killed"


def test_a_sandbox_that_is_gone_ends_its_stream(client: SandboxClient) -> None:
    sb = client.create_sandbox()
    handle = sb.run("echo up; sleep 1000", wait=False)
    assert next(handle).data == "up\n"
    sb.delete()
    with pytest.raises((SandboxOperationError, ResourceNotFoundError, SandboxNotReadyError)):
        _ = handle.result
    with pytest.raises(ResourceNotFoundError) as caught:
        sb.run("true")
    assert caught.value.resource_type == "sandbox"


def test_ctrl_c_ends_the_command(daemon: Daemon, sb: Sandbox) -> None:
    # Where the tests run in the background of a shell, Ctrl-C is ignored unless the program says otherwise.
    program = f"""
import signal
from shoal import SandboxClient
signal.signal(signal.SIGINT, signal.default_int_handler)
SandboxClient().get_sandbox({sb.name!r}).run("sleep 3600", timeout=TIMEOUT, on_stdout=CALLBACK)
"""
    environment = {**os.environ, "SHOAL_URL": daemon.url, "SHOAL_API_KEY": daemon.key}
    for timeout, callback in (("60", "None"), ("0", "print")):
        text = program.replace("TIMEOUT", timeout).replace("CALLBACK", callback)
        process = subprocess.Popen([sys.executable, "-c", text], env=environment, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: any(command.state == "running" for command in sb.list_commands()))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode != 0 and "KeyboardInterrupt" in errors
        wait_until(lambda: all(command.state == "ended" for command in sb.list_commands()))


async def test_a_cancelled_task_ends_its_command(asb: AsyncSandbox) -> None:
    for options in ({"timeout": 60}, {"timeout": 0}):
        task = asyncio.create_task(asb.run("sleep 3600", **options))  # type: ignore[call-overload]
        while not any(command.state == "running" for command in await asb.list_commands()):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not all(command.state == "ended" for command in await asb.list_commands()):
            await asyncio.sleep(0.01)


async def test_the_async_client_does_the_same(asb: AsyncSandbox) -> None:
    result = await asb.run("echo out; echo err >&2; exit 4")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 4)
    handle = await asb.run("echo one; read line; echo $line", wait=False)
    text = ""
    async for chunk in handle:
        text += chunk.data
        if text == "one\n":
            await handle.send_input("two\n")
    assert text == "one\ntwo\n"
    assert (await handle.result).success
    seen: list[str] = []
    await asb.run("echo called", on_stdout=seen.append)
    assert seen == ["called\n"]
    with pytest.raises(CommandTimeoutError):
        await asb.run("sleep 1000", timeout=0.3)


async def test_many_at_once(asb: AsyncSandbox) -> None:
    results = await asyncio.gather(*(asb.run(f"echo {n}") for n in range(50)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(50)]


async def test_a_read_that_was_given_up_loses_nothing(asb: AsyncSandbox) -> None:
    handle = await asb.run("read line; echo one; echo two", wait=False)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(handle.__anext__(), 0.2)
    await handle.send_input("go\n")
    assert "".join([chunk.data async for chunk in handle]) == "one\ntwo\n"


def test_bad_arguments_are_refused_before_anything_is_sent(sb: Sandbox) -> None:
    with pytest.raises(ValueError):
        sb.run("true", timeout=-1)
    with pytest.raises(ValueError):
        sb.run("true", wait=False, on_stdout=print)  # type: ignore[call-overload]
