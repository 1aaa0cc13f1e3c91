"""The client in the middle of what goes wrong: a daemon that is killed, callers that leave, and many sandboxes at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from typing import Any

from conftest import a_client, settings
from daemon import wait_until
from raw import Daemon
from sandbox0 import CmdOptions
from sandbox0.apispec.api.contexts import post_api_v1_sandboxes_id_contexts as contexts
from sandbox0.apispec.models.create_context_request import CreateContextRequest
from websockets.exceptions import ConnectionClosed

LINES = 80
SLOW = f"for i in $(seq 1 {LINES}); do echo line $i; sleep 0.03; done; exit 7"
EXPECTED = "".join(f"line {number}\n" for number in range(1, LINES + 1))


def test_the_daemon_is_killed_in_the_middle_of_a_stream(own_daemon: Daemon) -> None:
    with settings(own_daemon), a_client() as client:
        sandbox = client.sandboxes.claim("default")
        stream = sandbox.cmd_stream("sh", CmdOptions(command=["sh", "-c", SLOW]))
        assert next(stream.iter_outputs()).data.startswith("line 1\n")
        own_daemon.restart()
        # The connection is gone, and says so.
        with contextlib.suppress(ConnectionClosed):
            stream.wait()
            raise AssertionError("the daemon was killed")
        # The program is not: who connects again has all of it.
        again = sandbox.connect_ws_context(stream.context_id)
        assert "".join(output.data for output in again.iter_outputs()) == EXPECTED
        assert (again.wait().exit_code, again.wait().state) == (7, "crashed")
        assert client.sandboxes.get(sandbox.id).status == "running"


def test_fifty_sandboxes_at_once(client: Any) -> None:
    def one(number: int) -> tuple[Any, str]:
        sandbox = client.sandboxes.claim("default")
        sandbox.write_file("number", str(number).encode())
        return sandbox, sandbox.cmd("cat number").stdout

    with concurrent.futures.ThreadPoolExecutor(50) as crowd:
        made = list(crowd.map(one, range(50)))
        assert [text for _, text in made] == [str(number) for number in range(50)]
        assert len({sandbox.id for sandbox, _ in made}) == 50
        list(crowd.map(lambda pair: client.sandboxes.delete(pair[0].id), made))


def test_a_task_that_is_cancelled_leaves_the_sandbox_whole(client: Any, sandbox: Any) -> None:
    request = {"type": "cmd", "cmd": {"command": ["sh", "-c", "touch begun; sleep 600"]}, "wait_until_done": True}

    async def cancelled() -> None:
        body = CreateContextRequest.from_dict(request)
        running = asyncio.create_task(contexts.asyncio_detailed(id=sandbox.id, client=client.api, body=body))
        while sandbox.cmd("test -e begun").exit_code != 0:
            await asyncio.sleep(0.05)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    # The program goes on, can be found, and can be ended.
    left = [one for one in sandbox.list_contexts() if one.running]
    assert len(left) == 1
    sandbox.delete_context(left[0].id)
    wait_until(lambda: not any(one.running for one in sandbox.list_contexts()))
    assert sandbox.cmd("echo fine").stdout == "fine\n"
