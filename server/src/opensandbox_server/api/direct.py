# SPDX-License-Identifier: Apache-2.0
"""A short way to the few routes whose time clients feel.

The framework looks through all routes, resolves dependencies and stacks up what it has to close: half a millisecond of
a create that has five. The routes are the same functions and stay in the framework's table, which says what else is
asked of them: other methods, other paths.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from opensandbox_server.errors import OpenSandboxError

from .answers import refused

_PREFIXES = ("", "/v1")


@dataclass(frozen=True)
class _Way:
    route: APIRoute
    call: Callable[..., Awaitable[Response]]
    parameter: str | None
    """The name of the path's last part, if that is one."""


class Direct:
    """Pure ASGI, around the framework.

    >>> app.add_middleware(Direct, routes=sandbox_routes(lifecycle), named={"create_sandbox"})      # doctest: +SKIP
    """

    def __init__(self, app: ASGIApp, routes: APIRouter, named: Collection[str]) -> None:
        """`named` are functions of those routes that take the request and, if the path ends in one, its parameter."""
        self._app = app
        self._ways: dict[tuple[str, str], _Way] = {}
        for route in routes.routes:
            if isinstance(route, APIRoute) and route.name in named:
                path, parameter = route.path, None
                if path.endswith("}"):
                    path, _, parameter = path[:-1].partition("{")
                for method in route.methods or ():
                    for prefix in _PREFIXES:
                        self._ways[method, prefix + path] = _Way(route, route.endpoint, parameter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        way, arguments = self._find(scope)
        if way is None:
            await self._app(scope, receive, send)
            return
        # What those around us look at.
        scope["route"], scope["endpoint"], scope["path_params"] = way.route, way.call, arguments
        request = Request(scope, receive, send)
        try:
            response = await way.call(request=request, **arguments)
        except OpenSandboxError as error:
            response = refused(error, request)
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> tuple[_Way | None, dict[str, Any]]:
        if scope["type"] != "http":
            return None, {}
        method, path = scope["method"], scope["path"]
        way = self._ways.get((method, path))
        if way is not None:
            return way if way.parameter is None else None, {}
        folder, slash, last = path.rpartition("/")
        way = self._ways.get((method, folder + slash))
        if way is None or way.parameter is None:
            return None, {}
        return way, {way.parameter: last}
