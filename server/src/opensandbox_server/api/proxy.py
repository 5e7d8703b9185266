# SPDX-License-Identifier: Apache-2.0
"""The way to a sandbox's ports through this server: any method, streams in both directions, WebSockets.

Bytes pass as they come: nothing is collected, decompressed or parsed but the heads. Each side is read only as fast as
the other takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import anyio
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import CloseCode
from websockets.http11 import Response as HandshakeResponse
from websockets.uri import WebSocketURI
from yarl import URL

from opensandbox_server import context
from opensandbox_server.errors import Code, OpenSandboxError, invalid
from opensandbox_server.proxy import Caller, Proxy, Target, inward, outward

from . import request_id
from .dial import ProgramWebSocket, SandboxConnector, dial
from .tenant import tenant_of
from .turns import Turns

log = logging.getLogger(__name__)

READ_SECONDS = 180.0
LARGEST_HEADER = 64 * 1024
LARGEST_MESSAGE = 4 * 1024 * 1024
"""A WebSocket message is the one thing that is held as a whole."""
MOST_WEBSOCKETS = 128
"""Open at the same time into one sandbox."""

_PATH = re.compile(rb"(/v1)?/sandboxes/([^/]+)/proxy/([^/]+)(/.*)?", re.DOTALL)
_HOST = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?)(:[0-9]{1,5})?")
_HANDSHAKE = frozenset({"host", "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions"})
_AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
# What a close frame may carry; the others are only ever made up at one end.
_NOT_SENT = frozenset({CloseCode.NO_STATUS_RCVD, CloseCode.ABNORMAL_CLOSURE, CloseCode.TLS_HANDSHAKE})


@dataclass(frozen=True)
class _Asked:
    """The parts of a proxied path, as they were written."""

    root: str
    sandbox_id: str
    port: str
    rest: str
    bare: bool
    """The path ended behind the port, without a slash."""

    @classmethod
    def of(cls, scope: Scope) -> _Asked | None:
        """Read from the raw path: what has to be decoded first is no route, and what follows is the program's."""
        found = _PATH.fullmatch(scope.get("raw_path") or scope["path"].encode())
        if found is None:
            return None
        root, sandbox_id, port, rest = (part.decode("latin-1") for part in found.groups(b""))
        return cls(root, sandbox_id, port, rest or "/", bare=not rest)


def proxied_root(request: HTTPConnection, public_host: str | None = None) -> str:
    """This server as the client sees it: the beginning of an endpoint that goes through it.

    The Host header is the client's to choose, and what is made of it may be shown to others: only a name and a port.
    """
    name, port = _host_and_port(request.headers.get("host", ""))
    if public_host:
        name = f"[{public_host}]" if ":" in public_host else public_host
    return f"{name}{port}{'/v1' if request.scope['path'].startswith('/v1/') else ''}"


def _host_and_port(host: str) -> tuple[str, str]:
    """The name, with its brackets, and the port with its colon or nothing."""
    found = _HOST.fullmatch(host)
    name, port = found.groups("") if found else ("", "")
    if not name or int(port[1:] or 0) > 65535:
        raise invalid("The Host header is no host and port.", hint="Use a plain name or address of this server.")
    return name, port


