# SPDX-License-Identifier: Apache-2.0
"""The routes of sandboxes: parse, call one use case, shape the answer."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from opensandbox_server import labels
from opensandbox_server.errors import invalid
from opensandbox_server.lifecycle import Created, Endpoint, Lifecycle
from opensandbox_server.ports import Page
from opensandbox_server.sandbox import End, Sandbox, SandboxState
from opensandbox_server.wire.lifecycle import CreateSandboxRequest, RenewRequest

from . import request_id
from .answers import answer, body

TENANT = "default"

_STATES = {state.value.lower(): state for state in SandboxState}
# In the published vocabulary, but no sandbox of ours is ever in it.
_STATES_OF_OTHERS = frozenset({"allocated"})


def sandbox_routes(lifecycle: Lifecycle) -> APIRouter:
    """The same routes serve at root and under /v1."""
    routes = APIRouter()

    @routes.post("/sandboxes")
    async def create_sandbox(request: Request) -> Response:
        wanted = await body(request, CreateSandboxRequest)
        return answer(_created(await lifecycle.create(TENANT, wanted, request_id=request_id.current.get())), 202)

    @routes.get("/sandboxes")
    async def list_sandboxes(
        state: Annotated[list[str], Query()] = [],  # noqa: B006 - FastAPI copies it
        metadata: str = "",
        page: Annotated[int, Query(ge=1)] = 1,
        page_size: Annotated[int, Query(alias="pageSize", ge=1, le=200)] = 20,
    ) -> Response:
        found = await lifecycle.list(
            TENANT, states=_states(state), metadata=labels.parse_filter(metadata), page=page, page_size=page_size
        )
        return answer(_page(found, page, page_size))

    @routes.get("/sandboxes/{sandbox_id}")
    async def get_sandbox(sandbox_id: str) -> Response:
        return answer(_sandbox(await lifecycle.get(TENANT, sandbox_id)))

    @routes.delete("/sandboxes/{sandbox_id}")
    async def delete_sandbox(sandbox_id: str) -> Response:
        await lifecycle.delete(TENANT, sandbox_id)
        return Response(status_code=204)

    @routes.post("/sandboxes/{sandbox_id}/renew-expiration")
    async def renew_sandbox(sandbox_id: str, request: Request) -> Response:
        wanted = await body(request, RenewRequest)
        return answer({"expiresAt": await lifecycle.renew(TENANT, sandbox_id, wanted.expires_at)})

    @routes.get("/sandboxes/{sandbox_id}/endpoints/{port}")
    async def get_endpoint(
        sandbox_id: str, port: int, use_server_proxy: bool = False, expires: int | None = None
    ) -> Response:
        return answer(
            _endpoint(
                await lifecycle.endpoint(TENANT, sandbox_id, port, use_server_proxy=use_server_proxy, expires=expires)
            )
        )

    return routes


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
        "timings": created.timings,
        "endpoints": {port: _endpoint(endpoint) for port, endpoint in created.endpoints.items()},
    }
    if created.warnings:
        content["warnings"] = created.warnings
    return content


def _sandbox(sandbox: Sandbox) -> dict[str, Any]:
    content: dict[str, Any] = {
        "id": sandbox.id,
        "image": {"uri": sandbox.image},
        "status": _given(
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
        content["end"] = _end(sandbox.end)
    if sandbox.isolation:
        content["isolation"] = sandbox.isolation
    return content


def _end(end: End) -> dict[str, Any]:
    return _given(
        reason=end.reason,
        at=end.at,
        exitCode=end.exit_code,
        signal=end.signal,
        message=end.message,
        peakMemoryBytes=end.peak_memory_bytes,
    )


def _endpoint(endpoint: Endpoint) -> dict[str, Any]:
    return {"endpoint": endpoint.endpoint} | ({"headers": endpoint.headers} if endpoint.headers else {})


def _page(found: Page, page: int, page_size: int) -> dict[str, Any]:
    return {
        "items": [_sandbox(sandbox) for sandbox in found.items],
        "pagination": {
            "page": page,
            "pageSize": page_size,
            "totalItems": found.total,
            "totalPages": -(-found.total // page_size),
            "hasNextPage": page * page_size < found.total,
        },
    }


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
