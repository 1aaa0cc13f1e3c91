"""The client in the middle of what goes wrong: a daemon that is killed, connections that are cut, many sandboxes at once."""

from __future__ import annotations

import concurrent.futures
import random
from typing import Any

import pytest
from dialect import LEGACY, VERSION, a_client, a_sandbox, make, sandbox
from harness import Daemon, Proxy

#: Enough that it is under way when the daemon dies, and no longer.
LINES = 60
SLOW = f"for i in $(seq 1 {LINES}); do echo line $i; echo err $i >&2; sleep 0.03; done; exit 7"
EXPECTED = "".join(f"line {number}\n" for number in range(1, LINES + 1))


def test_the_daemon_is_killed_in_a_streamed_run(own_daemon: Daemon) -> None:
    with a_client(own_daemon) as client, a_sandbox(client) as sb:
        handle = sb.run(SLOW, timeout=120, wait=False)
        text, killed = "", False
        for chunk in handle:
            text += chunk.data if chunk.stream == "stdout" else ""
            if not killed and "line 5\n" in text:
                killed = True
                own_daemon.restart()
        result = handle.result
        assert killed and text == result.stdout == EXPECTED
        assert result.stderr == EXPECTED.replace("line", "err") and result.exit_code == 7
        again = client.get_sandbox(sb.name).reconnect(handle.command_id)
        assert again.result.stdout == EXPECTED, "also for whoever comes later"


def test_connections_are_cut_at_any_byte(daemon: Daemon) -> None:
    dice = random.Random(7)
    expected = "".join(f"ä {number} €\n" for number in range(20_000))
    script = "import sys\nfor i in range(20000): sys.stdout.write(f'ä {i} €\\n')\n"
    # Each connection gets further than the one before it was cut, which is when clients go on.
    cuts = [dice.randrange(2_000, 60_000) for _ in range(3)]
    proxy = Proxy(daemon, cuts)
    try:
        with a_client(daemon, proxy.url) as client, a_sandbox(client) as sb:
            assert sb.dataplane_url.startswith(proxy.url)
            sb.write("/tmp/much.py", script)
            handle = sb.run("python /tmp/much.py", timeout=120, wait=False)
            at, text = 0, ""
            for chunk in handle:
                assert chunk.offset == at, "no byte is lost, and none comes twice"
                at += len(chunk.data.encode())
                text += chunk.data
            assert text == expected and handle.result.exit_code == 0
            assert proxy.opened == 4 and not proxy.cuts
    finally:
        proxy.close()


def test_a_connection_that_breaks_before_the_command_is_known(daemon: Daemon) -> None:
    # Cut right behind the handshake. The newest client asks again for the same command; those before it give up; older ones
    # cannot say that they mean the same one, and run it again over plain HTTP.
    proxy = Proxy(daemon, [0])
    command = "echo once >> /tmp/count; echo ran"
    try:
        with a_client(daemon, proxy.url) as client, a_sandbox(client) as sb:
            try:
                assert sb.run(command, timeout=60).stdout == "ran\n"
            except sandbox.SandboxConnectionError:
                assert (0, 10, 11) <= VERSION < (0, 14, 3)
                assert sb.run(command, timeout=60).stdout == "ran\n", "the next one has nothing to fear"
            count = client.get_sandbox(sb.name).read("/tmp/count").count(b"once")
            assert count == 1 if VERSION >= (0, 14, 3) else 1 <= count <= 2
    finally:
        proxy.close()


def test_fifty_sandboxes_at_once(daemon: Daemon) -> None:
    with a_client(daemon) as client:
        before = {sb.name for sb in client.list_sandboxes()}

        def one(number: int) -> str:
            sb = make(client, name=f"crowd-{number}", timeout=100)
            sb.write("/tmp/number", str(number))
            return str(sb.run("cat /tmp/number").stdout)

        with concurrent.futures.ThreadPoolExecutor(50) as crowd:
            numbers = list(crowd.map(one, range(50)))
            assert numbers == [str(number) for number in range(50)]
            assert len({sb.name for sb in client.list_sandboxes()} - before) == 50
            list(crowd.map(lambda number: client.delete_sandbox(f"crowd-{number}"), range(50)))
        assert {sb.name for sb in client.list_sandboxes()} == before


@pytest.mark.skipif(LEGACY, reason="older clients do not open a connection again without output")
def test_a_silent_command_survives_cuts(daemon: Daemon) -> None:
    # Enough for `started`, which says that the connection stands.
    proxy = Proxy(daemon, [120, 120])
    try:
        with a_client(daemon, proxy.url) as client, a_sandbox(client) as sb:
            script = "until test -e /tmp/go; do sleep 0.05; done; echo done"
            handle: Any = sb.run(script, timeout=60, wait=False)
            sb.write("/tmp/go", "")
            assert handle.result.stdout == "done\n"
    finally:
        proxy.close()
