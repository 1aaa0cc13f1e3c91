"""The client in the middle of what goes wrong: a daemon that is killed, many sandboxes at once."""

from __future__ import annotations

import concurrent.futures
import os
from typing import Any

import modal
from harness import Daemon


def test_the_daemon_is_killed_in_the_middle_of_a_stream(daemon: Daemon, sb: Any) -> None:
    process = sb.exec("bash", "-c", "for i in $(seq 1 60); do echo line $i; sleep 0.05; done; exit 5", bufsize=1)
    heard = []
    for line in process.stdout:
        heard.append(line)
        if len(heard) == 5:
            daemon.restart()
    # Clients ask again from the byte where they were.
    assert heard == [f"line {number}\n" for number in range(1, 61)]
    assert process.wait() == 5
    assert sb.exec("echo", "back").stdout.read() == "back\n"


def test_fifty_sandboxes_at_once(app: Any) -> None:
    mark = os.urandom(4).hex()

    def one(number: int) -> Any:
        sb = modal.Sandbox.create(app=app, name=f"{mark}-{number}")
        assert sb.exec("echo", str(number)).stdout.read() == f"{number}\n"
        return sb

    with concurrent.futures.ThreadPoolExecutor(50) as crowd:
        made = list(crowd.map(one, range(50)))
        assert len({sb.object_id for sb in made}) == 50
        list(crowd.map(lambda sb: sb.terminate(), made))
