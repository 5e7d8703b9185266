# SPDX-License-Identifier: Apache-2.0
"""Puts the parts together. Nothing happens at import, and nothing but this and `__main__` knows all of them."""

from __future__ import annotations

import logging
import platform
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime

import anyio
from fastapi import FastAPI

from . import __version__
from .access import Access
from .admission import DEFAULT, Admission, Bounds
from .api.answers import UnhandledErrors, register_handlers
from .api.diagnostic import diagnostic_routes
from .api.direct import Direct
from .api.docs import docs_routes, specification
from .api.event import event_routes
from .api.execution import execution_routes
from .api.guard import Guard, GuardRules, with_cors
from .api.health import health_routes
from .api.history import history_routes
from .api.metric import metric_routes, server_metric_routes
from .api.not_built import not_built_routes
from .api.proxy import ProxyRoute
from .api.request_id import RequestId
from .api.runtime import runtime_routes
from .api.sandbox import HOT, sandbox_routes
from .background import Background
from .diagnostics import Diagnostics
from .events import Events
from .executions import Executions
from .expiry import Expiry
from .history import History
from .lifecycle import Lifecycle, utcnow
from .metrics import Metrics
from .ports import Runtime, Store
from .proxy import Proxy
from .reconcile import Reconcile
from .tenants import Tenants
from .validation import Rules

log = logging.getLogger(__name__)

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Deps:
    """What the server needs from outside: opened by whoever calls, and closed by them."""

    store: Store
    runtime: Runtime
    key: bytes = field(repr=False)
    """The instance key that sandbox tokens are made from."""
    node: str
    epoch: int
    """`SqlStore.epoch`."""
    api_key: str | None = field(default=None, repr=False)
    """What clients must send; None: nothing, and then only programs on this machine are answered."""
    tenants: Tenants | None = None
    """Many keys instead of one, each seeing its own sandboxes."""
    bounds: Bounds = DEFAULT
    """How many sandboxes, and how many in the making."""
    loopback: bool = True
    """True when the server listens on loopback only."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call from a browser."""
    max_timeout: int | None = None
    """Longest `timeout` of a create, in seconds."""
    public_host: str | None = None
    """Name or address that clients elsewhere reach this server by; None: as they already do."""
    page_sandbox: bool = True
    """Whether pages of sandboxes that pass through this server are cut off from its origin."""
    grace: float = 5.0
    """Seconds that creates and deletes at work are given when the server stops."""
    clock: Callable[[], datetime] = utcnow


def create_app(deps: Deps) -> FastAPI:
    """The server as an ASGI application. Its lifespan starts the runtime, compares it with the store, and watches.

    >>> async with open_store(path, node="local", runtime="local") as store:              # doctest: +SKIP
    ...     app = create_app(Deps(store, runtime, key, node="local", epoch=store.epoch))
    """
    parts = _Parts(deps)
    app = FastAPI(lifespan=parts.lifespan, redirect_slashes=False, openapi_url=None, docs_url=None, redoc_url=None)
    app.openapi = specification  # type: ignore[method-assign]
    app.include_router(health_routes())
    app.include_router(docs_routes())
    sandboxes = sandbox_routes(parts.lifecycle, public_host=deps.public_host)
    for routes in (
        sandboxes,
        event_routes(parts.events),
        execution_routes(Executions(deps.store, deps.runtime)),
        diagnostic_routes(Diagnostics(deps.store, deps.runtime), deps.runtime.name),
        history_routes(History(deps.store)),
        runtime_routes(deps.runtime, parts.admission),
    ):
        app.include_router(routes)
        app.include_router(routes, prefix="/v1")
    app.include_router(server_metric_routes(parts.metrics, deps.store, parts.admission, parts.events))
    app.include_router(metric_routes(), prefix="/v1")
    app.router.routes.append(parts.proxy)
    for prefix in ("", "/v1"):
        app.router.routes.extend(not_built_routes(prefix))
    register_handlers(app)
    app.add_middleware(Direct, routes=sandboxes, named=HOT)
    # Added last is outermost: every answer, also a refusal, carries the request id.
    app.add_middleware(Guard, rules=GuardRules(deps.api_key, deps.loopback, deps.cors_origins, deps.tenants))
    with_cors(app, deps.cors_origins)
    app.add_middleware(UnhandledErrors)
    app.add_middleware(RequestId, metrics=parts.metrics)
    app.state.stopping = parts.events.stop
    return app


class _Parts:
    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self.metrics = Metrics(__version__)
        self.events = Events(deps.store)
        self._background = Background(deps.grace)
        self._expiry = Expiry(deps.store, deps.clock, expired=self.metrics.expired.add)
        self._reconcile = Reconcile(
            store=deps.store, runtime=deps.runtime, epoch=deps.epoch, clock=deps.clock, told=self.metrics.found
        )
        self.admission = Admission(deps.store, deps.bounds)
        self.proxy = ProxyRoute(Proxy(deps.store, deps.runtime), page_sandbox=deps.page_sandbox)
        machine = platform.machine()
        self.lifecycle = Lifecycle(
            store=deps.store,
            runtime=deps.runtime,
            access=Access(deps.key),
            rules=Rules(
                runtime=deps.runtime.name,
                platform={"os": "linux", "arch": _ARCHITECTURES.get(machine, machine)},
                max_timeout=deps.max_timeout,
            ),
            admission=self.admission,
            metrics=self.metrics,
            node=deps.node,
            epoch=deps.epoch,
            background=self._background,
            wake_expiry=self._expiry.wake,
            wake_reconcile=self._reconcile.wake,
            clock=deps.clock,
            loopback=deps.loopback,
        )

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Nothing is served before store and runtime agree."""
        remove = self.lifecycle.remove
        await self._deps.runtime.start()
        try:
            await self.events.begin()
            found = await self._reconcile.once(remove)
            log.debug("reconcile: %s", found)
            app.state.found = found
            if found.failed:
                self._reconcile.wake()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._reconcile.run, remove)
                tasks.start_soon(self._reconcile.watch)
                tasks.start_soon(self._expiry.run, remove)
                tasks.start_soon(self.events.run)
                if self._deps.tenants is not None:
                    tasks.start_soon(self._deps.tenants.run)
                try:
                    async with self.proxy.open(), self._background:
                        yield
                finally:
                    self.events.stop()
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._deps.runtime.stop()
