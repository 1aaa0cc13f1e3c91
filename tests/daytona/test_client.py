"""The client alone: sandboxes, commands, sessions, files, and its own exceptions."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import daytona
import pytest
from conftest import settings
from daemon import wait_until
from daytona import (
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    Daytona,
    DaytonaError,
    FileDownloadRequest,
    FileUpload,
    SessionExecuteRequest,
)
from daytona._sync.process import Process
from raw import Daemon

VERSION = tuple(int(part) for part in importlib.metadata.version("daytona").split(".")[:2])
#: From here on a list is gone through with a cursor.
CURSOR = VERSION >= (0, 180)
#: From here on failures inside of a sandbox have classes of their own.
CODES = hasattr(daytona.common.errors, "DaytonaFileNotFoundError")


def raised(name: str) -> Any:
    """The exception class of that name; the general one before the client had it."""
    return getattr(daytona.common.errors, name, DaytonaError)


def printed(text: str) -> str:
    """What a one-shot command that wrote ``text`` results in. Older clients take it apart by lines, and lose the end of the last."""
    return "\n".join(text.splitlines()) if hasattr(Process, "_parse_output") else text


def listed(client: Any, labels: dict[str, str], limit: int = 10) -> list[str]:
    """The ids of all sandboxes with these labels."""
    if CURSOR:
        from daytona import ListSandboxesQuery

        return [sandbox.id for sandbox in client.list(ListSandboxesQuery(labels=labels, limit=limit))]
    ids: list[str] = []
    page = 1
    while True:
        answer = client.list(labels=labels, page=page, limit=limit)
        ids += [sandbox.id for sandbox in answer.items]
        if page >= answer.total_pages:
            assert answer.total == len(ids)
            return ids
        page += 1


def finished(sb: Any, session: str, command: str) -> Any:
    """A session's command, once it is over."""
    wait_until(lambda: sb.process.get_session_command(session, command).exit_code is not None, 30)
    return sb.process.get_session_command(session, command)


def test_a_sandbox_is_started_when_create_returns(sb: Any) -> None:
    assert str(getattr(sb.state, "value", sb.state)) == "started"
    assert len(sb.id) == 36 and sb.cpu >= 1 and sb.memory >= 1
    assert sb.process.exec("echo hello").result == printed("hello\n")


def policy_in(sb: Any) -> Any:
    return json.loads(sb.fs.download_file("/run/shoal/network.json"))


def test_the_network_is_open_unless_the_caller_says_otherwise(sb: Any, client: Any) -> None:
    assert policy_in(sb)["mode"] == "open", "as the vendor has it"
    closed = client.create(CreateSandboxFromSnapshotParams(network_block_all=True))
    try:
        assert closed.network_block_all
        done = closed.process.exec("bash -c 'exec 3<>/dev/tcp/192.0.2.1/80' 2>&1")
        assert done.exit_code != 0 and "unreachable" in done.result
        if hasattr(closed, "update_network_settings"):
            closed.update_network_settings(network_allow_list="192.0.2.0/24")
            policy = policy_in(closed)
            assert (policy["mode"], [rule["to"] for rule in policy["rules"]]) == ("none", ["192.0.2.0/24"])
    finally:
        client.delete(closed)


def test_what_was_asked_for_is_echoed(client: Any) -> None:
    params = CreateSandboxFromSnapshotParams(
        name="echoed",
        labels={"thread_id": "a b/c", "kind": "ü"},
        env_vars={"GREETING": "hi there"},
        auto_stop_interval=0,
        auto_archive_interval=60,
        auto_delete_interval=3600,
    )
    sandbox = client.create(params)
    try:
        found = client.get("echoed")
        assert found.id == sandbox.id == client.get(sandbox.id).id
        assert found.labels["thread_id"] == "a b/c" and found.labels["kind"] == "ü"
        assert (found.auto_stop_interval, found.auto_archive_interval, found.auto_delete_interval) == (0, 60, 3600)
        assert found.process.exec("echo $GREETING").result == printed("hi there\n")
        with pytest.raises(raised("DaytonaConflictError"), match="exists already"):
            client.create(CreateSandboxFromSnapshotParams(name="echoed"))
        found.set_labels({"only": "this"})
        found.set_autostop_interval(30)
        found.set_auto_delete_interval(-1)
        found.refresh_data()
        assert found.labels == {"only": "this"}
        assert (found.auto_stop_interval, found.auto_delete_interval) == (30, -1)
    finally:
        client.delete(sandbox)