class ProxyRoute(BaseRoute):
    """Serves at root and under /v1, for HTTP and WebSockets. Open it for as long as the server runs.

    >>> async with ProxyRoute(Proxy(store, runtime)).open(): ...     # doctest: +SKIP
    """

    path = "/sandboxes/{sandboxId}/proxy/{port}"
    """Its name in logs and figures."""

    def __init__(self, proxy: Proxy, *, page_sandbox: bool = True, read_seconds: float = READ_SECONDS) -> None:
        self._proxy = proxy
        self._page_sandbox = page_sandbox
        self._read_seconds = read_seconds
        self._session: aiohttp.ClientSession | None = None
        self._websockets: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """The pool of connections into sandboxes."""
        async with aiohttp.ClientSession(
            connector=SandboxConnector(self._proxy.address),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self._read_seconds),
            skip_auto_headers=_AUTOMATIC,
            auto_decompress=False,
            max_field_size=LARGEST_HEADER,
        ) as self._session:
            yield

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] not in ("http", "websocket") or (asked := _Asked.of(scope)) is None:
            return Match.NONE, {}
        return Match.FULL, {"opensandbox.proxy": asked, "route": self}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._request(scope, receive, send)

    async def _target(self, scope: Scope) -> tuple[_Asked, Target]:
        asked: _Asked = scope["opensandbox.proxy"]
        tenant = tenant_of(HTTPConnection(scope))
        return asked, await self._proxy.target(tenant, asked.sandbox_id, asked.port, root=asked.root)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, target = await self._target(scope)
        if asked.bare and not target.is_execd and scope["method"] in ("GET", "HEAD"):
            # Links of the program's page are relative to its root. Relative itself: a proxy in front may have put
            # something before the path.
            query = b"?" + scope["query_string"] if scope["query_string"] else b""
            headers = [(b"location", b"%d/%s" % (target.port, query)), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 308, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        upload = _Upload(receive, finished=not _has_body(scope))
        answer = _Answer(target, _caller(scope), send, self._page_sandbox)
        failure: OpenSandboxError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(upload.until_left, tasks.cancel_scope)
            try:
                await self._exchange(scope, asked, target, upload, answer)
            except OpenSandboxError as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None and not answer.begun:
            raise failure
        if failure is not None:
            # Too late to say it. The answer stays unfinished, and the client sees that.
            log.info("request %s: %s", request_id.current.get(), failure)

    async def _exchange(self, scope: Scope, asked: _Asked, target: Target, upload: _Upload, answer: _Answer) -> None:
        assert self._session is not None
        try:
            async with self._session.request(
                scope["method"],
                _url(asked, target, scope),
                headers=inward(scope["headers"], target, answer.caller),
                data=None if upload.finished else upload.chunks(),
                allow_redirects=False,
            ) as told:
                await answer.pass_on(told)
                if not upload.finished:
                    told.close()  # the rest of the request is nobody's; this connection cannot be used again
        except TimeoutError:
            raise OpenSandboxError(
                Code.BACKEND_TIMEOUT,
                f"Port {target.port} of the sandbox said nothing for {self._read_seconds:.0f} seconds.",
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            log.debug("request %s: %r", request_id.current.get(), error)
            raise OpenSandboxError(
                Code.BACKEND_RESPONSE_FAILED, f"Port {target.port} of the sandbox gave no proper answer."
            ) from None

    # -- WebSocket -----------------------------------------------------------------------------------------------------

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # the connect that is about to be answered
        try:
            asked, target = await self._target(scope)
            with self._one_more(target.sandbox_id):
                program = await self._open_websocket(scope, asked, target)
                await self._converse(program, receive, send)
        except _RefusedHandshake as refused:
            await refused.pass_on(send)
        except OpenSandboxError as error:
            # Accepted first: only then does a browser show the reason to its page.
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": _close_code(error), "reason": error.code.value})

    @contextlib.contextmanager
    def _one_more(self, sandbox_id: str) -> Iterator[None]:
        """Each may hold a message in each direction."""
        if self._websockets[sandbox_id] >= MOST_WEBSOCKETS:
            raise OpenSandboxError(Code.INGRESS_BUSY, f"{MOST_WEBSOCKETS} WebSockets into this sandbox are open.")
        self._websockets[sandbox_id] += 1
        try:
            yield
        finally:
            self._websockets[sandbox_id] -= 1
            if not self._websockets[sandbox_id]:
                del self._websockets[sandbox_id]

    async def _converse(self, program: ProgramWebSocket, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "websocket.accept", "subprotocol": program.subprotocol})
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_to_program, receive, program, tasks.cancel_scope)
                await _to_client(program, send)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await program.close()

    async def _open_websocket(self, scope: Scope, asked: _Asked, target: Target) -> ProgramWebSocket:
        caller = _caller(scope)
        protocol = ClientProtocol(
            _websocket_uri(asked, target, scope, caller.host),
            subprotocols=scope["subprotocols"] or None,
            max_size=LARGEST_MESSAGE,
        )
        sock = await dial(self._proxy.address(target.sandbox_id, target.port), target.port)
        program = await ProgramWebSocket.over(sock, protocol)
        try:
            headers = [
                (name, value)
                for name, value in inward(scope["headers"], target, caller)
                if name not in _HANDSHAKE and name != "sec-websocket-protocol"
            ]
            async with asyncio.timeout(self._read_seconds):
                await program.handshake(headers, user_agent_header=None)
        except TimeoutError:
            program.transport.abort()
            raise OpenSandboxError(
                Code.BACKEND_TIMEOUT, f"Port {target.port} of the sandbox did not answer the handshake."
            ) from None
        except (WebSocketException, OSError, ValueError) as error:
            program.transport.abort()
            if target.is_execd and isinstance(error, InvalidStatus) and error.response.status_code >= 400:
                extensions = scope.get("extensions") or {}
                if "websocket.http.response" in extensions:
                    raise _RefusedHandshake(error.response) from None
            log.debug("request %s: %r", request_id.current.get(), error)
            raise OpenSandboxError(
                Code.BACKEND_RESPONSE_FAILED, f"Port {target.port} of the sandbox opened no WebSocket."
            ) from None
        except BaseException:
            program.transport.abort()
            raise
        return program


class _RefusedHandshake(Exception):
    """execd answered a handshake with an error of its API (no such terminal, one that has its client already).

    The client gets it as it is: its status and code say what to do. A program's own refusal is not passed on: nothing
    of it can be trusted, and a page could not read it anyway.
    """

    def __init__(self, response: HandshakeResponse) -> None:
        super().__init__(response.status_code)
        self._response = response

    async def pass_on(self, send: Send) -> None:
        kind = self._response.headers.get("Content-Type", "application/json").encode("latin-1")
        headers = [(b"content-type", kind)]
        status = self._response.status_code
        await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": bytes(self._response.body or b"")})


