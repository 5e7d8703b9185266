# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 to clients: bounds for what they send before anything is known about them, and answers in one piece.

uvicorn takes the head of a request however long it is and however slowly it comes, and by then nobody has been asked
for a key. Here a head has a size, a number of lines and a time; what is over that is told so and cut off.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, cast

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from opensandbox_server.errors import Code, OpenSandboxError

HEAD_BYTES = 64 * 1024
HEAD_LINES = 256
HEAD_SECONDS = 20.0


class HeldHead:
    """A transport that holds the head of an answer back until its body comes, or the loop comes round.

    uvicorn writes them apart. So most answers were two packets, and their clients woke up for the head alone.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.bare = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            self.bare.writelines((head, data))
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._let_go)
        else:
            self.bare.write(data)

    def close(self) -> None:
        self._let_go()
        self.bare.close()

    def _let_go(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self.bare.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)


class BoundedHttp(HttpToolsProtocol):
    """HTTP/1.1 as uvicorn speaks it, with a bound on heads. For `uvicorn.Config(http=BoundedHttp)`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True
        self._bytes = 0  # of the head so far, as they came in
        self._lines = 0  # of the head, and of the trailer behind a chunked body
        self._size = 0  # of those lines
        self._refusal: OpenSandboxError | None = None
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, HeldHead(transport, self.loop))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return  # it is being closed
        if self._in_head:
            self._bytes += len(data)
        super().data_received(data)
        if self._in_head and self._bytes > HEAD_BYTES and self._refusal is None:
            self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._lines = self._size = 0
        if not self._in_head:  # the next request on this connection
            self._in_head, self._bytes = True, 0
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        self._size += len(name) + len(value)
        if self._lines > HEAD_LINES or self._size > HEAD_BYTES:
            self._refusal = _too_large()
            raise ValueError("the head is too large")  # stops the parser, which then asks for send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        self.transport = cast(HeldHead, self.transport).bare  # it belongs to another protocol from now on
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or OpenSandboxError(Code.GENERAL_INVALID_HTTP, msg))

    def _await_head(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def _head_is_there(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        if self._bytes:
            self._refuse(
                OpenSandboxError(
                    Code.GENERAL_REQUEST_TIMEOUT, f"The head of the request did not come within {HEAD_SECONDS:.0f} s."
                )
            )
        else:
            self.transport.close()  # never said a word; nobody reads an answer

    def _refuse(self, refusal: OpenSandboxError) -> None:
        """Answer without the application, which must not see any of it, and close."""
        self._refusal = refusal
        self._head_is_there()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an answer is on its way, and this would be taken for a part of it
            return
        body = to_json({"code": refusal.code.value, "message": refusal.message, "hint": refusal.hint})
        status = HTTPStatus(refusal.status)
        self.transport.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        self.transport.close()


def _too_large() -> OpenSandboxError:
    return OpenSandboxError(
        Code.GENERAL_HEADERS_TOO_LARGE,
        f"The head of the request is larger than {HEAD_BYTES // 1024} KiB or has more than {HEAD_LINES} lines.",
    )
