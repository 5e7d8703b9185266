# SPDX-License-Identifier: Apache-2.0
"""Connections into sandboxes: an HTTP connector whose hosts are sandbox ids, and single connections.

Which socket leads to a port, and how to ask for it, is the runtime's knowledge (`ports.Address`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler
from websockets.asyncio.client import ClientConnection
from websockets.client import ClientProtocol
from websockets.frames import DATA_OPCODES, CloseCode, Frame
from websockets.protocol import Event

from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.ports import Address

from .turns import WEBSOCKET_SLICE, InSlices

if TYPE_CHECKING:
    from aiohttp.http_parser import RawResponseMessage
    from aiohttp.streams import StreamReader
    from aiohttp.tracing import Trace

CONNECT_SECONDS = 10.0
MOST_INTERIM = 32
"""Answers like `102 Processing` before the one that counts."""
MOST_CONTROL_FRAMES = 1000
"""Pings and pongs of a program in `CONTROL_SECONDS`."""
CONTROL_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_REFUSALS = (CloseCode.MESSAGE_TOO_BIG, CloseCode.POLICY_VIOLATION)
# What is left in the kernel costs nobody memory or a turn. Large enough for a fast download.
_HTTP_SLICE = 32 * 1024
_LONGEST_LINE = 512
# Shorter than programs keep a connection themselves (five seconds with many), so that none is used that just ends.
_KEEP_IDLE_SECONDS = 4.0


async def dial(address: Address, port: int) -> socket.socket:
    """A connection to that port of a sandbox, with nothing read from it yet."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await loop.sock_connect(sock, address.socket)
            if address.kind == "ports":
                await loop.sock_sendall(sock, b"CONNECT %d\n" % port)
                if await _line(loop, sock) != b"OK":
                    raise _failed(f"Nothing listens on port {port} inside the sandbox.")
    except TimeoutError:
        sock.close()
        raise _failed("The sandbox took too long to open a connection.") from None
    except OSError:
        sock.close()
        raise _failed("The sandbox does not take connections; it may just have ended.") from None
    except BaseException:
        sock.close()
        raise
    return sock


async def _line(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bytes:
    """Byte by byte: what follows the line belongs to the connection's user."""
    line = bytearray()
    while len(line) < _LONGEST_LINE:
        byte = await loop.sock_recv(sock, 1)
        if byte in (b"\n", b""):
            break
        line += byte
    return bytes(line)


def _failed(message: str) -> OpenSandboxError:
    return OpenSandboxError(Code.BACKEND_CONNECTION_FAILED, message)


class SandboxConnector(aiohttp.BaseConnector):
    """Pools connections; `http://<sandbox id>:<port>/` is that port of that sandbox and nothing else resolves.

    Whoever uses it must not follow redirects: the programs that would send them are hostile.
    """

    def __init__(self, address: Callable[[str, int], Address]) -> None:
        super().__init__(limit=0, keepalive_timeout=_KEEP_IDLE_SECONDS)
        self._address = address

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        host, port = req.url.host, req.url.port
        assert host is not None
        assert port is not None
        sock = await dial(self._address(host, port), port)
        protocol = _Answers(self._loop)
        await _connect(protocol, sock, _HTTP_SLICE)
        return protocol


class _Answers(ResponseHandler):
    """One connection of the pool. The library takes any number of interim answers, one after another."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._interim = 0

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        if self.exception() is not None:
            return  # what else had been read already
        self._interim = self._interim + 1 if 100 <= data[0].code < 200 else 0
        if self._interim <= MOST_INTERIM:
            super().feed_data(data, size)
            return
        self.set_exception(aiohttp.ClientPayloadError("Too many interim answers."))
        if self.transport is not None:
            self.transport.close()


class ProgramWebSocket(ClientConnection):
    """A WebSocket to a program in a sandbox, that can neither flood nor outstay.

    One message at a time waits here; more are left in the socket. Who is still there is asked at the other end.
    """

    def __init__(self, protocol: ClientProtocol) -> None:
        super().__init__(protocol, ping_interval=None, close_timeout=_CLOSE_SECONDS, max_queue=1)
        self._control_frames = 0
        self._counted_since = self.loop.time()
        self._last_moment: asyncio.TimerHandle | None = None

    @classmethod
    async def over(cls, sock: socket.socket, protocol: ClientProtocol) -> ProgramWebSocket:
        """On that connection, before the handshake."""
        program = cls(protocol)
        await _connect(program, sock, WEBSOCKET_SLICE)
        return program

    @property
    def refused_with(self) -> CloseCode | None:
        """Why we ended it, when it was what the program sent."""
        sent = self.protocol.close_sent
        if sent is None or self.protocol.close_rcvd_then_sent:
            return None
        return next((code for code in _REFUSALS if code == sent.code), None)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.close_deadline is not None and self._last_moment is None:
            # Once closed, it is the program's to end the connection. It may not want to.
            self._last_moment = self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)

    def process_event(self, event: Event) -> None:
        super().process_event(event)
        if isinstance(event, Frame) and event.opcode not in DATA_OPCODES:
            self._count_control_frame()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._last_moment is not None:
            self._last_moment.cancel()

    def _count_control_frame(self) -> None:
        """Every ping has been answered already. From a program that does not read, the answers would pile up."""
        now = self.loop.time()
        if now - self._counted_since > CONTROL_SECONDS and not self.paused:
            self._counted_since, self._control_frames = now, 0
        self._control_frames += 1
        if self._control_frames == MOST_CONTROL_FRAMES + 1 and not self.protocol.close_expected():
            self.protocol.fail(CloseCode.POLICY_VIOLATION, "too many control frames")
            self.send_data()


async def _connect(protocol: asyncio.Protocol, sock: socket.socket, size: int) -> None:
    """Have the protocol take over an open connection. It is read that many bytes at a time."""
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: InSlices(protocol, size), sock=sock)
    except BaseException:
        sock.close()
        raise
