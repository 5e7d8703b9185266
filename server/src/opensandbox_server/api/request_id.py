# SPDX-License-Identifier: Apache-2.0
"""What is done around every request: it gets an id and a place in a trace, is counted, timed and logged.

The id is the caller's if it sends a decent one, else ours; every answer carries it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opensandbox_server import context
from opensandbox_server.logs import ACCESS
from opensandbox_server.metrics import Metrics

from .tenant import SCOPE as TENANT

_HEADER = b"x-request-id"
_LONGEST = 128
_SANDBOX = re.compile(r"/sandboxes/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:/|$)")
_PROXIED = re.compile(r"(/proxy/[^/]*/).+", re.DOTALL)
_LONGEST_PATH = 200
NO_ROUTE = "none"
"""The route of requests that were refused before one was looked for, or that fit none."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_QUIET = frozenset({"/health", "/metrics"})
"""Asked every few seconds by machines; their lines would bury the others."""

current = context.request_id
"""The id of the request at work in this context; also in the tasks it starts, for logs."""
access = logging.getLogger(ACCESS)


class RequestId:
    """Pure ASGI, so that streams pass untouched."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        given, parent, state = _given(scope)
        request_id = given or uuid.uuid4().hex
        about = _SANDBOX.search(scope["path"])
        tokens = (
            (context.request_id, context.request_id.set(request_id)),
            (context.trace, context.trace.set(context.Trace.given(parent, state))),
            (context.sandbox_id, context.sandbox_id.set(about[1] if about else "")),
        )
        header = (_HEADER, request_id.encode("ascii"))
        status = 0

        async def echo(message: Message) -> None:
            nonlocal status
            kind = message["type"]
            if kind in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                status = message.get("status", 101)
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, echo)
        finally:
            self._count(scope, status, time.perf_counter() - started)
            for variable, token in tokens:
                variable.reset(token)  # type: ignore[arg-type]

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        """Labels name the route, never the path: that is the client's. The line does too, where there is a route."""
        route = template(scope)
        method = scope.get("method", "WEBSOCKET")
        method = method if method in _METHODS or method == "WEBSOCKET" else "other"
        self._metrics.requests.add(route, method, str(status))
        self._metrics.request_seconds.observe(seconds, route, method)
        level = logging.DEBUG if route in _QUIET else logging.INFO
        if access.isEnabledFor(level):
            taken = round(seconds * 1000, 3)
            fields = {"method": method, "route": route, "status": status, "ms": taken}
            shown = route
            if route == NO_ROUTE:
                shown = fields["path"] = _path(scope)
            if client := scope.get("client"):
                fields["client"] = client[0]
            if tenant := scope.get(TENANT):
                fields["tenant"] = tenant
            # The end of the answer leaves this process only when the loop comes round; the line can wait for that.
            asyncio.get_running_loop().call_soon(
                partial(access.log, level, "%s %s %d %.1f ms", method, shown, status, taken, extra={"fields": fields})
            )


def template(scope: Scope) -> str:
    """The route as it is written in this program; all that fit none are one."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    if isinstance(path, str):
        return path
    return "other" if "endpoint" in scope else NO_ROUTE


def _path(scope: Scope) -> str:
    """What was asked for, without the query and without what is meant for a program in a sandbox: there are secrets."""
    path = _PROXIED.sub(r"\1...", scope["path"])
    return path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}..."


def _given(scope: Scope) -> tuple[str | None, str | None, str | None]:
    """The caller's id and trace. The id goes into a header and into logs, so only printable ASCII, and not a novel."""
    request_id = parent = state = None
    for name, value in scope["headers"]:
        if name == _HEADER:
            if request_id is None and 0 < len(value) <= _LONGEST and all(0x21 <= byte <= 0x7E for byte in value):
                request_id = value.decode("ascii")
        elif name == b"traceparent":
            # Sent twice it is no trace context at all.
            parent = value.decode("latin-1") if parent is None else ""
        elif name == b"tracestate":
            state = value.decode("latin-1") if state is None else f"{state},{value.decode('latin-1')}"
    return request_id, parent, state
