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

from .access import Access
from .api.answers import UnhandledErrors, register_handlers
from .api.docs import docs_routes, specification
from .api.guard import Guard, GuardRules, with_cors
from .api.health import health_routes
from .api.metric import metric_routes
from .api.not_built import not_built_routes
from .api.request_id import RequestId
from .api.sandbox import sandbox_routes
from .background import Background
from .expiry import Expiry
from .lifecycle import Lifecycle, utcnow
from .ports import Runtime, Store
from .reconcile import Reconcile
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
    loopback: bool = True
    """True when the server listens on loopback only."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call from a browser."""
    max_timeout: int | None = None
    """Longest `timeout` of a create, in seconds."""
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
    sandboxes = sandbox_routes(parts.lifecycle)
    app.include_router(sandboxes)
    app.include_router(sandboxes, prefix="/v1")
    app.include_router(metric_routes(), prefix="/v1")
    for prefix in ("", "/v1"):
        app.router.routes.extend(not_built_routes(prefix))
    register_handlers(app)
    # Added last is outermost: every answer, also a refusal, carries the request id.
    app.add_middleware(Guard, rules=GuardRules(deps.api_key, deps.loopback, deps.cors_origins))
    with_cors(app, deps.cors_origins)
    app.add_middleware(UnhandledErrors)
    app.add_middleware(RequestId)
    return app


class _Parts:
    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._background = Background(deps.grace)
        self._expiry = Expiry(deps.store, deps.clock)
        self._reconcile = Reconcile(store=deps.store, runtime=deps.runtime, epoch=deps.epoch, clock=deps.clock)
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
            node=deps.node,
            epoch=deps.epoch,
            background=self._background,
            wake_expiry=self._expiry.wake,
            wake_reconcile=self._reconcile.wake,
            clock=deps.clock,
        )

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Nothing is served before store and runtime agree."""
        remove = self.lifecycle.remove
        await self._deps.runtime.start()
        try:
            found = await self._reconcile.once(remove)
            log.debug("reconcile: %s", found)
            app.state.found = found
            if found.failed:
                self._reconcile.wake()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._reconcile.run, remove)
                tasks.start_soon(self._reconcile.watch)
                tasks.start_soon(self._expiry.run, remove)
                try:
                    async with self._background:
                        yield
                finally:
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._deps.runtime.stop()
