# SPDX-License-Identifier: Apache-2.0
"""Routes that published clients know and this server does not have yet: refused by name, not as unknown.

They are no part of our contract, so they are plain routes that `/openapi.json` and `/docs` do not show. A route that
gets built leaves this table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from opensandbox_server.errors import Code, OpenSandboxError

_SANDBOX = "/sandboxes/{sandbox_id}"
_REFUSED = Code.SANDBOX_API_NOT_SUPPORTED

TABLE: tuple[tuple[tuple[str, ...], str, str, Code], ...] = (
    (("POST",), f"{_SANDBOX}/pause", "Pausing a sandbox", _REFUSED),
    (("POST",), f"{_SANDBOX}/resume", "Resuming a sandbox", _REFUSED),
    (("POST",), f"{_SANDBOX}/snapshots", "Taking a snapshot", _REFUSED),
    (("GET",), "/snapshots", "Listing snapshots", _REFUSED),
    (("GET", "DELETE"), "/snapshots/{snapshot_id}", "Asking for a snapshot", _REFUSED),
    (("GET", "POST", "PUT", "PATCH", "DELETE"), f"{_SANDBOX}/networkpolicy", "A network policy", _REFUSED),
    (("GET", "POST"), "/pools", "A pool of sandboxes", Code.POOL_NOT_SUPPORTED),
    (("GET", "PUT", "PATCH", "DELETE"), "/pools/{name}", "A pool of sandboxes", Code.POOL_NOT_SUPPORTED),
    (("GET", "POST"), "/templates", "A template", Code.TEMPLATE_NOT_SUPPORTED),
    (("GET", "PUT", "PATCH", "DELETE"), "/templates/{template_id}", "A template", Code.TEMPLATE_NOT_SUPPORTED),
)


def not_built_routes(prefix: str) -> list[Route]:
    """The refusals, to go behind all routes that answer."""
    return [
        _Known(prefix + path, _refusal(what, code), methods=list(methods), include_in_schema=False)
        for methods, path, what, code in TABLE
    ]


class _Known(Route):
    """Says which route it is, as those of FastAPI do, so that figures and logs can name it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}


def _refusal(what: str, code: Code) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(_: Request) -> Response:
        raise OpenSandboxError(code, f"{what} is not built yet.", hint="GET /v1/runtime says what this server can do.")

    return refuse
