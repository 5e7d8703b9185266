# SPDX-License-Identifier: Apache-2.0
"""Every request has an id: the caller's if it sends a decent one, else ours. Every answer carries it."""

from __future__ import annotations

import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"
_LONGEST = 128

current: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request at work in this context; also in the tasks it starts, for logs."""


class RequestId:
    """Pure ASGI, so that streams pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = _given(scope) or uuid.uuid4().hex
        token = current.set(request_id)
        header = (_HEADER, request_id.encode("ascii"))

        async def echo(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, echo)
        finally:
            current.reset(token)


def _given(scope: Scope) -> str | None:
    """The caller's id. It goes into a header and into logs, so only printable ASCII, and not a novel."""
    for name, value in scope["headers"]:
        if name == _HEADER and 0 < len(value) <= _LONGEST and all(0x21 <= byte <= 0x7E for byte in value):
            return str(value.decode("ascii"))
    return None