def test_an_image_is_one_that_the_daemon_knows(client: Any) -> None:
    sandbox = client.create(CreateSandboxFromImageParams(image="debian:12"))
    try:
        assert sandbox.process.exec("echo from an image").result == printed("from an image\n")
    finally:
        client.delete(sandbox)
    with pytest.raises(DaytonaError, match="no-such-host.invalid"):
        client.create(CreateSandboxFromImageParams(image="no-such-host.invalid/x:1"))


def test_an_image_is_built_from_its_steps(client: Any) -> None:
    image = daytona.Image.base("debian:12").run_commands("echo built > /etc/built").env({"STEP": "one"})
    for _ in range(2):
        sandbox = client.create(CreateSandboxFromImageParams(image=image), timeout=150)
        try:
            assert sandbox.process.exec("cat /etc/built; echo $STEP").result == printed("built\none\n")
        finally:
            client.delete(sandbox)


def test_what_does_not_exist_and_who_may_not_ask(client: Any, daemon: Daemon) -> None:
    for missing in ("missing", "00000000-0000-4000-8000-000000000000"):
        with pytest.raises(raised("DaytonaNotFoundError"), match="does not exist"):
            client.get(missing)
    with pytest.raises(DaytonaError, match="no-such-snapshot"):
        client.create(CreateSandboxFromSnapshotParams(snapshot="no-such-snapshot"))
    with settings(daemon, key="a-key-that-nobody-has-made-here"):
        with pytest.raises(raised("DaytonaAuthenticationError"), match="key"):
            Daytona().create()


def test_sandboxes_are_found_by_labels(client: Any) -> None:
    labels = {"crowd": "of-labels", "thread_id": "7"}
    made = [client.create(CreateSandboxFromSnapshotParams(labels=labels)) for _ in range(3)]
    other = client.create(CreateSandboxFromSnapshotParams(labels={"crowd": "another"}))
    try:
        assert sorted(listed(client, labels, limit=1)) == sorted(sandbox.id for sandbox in made)
        assert listed(client, {"crowd": "of-labels", "thread_id": "8"}) == []
        if hasattr(client, "find_one"):
            assert client.find_one(labels={"crowd": "another"}).id == other.id
            with pytest.raises(DaytonaError):
                client.find_one(labels={"crowd": "nowhere"})
        if CURSOR:
            from daytona import ListSandboxesQuery
            from daytona_api_client import SandboxState

            by_state = client.list(ListSandboxesQuery(labels=labels, states=[SandboxState.STARTED]))
            assert len(list(by_state)) == 3
            assert list(client.list(ListSandboxesQuery(labels=labels, states=[SandboxState.STOPPED]))) == []
    finally:
        for sandbox in (*made, other):
            client.delete(sandbox)


def test_a_deleted_sandbox_is_gone(client: Any) -> None:
    sandbox = client.create()
    client.delete(sandbox)
    with pytest.raises(raised("DaytonaNotFoundError")):
        client.get(sandbox.id)
    with pytest.raises(DaytonaError, match="does not exist"):
        sandbox.process.exec("true")


def test_a_stopped_sandbox_keeps_its_files(sb: Any, client: Any) -> None:
    sb.process.create_session("ends")
    sb.process.execute_session_command("ends", SessionExecuteRequest(command="sleep 4545", run_async=True))
    sb.fs.upload_file(b"kept", "/tmp/kept")
    sb.stop()
    assert str(getattr(sb.state, "value", sb.state)) == "stopped"
    assert client.get(sb.id).state == sb.state
    sb.start()
    assert str(getattr(sb.state, "value", sb.state)) == "started"
    assert sb.fs.download_file("/tmp/kept") == b"kept"
    assert sb.process.exec("pgrep -f 'sleep 454[5]' || echo none").result == printed("none\n")
    sb.stop()
    assert sb.process.exec("cat /tmp/kept").result == "kept", "a command starts it again"


