# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 over one Unix socket, for a server that is ours.

Every create and delete waits for one exchange with sandboxd, and most of what a general client takes for it (sessions,
cookies, redirects, proxies, a timer per stage) is of no use on a socket of this machine: with aiohttp an exchange took
2 ms longer on a busy machine. httptools, which uvicorn brings along, does the parsing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import cast

import httptools

IDLE_SECONDS = 30.0
"""A connection that rested longer is not used again: the other side may be about to close it."""

_REPEATABLE = frozenset({"GET", "PUT", "DELETE"})
"""What may be sent twice: on a connection that rested, nobody can tell whether the first time was heard."""


class NotConnected(ConnectionError):
    """Nobody listens; nothing was sent."""


class Broken(ConnectionError):
    """The connection ended, or what came was no HTTP, after a request was sent."""


class UnixHttp:
    """Connections to one socket, kept while they are of use. Any number of exchanges may go on at once.

    >>> http = UnixHttp("/run/opensandbox/1f2e3d4c/sandboxd.sock")                       # doctest: +SKIP
    >>> status, body = await http.request("GET", "/version")
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[tuple[_Connection, float]] = []
        self._closed = False

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> tuple[int, bytes]:
        """One exchange: the status and the whole body."""
        resting = self._resting()
        if resting is not None:
            try:
                return await self._exchange(resting, method, target, headers or {}, body)
            except Broken:
                # Closed while it rested, or just now; if the other side has ended, the rest of them are no better.
                self._drop()
                if method not in _REPEATABLE:
                    raise
        return await self._exchange(await self._connect(), method, target, headers or {}, body)

    async def _exchange(
        self, connection: _Connection, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        try:
            connection.send(method, target, headers, body)
            content = bytearray()
            while (chunk := await connection.chunk()) is not None:
                content += chunk
            status = connection.status
        except BaseException:
            connection.close()  # also when we are cancelled: what comes later must not be taken for another answer
            raise
        self._keep(connection)
        return status, bytes(content)

    async def stream(
        self, target: str, *, headers: Mapping[str, str] | None = None, silence: float
    ) -> AsyncIterator[tuple[int, bytes]]:
        """A GET whose answer may go on for ever: the status with each piece of it. Quiet for longer than `silence`
        seconds is a TimeoutError."""
        connection = await self._connect()
        try:
            connection.send("GET", target, headers or {}, b"")
            while True:
                async with asyncio.timeout(silence):
                    chunk = await connection.chunk()
                if chunk is None:
                    return
                yield connection.status, chunk
        finally:
            connection.close()

    def close(self) -> None:
        """Close what rests. Exchanges under way end by themselves."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        while self._idle:
            self._idle.pop()[0].close()

    def _resting(self) -> _Connection | None:
        while self._idle:
            connection, since = self._idle.pop()
            if not connection.lost and time.monotonic() - since < IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        try:
            _, made = await asyncio.get_running_loop().create_unix_connection(_Connection, self._path)
        except OSError as error:
            raise NotConnected(error.strerror or str(error)) from error
        return made

    def _keep(self, connection: _Connection) -> None:
        if self._closed or connection.lost or not connection.reusable:
            connection.close()
        else:
            self._idle.append((connection, time.monotonic()))


class _Connection(asyncio.Protocol):
    """One connection and the answer that is coming in on it."""

    def __init__(self) -> None:
        self.lost = False
        self.reusable = False
        self.status = 0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._complete = False
        self._waiter: asyncio.Future[None] | None = None

    def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> None:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks, self._complete, self.reusable = [], False, False
        lines = [f"{method} {target} HTTP/1.1", "Host: sandboxd"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body or method not in ("GET", "HEAD", "DELETE"):
            lines.append(f"Content-Length: {len(body)}")
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1:
            raise ValueError("a line of a request head contains a line break")
        self._transport.write(head.encode("latin-1") + b"\r\n\r\n" + body)

    async def chunk(self) -> bytes | None:
        """What came since, or what comes next; None at the end of the answer."""
        while not self._chunks and not self._complete:
            if self.lost:
                raise Broken("The connection ended before the answer did.")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._chunks:
            return None
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    # -- what the event loop calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- what the parser calls -------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        if self.status >= 200:  # what says "continue" is not the answer yet
            self._complete = True
            self.reusable = bool(self._parser.should_keep_alive())
