# SPDX-License-Identifier: Apache-2.0
"""Contexts and cells: what is sent, what is made of the events, what goes wrong."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from stub import Reply, Stub

from code_interpreter import CodeContext, SupportedLanguage
from code_interpreter.code_interpreter import CodeInterpreter
from opensandbox.exceptions import (
    ConflictException,
    InvalidArgumentException,
    InvalidRequestException,
    NotFoundException,
    SandboxConnectionException,
    SandboxReadyTimeoutException,
    UnsupportedException,
)
from opensandbox.models import ExecutionHandlers
from opensandbox.sandbox import Sandbox

RUN = "POST", "/e/code"
CONTEXT = {"id": "c1", "language": "python", "cwd": "/workspace", "created_at": "2026-11-16T00:00:00Z", "busy": False}


def event(kind: str, **fields: Any) -> bytes:
    return json.dumps({"type": kind, "timestamp": 1700000000000, **fields}).encode() + b"\n\n"


def stream(*events: bytes, cut: bool = False) -> Reply:
    return Reply(200, headers={"Content-Type": "text/event-stream"}, chunks=list(events), cut=cut)


INIT = event("init", text="c1", framing="pieces")
DONE = event("execution_complete", execution_time=3, end={"reason": "exited", "exit_code": 0})


@pytest.mark.anyio
async def test_a_cell(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(
        INIT, event("execution_count", execution_count=7),
        event("stdout", text="a\nb"), event("stdout", text="b\n"), event("stderr", text="e\n"),
        event("result", results={"text": "4", "text/html": "<b>4</b>", "application/json": {"four": 4}}), DONE,
    )  # fmt: skip
    interpreter = await CodeInterpreter.create(sandbox)
    execution = await interpreter.codes.run("2 + 2", language=SupportedLanguage.PYTHON)
    assert stub.requests[-1].json() == {"code": "2 + 2", "context": {"language": "python"}}
    assert (execution.id, execution.execution_count, execution.exit_code) == ("c1", 7, None)
    assert execution.result[0].text == "4"
    assert execution.result[0].extra_properties == {"text/html": "<b>4</b>", "application/json": '{"four": 4}'}
    assert [message.text for message in execution.logs.stdout] == ["a\nb", "b\n"]
    assert [message.text for message in execution.logs.stderr] == ["e\n"]
    assert execution.error is None
    assert execution.text == "a\nbb\n4"
    assert interpreter.id == sandbox.id
    assert interpreter.commands is sandbox.commands
    assert interpreter.files is sandbox.files
    assert interpreter.metrics is sandbox.metrics
    assert interpreter.sandbox is sandbox


@pytest.mark.anyio
async def test_a_cell_that_fails_is_no_exception(stub: Stub, sandbox: Sandbox) -> None:
    error = {"ename": "ValueError", "evalue": "7", "traceback": ["line 1", "line 2"]}
    stub.routes[RUN] = stream(INIT, event("error", error=error, end={"reason": "exited", "exit_code": 1}))
    interpreter = await CodeInterpreter.create(sandbox)
    told: list[str] = []
    handlers = ExecutionHandlers(on_error=lambda error: told.append(error.name))
    execution = await interpreter.codes.run("raise ValueError(7)", handlers=handlers)
    assert execution.error is not None
    assert (execution.error.name, execution.error.value) == ("ValueError", "7")
    assert execution.error.traceback == ["line 1", "line 2"]
    assert execution.exit_code is None, "a cell has none, whatever its exception says"
    assert told == ["ValueError"]


@pytest.mark.anyio
async def test_what_is_sent(stub: Stub, sandbox: Sandbox) -> None:
    interpreter = await CodeInterpreter.create(sandbox)
    python, standard = CodeContext(id="c1", language="python"), CodeContext(language="bash")
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"context": {"language": "python"}}),
        ({"language": "bash"}, {"context": {"language": "bash"}}),
        ({"context": python}, {"context": {"language": "python", "id": "c1"}}),
        ({"context": python, "language": "python"}, {"context": {"language": "python", "id": "c1"}}),
        ({"context": standard}, {"context": {"language": "bash"}}),
        ({"timeout": timedelta(seconds=1.5)}, {"context": {"language": "python"}, "timeout": 1500}),
        ({"timeout": timedelta(microseconds=1)}, {"context": {"language": "python"}, "timeout": 1}),
        ({"timeout": timedelta()}, {"context": {"language": "python"}}),
        ({"envs": {"A": "b"}}, {"context": {"language": "python"}, "envs": {"A": "b"}}),
    ]
    for options, expected in cases:
        stub.routes[RUN] = stream(INIT, DONE)
        await interpreter.codes.run("x", **options)
        assert stub.requests[-1].json() == {"code": "x", **expected}
    stub.requests.clear()
    for wrong in ({"context": python, "language": "bash"}, {"code": " \n"}, {"timeout": timedelta(seconds=-1)}):
        with pytest.raises(InvalidArgumentException):
            await interpreter.codes.run(**{"code": "x", **wrong})
    with pytest.raises(ValidationError):
        CodeContext(language="")
    assert stub.requests == []


@pytest.mark.anyio
async def test_contexts(stub: Stub, sandbox: Sandbox) -> None:
    codes = (await CodeInterpreter.create(sandbox)).codes
    stub.requests.clear()
    stub.routes["POST", "/e/code/context"] = Reply.of(CONTEXT)
    stub.routes["GET", "/e/code/contexts"] = Reply.of([CONTEXT])
    stub.routes["GET", "/e/code/contexts/c1"] = Reply.of({"id": "c1", "language": "python"})
    stub.routes["DELETE", "/e/code/contexts/c1"] = Reply()
    stub.routes["DELETE", "/e/code/contexts"] = Reply()
    stub.routes["DELETE", "/e/code"] = Reply()
    made = await codes.create_context("python", working_directory="/tmp", envs={"A": "b"})
    assert (made.id, made.language, made.cwd, made.busy) == ("c1", "python", "/workspace", False)
    assert stub.requests[0].json() == {"language": "python", "cwd": "/tmp", "envs": {"A": "b"}}
    assert await codes.list_contexts("python") == [made]
    assert await codes.list_contexts() == [made]
    assert (await codes.get_context("c1")).language == "python"
    await codes.delete_context("c1")
    await codes.delete_contexts("python")
    await codes.interrupt("c1")
    assert [(r.method, r.target) for r in stub.requests[1:]] == [
        ("GET", "/e/code/contexts?language=python"),
        ("GET", "/e/code/contexts"),
        ("GET", "/e/code/contexts/c1"),
        ("DELETE", "/e/code/contexts/c1"),
        ("DELETE", "/e/code/contexts?language=python"),
        ("DELETE", "/e/code?id=c1"),
    ]
    with pytest.raises(InvalidArgumentException):
        await codes.get_context("")


@pytest.mark.anyio
async def test_refusals_are_exceptions(stub: Stub, sandbox: Sandbox) -> None:
    codes = (await CodeInterpreter.create(sandbox)).codes
    for status, code, kind in (
        (409, "CONTEXT_BUSY", ConflictException),
        (404, "CONTEXT_NOT_FOUND", NotFoundException),
        (400, "INVALID_REQUEST_BODY", InvalidRequestException),
        (404, "GENERAL::NOT_FOUND", UnsupportedException),
    ):
        stub.routes[RUN] = Reply.error(status, code, "session is busy")
        with pytest.raises(kind):
            await codes.run("x")


@pytest.mark.anyio
async def test_a_stream_that_breaks(stub: Stub, sandbox: Sandbox) -> None:
    codes = (await CodeInterpreter.create(sandbox)).codes
    stub.routes[RUN] = stream(INIT, event("stdout", text="so far"), cut=True)
    with pytest.raises(SandboxConnectionException) as caught:
        await codes.run("x")
    assert caught.value.execution is not None
    assert caught.value.execution.text == "so far"
    assert "context c1" in str(caught.value)


@pytest.mark.anyio
async def test_ready(stub: Stub, sandbox: Sandbox) -> None:
    moment = timedelta(milliseconds=1)
    probe = "GET", "/e/code/contexts"
    stub.routes[probe] = [Reply.error(500, "RUNTIME_ERROR", "not yet"), Reply.of([])]
    interpreter = await CodeInterpreter.create(sandbox, health_check_polling_interval=moment)
    assert len(stub.requests) == 2
    stub.routes[probe] = Reply.error(500, "RUNTIME_ERROR", "never")
    assert not await interpreter.is_healthy()
    with pytest.raises(SandboxReadyTimeoutException, match="never"):
        await interpreter.check_ready(moment, moment)
    with pytest.raises(SandboxReadyTimeoutException):
        await CodeInterpreter.create(sandbox, ready_timeout=moment, health_check_polling_interval=moment)
    stub.routes[probe] = Reply.error(404, "GENERAL::NOT_FOUND", "no route")
    with pytest.raises(UnsupportedException, match="Running code is not supported"):
        await CodeInterpreter.create(sandbox)
    stub.requests.clear()
    await CodeInterpreter.create(sandbox, skip_health_check=True)
    assert stub.requests == []
    stub.routes[probe] = Reply.of([])
    assert await interpreter.is_healthy()
    assert await interpreter.ping()
    assert await interpreter.codes.ping()
    with pytest.raises(InvalidArgumentException):
        await CodeInterpreter.create(sandbox, ready_timeout=30)  # type: ignore[arg-type]
    async with interpreter as same:
        assert same is interpreter


# Asynchronous only: without an event loop there is nothing to forget.
@pytest.mark.anyio
async def test_without_waiting_for_it_first(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = lambda _: stream(INIT, event("result", results={"text": "4"}), DONE)
    execution = await CodeInterpreter.create(sandbox).codes.run("2 + 2")
    assert execution.result[0].text == "4"
    assert stub.calls() == ["GET /e/code/contexts", "POST /e/code"]
    interpreter = CodeInterpreter.create(sandbox)
    await interpreter.codes.run("1")
    await interpreter.codes.run("1")
    assert await interpreter is interpreter
    assert stub.calls()[2:] == ["GET /e/code/contexts", "POST /e/code", "POST /e/code"], "it waits once"
    async with CodeInterpreter.create(sandbox) as used:
        assert used.id == sandbox.id
