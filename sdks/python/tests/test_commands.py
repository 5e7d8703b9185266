# SPDX-License-Identifier: Apache-2.0
"""Running commands: what is sent, what is made of the events, what a broken stream becomes."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from stub import Received, Reply, Stub, created

from opensandbox import ConnectionConfig, Sandbox
from opensandbox.exceptions import (
    ConflictException,
    InvalidArgumentException,
    InvalidRequestException,
    NotFoundException,
    SandboxConnectionException,
    SandboxException,
    ServerException,
    UnsupportedException,
)
from opensandbox.executions import env_line
from opensandbox.models import CommandEndReason, ExecutionHandlers, OutputBytes, OutputMessage, RunCommandOpts
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
async def test_no_time_is_no_limit_and_less_is_refused(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stub.routes["POST", "/e/session/s1/run"] = stream(INIT, DONE)
    await sandbox.commands.run("x", opts=RunCommandOpts(timeout=timedelta(0)))
    await sandbox.commands.run_in_session("s1", "x", timeout=timedelta(0))
    assert [request.json() for request in stub.requests] == [{"command": "x"}] * 2
    with pytest.raises(InvalidArgumentException, match="timeout must be positive"):
        await sandbox.commands.run("x", opts=RunCommandOpts(timeout=timedelta(seconds=-1)))
    with pytest.raises(InvalidArgumentException, match="timeout must be positive"):
        await sandbox.commands.run_in_session("s1", "x", timeout=timedelta(seconds=-1))
    assert len(stub.requests) == 2


@pytest.mark.anyio
async def test_what_cannot_be_run_is_refused_before_sending(stub: Stub, sandbox: Sandbox) -> None:
    nothing: list[str | list[str]] = ["", []]
    for empty in nothing:
        with pytest.raises(InvalidArgumentException) as refused:
            await sandbox.commands.run(empty)
        assert refused.value.hint
    wrong: list[Any] = [5, None, {"a": 1}, ["ls", 5]]
    for command in wrong:
        with pytest.raises(InvalidArgumentException, match="a command is a") as refused:
            await sandbox.commands.run(command)
        assert refused.value.hint
    with pytest.raises(InvalidArgumentException, match="a command for a session is a text"):
        await sandbox.commands.run_in_session("s1", ["ls"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentException, match="execution id is empty") as refused:
        await sandbox.commands.attach("")
    assert refused.value.hint
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


# --- streams that break and go on ------------------------------------------------------------------------

ATTACH = "GET", "/e/command/abc123/attach"
BEGUN = event("init", text="abc123", framing="joined")


def line(text: str, offset: int) -> bytes:
    return event("stdout", text=text, offset=offset)


@pytest.mark.anyio
async def test_a_broken_stream_goes_on_where_it_broke(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(BEGUN, line("one", 4), cut=True)
    stub.routes[ATTACH] = [
        stream(BEGUN, line("\ntwo", 8), cut=True),
        # Nothing new: it is asked for again, but not for ever.
        stream(BEGUN, cut=True),
        stream(BEGUN, event("status", text="12 bytes are not kept"), line("\nthree", 26)),
        stream(BEGUN, DONE),
    ]
    begun: list[ExecutionInit] = []
    execution = await sandbox.commands.run("x", handlers=ExecutionHandlers(on_init=begun.append))
    assert (execution.text, execution.exit_code, execution.offset) == ("one\ntwo\nthree", 0, 26)
    assert [notice.text for notice in execution.notices] == ["12 bytes are not kept"]
    assert [received.method for received in stub.requests] == ["POST", "GET", "GET", "GET", "GET"]
    assert [dict(received.params)["offset"] for received in stub.requests[1:]] == ["4", "8", "8", "26"]
    assert len(begun) == 1


@pytest.mark.anyio
async def test_a_stream_that_never_gets_any_further_is_given_up(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(BEGUN, line("half", 4), cut=True)
    stub.routes[ATTACH] = stream(BEGUN, cut=True)
    with pytest.raises(SandboxConnectionException) as raised:
        await sandbox.commands.run("x")
    assert len(stub.requests) == 1 + 3
    assert raised.value.execution is not None
    assert raised.value.execution.text == "half"
    assert "commands.attach('abc123', offset=4) the rest" in str(raised.value)


@pytest.mark.anyio
async def test_a_command_that_cannot_be_followed_again_says_why(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = stream(BEGUN, line("half", 4), cut=True)
    stub.routes[ATTACH] = Reply.error(404, "SANDBOX::NOT_FOUND", "there is no such sandbox any more")
    with pytest.raises(SandboxConnectionException, match="there is no such sandbox any more") as raised:
        await sandbox.commands.run("x")
    assert raised.value.execution is not None
    with pytest.raises(NotFoundException):
        await sandbox.commands.attach("abc123")


@pytest.mark.anyio
async def test_a_request_that_was_lost_is_made_again_with_its_key(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes["GET", "/e/commands"] = Reply.of({"items": []})
    stub.routes[RUN] = [None, stream(cut=True), stream(BEGUN, line("once", 4), DONE)]
    assert (await sandbox.commands.run("x")).text == "once"
    posts = [received for received in stub.requests if received.method == "POST"]
    assert len({received.headers["idempotency-key"] for received in posts}) == 1
    assert len(posts) == 3
    # In the background there is nothing to follow: the same request tells the same again.
    stub.routes[RUN] = [stream(BEGUN, cut=True), stream(BEGUN, DONE)]
    begun: list[ExecutionInit] = []
    background = RunCommandOpts(background=True, idempotency_key="mine")
    execution = await sandbox.commands.run("x", opts=background, handlers=ExecutionHandlers(on_init=begun.append))
    assert (execution.id, len(begun)) == ("abc123", 1)
    assert [received.headers["idempotency-key"] for received in stub.requests[-2:]] == ["mine", "mine"]


@pytest.mark.anyio
async def test_a_daemon_without_keys_is_not_asked_twice(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[RUN] = lambda _: None
    with pytest.raises(SandboxConnectionException):
        await sandbox.commands.run("x")
    assert stub.calls() == ["POST /e/command", "GET /e/commands"]


@pytest.mark.anyio
async def test_attach(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[ATTACH] = stream(BEGUN, event("stdout", data="/wA=", offset=9), cut=True)
    pieces: list[bytes] = []

    def hear(piece: OutputBytes) -> None:
        pieces.append(piece.data)
        stub.routes[ATTACH] = stream(
            BEGUN, event("execution_complete", end={"reason": "exited", "cpu_ms": 1500, "peak_memory_bytes": 4096})
        )

    execution = await sandbox.commands.attach("abc123", 7, ExecutionHandlers(on_output=hear))
    assert [received.params for received in stub.requests] == [
        [("offset", "7"), ("exact", "true")],
        [("offset", "9"), ("exact", "true")],
    ]
    assert pieces == [b"\xff\0"]
    assert (execution.id, execution.exit_code) == ("abc123", 0)
    assert (execution.cpu_time, execution.peak_memory_bytes) == (timedelta(seconds=1.5), 4096)


@pytest.mark.anyio
async def test_events_one_by_one(stub: Stub, sandbox: Sandbox, idle: Idle) -> None:
    stub.routes[RUN] = stream(
        BEGUN, event("ping"), line("out", 3), event("stderr", text="err", offset=6),
        event("error", error={"ename": "E", "evalue": "7", "traceback": []}, end={"reason": "exited", "exit_code": 7}),
    )  # fmt: skip
    heard: list[object] = []
    async for happening in sandbox.commands.stream("x"):
        heard.append(happening)
    assert [type(happening) for happening in heard] == [ExecutionInit, OutputMessage, OutputMessage, ExecutionError]
    last = heard[-1]
    assert isinstance(last, ExecutionError)
    assert last.end is not None
    assert last.end.exit_code == 7
    stub.routes[RUN] = stream(BEGUN, event("stdout", data="/wA=", offset=2), DONE)
    async for happening in sandbox.commands.stream(["x"], exact=True):
        if isinstance(happening, OutputBytes):
            heard.append(happening.data)
    assert heard[-1] == b"\xff\0"
    # Whoever leaves the loop gives the connection back.
    stub.routes[RUN] = stream(BEGUN, *[line("x" * 1000, 9)] * 10_000)
    events = sandbox.commands.stream("x")
    async for _ in events:
        break
    await events.aclose()
    assert await idle()


# --- input ------------------------------------------------------------------------------------------------

STDIN = "POST", "/e/command/abc123/stdin"


def fed(stub: Stub, answer: Reply) -> None:
    """A command that ends when it got its input, or was interrupted."""
    over = threading.Event()

    def taken(_: Received) -> Reply:
        over.set()
        return answer

    def stopped(_: Received) -> Reply:
        over.set()
        return Reply()

    def chunks() -> Iterator[bytes]:
        yield BEGUN
        assert over.wait(10)
        yield DONE

    stub.routes[RUN] = lambda _: Reply(200, chunks=chunks())
    stub.routes[STDIN] = taken if answer.status < 500 else answer
    stub.routes["DELETE", "/e/command"] = stopped


@pytest.mark.anyio
async def test_input_is_streamed_while_the_command_runs(stub: Stub, sandbox: Sandbox) -> None:
    for given in ("text", b"text", iter([b"te", b"", b"xt"])):
        fed(stub, Reply.of({"bytes": 4}))
        stub.requests.clear()
        assert (await sandbox.commands.run("cat", stdin=given)).exit_code == 0
        assert stub.requests[0].json() == {"command": "cat", "stdin": True}
        assert (stub.requests[1].body, stub.requests[1].params) == (b"text", [("close", "true")])
    # A command that wants no more is no error: it may have seen enough.
    fed(stub, Reply.error(409, "COMMAND_STDIN_CLOSED", "it reads no more"))
    assert (await sandbox.commands.run("head -1", stdin="x")).exit_code == 0
    # Otherwise it would wait for ever.
    fed(stub, Reply.error(500, "RUNTIME_ERROR", "no"))
    with pytest.raises(ServerException):
        await sandbox.commands.run("cat", stdin="x")
    assert stub.calls()[-1] == "DELETE /e/command"
    with pytest.raises(InvalidArgumentException):
        await sandbox.commands.run("cat", stdin="x", opts=RunCommandOpts(background=True))


@pytest.mark.anyio
async def test_write_and_close_stdin(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[STDIN] = Reply.of({"bytes": 3})
    assert await sandbox.commands.write_stdin("abc123", "grü") == 3
    assert (stub.requests[-1].body, stub.requests[-1].params) == ("grü".encode(), [])
    await sandbox.commands.close_stdin("abc123")
    assert (stub.requests[-1].body, stub.requests[-1].params) == (b"", [("close", "true")])
    stub.routes[STDIN] = Reply.error(409, "X", "its input is not open")
    with pytest.raises(ConflictException):
        await sandbox.commands.write_stdin("abc123", b"x")
    stub.routes[RUN] = stream(INIT, DONE)
    await sandbox.commands.run("cat", opts=RunCommandOpts(stdin=True, merge=False))
    assert stub.requests[-1].json() == {"command": "cat", "stdin": True, "merge": False}


@pytest.mark.anyio
async def test_the_commands_of_a_sandbox(stub: Stub, sandbox: Sandbox) -> None:
    with pytest.raises(UnsupportedException):
        await sandbox.commands.list()
    status = {"id": "a", "content": "cat", "running": True, "started_at": "2026-01-01T00:00:00Z"}
    stub.routes["GET", "/e/commands"] = Reply.of({"items": [{**status, "stdin_open": True, "output_bytes": 7}]})
    found = await sandbox.commands.list(running=True, limit=5)
    assert stub.requests[-1].params == [("limit", "5"), ("running", "true")]
    assert [(one.id, one.stdin_open, one.output_bytes) for one in found] == [("a", True, 7)]
    stub.routes["GET", "/e/command/a/logs"] = Reply(200, b"x", {"EXECD-COMMANDS-LOST-BYTES": "12"})
    assert (await sandbox.commands.get_background_command_logs("a", 3, "stderr")).lost_bytes == 12
    assert stub.requests[-1].params == [("cursor", "3"), ("stream", "stderr")]


# --- sessions ---------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_session_for_a_block(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes["POST", "/e/session"] = Reply.of({"session_id": "s1"})
    stub.routes["POST", "/e/session/s1/run"] = stream(event("init", text="s1"), event("stdout", text="hi"), DONE)
    stub.routes["DELETE", "/e/session/s1"] = Reply()
    async with sandbox.commands.session(working_directory="/srv") as shell:
        assert (await shell.run("echo hi", timeout=timedelta(seconds=1), separate=True)).text == "hi"
    assert stub.calls() == ["POST /e/session", "POST /e/session/s1/run", "DELETE /e/session/s1"]
    assert stub.requests[0].json() == {"cwd": "/srv"}
    assert stub.requests[1].json() == {"command": "echo hi", "timeout": 1000, "separate": True}
    # It is interrupted when nobody listens, so there is nothing to go on with.
    stub.routes["POST", "/e/session/s1/run"] = stream(BEGUN, line("half", 4), cut=True)
    with pytest.raises(SandboxConnectionException, match="interrupted with it"):
        await sandbox.commands.run_in_session("s1", "x")
    session = {"session_id": "s1", "cwd": "/srv", "created_at": "2026-01-01T00:00:00Z", "running": False}
    stub.routes["GET", "/e/sessions"] = Reply.of({"items": [session]})
    assert [one.cwd for one in await sandbox.commands.list_sessions()] == ["/srv"]
