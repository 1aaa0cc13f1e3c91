"""What every version of the client does: authentication, sandboxes, commands, streams, files. Sync and async."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import threading
import time
from typing import Any

import pytest
from dialect import (
    KILL_CLOSES,
    LEGACY,
    MODERN,
    NEWEST,
    SandboxClient,
    a_client,
    a_sandbox,
    an_async_client,
    an_async_sandbox,
    make,
    sandbox,
)
from harness import Daemon, read_head, wait_until

#: Commands whose stdin can be written to: older clients always, newer ones when they say so.
OPEN_STDIN: dict[str, Any] = {"close_input": False} if NEWEST else {}


def processes(sb: Any, text: str) -> str:
    """Processes of a sandbox that have a text in their command line, besides the one that looks."""
    return sb.run(f"pgrep -f '[{text[0]}]{text[1:]}' || true").stdout


# Who is asking, and where.


def test_both_base_paths_answer_and_a_wrong_key_is_refused(daemon: Daemon) -> None:
    for base in ["/v2/sandboxes", "/api/v2/sandboxes", "/langsmith/v2/sandboxes", "/langsmith/api/v2/sandboxes"]:
        with SandboxClient(api_endpoint=daemon.url + base, api_key=daemon.key) as client:
            assert isinstance(client.list_sandboxes(), list)
        with (
            SandboxClient(api_endpoint=daemon.url + base, api_key="wrong") as client,
            pytest.raises(sandbox.SandboxAuthenticationError),
        ):
            client.list_sandboxes()


def test_the_prefix_is_an_endpoint_too(daemon: Daemon) -> None:
    with a_client(daemon, daemon.url + "/langsmith") as client, a_sandbox(client) as sb:
        assert sb.run("echo hi").stdout == "hi\n"


def test_a_key_in_a_header_of_ones_own_works(daemon: Daemon) -> None:
    for header in ["authorization", "X-API-KEY"]:
        value = f"Bearer {daemon.key}" if header == "authorization" else daemon.key
        status, body = raw(daemon, "GET", "/v2/sandboxes/boxes", {header: value})
        assert status == 200 and "sandboxes" in body


def raw(daemon: Daemon, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    """A request with just these headers."""
    import http.client

    connection = http.client.HTTPConnection(*daemon.address, timeout=60)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    answer = response.status, response.read().decode()
    connection.close()
    return answer


def test_refusals_have_the_dialects_shape_whatever_is_refused(daemon: Daemon) -> None:
    for method, path, key, status in [
        ("GET", "/v2/sandboxes/boxes", "wrong", 401),
        ("GET", "/langsmith/nothing", None, 404),
        ("GET", "/api/v2/sandboxes/nothing", None, 404),
        ("PUT", "/v2/sandboxes/boxes", None, 405),
        ("POST", "/langsmith/dp/nonsense/execute", None, 404),
        ("GET", "/langsmith/dl/nonsense", None, 403),
    ]:
        got, body = daemon.answer(method, path, {} if method == "POST" else None, key)
        assert got == status, (method, path, got, body)
        assert set(body["detail"]) >= {"error", "message"}, (path, body)
    status, body = daemon.answer("POST", "/v2/sandboxes/boxes", {"idle_ttl_seconds": 61})
    assert status == 422 and body["detail"][0]["loc"] == ["body", "idle_ttl_seconds"], body
    assert body["detail"][0]["type"] == "value_error"


def test_a_refusal_does_not_break_the_connection(daemon: Daemon) -> None:
    # Clients keep connections, and a request on one that was closed under them raises what no document names. What is refused
    # here is refused before its body has come.
    body = json.dumps({"path": "/x"}).encode()
    for key, status in [(daemon.key, b"404"), ("wrong", b"401")]:
        with socket.create_connection(daemon.address, timeout=60) as connection:
            for _ in range(20):
                head = f"POST /v2/sandboxes/boxes/none/download-url HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {key}\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
                connection.sendall(body)
                answer = read_head(connection)
                assert answer.split()[1] == status and b"connection: close" not in answer.lower()
                length = int(re.search(rb"(?i)content-length: (\d+)", answer)[1])
                while length > 0:
                    length -= len(connection.recv(length))


def test_a_large_file_for_a_sandbox_that_is_gone_is_refused_in_words(client: Any) -> None:
    sb = make(client)
    client.delete_sandbox(sb.name)
    with pytest.raises(sandbox.ResourceNotFoundError):
        sb.write("/tmp/large", b"x" * (20 << 20))


# Sandboxes.


def test_a_context_manager_deletes_its_sandbox(client: Any) -> None:
    with a_sandbox(client) as sb:
        name = sb.name
        assert client.get_sandbox(name).id == sb.id
        assert name in [other.name for other in client.list_sandboxes()]
    with pytest.raises(sandbox.ResourceNotFoundError) as error:
        client.get_sandbox(name)
    assert error.value.resource_type == "sandbox"


def test_the_properties_of_a_sandbox(client: Any, sb: Any) -> None:
    assert sb.name and sb.id and sb.status == "ready" and sb.status_message is None
    assert sb.dataplane_url.startswith("http://127.0.0.1:") and not sb.dataplane_url.endswith("/")
    assert sb.created_at and sb.updated_at
    again = client.get_sandbox(sb.id) if MODERN else client.get_sandbox(sb.name)
    assert (again.name, again.dataplane_url) == (sb.name, sb.dataplane_url)


def test_creation_without_waiting(client: Any) -> None:
    sb = make(client, wait_for_ready=False)
    try:
        # One that stood ready may be so at once.
        assert sb.status in ("provisioning", "ready")
        ready = client.wait_for_sandbox(sb.name, timeout=60, poll_interval=0.02)
        assert ready.status == "ready" and ready.id == sb.id
        status = client.get_sandbox_status(sb.name)
        assert (status.status, status.status_message) == ("ready", None)
        assert ready.run("echo hello").stdout == "hello\n"
    finally:
        client.delete_sandbox(sb.name)


def test_names_are_unique_and_can_change(client: Any) -> None:
    one, other = make(client, name="one of two"), make(client, name="other-of-two")
    try:
        with pytest.raises(sandbox.SandboxClientError):
            make(client, name="other-of-two")
        with pytest.raises(sandbox.ResourceNameConflictError):
            client.update_sandbox(one.name, **renamed("other-of-two"))
        changed = client.update_sandbox(one.name, **renamed("third"))
        assert (changed.name, changed.id) == ("third", one.id)
        assert one.run("echo still").stdout == "still\n", "a handle that is held goes on"
        with pytest.raises(sandbox.ResourceNotFoundError):
            client.get_sandbox("one of two")
    finally:
        client.delete_sandbox("third")
        client.delete_sandbox(other.name)
    for act in [client.delete_sandbox, client.get_sandbox, client.get_sandbox_status]:
        with pytest.raises(sandbox.ResourceNotFoundError) as error:
            act("third")
        assert error.value.resource_type == "sandbox"


def renamed(name: str) -> dict[str, str]:
    """How this version says it."""
    import inspect

    parameters = inspect.signature(SandboxClient.update_sandbox).parameters
    return {"new_name" if "new_name" in parameters else "name": name}


def test_a_quota_is_told_as_such(daemon: Daemon) -> None:
    limited = daemon.ask("POST", "/v1/keys", {"owner": "few", "sandboxes_max": 1})
    options: dict[str, Any] = {"template_name": "default"} if LEGACY else {}
    with SandboxClient(api_endpoint=daemon.url + "/v2/sandboxes", api_key=limited["secret"]) as client:
        with client.sandbox(**options):
            began = time.monotonic()
            with pytest.raises(sandbox.QuotaExceededError) as error:
                client.create_sandbox(**options)
            assert error.value.quota_type == "sandbox_count"
            assert time.monotonic() - began < 20, "it is not waited for"
        assert client.list_sandboxes() == []


def test_what_is_not_valid_is_told_with_its_field(client: Any) -> None:
    # The last two could be made, but no path leads to them.
    for name in ["x" * 300, "a\nb", ".", ".."]:
        with pytest.raises(sandbox.ValidationError) as error:
            make(client, name=name)
        assert error.value.field == "name"


# Commands.


def test_a_command_and_its_result(sb: Any) -> None:
    result = sb.run("echo 'Hello, World!'")
    assert (result.stdout, result.stderr, result.exit_code, result.success) == ("Hello, World!\n", "", 0, True)
    result = sb.run("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.success) == ("out\n", "err\n", 3, False)
    assert sb.run("kill -9 $$").exit_code == 137
    assert sb.run("no-such-program").exit_code == 127


def test_environment_directory_and_shell(sb: Any) -> None:
    result = sb.run("echo $WHO in $PWD", env={"WHO": "me"}, cwd="/tmp")
    assert result.stdout == "me in /tmp\n"
    assert sb.run("echo $0", shell="/bin/sh").stdout == "/bin/sh\n"
    with pytest.raises(sandbox.SandboxOperationError):
        sb.run("true", cwd="/no/such/place")
    with pytest.raises(sandbox.SandboxOperationError):
        sb.run("true", shell="/no/such/shell")


def test_a_timeout_ends_the_command_and_its_children(sb: Any) -> None:
    with pytest.raises(sandbox.CommandTimeoutError) as error:
        sb.run("(exec -a timed-child sleep 300) & sleep 300", timeout=1)
    assert isinstance(error.value, sandbox.SandboxOperationError)
    wait_until(lambda: processes(sb, "timed-child") == "")


def test_callbacks_see_everything_in_order(sb: Any) -> None:
    out: list[str] = []
    err: list[str] = []
    script = "for i in 1 2 3; do echo out$i; echo err$i >&2; sleep 0.05; done; exit 4"
    result = sb.run(script, timeout=60, on_stdout=out.append, on_stderr=err.append)
    assert "".join(out) == result.stdout == "out1\nout2\nout3\n"
    assert "".join(err) == result.stderr == "err1\nerr2\nerr3\n"
    assert result.exit_code == 4


def test_chunks_come_while_the_command_runs(sb: Any) -> None:
    handle = sb.run("echo first; until test -e /tmp/go; do sleep 0.02; done; echo last", timeout=60, wait=False)
    assert handle.command_id and handle.pid > 0
    seen = []
    for chunk in handle:
        assert chunk.stream == "stdout"
        if not seen:
            assert chunk.data == "first\n" and chunk.offset == 0
            sb.write("/tmp/go", "")  # Only now can it end.
        seen.append((chunk.offset, chunk.data))
    assert "".join(data for _, data in seen) == "first\nlast\n"
    assert seen[-1][0] == len("first\n")
    assert handle.result.exit_code == 0


def test_a_kill_ends_the_command_with_a_code(sb: Any) -> None:
    handle = sb.run("(exec -a killed-child sleep 300) & echo up; sleep 300", timeout=0, wait=False)
    for chunk in handle:
        assert chunk.data == "up\n"
        break
    handle.kill()
    try:
        assert handle.result.exit_code != 0
    except sandbox.SandboxConnectionError:
        assert KILL_CLOSES, "older clients keep the connection until they have heard"
    assert sb.reconnect(handle.command_id).result.exit_code != 0
    wait_until(lambda: processes(sb, "killed-child") == "")


def test_a_kill_from_another_thread(sb: Any) -> None:
    handle = sb.run("echo up; sleep 300", timeout=300, wait=False)
    seen = threading.Event()

    def kill() -> None:
        seen.wait(60)
        handle.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        for chunk in handle:
            assert chunk.data == "up\n"
            seen.set()
        assert handle.result.exit_code != 0
    except sandbox.SandboxConnectionError:
        assert KILL_CLOSES
    thread.join()


def test_stdin_is_written_to(sb: Any) -> None:
    script = 'python -c \'name = input("Name: "); print(f"Hello {name}")\''
    handle = sb.run(script, timeout=60, wait=False, **OPEN_STDIN)
    text = ""
    for chunk in handle:
        if "Name:" in chunk.data:
            handle.send_input("Wörld\n")
        text += chunk.data
    assert text == "Name: Hello Wörld\n" and handle.result.success


def test_much_stdin_reaches_a_command_that_reads_late(sb: Any) -> None:
    # More than pipes and windows hold, for a command that reads none of it for a while.
    size = 3_000_000
    script = f"until test -e /tmp/read; do sleep 0.02; done; head -c {size + 3} | md5sum"
    handle = sb.run(script, timeout=60, wait=False, **OPEN_STDIN)
    handle.send_input("x" * size)
    handle.send_input("ä\n")
    sb.write("/tmp/read", "")
    digest = hashlib.md5(("x" * size + "ä\n").encode()).hexdigest()
    assert handle.result.stdout == f"{digest}  -\n"


def test_input_that_is_lost_is_told(sb: Any) -> None:
    handle = sb.run("head -c 1", timeout=60, wait=False, **OPEN_STDIN)
    handle.send_input("\ud800")
    with pytest.raises(sandbox.SandboxOperationError, match="JSON"):
        _ = handle.result
    handle = sb.reconnect(handle.command_id)
    handle.kill()


def test_a_sandbox_that_is_gone_is_told_at_once(client: Any) -> None:
    sb = make(client)
    handle = sb.run("echo up; sleep 300", timeout=0, wait=False)
    assert next(iter(handle)).data == "up\n"
    client.delete_sandbox(sb.name)
    with pytest.raises(sandbox.SandboxOperationError, match="sandbox ended"):
        _ = handle.result
    began = time.monotonic()
    for act in [lambda: sb.run("true"), lambda: sb.reconnect(handle.command_id).result]:
        with pytest.raises(sandbox.SandboxOperationError, match="does not exist") as error:
            act()
        assert error.value.error_type == "SandboxNotFound"
    assert time.monotonic() - began < 10, "clients do not try to come back"
    for act in [lambda: sb.read("/etc/hostname"), lambda: sb.write("/tmp/a", "b")]:
        with pytest.raises(sandbox.ResourceNotFoundError):
            act()


def test_reconnecting_by_hand(daemon: Daemon, client: Any, sb: Any) -> None:
    handle = sb.run("echo one; echo two; echo err >&2", timeout=60, wait=False)
    whole = handle.result
    with a_client(daemon) as other:
        again = other.get_sandbox(sb.name).reconnect(handle.command_id)
        assert again.command_id == handle.command_id
        assert (again.result.stdout, again.result.stderr) == (whole.stdout, whole.stderr) == ("one\ntwo\n", "err\n")
        rest = other.get_sandbox(sb.name).reconnect(handle.command_id, stdout_offset=4, stderr_offset=4)
        assert (rest.result.stdout, rest.result.stderr, rest.result.exit_code) == ("two\n", "", 0)
    with pytest.raises(sandbox.SandboxOperationError) as error:
        _ = sb.reconnect("never-seen").result
    assert error.value.error_type == "CommandNotFound"


def test_a_command_outlives_its_client(daemon: Daemon, client: Any, sb: Any) -> None:
    handle = sb.run("echo begun; until test -e /tmp/end; do sleep 0.02; done; echo done", timeout=60, wait=False)
    for _ in handle:
        break
    with a_client(daemon) as other:
        again = other.get_sandbox(sb.name).reconnect(handle.command_id)
        sb.write("/tmp/end", "")
        assert again.result.stdout == "begun\ndone\n"


def test_two_clients_on_one_command(daemon: Daemon, client: Any, sb: Any) -> None:
    handle = sb.run("until test -e /tmp/go; do sleep 0.02; done; seq 1 2000", timeout=60, wait=False)
    results = []

    def follow() -> None:
        with SandboxClient(api_endpoint=daemon.url + "/v2/sandboxes", api_key=daemon.key) as other:
            results.append(other.get_sandbox(sb.name).reconnect(handle.command_id).result)

    threads = [threading.Thread(target=follow) for _ in range(2)]
    for thread in threads:
        thread.start()
    sb.write("/tmp/go", "")
    whole = handle.result
    for thread in threads:
        thread.join(60)
    expected = "".join(f"{number}\n" for number in range(1, 2001))
    assert [result.stdout for result in [whole, *results]] == [expected] * 3


def test_much_output_arrives_whole(sb: Any) -> None:
    size = 10 << 20
    result = sb.run(f"head -c {size} /dev/zero | tr '\\0' x", timeout=120)
    assert len(result.stdout) == size and set(result.stdout) == {"x"}
    # Bytes that JSON writes with six.
    result = sb.run("head -c 300000 /dev/zero | tr '\\0' '\\001'", timeout=120)
    assert result.stdout == "\x01" * 300_000


def test_text_is_whole_and_offsets_count_it(sb: Any) -> None:
    script = "import sys\nfor i in range(3000): sys.stdout.write('aä€🐟')\nsys.stdout.flush()\n"
    script += "sys.stdout.buffer.write(b'\\xff\\xfe|\\xe2\\x82|\\xf0\\x9f')\n"
    sb.write("/tmp/text.py", script)
    handle = sb.run("python /tmp/text.py", timeout=60, wait=False)
    at, text = 0, ""
    for chunk in handle:
        assert chunk.offset == at
        at += len(chunk.data.encode())
        text += chunk.data
    expected = "aä€🐟" * 3000 + "\ufffd\ufffd|\ufffd|\ufffd"
    assert text == expected
    rest = sb.reconnect(handle.command_id, stdout_offset=len("aä€🐟".encode()) * 2999)
    assert rest.result.stdout == expected[4 * 2999 :]


def test_a_silent_command_and_a_background_child(sb: Any) -> None:
    assert sb.run("sleep 0.3; echo done").stdout == "done\n"
    began = time.monotonic()
    assert sb.run("sleep 60 & echo at once", timeout=50).stdout == "at once\n"
    assert time.monotonic() - began < 40


# Files.


def test_files_of_all_kinds(sb: Any) -> None:
    large = bytes(range(256)) * (20 << 12)
    for path, content in [
        ("/app/script.py", "print('Hello from file!')"),
        ("/app/data.bin", b"\x00\x01\x02\x03\xff"),
        ("/app/empty", b""),
        ("/app/deep/er/and & deeper/größe 100%.txt", "ünïcode\r\n"),
        ("/app/large", large),
        ("relative.txt", "beside the commands"),
    ]:
        sb.write(path, content)
        expected = content.encode() if isinstance(content, str) else content
        assert sb.read(path) == expected
    assert sb.run("python /app/script.py").stdout == "Hello from file!\n"
    assert sb.run("cat relative.txt").stdout == "beside the commands"
    sb.write("/app/script.py", "print(2)")
    assert sb.read("/app/script.py") == b"print(2)"


def test_what_is_wrong_with_a_file(sb: Any) -> None:
    with pytest.raises(sandbox.ResourceNotFoundError) as missing:
        sb.read("/no/such/file")
    assert missing.value.resource_type == "file"
    with pytest.raises(sandbox.SandboxOperationError, match="is a directory"):
        sb.read("/etc")
    for path in ["/proc/version", "/etc", "/etc/hostname/below", "", "/a\0b", "/" + "d/" * 3000]:
        with pytest.raises(sandbox.SandboxOperationError):
            sb.write(path, "no")
    for path in ["", "/a\0b", "/" + "d/" * 3000]:
        with pytest.raises(sandbox.SandboxOperationError) as error:
            sb.read(path)
        assert error.value.operation == "read"


# The same for asyncio.


def test_everything_with_asyncio(daemon: Daemon) -> None:
    asyncio.run(everything_with_asyncio(daemon))


async def everything_with_asyncio(daemon: Daemon) -> None:
    async with an_async_client(daemon) as client:
        async with await an_async_sandbox(client) as sb:
            name = sb.name
            result = await sb.run("python -c 'print(1 + 1)'")
            assert (result.stdout, result.exit_code) == ("2\n", 0)
            await sb.write("/app/test.txt", "async content")
            assert await sb.read("/app/test.txt") == b"async content"
            handle = await sb.run("echo one; sleep 0.1; echo two >&2; exit 5", timeout=60, wait=False)
            chunks = [(chunk.stream, chunk.data) async for chunk in handle]
            assert chunks == [("stdout", "one\n"), ("stderr", "two\n")]
            assert (await handle.result).exit_code == 5
            again = await (await sb.reconnect(handle.command_id, stdout_offset=4)).result
            assert (again.stdout, again.stderr) == ("", "two\n")
            seen: list[str] = []
            await sb.run("seq 1 3", on_stdout=seen.append)
            assert "".join(seen) == "1\n2\n3\n"
            typed = await sb.run("read line; echo got $line", timeout=60, wait=False, **OPEN_STDIN)
            await typed.send_input("this\n")
            assert (await typed.result).stdout == "got this\n"
            with pytest.raises(sandbox.CommandTimeoutError):
                await sb.run("sleep 300", timeout=1)
            with pytest.raises(sandbox.ResourceNotFoundError):
                await sb.read("/no/such/file")
            with pytest.raises(sandbox.SandboxOperationError):
                await sb.write("/etc", "no")
            killed = await sb.run("echo up; sleep 300", timeout=0, wait=False)
            async for _ in killed:
                break
            await killed.kill()
            assert (await (await sb.reconnect(killed.command_id)).result).exit_code != 0
            assert name in [other.name for other in await client.list_sandboxes()]
            assert (await client.get_sandbox_status(name)).status == "ready"
            changed = await client.update_sandbox(name, **renamed("async-renamed"))
            assert changed.id == sb.id
            await client.update_sandbox("async-renamed", **renamed(name))
        with pytest.raises(sandbox.ResourceNotFoundError):
            await client.get_sandbox(name)
        results = await asyncio.gather(*(one_of_many(client) for _ in range(5)))
        assert results == ["ok\n"] * 5


async def one_of_many(client: Any) -> str:
    async with await an_async_sandbox(client) as sb:
        return str((await sb.run("echo ok")).stdout)