def test_an_ephemeral_sandbox_is_gone_when_it_is_stopped(client: Any) -> None:
    sandbox = client.create(CreateSandboxFromSnapshotParams(auto_delete_interval=0))
    assert client.get(sandbox.id).auto_delete_interval == 0
    sandbox.stop()
    with pytest.raises(raised("DaytonaNotFoundError")):
        client.get(sandbox.id)


def test_commands_have_codes_directories_and_variables(sb: Any) -> None:
    done = sb.process.exec("echo o; echo e >&2; exit 3")
    assert done.exit_code == 3 and done.result == printed("o\ne\n")
    # Older clients put all into one argument of a shell of their own: without blanks in values, and 128 KiB at most.
    wrapped = hasattr(Process, "_parse_output")
    value = "1" if wrapped else "1 'x'"
    assert sb.process.exec("pwd; echo $A", cwd="/usr", env={"A": value}).result == printed(f"/usr\n{value}\n")
    assert sb.process.exec("printf x", cwd="/nowhere").exit_code != 0
    length = 50_000 if wrapped else 200_000
    assert sb.process.exec(f"printf %s '{'x' * length}' | wc -c").result.strip() == str(length)


def test_a_command_that_takes_too_long_is_ended(sb: Any) -> None:
    began = time.monotonic()
    with pytest.raises(raised("DaytonaProcessExecutionTimeoutError")):
        sb.process.exec("sleep 4242", timeout=1)
    assert time.monotonic() - began < 10
    assert sb.process.exec("pgrep -f 'sleep 424[2]' || echo none").result == printed("none\n")


def test_a_session_is_one_shell(sb: Any) -> None:
    run = session(sb, "one")
    assert run("cd /usr; export A=1; f() { echo f $A; }")[0] == 0
    assert run("pwd; f") == (0, "/usr\nf 1\n", "")
    assert run("echo out; echo err >&2; (exit 4)") == (4, "out\n", "err\n")
    assert run("cat <<'END'\nit's \"$A\" `x`\nEND")[1] == "it's \"$A\" `x`\n"
    assert run("if")[0] == 2, "a syntax error ends only the command"
    assert run("sleep 300 & echo started")[:2] == (0, "started\n")
    assert run("jobs | wc -l")[1].strip() == "1"
    assert run("printf 'a\\0b\\377'")[1] == "a\0b\ufffd"
    commands = sb.process.get_session("one").commands
    assert len(commands) == 8 and commands[0].command.startswith("cd /usr") and commands[2].exit_code == 4
    assert "one" in [session.session_id for session in sb.process.list_sessions()]
    assert run("exit 7")[0] == 7
    with pytest.raises(raised("DaytonaGoneError")):
        run("echo after the end")
    assert sb.process.get_session("one").commands[2].exit_code == 4, "what ran can still be read"
    sb.process.delete_session("one")


def session(sb: Any, name: str) -> Callable[[str], tuple[int, str, str]]:
    """Makes a session; what runs a command in it says code, stdout and stderr."""
    sb.process.create_session(name)

    def run(command: str) -> tuple[int, str, str]:
        answer = sb.process.execute_session_command(name, SessionExecuteRequest(command=command))
        logs = sb.process.get_session_command_logs(name, answer.cmd_id)
        assert (answer.stdout or "", answer.stderr or "") == (logs.stdout or "", logs.stderr or "")
        return answer.exit_code, logs.stdout or "", logs.stderr or ""

    return run


