"""Contexts: programs, interpreters and terminals, in one request and over a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from daemon import wait_until
from sandbox0 import APIError, CmdOptions, RunOptions
from sandbox0.apispec.models.create_context_request import CreateContextRequest


def shell(script: str, **more: Any) -> tuple[str, CmdOptions]:
    return "sh", CmdOptions(command=["sh", "-c", script], **more)


def made(sandbox: Any, **request: Any) -> str:
    return sandbox.create_context(CreateContextRequest.from_dict(request)).id


def test_a_program_has_a_code_and_two_streams(sandbox: Any) -> None:
    done = sandbox.cmd(*shell("echo out; echo err >&2; exit 3"))
    assert (done.exit_code, done.stdout, done.stderr, done.state) == (3, "out\n", "err\n", "crashed")
    assert sorted(done.output_raw.split()) == ["err", "out"]
    assert sandbox.cmd("echo 'two words' 3").stdout == "two words 3\n"
    assert sandbox.cmd("true").state == "stopped"
    assert (sandbox.cmd(*shell("kill -9 $$")).exit_code, sandbox.cmd(*shell("kill -9 $$")).state) == (-1, "killed")


def test_directories_and_variables(sandbox: Any) -> None:
    sandbox.mkdir("sub")
    assert sandbox.cmd("pwd", CmdOptions(cwd="sub")).stdout == "/workspace/sub\n"
    assert sandbox.cmd("pwd", CmdOptions(cwd="/tmp")).stdout == "/tmp\n"
    assert sandbox.cmd(*shell("echo $X", env_vars={"X": "ü"})).stdout == "ü\n"
    for wrong in (CmdOptions(cwd="/none"), CmdOptions(command=["a-program-that-nobody-has"])):
        with pytest.raises(APIError) as error:
            sandbox.cmd("x", wrong)
        assert error.value.status_code == 400 and "create_failed" in error.value.message


def test_a_time_that_is_over_keeps_what_was_written(sandbox: Any) -> None:
    done = sandbox.cmd(*shell("echo begun; sleep 600", ttl_sec=1))
    assert (done.exit_code, done.state, done.stdout) == (124, "killed", "begun\n")
    done = sandbox.cmd(*shell("echo begun; sleep 600", idle_timeout_sec=1))
    assert (done.exit_code, done.stdout) == (124, "begun\n")


def test_much_output_and_what_is_no_text(sandbox: Any) -> None:
    done = sandbox.cmd(*shell("head -c 3000000 /dev/zero | tr '\\0' x"))
    assert len(done.stdout) == 3_000_000
    assert sandbox.cmd(*shell("printf 'a\\377b\\000c'")).stdout == "a\ufffdb\x00c"


def test_a_script_longer_than_an_argument_may_be(sandbox: Any) -> None:
    script = f": '{'x' * 300_000}'; echo long; pwd"
    assert sandbox.cmd("bash", CmdOptions(command=["bash", "-lc", script])).stdout == "long\n/workspace\n"


def test_contexts_are_found_written_to_and_deleted(sandbox: Any) -> None:
    started = sandbox.cmd("cat", CmdOptions(wait=False))
    assert started.state in ("starting", "running") and started.exit_code is None
    assert [one.id for one in sandbox.list_contexts()] == [started.context_id]
    sandbox.context_input(started.context_id, "a line\n")
    wait_until(lambda: sandbox.get_context(started.context_id).stdout == "a line\n")
    sandbox.context_signal(started.context_id, "SIGTERM")
    wait_until(lambda: not sandbox.get_context(started.context_id).running)
    with pytest.raises(APIError) as error:
        sandbox.context_input(started.context_id, "more\n")
    assert error.value.status_code == 410
    again = sandbox.restart_context(started.context_id)
    assert (again.id, again.running) == (started.context_id, True)
    sandbox.context_input(started.context_id, "of the second run\n")
    wait_until(lambda: sandbox.get_context(started.context_id).stdout == "of the second run\n")
    assert len(sandbox.list_contexts()) == 1
    with pytest.raises(APIError) as error:
        sandbox.context_resize(started.context_id, 10, 10)
    assert error.value.status_code == 409 and "pty_unavailable" in error.value.message
    sandbox.delete_context(started.context_id)
    for call in (sandbox.get_context, sandbox.delete_context):
        with pytest.raises(APIError) as error:
            call(started.context_id)
        assert error.value.status_code == 404 and "context_not_found" in error.value.message
    assert sandbox.list_contexts() == []


def test_a_stream_has_everything_from_the_start(sandbox: Any) -> None:
    stream = sandbox.cmd_stream(*shell("echo early; echo err >&2; read line; echo got $line; exit 5"))
    seen: dict[str, str] = {}
    for output in stream.iter_outputs():
        seen[output.source] = seen.get(output.source, "") + output.data
        if seen.get("stdout") == "early\n" and seen.get("stderr") == "err\n" and "sent" not in seen:
            seen["sent"] = "yes"
            stream.send_input("words\n")
    done = stream.wait()
    assert (seen["stdout"], seen["stderr"]) == ("early\ngot words\n", "err\n")
    assert (done.exit_code, done.state) == (5, "crashed")
    # Whoever comes later gets the same.
    again = sandbox.connect_ws_context(stream.context_id)
    assert "".join(one.data for one in again.iter_outputs() if one.source == "stdout") == "early\ngot words\n"
    assert again.wait().exit_code == 5


def test_a_large_stream_comes_in_small_messages(sandbox: Any) -> None:
    stream = sandbox.cmd_stream(*shell("head -c 4000000 /dev/zero | tr '\\0' '\\001'"))
    assert sum(len(output.data) for output in stream.iter_outputs()) == 4_000_000
    assert stream.wait().exit_code == 0


def test_a_terminal(sandbox: Any) -> None:
    stream = sandbox.cmd_stream("bash", CmdOptions(command=["bash", "--norc"], pty_rows=20, pty_cols=60))
    stream.send_input("stty size; exit 3\n")
    said = "".join(output.data for output in stream.iter_outputs())
    assert "20 60" in said and stream.wait().exit_code == 3
    stream = sandbox.cmd_stream("cat", CmdOptions(pty_rows=20, pty_cols=60))
    stream.send_resize(30, 90)
    sandbox.context_resize(stream.context_id, 31, 91)
    stream.send_signal("KILL")
    for output in stream.iter_outputs():
        assert output.source == "pty"
    assert stream.wait().state == "killed"


def test_what_is_wrong_on_a_stream_is_told_and_it_goes_on(sandbox: Any) -> None:
    stream = sandbox.cmd_stream("cat")
    for wrong in ("no json", '{"type":"signal","signal":"NOPE"}', '{"type":"resize","rows":1,"cols":1}', '{"type":"new"}'):
        stream._conn.send(wrong)
    told = [json.loads(stream._conn.recv())["type"] for _ in range(3)]
    assert told == ["error"] * 3
    stream.send_input("still here\n")
    assert next(stream.iter_outputs()).data == "still here\n"
    stream.close()


def test_python_keeps_its_scope(sandbox: Any) -> None:
    assert sandbox.run("python", "x = 41").output_raw == ""
    assert sandbox.run("python", "x + 1").output_raw == "42\n"
    text = "def double(n):\n    return 2 * n\nfor i in range(2):\n    print(double(i))\nprint('ü')"
    assert sandbox.run("python", text).output_raw == "0\n2\nü\n"
    assert "ZeroDivisionError" in sandbox.run("python", "1 / 0").output_raw
    assert "SyntaxError" in sandbox.run("python", "def").output_raw
    assert sandbox.run("python", "import os; os.system('echo from a child')").output_raw.startswith("from a child\n")
    assert sandbox.run("python", "x").output_raw == "41\n"
    # One context for all of it.
    assert [(str(one.type_), one.alias) for one in sandbox.list_contexts()] == [("repl", "python")]


def test_a_shell_keeps_its_scope(sandbox: Any) -> None:
    sandbox.run("bash", "cd /tmp; X='a b'")
    assert sandbox.run("bash", 'pwd; echo "$X"; echo err >&2').output_raw == "/tmp\na b\nerr\n"
    assert sandbox.run("bash", "cat; echo 'it has no stdin'").output_raw == "it has no stdin\n"


def test_an_interpreter_over_a_stream(sandbox: Any) -> None:
    context = made(sandbox, type="repl", repl={"alias": "python"}, env_vars={"A": "1"})
    assert sandbox.run("", "import os; os.environ['A']", RunOptions(context_id=context)).output_raw == "'1'\n"
    stream = sandbox.connect_ws_context(context)
    stream.send_input("print('one')\n", request_id="first")
    stream.send_input("print('two')\nraise SystemExit(4)", request_id="second")
    messages = []
    while not messages or "exit_code" not in messages[-1]:
        messages.append(json.loads(stream._conn.recv()))
    text = "".join(one["data"] for one in messages if one["type"] == "output")
    assert text == "'1'\none\ntwo\n"
    assert [one["request_id"] for one in messages if "request_id" in one][-1] == "first"
    assert messages[-1] == {"type": "done", "exit_code": 4, "state": "crashed"}
    with pytest.raises(APIError) as error:
        sandbox.context_exec(context, "1")
    assert error.value.status_code == 410


def test_interpreters_that_are_not_here_say_so(sandbox: Any) -> None:
    with pytest.raises(APIError) as error:
        sandbox.run("redis-cli", "PING")
    assert error.value.status_code == 400 and "use python" in error.value.message
    cat = sandbox.cmd("cat", CmdOptions(wait=False)).context_id
    with pytest.raises(APIError) as error:
        sandbox.context_exec(cat, "1")
    assert error.value.status_code == 409
