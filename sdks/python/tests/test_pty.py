# SPDX-License-Identifier: Apache-2.0
"""Terminals: what is sent, and what a refused connection becomes. What a real one does is tried with a real one."""

from __future__ import annotations

import pytest
from scripted import websocket
from stub import Reply, Stub

from opensandbox import ConnectionConfig, Sandbox
from opensandbox.exceptions import (
    ConflictException,
    InvalidArgumentException,
    NotFoundException,
    SandboxConnectionException,
    UnsupportedException,
)
from opensandbox.pty import Pty
from opensandbox.transport import Connection

SOCKET = "GET", "/e/pty/p1/ws"


@pytest.mark.anyio
async def test_create_list_get_and_delete(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes["POST", "/e/pty"] = Reply.of({"session_id": "p1"}, 201)
    assert await sandbox.pty.create() == "p1"
    assert stub.requests[-1].json() == {"cols": 80, "rows": 24}
    await sandbox.pty.create(["vi"], working_directory="/srv", envs={"A": "b"}, cols=100, rows=30, term="vt100")
    assert stub.requests[-1].json() == {
        "argv": ["vi"], "cwd": "/srv", "envs": {"A": "b"}, "cols": 100, "rows": 30, "term": "vt100",
    }  # fmt: skip
    await sandbox.pty.create("top")
    assert stub.requests[-1].json()["command"] == "top"
    for empty in ("", list[str]()):
        with pytest.raises(InvalidArgumentException):
            await sandbox.pty.create(empty)
    info = {"session_id": "p1", "running": True, "output_offset": 7, "mode": "pipe", "connected": True, "viewers": 2}
    stub.routes["GET", "/e/ptys"] = Reply.of({"items": [info]})
    stub.routes["GET", "/e/pty/p1"] = Reply.of(info)
    assert await sandbox.pty.list() == [await sandbox.pty.get("p1")]
    stub.routes["DELETE", "/e/pty/p1"] = Reply()
    await sandbox.pty.delete("p1")
    assert stub.calls()[-1] == "DELETE /e/pty/p1"


@pytest.mark.anyio
async def test_a_connection_that_is_refused(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[SOCKET] = Reply.error(409, "ALREADY_CONNECTED", "another client is connected", hint="takeover")
    with pytest.raises(ConflictException, match="another client is connected") as raised:
        await sandbox.pty.connect("p1", since=5, viewer=True)
    assert raised.value.hint == "takeover"
    sent = stub.requests[-1]
    assert sent.headers["x-execd-access-token"] == "secret-token"
    assert sent.headers["user-agent"].startswith("OpenSandbox-Python-SDK/")
    assert sent.params == [("since", "5"), ("pty", "1"), ("viewer", "1")]
    with pytest.raises(ConflictException):
        await sandbox.pty.connect("p1", takeover=True, pipes=True)
    assert stub.requests[-1].params == [("since", "0"), ("pty", "0"), ("takeover", "1")]
    stub.routes[SOCKET] = Reply.error(404, "CONTEXT_NOT_FOUND", "there is no terminal")
    with pytest.raises(NotFoundException):
        await sandbox.pty.connect("p1")
    stub.routes[SOCKET] = Reply(404, b"404 page not found")
    with pytest.raises(UnsupportedException, match="terminal"):
        await sandbox.pty.connect("p1")
    stub.routes[SOCKET] = lambda _: None
    with pytest.raises(SandboxConnectionException):
        await sandbox.pty.connect("p1")


@pytest.mark.anyio
async def test_nobody_there(config: ConnectionConfig) -> None:
    with pytest.raises(SandboxConnectionException, match="cannot connect"):
        await Pty(Connection(config, "http://127.0.0.1:1", {})).connect("p1")


CONNECTED, PIPES = '{"type":"connected","mode":"pty"}', '{"type":"connected","mode":"pipe"}'


@pytest.mark.anyio
async def test_what_cannot_be_asked_of_a_program_is_refused_at_the_call(config: ConnectionConfig) -> None:
    """The other side would answer to whoever reads."""
    with websocket(CONNECTED) as (address, heard):
        terminals = Pty(Connection(config, address, {}))
        async with await terminals.connect("p1") as typist:
            for wrong in ("FOO", "INT", "SIGSTOP", ""):
                with pytest.raises(InvalidArgumentException, match="cannot be sent") as raised:
                    await typist.signal(wrong)
                assert "SIGINT" in (raised.value.hint or "")
            for cols, rows in ((0, 0), (80, 0), (-1, 24), (65536, 24), (80.5, 24)):
                with pytest.raises(InvalidArgumentException, match="between 1 and 65535"):
                    await typist.resize(cols, rows)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentException, match="cannot be typed"):
                await typist.write(5)  # type: ignore[arg-type]
        with pytest.raises(SandboxConnectionException, match="closed"):
            await typist.write("late")
        async with await terminals.connect("p1", viewer=True) as viewer:
            with pytest.raises(InvalidArgumentException, match="can only look"):
                await viewer.write("x")
            with pytest.raises(InvalidArgumentException, match="can only look"):
                await viewer.resize(80, 24)
            with pytest.raises(InvalidArgumentException, match="can only look"):
                await viewer.signal("SIGINT")
    assert heard == []
    with websocket(PIPES) as (address, heard):
        async with await Pty(Connection(config, address, {})).connect("p1", pipes=True) as program:
            with pytest.raises(InvalidArgumentException, match="no size"):
                await program.resize(80, 24)
            await program.signal("SIGINT")
    assert heard == ['{"type": "signal", "signal": "SIGINT"}']


@pytest.mark.anyio
async def test_nobody_types_after_the_end(config: ConnectionConfig) -> None:
    with websocket(CONNECTED, b"\1bye", '{"type":"exit","exit_code":3}') as (address, heard):
        async with await Pty(Connection(config, address, {})).connect("p1") as terminal:
            assert await terminal.wait() == 3
            with pytest.raises(SandboxConnectionException, match="the program has ended"):
                await terminal.write("x")
            with pytest.raises(SandboxConnectionException, match="the program has ended"):
                await terminal.signal("SIGINT")
    assert heard == []