def test_a_command_of_a_session_goes_on_by_itself(sb: Any) -> None:
    sb.process.create_session("async")
    command = SessionExecuteRequest(command="echo begun; read x; echo got $x; exit 5", run_async=True)
    started = sb.process.execute_session_command("async", command)
    assert sb.process.get_session_command("async", started.cmd_id).exit_code is None
    wait_until(lambda: "begun" in (sb.process.get_session_command_logs("async", started.cmd_id).stdout or ""))
    if hasattr(sb.process, "send_session_command_input"):
        sb.process.send_session_command_input("async", started.cmd_id, "it")
    done = finished(sb, "async", started.cmd_id)
    assert done.exit_code == 5
    assert sb.process.get_session_command_logs("async", started.cmd_id).stdout == "begun\ngot it\n"
    with pytest.raises(raised("DaytonaGoneError")):
        sb.process.send_session_command_input("async", started.cmd_id, "too late")


def test_commands_of_a_session_run_one_after_the_other(sb: Any) -> None:
    sb.process.create_session("queue")
    started = [
        sb.process.execute_session_command(
            "queue", SessionExecuteRequest(command=f"echo {number} >> /tmp/order; sleep 0.1", run_async=True)
        ).cmd_id
        for number in range(5)
    ]
    assert len(set(started)) == 5
    for command in started:
        assert finished(sb, "queue", command).exit_code == 0
    assert sb.process.exec("tr -d '\\n' < /tmp/order").result == printed("01234")


def test_what_waits_behind_an_exit_does_not_wait_forever(sb: Any) -> None:
    sb.process.create_session("left")
    first = SessionExecuteRequest(command="sleep 0.5; exit 3", run_async=True)
    second = SessionExecuteRequest(command="echo never", run_async=True)
    ids = [sb.process.execute_session_command("left", request).cmd_id for request in (first, second)]
    assert finished(sb, "left", ids[0]).exit_code == 3
    assert finished(sb, "left", ids[1]).exit_code != 0


def test_deleting_a_session_ends_what_runs_in_it(sb: Any) -> None:
    sb.process.create_session("doomed")
    with pytest.raises(raised("DaytonaConflictError")):
        sb.process.create_session("doomed")
    sb.process.execute_session_command("doomed", SessionExecuteRequest(command="sleep 4343", run_async=True))
    wait_until(lambda: sb.process.exec("pgrep -f 'sleep 434[3]'").exit_code == 0)
    began = time.monotonic()
    sb.process.delete_session("doomed")
    assert time.monotonic() - began < 2
    wait_until(lambda: sb.process.exec("pgrep -f 'sleep 434[3]'").exit_code != 0)
    with pytest.raises(raised("DaytonaNotFoundError")):
        sb.process.get_session("doomed")
    sb.process.create_session("doomed")
    assert sb.process.get_session("doomed").commands in (None, []), "the same name is another session"
    for odd in ("entrypoint", ""):
        with pytest.raises(DaytonaError):
            sb.process.create_session(odd)


def test_logs_are_followed_as_they_come(sb: Any) -> None:
    sb.process.create_session("logs")
    text = "for i in 1 2 3; do echo out $i; echo err $i >&2; sleep 0.2; done"
    started = sb.process.execute_session_command("logs", SessionExecuteRequest(command=text, run_async=True))
    out: list[str] = []
    err: list[str] = []
    asyncio.run(sb.process.get_session_command_logs_async("logs", started.cmd_id, out.append, err.append))
    assert "".join(out) == "out 1\nout 2\nout 3\n"
    assert "".join(err) == "err 1\nerr 2\nerr 3\n"
    again: list[str] = []
    asyncio.run(sb.process.get_session_command_logs_async("logs", started.cmd_id, again.append, lambda _: None))
    assert "".join(again) == "".join(out), "whoever comes later gets all of it"


