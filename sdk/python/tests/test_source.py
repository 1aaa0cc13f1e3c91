"""The source itself: what is generated is what would be generated, and the examples in it run."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import shoal
import shoal._archive
import shoal._core
import shoal._sync.client
import shoal._sync.command
import shoal._sync.files
import shoal._sync.images
import shoal._sync.pools
import shoal._sync.sandbox
import shoal._sync.templates
import shoal._sync.volumes
from shoal import SandboxClient
from shoal._core import OutputState, SseParser, query
from shoal.errors import SandboxAPIError

HERE = Path(__file__).resolve().parent.parent


def test_the_sync_client_is_what_the_async_one_says() -> None:
    subprocess.run([sys.executable, str(HERE / "generate_sync.py"), "--check"], check=True)


def test_both_clients_have_the_same_names() -> None:
    for plain in ("SandboxClient", "Sandbox", "CommandHandle", "BuildHandle", "Files"):
        one, two = getattr(shoal, plain), getattr(shoal, f"Async{plain}")
        public = [{name for name in dir(kind) if not name.startswith("_")} for kind in (one, two)]
        assert public[0] == public[1]


@pytest.mark.parametrize(
    "module",
    [
        shoal._archive,
        shoal._core,
        shoal.models,
        shoal._sync.client,
        shoal._sync.files,
        shoal._sync.images,
        shoal._sync.pools,
        shoal._sync.sandbox,
        shoal._sync.templates,
        shoal._sync.volumes,
    ],
    ids=lambda m: m.__name__,
)
def test_the_examples_in_docstrings_run(module: ModuleType, client: SandboxClient) -> None:
    globs = {**vars(shoal), "client": client}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    tested = 0
    for example in doctest.DocTestFinder().find(module, extraglobs=globs):
        # Each has a sandbox of its own.
        with client.sandbox() as own:
            example.globs["sb"] = own
            runner.run(example)
        tested += bool(example.examples)
    assert tested and runner.summarize(verbose=False).failed == 0


def test_events_come_out_however_they_are_cut() -> None:
    stream = b': ping\n\nid: 7\nevent: x\ndata: {"a":\ndata: 1}\n\ndata: "\xc3\xbc"\r\n\r\n'
    for size in range(1, len(stream)):
        parser = SseParser()
        events = [event for start in range(0, len(stream), size) for event in parser.feed(stream[start : start + size])]
        assert events == [("7", {"a": 1}), ("7", "ü")]


def test_a_byte_that_comes_twice_is_seen_once_and_a_gap_is_an_error() -> None:
    state = OutputState()
    seen = b""
    for offset, raw in ((0, b"abc"), (0, b"abc"), (1, b"bcde"), (5, b"f"), (2, b"cd")):
        chunk = state.output("stdout", offset, raw)
        seen += chunk.raw if chunk else b""
    assert seen == b"abcdef"
    with pytest.raises(SandboxAPIError):
        state.output("stdout", 10, b"x")
    state.skip("stdout", 10)
    assert state.output("stdout", 10, b"x") is not None
    assert state.lost["stdout"] == 10


def test_what_a_handle_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal._core, "OUTPUT_KEPT_BYTES_MAX", 10)
    state = OutputState()
    for n in range(10):
        state.output("stdout", n * 4, b"abcd")
    assert state.lost["stdout"] == 32


def test_queries_carry_any_bytes() -> None:
    assert query("/x", {"path": "/a b&\udcff", "no": None, "yes": True}) == "/x?path=/a%20b%26%FF&yes=true"


def test_everything_public_says_what_it_is() -> None:
    for name in shoal.__all__:
        kind = getattr(shoal, name)
        assert kind.__doc__, name
        for member, value in vars(kind).items():
            function = value.fget if isinstance(value, property) else value
            if callable(function) and not member.startswith("_"):
                assert getattr(function, "__doc__", None), f"{name}.{member}"


def test_a_missing_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['deepagents'] = None\n"
        "try:\n    import shoal.deepagents\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "shoal[deepagents]" in said