async def _to_program(receive: Receive, program: ProgramWebSocket, scope: anyio.CancelScope) -> None:
    """Until the client closes; then the program is told with the same words."""
    turns = Turns()
    try:
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            await program.send(text if text is not None else message["bytes"])
            await turns.next()
        code, reason = message.get("code", CloseCode.ABNORMAL_CLOSURE), message.get("reason")
        if code in _NOT_SENT:
            # A client that closed without a word has an empty reason, one that vanished has none.
            code = CloseCode.GOING_AWAY if reason is None else CloseCode.NORMAL_CLOSURE
        await program.close(code, reason or "")
        scope.cancel()
    except ConnectionClosed:
        pass  # the other direction tells the client


async def _to_client(program: ProgramWebSocket, send: Send) -> None:
    """Until the program closes; then the client is told with the same words."""
    turns = Turns()
    try:
        while True:
            message = await program.recv()
            await send({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})
            await turns.next()
    except ConnectionClosed:
        code, reason = program.close_code, program.close_reason or ""
        if (refused_with := program.refused_with) is not None:
            code, reason = refused_with, Code.BACKEND_RESPONSE_FAILED.value
        elif code == CloseCode.NO_STATUS_RCVD:
            code = CloseCode.NORMAL_CLOSURE
        elif code is None or code in _NOT_SENT:
            code, reason = CloseCode.INTERNAL_ERROR, Code.BACKEND_RESPONSE_FAILED.value
        with contextlib.suppress(OSError):
            await send({"type": "websocket.close", "code": int(code), "reason": reason})
    except OSError:
        pass  # the client is gone, and the other direction knows


# -- parts -------------------------------------------------------------------------------------------------------------


class _Upload:
    """The body of a request, and the sight of a client that leaves."""

    def __init__(self, receive: Receive, *, finished: bool) -> None:
        self._receive = receive
        self._left = False
        self._read = anyio.Event()
        self.finished = finished
        """Nothing of it is left to read."""

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b""  # has the head written now, not with the first bytes
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._left = True
                self._read.set()
                await anyio.sleep_forever()  # the whole exchange is about to be cancelled
            if chunk := message.get("body", b""):
                yield chunk
            if not message.get("more_body", False):
                self.finished = True
                self._read.set()
                return

    async def until_left(self, scope: anyio.CancelScope) -> None:
        """Ends everything when there is nobody to answer. Two cannot listen at once: the body goes first."""
        if not self.finished:
            await self._read.wait()
        while not self._left:
            self._left = (await self._receive())["type"] == "http.disconnect"
        scope.cancel()


class _Answer:
    """The way back."""

    def __init__(self, target: Target, caller: Caller, send: Send, page_sandbox: bool) -> None:
        self.caller = caller
        self.begun = False
        self._target = target
        self._send = send
        self._page_sandbox = page_sandbox

    async def pass_on(self, told: aiohttp.ClientResponse) -> None:
        if not 200 <= told.status <= 599:
            # 101 would be a protocol that nobody asked for; the others mean nothing.
            raise OpenSandboxError(Code.BACKEND_RESPONSE_FAILED, f"The program answered with status {told.status}.")
        headers = outward(
            told.raw_headers, self._target, self.caller, status=told.status, page_sandbox=self._page_sandbox
        )
        self.begun = True
        await self._send({"type": "http.response.start", "status": told.status, "headers": headers})
        turns = Turns()
        async for chunk in told.content.iter_any():
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            await turns.next()
        await self._send({"type": "http.response.body", "body": b""})


def _close_code(error: OpenSandboxError) -> int:
    if error.status == 429:
        return int(CloseCode.TRY_AGAIN_LATER)
    return int(CloseCode.INTERNAL_ERROR if error.status >= 500 else CloseCode.POLICY_VIOLATION)


def _caller(scope: Scope) -> Caller:
    host = next((value for name, value in scope["headers"] if name == b"host"), b"")
    scheme = "https" if scope["scheme"] in ("https", "wss") else "http"
    client = scope["client"][0] if scope.get("client") else ""
    place = context.trace.get()
    trace = tuple(place.headers().items()) if place else ()
    return Caller(scheme, host.decode("latin-1"), client, request_id.current.get(), trace)


def _url(asked: _Asked, target: Target, scope: Scope) -> URL:
    query = scope["query_string"].decode("latin-1")
    return URL.build(
        scheme="http", host=target.sandbox_id, port=target.port, path=asked.rest, query_string=query, encoded=True
    )


def _websocket_uri(asked: _Asked, target: Target, scope: Scope, host: str) -> WebSocketURI:
    query = scope["query_string"].decode("latin-1")
    name, port = _host_and_port(host)
    # Path and query in one, so that they arrive as they were written. The host is only what the program reads.
    return WebSocketURI(
        secure=False,
        host=name.strip("[]").lower(),
        port=int(port[1:] or 80),
        path=f"{asked.rest}?{query}" if query else asked.rest,
        query="",
    )


def _has_body(scope: Scope) -> bool:
    headers: dict[bytes, Any] = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