def test_files_up_and_down(sb: Any) -> None:
    # Before 0.167 the client itself cannot download a file whose name is not ASCII.
    unicode = "/tmp/up/text ü€.txt" if VERSION >= (0, 167) else "/tmp/up/text u.txt"
    files = {
        unicode: "ünïcode".encode(),
        "/tmp/up/quote\"s and \\.bin": bytes(range(256)) * 4096,
        "/tmp/up/deeper/empty": b"",
    }
    sb.fs.upload_files([FileUpload(source=content, destination=path) for path, content in files.items()])
    answers = sb.fs.download_files([FileDownloadRequest(source=path) for path in files])
    assert {answer.source: answer.result for answer in answers} == files
    mixed = sb.fs.download_files([FileDownloadRequest(source=path) for path in (unicode, "/none", "/tmp")])
    assert [answer.error is None for answer in mixed] == [True, False, False]
    with pytest.raises(raised("DaytonaFileNotFoundError") if CODES else DaytonaError):
        sb.fs.download_file("/none")
    sb.fs.upload_file(b"relative", "relative.txt")
    assert sb.process.exec("cat relative.txt").result == printed("relative"), "where commands run"
    with pytest.raises(DaytonaError):
        sb.fs.upload_files([FileUpload(source=b"x", destination="/tmp/up"), FileUpload(source=b"y", destination="/tmp/y")])
    assert sb.fs.download_file("/tmp/y") == b"y", "one failure does not take the others with it"


def test_a_large_file_up_and_down(sb: Any) -> None:
    content = b"0123456789abcdef" * (40 << 16)
    sb.fs.upload_file(content, "/tmp/large")
    assert sb.process.exec("wc -c < /tmp/large").result.strip() == str(len(content))
    assert sb.fs.download_file("/tmp/large") == content


def test_directories_and_searches(sb: Any) -> None:
    sb.fs.create_folder("/tmp/d/e", "755")
    sb.fs.upload_file(b"one needle\ntwo\n", "/tmp/d/e/a.txt")
    sb.fs.upload_file(b"x", "/tmp/d/b.py")
    assert {(entry.name, entry.is_dir) for entry in sb.fs.list_files("/tmp/d")} == {("e", True), ("b.py", False)}
    info = sb.fs.get_file_info("/tmp/d/b.py")
    assert (info.name, info.size, info.permissions, info.mode) == ("b.py", 1, "0644", "-rw-r--r--")
    found = sb.fs.find_files("/tmp/d", "needle")
    assert [(match.file, match.line, match.content) for match in found] == [("/tmp/d/e/a.txt", 1, "one needle")]
    assert sb.fs.search_files("/tmp/d", "*.txt").files == ["/tmp/d/e/a.txt"]
    replaced = sb.fs.replace_in_files(["/tmp/d/e/a.txt", "/none"], "needle", "thread")
    assert [result.success for result in replaced] == [True, False]
    assert sb.fs.download_file("/tmp/d/e/a.txt") == b"one thread\ntwo\n"
    sb.fs.move_files("/tmp/d/b.py", "/tmp/d/c.py")
    with pytest.raises(raised("DaytonaConflictError")):
        sb.fs.move_files("/tmp/d/c.py", "/tmp/d/e/a.txt")
    with pytest.raises(DaytonaError):
        sb.fs.delete_file("/tmp/d")
    sb.fs.delete_file("/tmp/d/c.py")
    sb.fs.delete_file("/tmp/d", recursive=True)
    with pytest.raises(raised("DaytonaNotFoundError")):
        sb.fs.get_file_info("/tmp/d")


def test_the_same_with_asyncio(switched: Daemon) -> None:
    from daytona import AsyncDaytona

    async def everything() -> None:
        async with AsyncDaytona() as client:
            sandbox = await client.create()
            try:
                done = await asyncio.gather(*(sandbox.process.exec(f"echo {number}") for number in range(8)))
                assert [one.result for one in done] == [printed(f"{number}\n") for number in range(8)]
                name = "/tmp/ü x" if VERSION >= (0, 167) else "/tmp/u x"
                await sandbox.fs.upload_files([FileUpload(source=b"a b", destination=name)])
                assert await sandbox.fs.download_file(name) == b"a b"
                await sandbox.process.create_session("a")
                request = SessionExecuteRequest(command="echo in a session; exit 2")
                answer = await sandbox.process.execute_session_command("a", request)
                assert (answer.exit_code, answer.stdout) == (2, "in a session\n")
                await sandbox.process.delete_session("a")
            finally:
                await sandbox.delete()

    asyncio.run(everything())


