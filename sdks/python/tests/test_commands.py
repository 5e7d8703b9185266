# SPDX-License-Identifier: Apache-2.0
"""Running commands: what is sent, what is made of the events, what a broken stream becomes."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from stub import Received, Reply, Stub, created

from opensandbox import ConnectionConfig, Sandbox
from opensandbox.exceptions import (
    InvalidArgumentException,
    InvalidRequestException,
    NotFoundException,
    SandboxConnectionException,
    SandboxException,
    ServerException,
)
from opensandbox.executions import env_line
from opensandbox.models import CommandEndReason, ExecutionHandlers, OutputMessage, RunCommandOpts
from opensandbox.models.execd import ExecutionComplete, ExecutionError, ExecutionInit

Idle = Callable[[], Awaitable[bool]]
RUN = "POST", "/e/command"


def event(kind: str, **fields: Any) -> bytes:
    return json.dumps({"type": kind, "timestamp": 1700000000000, **fields}).encode() + b"\n\n"


def stream(*events: bytes, cut: bool = False) -> Reply:
    return Reply(200, headers={"Content-Type": "text/event-stream"}, chunks=list(events), cut=cut)


INIT = event("init", text="abc123")
DONE = event("execution_complete", execution_time=12, end={"reason": "exited", "exit_code": 0})


@pytest.mark.anyio
async def test_a_command_that_succeeds(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(
        INIT, event("ping", text="pong"), event("stdout", text="one"), event("stdout", text="\ntwo"),
        event("stderr", text="careful"), event("from_the_future", text="?"), DONE,
    )  # fmt: skip
    execution = await sandbox.commands.run("printf 'one\ntwo\n'")
    assert stub.requests[0].json() == {"command": "printf 'one\ntwo\n'"}
    assert stub.requests[0].headers["accept"] == "text/event-stream"
    assert execution.id == "abc123"
    assert execution.exit_code == 0
    assert execution.text == "one\ntwo"
    assert [message.text for message in execution.logs.stdout] == ["one", "\ntwo"]
    assert execution.logs.stderr == [OutputMessage(text="careful", timestamp=1700000000000, is_error=True)]
    assert execution.complete is not None
    assert execution.complete.execution_time_in_millis == 12
    assert execution.end is not None
    assert execution.end.reason == CommandEndReason.EXITED


@pytest.mark.parametrize(
    ("texts", "joined", "lines"),
    [
        (["a" * 70_000, "b", "\nc"], "a" * 70_000 + "b\nc", "a" * 70_000 + "\nb\nc"),
        (["a\r", "b\r", "\nc\r"], "a\rb\r\nc\r", "a\r\nb\r\nc\r"),
        (["a", "\n", "\n"], "a\n\n", "a\n"),
        (["one", "two\n"], "onetwo\n", "one\ntwo"),
        ([], "", ""),
    ],
)
@pytest.mark.anyio
async def test_text_is_exact_where_the_sandbox_says_how_it_frames(
    stub: Stub, sandbox: Sandbox, texts: list[str], joined: str, lines: str
) -> None:
    output = [event("stdout", text=text) for text in texts]
    stub.routes[RUN] = stream(event("init", text="abc123", framing="joined"), *output, DONE)
    assert (await sandbox.commands.run("x")).text == joined
    stub.routes[RUN] = stream(INIT, *output, DONE)
    assert (await sandbox.commands.run("x")).text == lines
    # A result is a line of its own either way.
    result = event("result", results={"text": "4"})
    stub.routes[RUN] = stream(event("init", text="abc123", framing="joined"), event("stdout", text="o"), result, DONE)
    assert (await sandbox.commands.run("x")).text == "o\n4"


@pytest.mark.parametrize(
    ("evalue", "end", "code"),
    [
        ("127", {"reason": "exited", "exit_code": 127}, 127),
        ("-1", {"reason": "timed_out", "signal": "SIGKILL"}, -1),
        ("-1", {"reason": "out_of_memory", "signal": "SIGKILL"}, -1),
        ("no such program", {"reason": "start_failed", "message": "no such program"}, None),
        ("-1", {"reason": "a_reason_of_next_year"}, -1),
    ],
)
@pytest.mark.anyio
async def test_a_command_that_fails_is_no_exception(
    stub: Stub, sandbox: Sandbox, evalue: str, end: dict[str, Any], code: int | None
) -> None:
    error = {"ename": "CommandExecError", "evalue": evalue, "traceback": ["exit status"]}
    stub.routes[RUN] = stream(INIT, event("error", error=error, end=end))
    execution = await sandbox.commands.run("x")
    assert execution.exit_code == code
    assert execution.complete is None
    assert execution.error is not None
    assert execution.error.value == evalue
    assert execution.end is not None
    assert execution.end.reason == end["reason"]


@pytest.mark.anyio
async def test_options_and_lists(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(INIT, DONE)
    opts = RunCommandOpts(
        working_directory="/tmp", timeout=timedelta(seconds=1.5), uid=1, gid=2, envs={"A": "b"}, background=True
    )
    execution = await sandbox.commands.run(["ls", "-l"], opts=opts)
    assert stub.requests[0].json() == {
        "argv": ["ls", "-l"], "cwd": "/tmp", "background": True, "timeout": 1500, "uid": 1, "gid": 2,
        "envs": {"A": "b"},
    }  # fmt: skip
    assert execution.exit_code is None
    await sandbox.commands.run("x", opts=RunCommandOpts(timeout=timedelta(microseconds=1)))
    assert stub.requests[1].json()["timeout"] == 1


@pytest.mark.anyio
async def test_what_cannot_be_run_is_refused_before_sending(stub: Stub, sandbox: Sandbox) -> None:
    nothing: list[str | list[str]] = ["", []]
    for empty in nothing:
        with pytest.raises(InvalidArgumentException):
            await sandbox.commands.run(empty)
    with pytest.raises(ValidationError, match="uid is required"):
        RunCommandOpts(gid=1)
    assert not stub.requests


@pytest.mark.anyio
async def test_handlers_hear_everything_as_it_comes(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(
        INIT, event("stdout", text="out"), event("stderr", text="err"),
        event("result", results={"text": "4", "image/png": "x"}), event("execution_count", execution_count=3), DONE,
    )  # fmt: skip
    heard: list[object] = []

    async def hear(value: object) -> None:
        heard.append(value)

    def hear_at_once(value: object) -> None:
        heard.append(value)

    handlers = ExecutionHandlers(
        on_init=hear, on_stdout=hear, on_stderr=hear_at_once, on_result=hear, on_execution_complete=hear,
        skip_accumulation=True,
    )  # fmt: skip
    execution = await sandbox.commands.run("x", handlers=handlers)
    assert isinstance(heard[0], ExecutionInit)
    assert [getattr(value, "text", None) for value in heard[1:4]] == ["out", "err", "4"]
    assert isinstance(heard[4], ExecutionComplete)
    assert [*execution.logs.stdout, *execution.logs.stderr, *execution.result] == []
    assert (execution.exit_code, execution.execution_count) == (0, 3)

    errors: list[ExecutionError] = []

    async def on_error(error: ExecutionError) -> None:
        errors.append(error)

    stub.routes[RUN] = stream(INIT, event("error", error={"ename": "E", "evalue": "1", "traceback": []}))
    await sandbox.commands.run("x", handlers=ExecutionHandlers(on_error=on_error))
    assert [error.name for error in errors] == ["E"]


@pytest.mark.anyio
async def test_a_handler_that_fails_stops_the_run(stub: Stub, sandbox: Sandbox, idle: Idle) -> None:
    async def stop(_: OutputMessage) -> None:
        raise RuntimeError("enough")

    stub.routes[RUN] = stream(INIT, event("stdout", text="out"), *[event("stdout", text="x" * 1000)] * 10_000)
    with pytest.raises(RuntimeError, match="enough"):
        await sandbox.commands.run("x", handlers=ExecutionHandlers(on_stdout=stop))
    assert await idle()


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.anyio
async def test_a_stream_that_ends_early_keeps_what_is_known(stub: Stub, sandbox: Sandbox, cut: bool) -> None:
    stub.routes[RUN] = stream(INIT, event("stdout", text="half"), cut=cut)
    with pytest.raises(SandboxConnectionException) as raised:
        await sandbox.commands.run("x")
    # A command is not run twice, and what was heard of it is not lost.
    assert len(stub.requests) == 1
    error = raised.value
    assert error.execution is not None
    assert (error.execution.id, error.execution.text, error.execution.exit_code) == ("abc123", "half", None)
    assert "goes on" in str(error)
    assert "commands.get_command_status('abc123') tells how it ends" in str(error)
    if cut:
        assert error.request_id == stub.requests[0].headers["x-request-id"]
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Traceback") == 1, shown
    assert "httpx" not in shown


@pytest.mark.anyio
async def test_a_stream_that_breaks_before_the_command_is_known(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(event("ping", text="pong"), cut=True)
    with pytest.raises(SandboxConnectionException, match="broke") as raised:
        await sandbox.commands.run("x")
    assert raised.value.execution is None
    assert "get_command_status" not in str(raised.value)


@pytest.mark.anyio
async def test_a_stream_that_breaks_after_the_end_is_whole(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(INIT, event("stdout", text="all"), DONE, cut=True)
    execution = await sandbox.commands.run("x")
    assert (execution.text, execution.exit_code) == ("all", 0)


@pytest.mark.anyio
async def test_a_connection_that_breaks_in_a_handler_is_the_handlers(stub: Stub, sandbox: Sandbox) -> None:
    async def ask(_: OutputMessage) -> None:
        raise SandboxConnectionException("of another request")

    stub.routes[RUN] = stream(INIT, event("stdout", text="out"), DONE)
    with pytest.raises(SandboxConnectionException, match="of another request") as raised:
        await sandbox.commands.run("x", handlers=ExecutionHandlers(on_stdout=ask))
    assert raised.value.execution is None


@pytest.mark.anyio
async def test_an_error_before_the_stream_and_in_it(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = Reply.error(400, "INVALID_REQUEST_BODY", "working directory does not exist")
    with pytest.raises(InvalidRequestException, match="working directory does not exist"):
        await sandbox.commands.run("x", opts=RunCommandOpts(working_directory="/nowhere"))
    stub.routes[RUN] = stream(INIT, b'{"code":"RUNTIME_ERROR","message":"the spool is gone"}\n\n')
    with pytest.raises(ServerException, match="the spool is gone"):
        await sandbox.commands.run("x")


@pytest.mark.anyio
async def test_a_command_may_be_silent_for_longer_than_other_answers(stub: Stub, config: ConnectionConfig) -> None:
    impatient = config.model_copy(update={"request_timeout": timedelta(milliseconds=200)})

    def slowly(_: Received) -> Reply:
        time.sleep(0.6)
        return stream(INIT, DONE)

    stub.routes["POST", "/v1/sandboxes"] = created(stub)
    stub.routes[RUN] = slowly
    async with await Sandbox.create("host", connection_config=impatient) as sandbox:
        assert (await sandbox.commands.run("x")).exit_code == 0


@pytest.mark.anyio
async def test_rubbish_in_the_stream_is_passed_over(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(
        INIT, b"{not json}\n\n", b'{"type":"stdout"}\n\n', b"[1]\n\ndata: 7\n\n", event("stdout", text="good"),
        b'{"type":"stdout","timestamp":1,"text":"bad \xff byte"}\n\n', DONE,
    )  # fmt: skip
    execution = await sandbox.commands.run("x")
    assert [message.text for message in execution.logs.stdout] == ["good", "bad � byte"]


@pytest.mark.anyio
async def test_status_logs_and_interrupt(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes["GET", "/e/command/status/abc"] = Reply.of(
        {"id": "abc", "content": "sleep 9", "running": False, "exit_code": None, "started_at": "2026-01-01T00:00:00Z",
         "finished_at": "2026-01-01T00:00:09Z", "background": True, "end": {"reason": "killed"}}
    )  # fmt: skip
    status = await sandbox.commands.get_command_status("abc")
    assert status.running is False
    assert status.end is not None
    assert status.end.reason == "killed"

    stub.routes["GET", "/e/command/abc/logs"] = Reply(
        200, b"four\xff", {"EXECD-COMMANDS-TAIL-CURSOR": "9", "Content-Type": "text/plain"}
    )
    logs = await sandbox.commands.get_background_command_logs("abc", cursor=4)
    assert (logs.content, logs.cursor) == ("four�", 9)
    assert stub.requests[-1].params == [("cursor", "4")]
    await sandbox.commands.get_background_command_logs("abc")
    assert stub.requests[-1].params == []

    stub.routes["DELETE", "/e/command"] = Reply()
    await sandbox.commands.interrupt("abc")
    assert stub.requests[-1].params == [("id", "abc")]
    # Asked again, the answer would be that nothing runs: so it is not asked again.
    stub.routes["DELETE", "/e/command"] = lambda _: None
    before = len(stub.requests)
    with pytest.raises(SandboxConnectionException):
        await sandbox.commands.interrupt("abc")
    assert len(stub.requests) == before + 1
    with pytest.raises(NotFoundException):
        await sandbox.commands.get_command_status("../status/abc?x=1")
    assert stub.requests[-1].target == "/e/command/status/..%2Fstatus%2Fabc%3Fx%3D1"


@pytest.mark.anyio
async def test_set_env(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(INIT, DONE)
    await sandbox.commands.set_env("GREETING", "hello $USER; rm -rf /")
    sent = stub.requests[0].json()
    assert sent["envs"] == {"OPENSANDBOX_LINE": "GREETING='hello $USER; rm -rf /'"}
    assert "rm -rf" not in sent["command"]
    for key in ("", "1A", "A B", "A=B"):
        with pytest.raises(InvalidArgumentException):
            await sandbox.commands.set_env(key, "x")
    stub.routes[RUN] = stream(
        INIT, event("stderr", text="read-only"), event("error", error={"ename": "E", "evalue": "1", "traceback": []})
    )
    with pytest.raises(SandboxException, match="cannot set A: read-only"):
        await sandbox.commands.set_env("A", "b")


def test_lines_of_the_environment_file() -> None:
    assert env_line("A", "b c") == "A='b c'"
    assert env_line("A", 'say "$HOME"\\') == "A='say \"$HOME\"\\'"
    assert env_line("A", 'it\'s $5\n\t"x"\\') == 'A="it\'s \\$5\\n\\t\\"x\\"\\\\"'


@pytest.mark.anyio
async def test_exact_output_is_handed_on_as_bytes(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(
        INIT, event("stdout", data="/wBwcm9tcHQ6IA=="), event("stderr", data="Cg=="), event("stdout", text="ä"), DONE
    )
    pieces: list[tuple[bool, bytes]] = []
    handlers = ExecutionHandlers(on_output=lambda piece: pieces.append((piece.is_error, piece.data)))
    execution = await sandbox.commands.run("true", handlers=handlers)
    assert stub.requests[0].json() == {"command": "true", "exact": True}
    assert pieces == [(False, b"\xff\0prompt: "), (True, b"\n"), (False, "ä".encode())]
    assert execution.exit_code == 0
    assert execution.logs.stdout == []


@pytest.mark.anyio
async def test_exact_output_that_is_not_base64_is_an_error(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(INIT, event("stdout", data="a"), DONE)
    with pytest.raises(SandboxConnectionException, match="cannot be decoded"):
        await sandbox.commands.run("true", handlers=ExecutionHandlers(on_output=lambda piece: None))
