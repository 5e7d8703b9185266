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

from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.ports import Address

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.tracing import Trace

CONNECT_SECONDS = 10.0
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
        try:
            _, protocol = await self._loop.create_unix_connection(self._factory, sock=sock)
        except BaseException:
            sock.close()
            raise
        return protocol
