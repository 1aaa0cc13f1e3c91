"""The examples of the documents, with a scripted chat model in the place of one that thinks."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from daytona import CreateSandboxFromSnapshotParams, Daytona
from deepagents import create_deep_agent
from langchain_daytona import DaytonaSandbox
from raw import Daemon
from scripted import HELLO, Scripted


def test_create_an_agent_and_run_it(switched: Daemon) -> None:
    sandbox = Daytona().create()
    backend = DaytonaSandbox(sandbox=sandbox)
    agent = create_deep_agent(
        model=Scripted(calls=HELLO),
        backend=backend,
        system_prompt="You are a coding assistant with sandbox access. You can create and run code in the sandbox.",
    )
    task = {"messages": [{"role": "user", "content": "Create a hello world Python script and run it"}]}
    try:
        result = agent.invoke(task)
        assert "Hello, World!" in str(result["messages"][-1].content)
    finally:
        sandbox.delete()


def test_get_or_create_by_thread_id(switched: Daemon) -> None:
    client = Daytona()
    thread_id = str(uuid.uuid4())

    def get_or_create() -> Any:
        try:
            return client.find_one(labels={"thread_id": thread_id})
        except Exception:
            params = CreateSandboxFromSnapshotParams(labels={"thread_id": thread_id}, auto_delete_interval=3600)
            return client.create(params)

    sandbox = get_or_create()
    try:
        agent = create_deep_agent(model=Scripted(calls=HELLO), backend=DaytonaSandbox(sandbox=sandbox))
        result = agent.invoke(
            {"messages": [{"role": "user", "content": "Create a hello world Python script and run it"}]},
            config={"configurable": {"thread_id": thread_id}},
        )
        assert "Hello, World!" in str(result["messages"][-1].content)
        if hasattr(client, "find_one"):
            again = get_or_create()
            assert again.id == sandbox.id, "the thread comes back to its sandbox"
            assert again.fs.download_file("/tmp/hello.py") == b"print('Hello, World!')\n"
    finally:
        client.delete(sandbox)


def test_download_files(switched: Daemon) -> None:
    sandbox = Daytona().create()
    try:
        backend = DaytonaSandbox(sandbox=sandbox)
        backend.upload_files([("/src/index.py", b"print('Hello')\n")])
        results = backend.download_files(["/src/index.py", "/output.txt"])
        assert [result.content for result in results] == [b"print('Hello')\n", None]
        assert results[1].error
    finally:
        sandbox.delete()


def test_stop_at_the_end(switched: Daemon) -> None:
    sandbox = Daytona().create()
    try:
        sandbox.fs.upload_file(b"kept", "/tmp/kept")
        sandbox.stop()
        sandbox.start()
        assert sandbox.fs.download_file("/tmp/kept") == b"kept"
    finally:
        sandbox.delete()
