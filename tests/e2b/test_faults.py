"""The client in the middle of what goes wrong: a daemon that is killed, many sandboxes at once."""

from __future__ import annotations

import concurrent.futures
import os
from typing import Any

import pytest
from e2b import Sandbox, SandboxQuery
from harness import Daemon, wait_until


def test_the_daemon_is_killed_in_the_middle_of_a_stream(own_daemon: Daemon) -> None:
    sbx = Sandbox.create(timeout=600)
    script = "for i in $(seq 1 80); do echo line $i; sleep 0.05; done; echo all > /tmp/all; sleep 300"
    handle = sbx.commands.run(script, background=True, timeout=0)
    heard: list[str] = []

    def hear(text: str) -> None:
        heard.append(text)
        if len(heard) == 5:
            own_daemon.restart()

    with pytest.raises(Exception):  # noqa: B017, PT011 - the stream is cut, which each version says in its own way
        handle.wait(on_stdout=hear)
    assert len(heard) >= 5
    # The sandbox and the command have gone on, and the client that knows them too.
    again = Sandbox.connect(sbx.sandbox_id)
    wait_until(lambda: again.files.exists("/tmp/all"), 60)
    assert handle.pid in [process.pid for process in sbx.commands.list()]
    assert sbx.commands.kill(handle.pid) is True
    assert sbx.commands.run("echo back").stdout == "back\n"
    assert sbx.kill()


def test_fifty_sandboxes_at_once() -> None:
    mark = os.urandom(8).hex()

    def one(number: int) -> Any:
        sbx = Sandbox.create(metadata={"crowd": mark}, timeout=600, request_timeout=100)
        sbx.files.write("/tmp/number", str(number))
        assert sbx.commands.run("cat /tmp/number", request_timeout=100).stdout == str(number)
        return sbx

    with concurrent.futures.ThreadPoolExecutor(50) as crowd:
        made = list(crowd.map(one, range(50)))
        assert len({sbx.sandbox_id for sbx in made}) == 50
        page = Sandbox.list(query=SandboxQuery(metadata={"crowd": mark}), limit=100).next_items()
        assert len(page) == 50
        assert all(crowd.map(lambda sbx: sbx.kill(), made))


def test_many_commands_on_one_sandbox(sbx: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(20) as crowd:
        done = list(crowd.map(lambda number: sbx.commands.run(f"echo {number}").stdout, range(60)))
    assert done == [f"{number}\n" for number in range(60)]
