"""The backend beside the helpers of the installed version, and a whole session of an agent on it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from deepagents import create_deep_agent
from deepagents.backends.sandbox import BaseSandbox
from harness import Daemon

from shoal import LifetimeRule, SandboxClient
from shoal._sync.transport import Transport
from shoal.deepagents import ShoalSandbox
from shoal.deepagents.backend import _WRITE_REPLACES


@pytest.fixture
def backend(client: SandboxClient) -> Iterator[ShoalSandbox]:
    """A backend on a fresh sandbox."""
    with client.sandbox() as sandbox:
        yield ShoalSandbox(sandbox)


def test_output_comes_in_the_order_in_which_it_was_written(backend: ShoalSandbox) -> None:
    done = backend.execute("for i in 1 2 3; do echo out $i; echo err $i >&2; done; exit 5")
    assert done.output == "out 1\nerr 1\nout 2\nerr 2\nout 3\nerr 3\n"
    assert (done.exit_code, done.truncated) == (5, False)
    assert backend.execute("if").exit_code != 0
    assert "syntax error" in backend.execute("if").output
    assert "line 3" in backend.execute("\n\nno-such-program").output


def test_a_timeout_is_124_with_what_was_written(backend: ShoalSandbox) -> None:
    done = backend.execute("echo part; sleep 1000", timeout=1)
    assert done.exit_code == 124
    assert done.output.startswith("part\n") and "timed out" in done.output


def test_stdin_is_empty_and_here_documents_work(backend: ShoalSandbox) -> None:
    assert backend.execute("cat; echo end").output == "end\n"
    assert backend.execute("cat <<'X'\nhello $HOME\nX\n").output == "hello $HOME\n"


def test_every_call_is_a_fresh_shell_in_the_working_directory(backend: ShoalSandbox) -> None:
    backend.execute("cd /tmp; export A=1")
    assert backend.execute("echo $PWD $A").output == "/workspace\n"


def test_a_command_that_cannot_start_is_an_answer(backend: ShoalSandbox) -> None:
    backend.execute("rm -r /workspace")
    done = backend.execute("true")
    assert done.exit_code not in (0, None) and "/workspace" in done.output
    assert asyncio.run(backend.aexecute("true")) == done


def test_bytes_survive_and_long_commands_work(backend: ShoalSandbox) -> None:
    assert backend.execute(r"printf 'a\000b\377'").output == "a\x00b\ufffd"
    text = "ü" * 100_000
    assert backend.execute(f"printf %s '{text}' | wc -c").output.strip() == "200000"


def test_output_beyond_the_bound_is_cut_and_says_so(backend: ShoalSandbox) -> None:
    done = backend.execute("head -c 12000000 /dev/zero | tr '\\0' x")
    assert (len(done.output), done.truncated) == (10 << 20, True)


def test_files_have_errors_of_their_own(backend: ShoalSandbox) -> None:
    up = backend.upload_files([("/workspace/a/b", b"1"), ("rel", b"2"), ("/workspace", b"3"), ("/workspace/c", b"4")])
    assert [response.error for response in up] == [None, "invalid_path", "is_directory", None]
    down = backend.download_files(["/workspace/a/b", "rel", "/workspace", "/workspace/none", "/workspace/c"])
    assert [response.error for response in down] == [None, "invalid_path", "is_directory", "file_not_found", None]
    assert [response.content for response in down] == [b"1", None, None, None, b"4"]
    assert asyncio.run(backend.aupload_files([("/workspace/d", b"5"), ("rel", b"")])) == [
        type(up[0])(path="/workspace/d"),
        type(up[0])(path="rel", error="invalid_path"),
    ]
    assert [response.error for response in asyncio.run(backend.adownload_files(["/workspace/d", "/x"]))] == [
        None,
        "file_not_found",
    ]


PREPARE = """
mkdir -p dir/sub 'dir/with space' empty; touch dir/file dir/.hidden 'dir/ünï'; ln -s sub dir/link; ln -s none dir/broken
mkfifo dir/fifo; touch plain
"""


@pytest.mark.parametrize(
    "path",
    ["/workspace/dir", "/workspace/dir/", "/workspace/empty", "/workspace/none", "/workspace/plain", "/workspace/dir/link",
     "/", "//workspace//dir", "/workspace/dir/..", "dir", "", "/workspace/dir/fifo", "/workspace/'; echo x; '"],
)  # fmt: skip
def test_ls_is_what_the_helper_gives(backend: ShoalSandbox, path: str) -> None:
    backend.execute(PREPARE)

    def comparable(result: Any) -> Any:
        entries = result.entries
        return result.error, entries if entries is None else sorted(entries, key=lambda entry: str(entry["path"]))

    helper = comparable(BaseSandbox.ls(backend, path))
    assert comparable(backend.ls(path)) == helper
    assert comparable(asyncio.run(backend.als(path))) == helper


@pytest.mark.skipif(not _WRITE_REPLACES, reason="deepagents 0.6 has a `write` of its own, which is not overridden")
def test_write_does_what_the_helper_does(client: SandboxClient) -> None:
    cases = [
        ("/workspace/new", "text\n"),
        ("/workspace/new", "again"),
        ("/workspace/deep/er/file", "ünï\r\n\x00"),
        ("/workspace/deep//er/", "x"),
        ("/workspace/dir", "x"),
        ("/workspace/new/below", "x"),
        ("/workspace/link", "through"),
        ("/workspace/it's", ""),
    ]
    seen = []
    for write in (BaseSandbox.write, ShoalSandbox.write):
        with client.sandbox() as sandbox:
            backend = ShoalSandbox(sandbox)
            backend.execute("mkdir dir; echo old > target; chmod 640 target; ln -s target link")
            results = [write(backend, path, content) for path, content in cases]
            tree = backend.execute(
                "find . -type f -printf '%p %m ' -exec sha256sum {} \\; | sort; readlink link"
            ).output
            seen.append(([(result.path, result.error is None) for result in results], tree))
    assert seen[0] == seen[1]


FILES: dict[str, bytes] = {
    "empty.txt": b"",
    "one.txt": b"one",
    "two.py": b"one\ntwo\n",
    "crlf.txt": b"one\r\ntwo\r\n\r\nfour",
    "cr.txt": b"one\rtwo\r\rthree",
    "mixed.md": "\ufeffgrüße\n\n\x00\x0b\x0c \u2028 x\n\n".encode(),
    "invalid.txt": b"one\n\xff\n",
    "invalid-later.txt": b"line\n" * 5000 + b"\xff\n",
    "long.log": b"".join(b"line %d\n" % n for n in range(5000)),
    "wide.json": b"x" * 300_000 + b"\ny\n",
    "large.csv": b"0123456789\n" * 120_000,
    "picture.png": bytes(range(256)),
    "unknown.kind": b"text\n",
    "Makefile": b"all:\n",
}
#: Each page costs a start of Python in the sandbox, so most files are asked for two.
PAGED = {"two.py", "crlf.txt", "mixed.md", "long.log"}
PAGES = [(0, 2000), (1, 1), (0, 3), (3, 100), (4999, 10), (5000, 10), (-1, 2), (0, 0), (0, -1)]


def test_read_is_what_the_helper_gives(backend: ShoalSandbox) -> None:
    backend.upload_files([(f"/workspace/{name}", content) for name, content in FILES.items()])
    backend.execute("mkdir dir.txt; ln -s one.txt link.txt; mkfifo fifo.txt")

    async def compare() -> None:
        for name in [*FILES, "none.txt", "dir.txt", "link.txt", "fifo.txt"]:
            for offset, limit in PAGES if name in PAGED else PAGES[:2]:
                path = f"/workspace/{name}"
                helper = await BaseSandbox.aread(backend, path, offset, limit)
                assert await backend.aread(path, offset, limit) == helper, (name, offset, limit)
                same = await asyncio.to_thread(backend.read, path, offset, limit)
                assert same == helper, (name, offset, limit)

    asyncio.run(compare())
    assert backend.read("one.txt") == BaseSandbox.read(backend, "one.txt")


TREE = """
mkdir -p src/deep/er src/.hidden .git/objects 'with space' many; cd src
touch main.py deep/other.py deep/er/third.py .hidden/fourth.py .dot.py 'ünï.py' Upper.PY x.pyc deep/er/notes.md ../top.py
touch '../with space/a.py' ../.git/objects/b.py; mkdir dir.py; for n in 1 2 3; do touch ../many/$n.txt; done
"""
MORE = """
cd src; ln -s main.py link.py; ln -s none broken.py; ln -s /etc/passwd out.py; ln -s deep linked; mkfifo fifo.py
touch 'back\\\\slash.py' "$(printf 'new\\nline.py')" "$(printf 'not-utf8-\\377.py')"; ln -s src ../way
"""
PATTERNS = [
    "*.py", "**/*.py", "*", "**/*", "src/*.py", "src/**/*.py", "*/*.py", "main.py", "m*n.py", "**/deep/*", "*.txt", "none*",
    "**", "src/", "/src/*.py", "*.{py,md}", "[mt]*.py", "?op.py", ".*", "**/.hidden/*", "../*", "a**b", "", "src//*.py",
    "many/**", "src/deep/*", "src/**/er/*", "**/**/*.py", "**/x*",
]  # fmt: skip
ROOTS = ["/workspace", "/workspace/", "/workspace/src", "/workspace/none", "/workspace/top.py", "/workspace/way",
         "/workspace/src/..", "workspace", "/workspace//src"]  # fmt: skip


def test_glob_is_what_the_helper_gives(backend: ShoalSandbox) -> None:
    backend.execute(TREE)

    async def compare(patterns: list[str], roots: list[str]) -> None:
        for pattern, root in ((pattern, root) for root in roots for pattern in patterns):
            helper = await BaseSandbox.aglob(backend, pattern, root)
            assert await backend.aglob(pattern, root) == helper, (pattern, root)
            assert await asyncio.to_thread(backend.glob, pattern, root) == helper, (pattern, root)

    asyncio.run(compare([*PATTERNS, "*/*", "*/*/*.py"], ROOTS[:1]))
    backend.execute(MORE)
    asyncio.run(compare(PATTERNS, ROOTS[:1]))
    asyncio.run(compare(["*.py", "**/*.py", "*.txt"], ROOTS[1:]))


def run_nothing(monkeypatch: pytest.MonkeyPatch, helper: str) -> None:
    """From here on, neither commands nor the helper can be used."""
    monkeypatch.delattr(ShoalSandbox, "aexecute")
    monkeypatch.delattr(ShoalSandbox, "execute")
    monkeypatch.setattr(BaseSandbox, helper, None)


def test_a_plain_glob_runs_nothing_in_the_sandbox(backend: ShoalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.execute(TREE)
    run_nothing(monkeypatch, "glob")
    for pattern in ("*.py", "**/*.py", "src/**/*.py", "src/*.py", "none*", "*", "*/*"):
        assert backend.glob(pattern, "/workspace").error is None


LINES = """
mkdir -p src/deep/er .git/objects src/.hidden sub/.git 'with space' tmp; cd src
printf 'needle\\nno\\nneedle needle\\n' > a.py; printf 'x needle\\r\\nneedle' > deep/crlf.py; echo Needle > deep/er/upper.py
echo 'needle: 1:2' > 'with:colon.py'; echo needle > .hidden/h.py; echo needle > ../.git/objects/o; echo needle > .dot.py
echo 'n.edle *[x] $y' > special.txt; echo 'grüße needle' > 'ünï.md'; echo needle > '../with space/a b.py'
echo needle > ../sub/.git/f
ln -s a.py link.py; ln -s deep linked; ln -s none broken; mkfifo fifo; touch empty; : > ../tmp/none
printf '\\tneedle\\t\\n' > tabs.py
"""
BINARY = r"printf 'needle\000x\n' > src/binary.bin; printf 'a\000' > src/other.bin"
ODD = r"""
printf 'needle \377\n' > src/latin.txt
(echo needle; head -c 120000 /dev/zero | tr '\0' x; echo; printf '\000needle\n') > src/mixed
python3 -c "print('x' * 5000 + 'needle' + 'y' * 5000)" > src/long.txt; echo needle > "$(printf 'src/new\nline')"
echo needle > "$(printf 'src/not-utf8-\377')"
"""
GREPS: list[tuple[str, str | None, str | None]] = [
    ("needle", "/workspace", None), ("needle", "/workspace", "*.py"), ("needle", "/workspace", "a*"),
    ("needle", "/workspace/src", "*"), ("needle", "/workspace", "*.none"), ("needle", "/workspace/src/a.py", None),
    ("needle", "/workspace/src/a.py", "*.py"), ("needle", "/workspace/src/a.py", "*.txt"), ("none at all", "/workspace", None),
    ("n.edle", "/workspace", None), ("*[x]", "/workspace", None), ("$y", "/workspace", None), ("grüße", "/workspace", None),
    ("NEEDLE", "/workspace", None), ("needle", "/workspace/none", None), ("needle", "/workspace/src/linked", None),
    ("needle", "/workspace/src/link.py", None), ("needle", "/workspace/src/broken", None), ("needle", "/workspace/.git", None),
    ("needle", "/workspace/sub", None), ("needle", "/workspace/sub/.git", None), ("needle", "/workspace/tmp", None),
    ("needle", "/workspace/with space", None), ("x needle", "/workspace", None), ("needle: 1:", "/workspace", None),
    ("needle\t", "/workspace", None), ("needle\nno", "/workspace", None), ("-e", "/workspace", None),
    (" ", "/workspace/src", None),
    ("needle", "/workspace/", None), ("needle", "/workspace//src", None), ("needle", "src", None), ("needle", None, None),
    ("needle", "/workspace", "src/*.py"), ("needle", "/workspace", "**/*.py"), ("needle", "/workspace", "*.{py,md}"),
    ("needle", "/workspace", "[a-d]*.py"), ("needle", "/workspace", "?.py"), ("needle", "/workspace/src/empty", None),
    ("x" * 5000, "/workspace", None),
]  # fmt: skip


def found_lines(result: Any) -> Any:
    """A result, whose order nobody promises."""
    matches = result.matches
    by_path = None if matches is None else sorted(matches, key=lambda match: (match["path"], match["line"]))
    return result.error, getattr(result, "truncated", None), by_path


def test_grep_is_what_the_helper_gives(backend: ShoalSandbox) -> None:
    async def compare(greps: list[tuple[str, str | None, str | None]], **more: Any) -> None:
        for wish in greps:
            helper = found_lines(await BaseSandbox.agrep(backend, *wish, **more))
            assert found_lines(await backend.agrep(*wish, **more)) == helper, (wish, more)
            assert found_lines(await asyncio.to_thread(backend.grep, *wish, **more)) == helper, (wish, more)

    for prepare in (LINES, BINARY, ODD):
        backend.execute(prepare)
        asyncio.run(compare(GREPS if prepare is LINES else GREPS[:6]))
    if "max_count" in inspect.signature(BaseSandbox.grep).parameters:
        backend.execute("rm -r src/mixed src/latin.txt src/n*")
        asyncio.run(compare([("needle", "/workspace/src/deep", None)], max_count=5))
        asyncio.run(compare([("needle", "/workspace", None)], max_count=1000))
        capped = backend.grep("needle", "/workspace", max_count=2)
        assert capped.matches is not None and len(capped.matches) == 2 and capped.truncated


def test_a_plain_grep_runs_nothing_in_the_sandbox(backend: ShoalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.execute(LINES + BINARY)
    run_nothing(monkeypatch, "grep")
    for wish in (("needle", "/workspace"), ("needle", "/workspace/src", "*.py"), ("grüße", "/workspace")):
        assert backend.grep(*wish).matches


EDITS: list[tuple[str, str, str, bool]] = [
    ("/workspace/a.py", "one", "1", False),
    ("/workspace/a.py", "two", "2", False),
    ("/workspace/a.py", "two", "2", True),
    ("/workspace/a.py", "none", "", False),
    ("/workspace/a.py", "", "x", False),
    ("/workspace/a.py", "aa", "a", True),
    ("/workspace/crlf.txt", "one\ntwo", "1\n2", False),
    ("/workspace/crlf.txt", "four\r\n", "4\n", False),
    ("/workspace/invalid.txt", "one", "1", False),
    ("/workspace/link.txt", "x", "y", False),
    ("/workspace/hard", "x", "y", False),
    ("/workspace/none.txt", "x", "y", False),
    ("/workspace", "x", "y", False),
    ("a.py", "three", "3", False),
    ("/workspace/large", "b", "c" * 60_000, False),
    ("/workspace/lf.txt", "one\r\ntwo", "1\r\n2", False),
    ("/workspace/mixed.txt", "a\nb", "c\nd", True),
    ("/workspace/mixed.txt", "a\nb", "c\nd", True),
    ("/workspace/mixed.txt", "e\n\r\nf", "g\n\r\n\n", False),
    ("/workspace/a.py", "three", "ünï \U0001f600 \x00 $(id) '\"\\", False),
    ("/workspace/a.py", "ünï", "ünï", False),
    ("/workspace/a.py", "\n", "\n\n", False),
    ("/workspace/empty", "x", "y", False),
    ("/workspace//a.py", "1", "one", False),
    ("/workspace/a.py/", "one", "1", False),
    ("/workspace/a.py/below", "one", "1", False),
    ("/workspace/broken", "x", "y", False),
    ("/workspace/circle", "x", "y", False),
    ("/workspace/fifo", "x", "y", False),
    ("/workspace/..", "x", "y", False),
    ("/workspace/huge", "x", "y", False),
    ("/workspace/large", "a" * 1_100_000, "y", False),
    ("/workspace/large", "c", "d", True),
]


def test_edit_does_what_the_helper_does(client: SandboxClient) -> None:
    seen = []

    async def awaited(backend: ShoalSandbox, *edit: Any) -> Any:
        return await backend.aedit(*edit)

    for way in (BaseSandbox.edit, ShoalSandbox.edit, lambda *edit: asyncio.run(awaited(*edit))):
        with client.sandbox() as sandbox:
            backend = ShoalSandbox(sandbox)
            backend.upload_files(
                [
                    ("/workspace/a.py", b"one\ntwo\ntwo\nthree\naaaaa\n"),
                    ("/workspace/crlf.txt", b"one\r\ntwo\r\nthree\r\nfour\r\n"),
                    ("/workspace/invalid.txt", b"one\xff"),
                    ("/workspace/target.txt", b"x\n"),
                    ("/workspace/hard", b"x\n"),
                    ("/workspace/large", b"a" * 300_000 + b"b"),
                    ("/workspace/lf.txt", b"one\ntwo\n"),
                    ("/workspace/mixed.txt", b"a\nb a\r\nb a\nb e\r\n\r\nf"),
                    ("/workspace/empty", b""),
                ]
            )
            backend.execute(
                "ln -s target.txt link.txt; ln hard second; chmod 640 a.py; chown 5:6 a.py; ln -s none broken; "
                "ln -s circle circle; mkfifo fifo; truncate -s 17M huge; echo x >> huge"
            )
            results = [way(backend, *edit) for edit in EDITS]
            tree = backend.execute("find . -type f -printf '%p %m %U %G %n ' -exec sha256sum {} \\; | sort").output
            seen.append(([(result.path, result.error, result.occurrences) for result in results], tree))
    assert seen[0] == seen[1] == seen[2]


def test_an_edit_is_one_request_and_runs_nothing(backend: ShoalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.upload_files([("/workspace/f.txt", b"one two two\r\n"), ("/workspace/binary", b"\xff")])
    requests: list[str] = []

    def counted(self: Transport, method: str, path: str, **more: Any) -> Any:
        requests.append(path)
        return call(self, method, path, **more)

    call = Transport.call
    monkeypatch.setattr(Transport, "call", counted)
    for path, old, error in [
        ("/workspace/f.txt", "one", None),
        ("/workspace/f.txt", "two\n", None),
        ("/workspace/f.txt", "none", "not found"),
        ("/workspace/f.txt", "1", "multiple times"),
        ("/workspace/none", "one", "not found"),
        ("/workspace/binary", "one", "not a text file"),
        ("/workspace", "one", "not a regular file"),
    ]:
        requests.clear()
        said = backend.edit(path, old, "1\n1")
        assert (error or "None") in str(said.error), (path, old)
        assert len(requests) == 1 and "/files/edit?" in requests[0], (path, old)


def test_edits_of_one_file_at_once_are_all_made(backend: ShoalSandbox) -> None:
    numbers = range(20)
    backend.write("/workspace/f.txt", "".join(f"<{number}>\n" for number in numbers))

    async def edit() -> list[Any]:
        edits = (backend.aedit("/workspace/f.txt", f"<{number}>", f"[{number}]") for number in numbers)
        return list(await asyncio.gather(*edits))

    assert [result.error for result in asyncio.run(edit())] == [None] * len(numbers)
    assert backend.execute("cat f.txt").output == "".join(f"[{number}]\n" for number in numbers)


def test_an_agent_writes_a_program_sees_it_fail_and_mends_it(backend: ShoalSandbox) -> None:
    from scripted_model import SESSION, ScriptedModel

    for invoke in ("invoke", "ainvoke"):
        agent = create_deep_agent(model=ScriptedModel(), backend=backend)
        wish: Any = {"messages": [{"role": "user", "content": "print the tenth Fibonacci number"}]}
        state = agent.invoke(wish) if invoke == "invoke" else asyncio.run(agent.ainvoke(wish))
        said = [message.text for message in state["messages"] if message.type == "tool"]
        assert len(said) == len(SESSION)
        write, broke, found, edited, read, ran, listed, globbed = said
        assert "fib.py" in write
        assert "RecursionError" in broke or "AssertionError" in broke
        assert "exit code 1" in broke
        assert "fib.py" in found
        assert "n - 2" in read and "error" not in edited.lower()
        assert "55" in ran and "exit code 0" in ran
        assert "/workspace/answer.txt" in listed
        assert "fib.py" in globbed
        assert state["messages"][-1].text == "all is done"
        (artefact,) = backend.download_files(["/workspace/answer.txt"])
        assert artefact.content == b"55\n"
        backend.execute("rm -r src answer.txt")


def test_a_thread_has_its_sandbox_by_its_labels(daemon: Daemon) -> None:
    with daemon.client() as client:

        def backend_of(thread: str) -> ShoalSandbox:
            idle = [LifetimeRule.idle(1800)]
            return ShoalSandbox(client.get_or_create({"app": "chat", "thread": thread}, lifetime=idle))

        backend_of("7").write("/workspace/memory", "likes tea")
        assert backend_of("7").execute("cat memory").output == "likes tea"
        assert backend_of("8").execute("cat memory").exit_code == 1
        for sandbox in client.list_sandboxes(labels={"app": "chat"}):
            sandbox.delete()
