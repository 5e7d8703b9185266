# SPDX-License-Identifier: Apache-2.0
"""The routes of events, as server-sent events that end when the server does."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Header, Request, Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from opensandbox_server.events import Cut, Events, Following, Heartbeat, Item
from opensandbox_server.ports import SandboxEvent

from .shape import given
from .tenant import tenant_of

STALLED_SECONDS = 60.0
"""A client that takes nothing for so long is left."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
_LAST = Header(alias="Last-Event-ID", ge=0, le=2**63 - 1)
_LINE_ENDS = re.compile(r"[\x00-\x1f\x7f]+")


def event_routes(events: Events) -> APIRouter:
    """The same routes serve at root and under /v1."""
    routes = APIRouter()

    @routes.get("/sandboxes/{sandbox_id}/events")
    async def watch_sandbox_events(
        sandbox_id: str, request: Request, last: Annotated[int | None, _LAST] = None, follow: bool = True
    ) -> Response:
        return EventStream(await events.follow(tenant_of(request), sandbox_id=sandbox_id, after=last, follow=follow))

    @routes.get("/events")
    async def watch_events(request: Request, last: Annotated[int | None, _LAST] = None) -> Response:
        return EventStream(await events.follow(tenant_of(request), after=last))

    return routes


class EventStream(Response):
    """Sends what is followed until it ends, the client leaves, or the client stops taking it."""

    def __init__(self, following: Following) -> None:
        super().__init__(status_code=200, headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._following = following

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_client, receive, tasks.cancel_scope)
                await self._send_all(send)
                tasks.cancel_scope.cancel()
        finally:
            self._following.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        # At once, so that the client knows it is connected.
        await send({"type": "http.response.body", "body": b": events\n\n", "more_body": True})
        with suppress(TimeoutError):
            async for item in self._following.items:
                with anyio.fail_after(STALLED_SECONDS):
                    await send({"type": "http.response.body", "body": framed(item), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch_client(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()


def framed(item: Item) -> bytes:
    """One server-sent event. JSON has no line ends of its own, and a name cannot bring one either.

    >>> framed(Cut("too slow"))
    b'event: cut\\ndata: {"message":"too slow"}\\n\\n'
    """
    if isinstance(item, Heartbeat):
        return b": heartbeat\n\n"
    if isinstance(item, Cut):
        return b"event: cut\ndata: " + to_json({"message": item.message}) + b"\n\n"
    name = _LINE_ENDS.sub(" ", item.kind)
    return f"id: {item.seq}\nevent: {name}\ndata: ".encode() + to_json(_content(item)) + b"\n\n"


def _content(event: SandboxEvent) -> dict[str, Any]:
    return given(
        seq=event.seq,
        sandboxId=event.sandbox_id,
        at=event.at,
        event=event.kind,
        state=event.state,
        reason=event.reason,
        message=event.told,
    )
