# SPDX-License-Identifier: Apache-2.0
"""The routes of diagnostics: JSON for those who name a scope, and the plain text of before for those who do not."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from opensandbox_server.diagnostics import EVENT_LINES, LOG_LINES, Diagnostics, Excerpt
from opensandbox_server.errors import Code, OpenSandboxError, unsupported_field

from .answers import answer
from .tenant import tenant_of

_TEXT = "text/plain; charset=utf-8"
_SCOPES = {"logs": ("container", "all"), "events": ("runtime", "all")}
_SAFE = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def diagnostic_routes(diagnostics: Diagnostics, runtime: str) -> APIRouter:
    """The same routes serve at root and under /v1."""
    routes = APIRouter()

    @routes.get("/sandboxes/{sandbox_id}/diagnostics/logs")
    async def get_diagnostic_logs(
        sandbox_id: str,
        request: Request,
        scope: str | None = None,
        tail: Annotated[int, Query(ge=1, le=10_000)] = LOG_LINES,
        since: str | None = None,
        container: str | None = None,
    ) -> Response:
        _check_scope("logs", scope)
        if since:
            raise unsupported_field(
                runtime, "since", hint="Output is not stamped with the time; ask for the last lines with tail instead."
            )
        lines = LOG_LINES if scope is not None else tail
        return _answer("logs", sandbox_id, scope, await diagnostics.logs(tenant_of(request), sandbox_id, lines))

    @routes.get("/sandboxes/{sandbox_id}/diagnostics/events")
    async def get_diagnostic_events(
        sandbox_id: str,
        request: Request,
        scope: str | None = None,
        limit: Annotated[int, Query(ge=1, le=500)] = EVENT_LINES,
    ) -> Response:
        _check_scope("events", scope)
        lines = EVENT_LINES if scope is not None else limit
        return _answer("events", sandbox_id, scope, await diagnostics.events(tenant_of(request), sandbox_id, lines))

    @routes.get("/sandboxes/{sandbox_id}/diagnostics/inspect")
    async def get_diagnostic_inspect(sandbox_id: str, request: Request) -> Response:
        return _text(await diagnostics.inspect(tenant_of(request), sandbox_id))

    @routes.get("/sandboxes/{sandbox_id}/diagnostics/summary")
    async def get_diagnostic_summary(
        sandbox_id: str,
        request: Request,
        tail: Annotated[int, Query(ge=1, le=10_000)] = 50,
        event_limit: Annotated[int, Query(ge=1, le=500)] = 20,
    ) -> Response:
        return _text(await diagnostics.summary(tenant_of(request), sandbox_id, tail=tail, event_limit=event_limit))

    return routes


def _check_scope(kind: str, scope: str | None) -> None:
    if scope is not None and scope not in _SCOPES[kind]:
        raise OpenSandboxError(
            Code.DIAGNOSTICS_SCOPE_UNSUPPORTED,
            f"{kind} have no scope {scope[:64]!r}.",
            hint=f"Scopes of {kind}: {', '.join(_SCOPES[kind])}.",
        )


def _answer(kind: str, sandbox_id: str, scope: str | None, found: Excerpt) -> Response:
    if scope is None:
        return _text(found.text, {"Deprecation": "true"})
    return answer(
        {
            "sandboxId": sandbox_id,
            "kind": kind,
            "scope": scope,
            "delivery": "inline",
            "contentType": _TEXT,
            "content": found.text,
            "contentLength": len(found.text.encode()),
            "truncated": found.truncated,
        }
    )


def _text(text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(text.encode(), media_type=_TEXT, headers={**_SAFE, **(headers or {})})
