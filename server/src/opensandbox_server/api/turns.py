# SPDX-License-Identifier: Apache-2.0
"""So that nobody's stream keeps the event loop for itself.

A peer that writes without an end always has something to read, and thousands of tiny messages fit into one read. All
other requests would wait for them: here they are read in small slices, with a turn for everybody after each.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

WEBSOCKET_SLICE = 4 * 1024
"""A frame may have two bytes, and each costs some microseconds."""
MESSAGES_IN_A_TURN = 32


class InSlices(asyncio.BufferedProtocol):
    """Stands between a transport and a protocol that takes whatever was read at once.

    >>> await loop.create_unix_connection(lambda: InSlices(protocol, 4096), path)     # doctest: +SKIP
    """

    # Not an `asyncio.Protocol` itself: uvloop gives those no buffer of their own, and reads up to 8 MB in one go.

    def __init__(self, protocol: asyncio.Protocol, size: int) -> None:
        self._protocol = protocol
        self._buffer = bytearray(size)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._protocol.connection_made(transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))
        transport = self._transport
        # Less than a slice was all there is. A protocol that has paused continues by itself.
        if nbytes == len(self._buffer) and transport is not None and transport.is_reading():
            transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._next_slice)

    def _next_slice(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)
        self._transport = None

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


class ClientWebSocket(InSlices):
    """A client's WebSocket, for uvicorn's `ws`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(WebSocketsSansIOProtocol(*args, **options), WEBSOCKET_SLICE)


class Turns:
    """Lets others run after every few messages: to take one that is there already does not wait.

    >>> turns = Turns()
    >>> while True: await turns.next()     # doctest: +SKIP
    """

    def __init__(self, messages: int = MESSAGES_IN_A_TURN) -> None:
        self._messages = messages
        self._left = messages

    async def next(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._left = self._messages
            await asyncio.sleep(0)
