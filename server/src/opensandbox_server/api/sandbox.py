# SPDX-License-Identifier: Apache-2.0
"""The routes of sandboxes: parse, call one use case, shape the answer."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import RootModel
from starlette.requests import ClientDisconnect

from opensandbox_server import context, idempotency, labels
from opensandbox_server.admission import ClientLeft
from opensandbox_server.errors import Code, OpenSandboxError, invalid
from opensandbox_server.lifecycle import Created, Endpoint, Lifecycle
from opensandbox_server.ports import Page
from opensandbox_server.sandbox import Sandbox, SandboxState
from opensandbox_server.wire.lifecycle import CreateSandboxRequest, RenewRequest

from . import request_id
from .answers import answer, body
from .proxy import proxied_root
from .shape import ending, given, pagination
from .tenant import tenant_of

HOT = frozenset({"create_sandbox", "get_sandbox", "delete_sandbox"})
"""The routes that `direct` serves."""
_KEY = "Idempotency-Key"
_STATES = {state.value.lower(): state for state in SandboxState}
# In the published vocabulary, but no sandbox of ours is ever in it.
_STATES_OF_OTHERS = frozenset({"allocated"})


class MetadataPatch(RootModel[dict[str, str | None]]):
    """JSON merge patch."""


def sandbox_routes(lifecycle: Lifecycle, *, public_host: str | None = None) -> APIRouter:
    """The same routes serve at root and under /v1. `public_host` is `Deps.public_host`."""
    routes = APIRouter()

    @routes.post("/sandboxes")
    async def create_sandbox(request: Request) -> Response:
        named = _named(request)
        wanted = await body(request, CreateSandboxRequest)
        tenant = tenant_of(request)
        try:
            created = await lifecycle.create(
                tenant,
                wanted,
                key=idempotency.key_of(tenant, named, wanted) if named else None,
                client_left=partial(_hung_up, request),
                request_id=request_id.current.get(),
            )
        except ClientLeft:
            raise ClientDisconnect from None
        context.sandbox_id.set(created.sandbox.id)  # for the line of this request in the log
        return answer(_created(created), 202, {"Idempotency-Replayed": "true"} if created.replayed else None)

    @routes.get("/sandboxes")
    async def list_sandboxes(
        request: Request,
        state: Annotated[list[str], Query()] = [],  # noqa: B006 - FastAPI copies it
        metadata: str = "",
        page: Annotated[int, Query(ge=1)] = 1,
        page_size: Annotated[int, Query(alias="pageSize", ge=1, le=200)] = 20,
    ) -> Response:
        found = await lifecycle.list(
            tenant_of(request),
            states=_states(state),
            metadata=labels.parse_filter(metadata),
            page=page,
            page_size=page_size,
        )
        return answer(_page(found, page, page_size))

    @routes.get("/sandboxes/{sandbox_id}")
    async def get_sandbox(sandbox_id: str, request: Request) -> Response:
        return answer(_sandbox(await lifecycle.get(tenant_of(request), sandbox_id)))

    @routes.patch("/sandboxes/{sandbox_id}/metadata")
    async def patch_metadata(sandbox_id: str, request: Request) -> Response:
        patch = await body(request, MetadataPatch)
        return answer(_sandbox(await lifecycle.patch_metadata(tenant_of(request), sandbox_id, patch.root)))

    @routes.delete("/sandboxes/{sandbox_id}")
    async def delete_sandbox(sandbox_id: str, request: Request) -> Response:
        await lifecycle.delete(tenant_of(request), sandbox_id)
        return Response(status_code=204)

    @routes.post("/sandboxes/{sandbox_id}/renew-expiration")
    async def renew_sandbox(sandbox_id: str, request: Request) -> Response:
        wanted = await body(request, RenewRequest)
        return answer({"expiresAt": await lifecycle.renew(tenant_of(request), sandbox_id, wanted.expires_at)})

    @routes.get("/sandboxes/{sandbox_id}/endpoints/{port}")
    async def get_endpoint(
        sandbox_id: str, port: int, request: Request, use_server_proxy: bool = False, expires: int | None = None
    ) -> Response:
        found = await lifecycle.endpoint(
            tenant_of(request),
            sandbox_id,
            port,
            through=proxied_root(request, public_host) if use_server_proxy else None,
            expires=expires,
        )
        return answer(_endpoint(found))

    return routes


def _named(request: Request) -> str | None:
    """The Idempotency-Key, if one was sent."""
    keys = request.headers.getlist(_KEY)
    if not keys:
        return None
    key = keys[0]
    if len(keys) > 1 or not 0 < len(key) <= idempotency.LONGEST_KEY or not (key.isascii() and key.isprintable()):
        message = f"{_KEY} is not one text of 1 to {idempotency.LONGEST_KEY} printable ASCII characters."
        raise OpenSandboxError(
            Code.GENERAL_INVALID_REQUEST,
            message,
            hint="Send a new UUID for each sandbox you want, and the same one when you repeat a request.",
            violations=[{"type": "value_error", "loc": ["header", _KEY], "msg": f"Value error, {message}"}],
        )
    return key


async def _hung_up(request: Request) -> None:
    """Until the client is gone. Only after its body was read: nothing else is left to receive then."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _states(names: list[str]) -> frozenset[SandboxState] | None:
    if not names:
        return None
    for name in names:
        if name.lower() not in _STATES and name.lower() not in _STATES_OF_OTHERS:
            raise invalid(f"There is no state {name[:64]!r}.", hint=f"States: {', '.join(SandboxState)}.")
    return frozenset(_STATES[name.lower()] for name in names if name.lower() in _STATES)


def _created(created: Created) -> dict[str, Any]:
    content = {
        **_sandbox(created.sandbox),
        "endpoints": {port: _endpoint(endpoint) for port, endpoint in created.endpoints.items()},
    }
    if created.timings:
        content["timings"] = created.timings
    if created.warnings:
        content["warnings"] = created.warnings
    return content


def _sandbox(sandbox: Sandbox) -> dict[str, Any]:
    content: dict[str, Any] = {
        "id": sandbox.id,
        "image": {"uri": sandbox.image},
        "status": given(
            state=sandbox.state, reason=sandbox.reason, message=sandbox.message, lastTransitionAt=sandbox.changed_at
        ),
        "entrypoint": sandbox.entrypoint,
        "createdAt": sandbox.created_at,
    }
    if sandbox.metadata:
        content["metadata"] = sandbox.metadata
    if sandbox.extensions:
        content["extensions"] = sandbox.extensions
    if sandbox.platform:
        content["platform"] = sandbox.platform
    if sandbox.expires_at:
        content["expiresAt"] = sandbox.expires_at
    if sandbox.end:
        content["end"] = ending(sandbox.end)
    if sandbox.isolation:
        content["isolation"] = sandbox.isolation
    return content


def _endpoint(endpoint: Endpoint) -> dict[str, Any]:
    return given(endpoint=endpoint.endpoint, headers=endpoint.headers or None, warnings=endpoint.warnings or None)


def _page(found: Page, page: int, page_size: int) -> dict[str, Any]:
    return {
        "items": [_sandbox(sandbox) for sandbox in found.items],
        "pagination": pagination(found.total, page, page_size),
    }
