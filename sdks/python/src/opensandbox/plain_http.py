# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 over plain TCP, as a transport of httpx2.

A sandbox is made, and says its first word, in a few milliseconds. The general transport would take a third of them: it
finds its way through proxies, TLS, HTTP/2 and a queue with every request. This one knows what an SDK for a server
nearby needs: kept connections, limits of time, bodies that stream both ways. The grammar is h11's. What it does not
speak (TLS) goes to the general one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import h11
import httpx2

from opensandbox.concurrency import Slots, Wire, connect

# Of all connections of one pool that are in use at once; more requests wait. Well below the usual limit of files.
MOST_CONNECTIONS = 500
# Of those that rest, for each address.
MOST_KEPT = 20
# Shorter than any server's patience: a connection must not be closed there just when it is used again here.
KEPT_SECONDS = 15.0
_READ_SIZE = 256 * 1024
_LONGEST_HEAD = 100 * 1024

Limits = dict[str, float | None]


class PlainTransport(httpx2.AsyncBaseTransport):
    """Keeps connections per host and port, the last one used first.

    `general` makes the transport for everything that is not plain HTTP, when it is needed.
    """

    def __init__(self, general: Callable[[], httpx2.AsyncBaseTransport], most: int = MOST_CONNECTIONS) -> None:
        self._general = general
        self._other: httpx2.AsyncBaseTransport | None = None
        # Only single operations of deque and dict, which no other thread comes between.
        self._kept: dict[tuple[str, int], deque[_Connection]] = {}
        self._slots = Slots(most)
        self._closed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and hand out the answer when its head is there."""
        if request.url.scheme != "http":
            if self._other is None:
                self._other = self._general()
            return await self._other.handle_async_request(request)
        limits: Limits = request.extensions.get("timeout") or {}
        try:
            await self._slots.take(limits.get("pool"))
        except TimeoutError as error:
            raise httpx2.PoolTimeout("all connections of the pool are in use") from error
        connection = None
        try:
            connection = await self._connection(request.url, limits)
            head = await connection.exchange(request, limits)
        except BaseException:
            self._slots.give()
            if connection is not None:
                await connection.close()
            raise
        body = _Body(self, connection, limits)
        return httpx2.Response(head.status_code, headers=head.headers.raw_items(), stream=body)

    async def _connection(self, url: httpx2.URL, limits: Limits) -> _Connection:
        address = url.host, url.port or 80
        kept = self._kept.get(address)
        while kept:
            try:
                connection = kept.pop()
            except IndexError:
                break  # another thread took the last one
            if connection.fresh():
                return connection
            await connection.close()
        try:
            return _Connection(address, await connect(*address, limits.get("connect")))
        except TimeoutError as error:
            raise httpx2.ConnectTimeout(f"no connection after {limits.get('connect')} seconds") from error
        except OSError as error:
            raise httpx2.ConnectError(str(error)) from error

    async def release(self, connection: _Connection) -> None:
        """Take back a connection whose answer was read, or given up."""
        self._slots.give()
        if connection.reusable() and not self._closed:
            kept = self._kept.setdefault(connection.address, deque())
            if len(kept) < MOST_KEPT:
                kept.append(connection)
                return
        await connection.close()

    async def aclose(self) -> None:
        """Close the connections that rest; those in use are closed when they are released."""
        self._closed = True
        for kept in self._kept.values():
            while kept:
                await kept.pop().close()
        other, self._other = self._other, None
        if other is not None:
            await other.aclose()


class _NotTaken(Exception):
    """The other side takes no more of the request. No `OSError`: one of those is from the caller's own body."""


class _Connection:
    """One connection, which has one request on its way at a time."""

    def __init__(self, address: tuple[str, int], wire: Wire) -> None:
        self.address = address
        self._wire = wire
        self._state = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        self._used = time.monotonic()

    async def exchange(self, request: httpx2.Request, limits: Limits) -> h11.Response:
        """Send a request and read the head of its answer."""
        try:
            await self._send(request, limits.get("write"))
        except h11.LocalProtocolError as error:
            raise httpx2.LocalProtocolError(str(error)) from error
        except _NotTaken:
            # A server may refuse a body before it has taken all of it: then its answer is there to read.
            pass
        while True:
            event = await self._event(limits.get("read"))
            if isinstance(event, h11.Response):
                return event
            # What comes before are interim answers (1xx), which nobody asked for.

    async def _send(self, request: httpx2.Request, limit: float | None) -> None:
        head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
        # The head goes with the first piece of the body: one packet, one system call.
        waiting = self._state.send(head) or b""
        async for chunk in _chunks(request):
            await self._put(waiting + (self._state.send(h11.Data(data=chunk)) or b""), limit)
            waiting = b""
        waiting += self._state.send(h11.EndOfMessage()) or b""
        if waiting:
            await self._put(waiting, limit)

    async def _put(self, data: bytes, limit: float | None) -> None:
        try:
            await self._wire.send(data, limit)
        except TimeoutError as error:
            raise httpx2.WriteTimeout(str(error)) from error
        except OSError as error:
            raise _NotTaken from error

    async def data(self, limit: float | None) -> bytes:
        """The next piece of the answer's body; empty at its end."""
        event = await self._event(limit)
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def _event(self, limit: float | None) -> Any:
        while True:
            try:
                event = self._state.next_event()
            except h11.RemoteProtocolError as error:
                raise httpx2.RemoteProtocolError(str(error)) from error
            if event is not h11.NEED_DATA:
                if isinstance(event, h11.ConnectionClosed):
                    raise httpx2.RemoteProtocolError("it was closed without an answer")
                return event
            try:
                received = await self._wire.receive(_READ_SIZE, limit)
            except TimeoutError as error:
                raise httpx2.ReadTimeout(f"nothing came for {limit} seconds") from error
            except OSError as error:
                raise httpx2.ReadError(str(error)) from error
            if not received and self._state.their_state is h11.SEND_RESPONSE:
                raise httpx2.RemoteProtocolError("it was closed without an answer")
            self._state.receive_data(received)

    def reusable(self) -> bool:
        """Whether request and answer are through; then it is ready for the next ones."""
        if self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        self._used = time.monotonic()
        return True

    def fresh(self) -> bool:
        """Whether it has rested for a short time only, and the other side has neither closed it nor spoken."""
        return time.monotonic() - self._used < KEPT_SECONDS and not self._wire.readable()

    async def close(self) -> None:
        await self._wire.close()


class _Body(httpx2.AsyncByteStream):
    """The body of an answer. It is read once; closing it gives the connection back."""

    def __init__(self, transport: PlainTransport, connection: _Connection, limits: Limits) -> None:
        self._transport = transport
        self._connection: _Connection | None = connection
        self._limit = limits.get("read")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._connection is not None and (chunk := await self._connection.data(self._limit)):
            yield chunk

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._transport.release(connection)


async def _chunks(request: httpx2.Request) -> AsyncIterator[bytes]:
    stream: Any = request.stream
    async for chunk in stream:
        if chunk:
            yield chunk
