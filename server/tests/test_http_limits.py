# SPDX-License-Identifier: Apache-2.0
"""Heads that are too large, too slow or no heads at all, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from opensandbox_server.api import http_limits
from opensandbox_server.api.http_limits import BoundedHttp, HeldHead

pytestmark = pytest.mark.anyio


@dataclass
class Listening:
    """A server whose application only says how much it was sent."""

    port: int = 0
    called: list[str] = field(default_factory=list)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.called.append(scope["path"])
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        body = str(size).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def say(self, *pieces: bytes) -> bytes:
        """Everything it answers until it closes; pieces that it no longer takes are lost."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(65536):
                answer += chunk
        writer.close()
        return answer

    async def refused(self, status: int, code: str, *pieces: bytes) -> None:
        answer = await self.say(*pieces)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        told = json.loads(body)
        assert told["code"] == code
        assert told["message"]
        assert told["hint"]


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    made = Listening()
    listener = socket.create_server(("127.0.0.1", 0))
    made.port = listener.getsockname()[1]
    config = uvicorn.Config(made.app, http=BoundedHttp, interface="asgi3", lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield made
    server.should_exit = True
    await task


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n\r\n"


async def test_ordinary_requests_pass(listening: Listening) -> None:
    # The head of the second comes with the body of the first, and both bodies are far larger than a head may be.
    body = b"x" * 300_000
    post = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n"
    answer = await listening.say(post + b"\r\n" + body + post, CLOSE + body)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b"300000") == 2


@pytest.mark.parametrize(
    "head",
    [
        pytest.param([GET + b"".join(b"x%d: y\r\n" % n for n in range(300)) + CLOSE], id="lines"),
        pytest.param([GET + b"x: " + b"y" * 70_000 + b"\r\n" + CLOSE], id="one line"),
        pytest.param([GET + b"x: ", *[b"y" * 10_000] * 50], id="a line without an end"),
        pytest.param([GET, *[b"x: y\r\n" * 1000] * 50], id="a head without an end"),
        pytest.param([b"GET /", *[b"y" * 10_000] * 50], id="an address without an end"),
    ],
)
async def test_a_head_that_is_too_large_is_refused_before_anybody_sees_it(
    listening: Listening, head: list[bytes]
) -> None:
    await listening.refused(431, "GENERAL::HEADERS_TOO_LARGE", *head)
    assert listening.called == []


async def test_the_next_head_on_a_connection_is_bounded_too(listening: Listening) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
    writer.write(GET + b"\r\n")
    assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200 OK")
    writer.write(GET + b"x: y\r\n" * 300)
    assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    writer.close()
    assert listening.called == ["/"]


async def test_a_trailer_is_bounded_as_a_head_is(listening: Listening) -> None:
    post = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    assert await listening.say(post, *[b"x: y\r\n" * 1000] * 50) == b"", "cut off, without a word into its answer"


async def test_a_head_that_comes_too_slowly(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEAD_SECONDS", 0.1)
    await listening.refused(408, "GENERAL::REQUEST_TIMEOUT", GET)
    assert await listening.say() == b"", "nobody who said nothing is answered"
    assert listening.called == []


async def test_what_is_no_request_at_all(listening: Listening) -> None:
    await listening.refused(400, "GENERAL::INVALID_HTTP", b"\x16\x03\x01 hello\r\n\r\n")


class Wire:
    """A transport that keeps what goes out, packet by packet."""

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.packets.append(data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.packets.append(b"".join(parts))

    def close(self) -> None:
        self.closed = True


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def held(wire: Wire) -> HeldHead:
    return HeldHead(cast(asyncio.Transport, wire), asyncio.get_running_loop())


async def test_a_head_goes_out_with_its_body() -> None:
    wire = Wire()
    transport = held(wire)
    for body in (b"first", b""):
        transport.write(HEAD)
        assert not [packet for packet in wire.packets if packet == HEAD]
        transport.write(body)
    transport.write(b"more")
    assert wire.packets == [HEAD + b"first", HEAD, b"more"]


async def test_a_head_without_a_body_waits_for_nobody() -> None:
    wire = Wire()
    transport = held(wire)
    transport.write(HEAD)
    await asyncio.sleep(0)
    assert wire.packets == [HEAD]
    transport.write(HEAD)
    transport.close()
    assert (wire.packets, wire.closed) == ([HEAD, HEAD], True)


async def test_an_answer_is_one_packet(listening: Listening) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    packet = await reader.read(65536)
    writer.close()
    assert packet.startswith(b"HTTP/1.1 200 OK")
    assert packet.endswith(b"\r\n\r\n0")
