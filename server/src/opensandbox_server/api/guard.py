# SPDX-License-Identifier: Apache-2.0
"""Who may call.

With a key, whoever has it; with tenants, whoever has a key of one of them, as that tenant. Without any, programs on
this machine; but a browser is such a program too, and runs pages from anywhere. So then the request must name this
machine by a loopback name (or DNS could be made to point a foreign name here), and if a page made it, that page must
come from this very server. WebSockets are no exception: browsers open them across origins without asking.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from opensandbox_server.errors import Code, OpenSandboxError

from .answers import error_answer
from .tenant import DEFAULT, SCOPE

KEY_HEADER = b"open-sandbox-api-key"
METRICS_PATH = "/metrics"
"""Collectors of figures can send a bearer token, and often nothing else."""
OPEN_PATHS = frozenset({"/health", "/version", "/docs", "/redoc", "/openapi.json"})


class KeyHolders(Protocol):
    """`tenants.Tenants`."""

    def tenant(self, key: bytes) -> str | None:
        """Whose key that is; None: nobody's."""


@dataclass(frozen=True)
class GuardRules:
    """What is asked of a caller."""

    api_key: str | None = field(default=None, repr=False)
    loopback: bool = True
    """Only this machine can connect. False without a key means that the operator insisted on an open server."""
    cors_origins: tuple[str, ...] = ()
    tenants: KeyHolders | None = None
    """Many keys instead of one."""


class Guard:
    """Pure ASGI; refuses before anything of the request is read."""

    def __init__(self, app: ASGIApp, rules: GuardRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            scope[SCOPE] = identify(scope, self._rules)
        except OpenSandboxError as refusal:
            if scope["type"] == "websocket":
                await receive()  # the connect that is being refused
                await send({"type": "websocket.close", "code": 1008, "reason": refusal.code.value})
            else:
                await error_answer(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def identify(scope: Scope, rules: GuardRules) -> str:
    """The tenant that calls; raises why this caller may not come in. Pure."""
    if rules.api_key is None and rules.tenants is None:
        _refuse_strange_browser(scope, rules)
        return DEFAULT
    if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
        return DEFAULT
    keys = _values(scope, KEY_HEADER) or (_bearer(scope) if scope["path"] == METRICS_PATH else [])
    if not keys or not keys[0]:
        raise OpenSandboxError(Code.MISSING_API_KEY, "This server asks for an API key.")
    tenant = _holder(keys[0], rules) if len(keys) == 1 else None
    if tenant is None:
        raise OpenSandboxError(Code.INVALID_API_KEY, "This is not an API key of this server.")
    return tenant


def _holder(key: bytes, rules: GuardRules) -> str | None:
    if rules.tenants is not None:
        return rules.tenants.tenant(key)
    expected = (rules.api_key or "").encode()
    return DEFAULT if expected and hmac.compare_digest(key, expected) else None


def _refuse_strange_browser(scope: Scope, rules: GuardRules) -> None:
    hosts = _values(scope, b"host")
    host = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
    if rules.loopback and not is_loopback_name(host):
        raise OpenSandboxError(Code.FOREIGN_ORIGIN, f"{host[:100]!r} is not a loopback name of this machine.")
    for value in _values(scope, b"origin"):
        origin = value.decode("latin-1").lower()
        if origin not in (f"http://{host}", f"https://{host}", *map(str.lower, rules.cors_origins)):
            raise OpenSandboxError(Code.FOREIGN_ORIGIN, f"A page of {origin[:100]!r} may not call this server.")


def is_loopback_name(host: str) -> bool:
    """The Host header, with or without a port.

    >>> is_loopback_name("localhost:8080"), is_loopback_name("[::1]"), is_loopback_name("localhost.evil.example")
    (True, True, False)
    """
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        if not bracket or (rest and not _is_port(rest)):
            return False
    else:
        name, colon, port = host.partition(":")
        if colon and not _is_port(colon + port):
            return False
    if name in ("localhost", "127.0.0.1", "::1"):  # nearly always, and the general way is slow
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def with_cors(app: FastAPI, origins: tuple[str, ...]) -> None:
    """Nothing at all unless origins are configured: a browser then refuses to show any answer to any other page."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-ID", "OPEN-SANDBOX-ORIGIN", "Retry-After", "Idempotency-Replayed"],
        )


def _is_port(text: str) -> bool:
    return text[0] == ":" and text[1:].isascii() and text[1:].isdigit() and len(text) <= 6


def _bearer(scope: Scope) -> list[bytes]:
    return [value[7:].strip() for value in _values(scope, b"authorization") if value[:7].lower() == b"bearer "]


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]
