"""The client in the middle of what goes wrong: a daemon that is killed, and many sandboxes at once."""

from __future__ import annotations

import concurrent.futures
from typing import Any

from conftest import settings
from daemon import wait_until
from daytona import CreateSandboxFromSnapshotParams, Daytona, SessionExecuteRequest
from raw import Daemon

LINES = 60
SLOW = f"for i in $(seq 1 {LINES}); do echo line $i; echo err $i >&2; sleep 0.03; done; (exit 7)"
EXPECTED = "".join(f"line {number}\n" for number in range(1, LINES + 1))


def test_the_daemon_is_killed_in_the_middle_of_a_command(own_daemon: Daemon) -> None:
    with settings(own_daemon):
        client = Daytona()
        sb = client.create(CreateSandboxFromSnapshotParams(labels={"survives": "yes"}))
        sb.process.create_session("s")
        command = sb.process.execute_session_command("s", SessionExecuteRequest(command=SLOW, run_async=True)).cmd_id
        wait_until(lambda: "line 5\n" in (sb.process.get_session_command_logs("s", command).stdout or ""))
        own_daemon.restart()

        def over() -> Any:
            return Daytona().get(sb.id).process.get_session_command("s", command).exit_code is not None

        wait_until(over)
        found = Daytona().get(sb.id)
        assert found.labels["survives"] == "yes"
        assert found.process.get_session_command("s", command).exit_code == 7
        logs = found.process.get_session_command_logs("s", command)
        assert (logs.stdout, logs.stderr) == (EXPECTED, EXPECTED.replace("line", "err"))
        again = found.process.execute_session_command("s", SessionExecuteRequest(command="echo the shell lives"))
        assert (again.exit_code, again.stdout) == (0, "the shell lives\n")


def test_fifty_sandboxes_at_once(switched: Daemon) -> None:
    client = Daytona()

    def one(number: int) -> tuple[str, str]:
        params = CreateSandboxFromSnapshotParams(name=f"crowd-{number}", labels={"crowd": "fifty"})
        sb = client.create(params, timeout=150)
        sb.fs.upload_file(str(number).encode(), "/tmp/number")
        return sb.id, sb.process.exec("cat /tmp/number").result

    with concurrent.futures.ThreadPoolExecutor(50) as crowd:
        made = list(crowd.map(one, range(50)))
        assert [text for _, text in made] == [str(number) for number in range(50)]
        assert len({sandbox for sandbox, _ in made}) == 50
        list(crowd.map(lambda sandbox: client.delete(client.get(sandbox[0])), made))
