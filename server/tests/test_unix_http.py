# SPDX-License-Identifier: Apache-2.0
"""The client of Unix sockets, against a server that answers as each test wants, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from opensandbox_server.runtimes.local import unix_http
from opensandbox_server.runtimes.local.unix_http import Broken, NotConnected, UnixHttp

pytestmark = pytest.mark.anyio

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A socket with a server behind it, and how often it was connected to."""

    def __init__(self, path: Path, serve: Serve) -> None:
        self.path = path
        self.connections = 0
        self._serve = serve
        self._writers: list[asyncio.StreamWriter] = []

    def hang_up(self) -> None:
        """End all connections, as a process that dies does."""
        for writer in self._writers:
            writer.transport.abort()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._serve(reader, writer)
        writer.close()


@contextlib.asynccontextmanager
async def peer(tmp_path: Path, serve: Serve) -> AsyncIterator[Peer]:
    made = Peer(tmp_path / "s", serve)
    server = await asyncio.start_unix_server(made.accept, made.path)
    yield made
    server.close()


async def head(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\r\n\r\n")).decode()


async def for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        told = await head(reader)
        length = next((int(line[15:]) for line in told.split("\r\n") if line.startswith("Content-Length:")), 0)
        body = await reader.readexactly(length)
        answer = told.split("\r\n")[0].encode() + b"|" + body
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)


async def test_one_connection_serves_one_exchange_after_another(tmp_path: Path) -> None:
    async with peer(tmp_path, for_ever) as server:
        http = UnixHttp(str(server.path))
        for number in range(3):
            status, body = await http.request("POST", f"/{number}", body=b"x" * number)
            assert (status, body) == (200, f"POST /{number} HTTP/1.1|{'x' * number}".encode())
        assert server.connections == 1
        await asyncio.gather(*(http.request("GET", "/") for _ in range(5)))
        assert server.connections == 5
        http.close()


async def test_one_that_rested_too_long_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer(tmp_path, for_ever) as server:
        http = UnixHttp(str(server.path))
        await http.request("GET", "/")
        monkeypatch.setattr(unix_http, "IDLE_SECONDS", 0.0)
        await http.request("GET", "/")
        assert server.connections == 2
        http.close()


async def test_pieces_make_one_answer(tmp_path: Path) -> None:
    async def in_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        for piece in (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 20",
            b"1 Made\r\nTransfer-Enc",
            b"oding: chunked\r\n\r\n3\r",
            b"\nabc\r\n2\r\nde\r\n",
            b"0\r\n\r\n",
        ):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    async with peer(tmp_path, in_pieces) as server:
        http = UnixHttp(str(server.path))
        assert await http.request("GET", "/") == (201, b"abcde")
        http.close()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b"no http at all\r\n\r\n"])
async def test_a_connection_that_breaks_is_an_error_and_the_next_one_is_new(tmp_path: Path, said: bytes) -> None:
    async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(said)

    async with peer(tmp_path, breaking) as server:
        http = UnixHttp(str(server.path))
        for _ in range(2):
            with pytest.raises(Broken):
                await http.request("GET", "/")
        assert server.connections == 2
        http.close()


async def test_connections_that_ended_while_they_rested_are_no_failure(tmp_path: Path) -> None:
    async with peer(tmp_path, for_ever) as server:
        http = UnixHttp(str(server.path))
        await asyncio.gather(*(http.request("GET", "/") for _ in range(3)))
        # The peer ends, and another takes its place; our side has not heard of it when the next request is made.
        server.hang_up()
        assert (await http.request("DELETE", "/"))[0] == 200
        assert server.connections == 4
        server.hang_up()
        with pytest.raises(Broken):  # it may have been heard
            await http.request("POST", "/")
        http.close()


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(NotConnected, match="No such file"):
        await UnixHttp(str(tmp_path / "none")).request("GET", "/")


async def test_an_answer_nobody_waited_for_is_not_given_to_the_next(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told = await head(reader)
        if "/slow" in told:
            asked.set()
            await reader.read()  # until the client has gone
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmine")
        await reader.read()

    async with peer(tmp_path, late) as server:
        http = UnixHttp(str(server.path))
        slow = asyncio.create_task(http.request("GET", "/slow"))
        await asked.wait()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert await http.request("GET", "/") == (200, b"mine")
        http.close()


async def test_a_stream_gives_pieces_as_they_come_and_notices_silence(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n")
        await more.wait()
        writer.write(b"4\r\ntwo\n\r\n")
        await reader.read()

    async with peer(tmp_path, events) as server:
        http = UnixHttp(str(server.path))
        told = http.stream("/events", silence=0.2)
        assert await anext(told) == (200, b"one\n")
        more.set()
        assert await anext(told) == (200, b"two\n")
        with pytest.raises(TimeoutError):
            await anext(told)


async def test_no_line_can_be_put_into_a_head(tmp_path: Path) -> None:
    async with peer(tmp_path, for_ever) as server:
        http = UnixHttp(str(server.path))
        with pytest.raises(ValueError, match="line break"):
            await http.request("GET", "/", headers={"X-Request-ID": "a\r\nX-Other: b"})
        http.close()