def test_odd_arguments_are_never_our_failure(sb: Any, daemon: Daemon) -> None:
    toolbox = f"/daytona/toolbox/{sb.id}"
    for method, path, body in [
        ("POST", "/daytona/sandbox", {"cpu": -1}),
        ("POST", "/daytona/sandbox", {"cpu": "many"}),
        ("POST", "/daytona/sandbox", {"labels": {"a=b": "x"}}),
        ("POST", "/daytona/sandbox", {"env": {"a=b": "x"}}),
        ("POST", "/daytona/sandbox", {"autoDeleteInterval": -2}),
        ("POST", "/daytona/sandbox", {"buildInfo": {"dockerfileContent": "NONSENSE x\nFROM y"}}),
        ("POST", "/daytona/sandbox", {"name": "x" * 300}),
        ("POST", "/daytona/sandbox", {"gpu": 1}),
        ("GET", "/daytona/sandbox?labels=nonsense", None),
        ("GET", "/daytona/sandbox?limit=0", None),
        ("GET", "/daytona/sandbox?cursor=nonsense", None),
        ("GET", "/daytona/sandbox/%00", None),
        ("POST", f"/daytona/sandbox/{sb.id}/autostop/many", None),
        ("POST", f"/daytona/sandbox/{sb.id}/autostop/-1", None),
        ("POST", f"/daytona/sandbox/{sb.id}/fork", {}),
        ("GET", "/daytona/nowhere", None),
        ("PATCH", "/daytona/sandbox", {}),
        ("GET", "/daytona//sandbox", None),
        ("POST", f"{toolbox}/process/execute", {}),
        ("POST", f"{toolbox}/process/execute", {"command": "a\0b"}),
        ("POST", f"{toolbox}/process/execute", {"command": "true", "timeout": -1}),
        ("POST", f"{toolbox}/process/execute", {"command": "true", "cwd": "relative"}),
        ("POST", f"{toolbox}/process/session", {"sessionId": "x" * 300}),
        ("POST", f"{toolbox}/process/session/none/exec", {"command": "true"}),
        ("GET", f"{toolbox}/process/session/none/command/none", None),
        ("POST", f"{toolbox}/files/bulk-download", {"paths": []}),
        ("POST", f"{toolbox}/files/bulk-upload", {"not": "a form"}),
        ("GET", f"{toolbox}/files/info", None),
        ("GET", f"{toolbox}/files?path=/none", None),
        ("GET", f"{toolbox}/files?depth=100", None),
        ("DELETE", f"{toolbox}/files?path=/", None),
        ("GET", f"{toolbox}/nowhere", None),
    ]:
        status, answer = daemon.answer(method, path, body)
        assert 400 <= status < 500 or status == 501, f"{method} {path} {body}: {status} {answer}"
        assert answer["statusCode"] == status and answer["message"], answer
    status, answer = daemon.answer("POST", "/daytona/sandbox", raw=b"{broken")
    assert status == 400 and "JSON" in answer["message"]
    status, answer = daemon.answer("GET", "/daytona/sandbox", key="nobody-has-made-this-key")
    assert (status, answer["statusCode"]) == (401, 401)


def test_another_owner_sees_nothing(sb: Any, daemon: Daemon) -> None:
    key = daemon.ask("POST", "/v1/keys", {"owner": "eve"})["secret"]
    assert daemon.ask("GET", "/daytona/sandbox", key=key)["items"] == []
    for method, path in [
        ("GET", f"/daytona/sandbox/{sb.id}"),
        ("GET", f"/daytona/sandbox/{sb.name}"),
        ("DELETE", f"/daytona/sandbox/{sb.id}"),
        ("POST", f"/daytona/sandbox/{sb.id}/stop"),
        ("GET", f"/daytona/toolbox/{sb.id}/process/session"),
        ("GET", f"/daytona/toolbox/{sb.id}/files"),
    ]:
        assert daemon.answer(method, path, key=key)[0] == 404, path


def test_threads_share_a_client(sb: Any) -> None:
    results: list[str] = []

    def one(number: int) -> None:
        results.append(sb.process.exec(f"echo {number}").result)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [printed(f"{number}\n") for number in range(8)]
