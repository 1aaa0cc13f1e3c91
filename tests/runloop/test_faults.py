"""The client in the middle of what goes wrong: a daemon that is killed, and many devboxes at once."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

from conftest import settings
from daemon import wait_until
from raw import Daemon
from runloop_api_client import RunloopSDK

LINES = 80
SLOW = f"for i in $(seq 1 {LINES}); do echo line $i; echo err $i >&2; sleep 0.03; done; exit 7"
EXPECTED = "".join(f"line {number}\n" for number in range(1, LINES + 1))


def test_the_daemon_is_killed_in_the_middle_of_a_command(own_daemon: Daemon) -> None:
    with settings(own_daemon):
        sdk = RunloopSDK()
        box = sdk.devbox.create()
        results: list[Any] = []
        # The client reads the answer to the start for so long, and the daemon holds it until the command is over.
        running = threading.Thread(target=lambda: results.append(box.cmd.exec(f"touch /tmp/begun; {SLOW}", timeout=300)))
        running.start()
        wait_until(lambda: box.cmd.exec("test -e /tmp/begun").exit_code == 0)
        own_daemon.restart()
        running.join(120)
        assert len(results) == 1, "the client has asked again, and found the same command"
        assert (results[0].exit_code, results[0].stdout()) == (7, EXPECTED)
        assert results[0].stderr() == EXPECTED.replace("line", "err")


def test_fifty_devboxes_at_once(switched: Daemon) -> None:
    sdk = RunloopSDK()

    def one(number: int) -> tuple[Any, str]:
        box = sdk.devbox.create()
        box.file.upload(path="/tmp/number", file=str(number).encode())
        return box, box.cmd.exec("cat /tmp/number").stdout()

    with concurrent.futures.ThreadPoolExecutor(50) as crowd:
        made = list(crowd.map(one, range(50)))
        assert [text for _, text in made] == [str(number) for number in range(50)]
        assert len({box.id for box, _ in made}) == 50
        list(crowd.map(lambda pair: pair[0].shutdown(), made))
