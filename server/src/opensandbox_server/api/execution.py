# SPDX-License-Identifier: Apache-2.0
"""The route of what was run in a sandbox."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from opensandbox_server.executions import Execution, Executions

from .answers import answer
from .shape import given, pagination
from .tenant import tenant_of


def execution_routes(executions: Executions) -> APIRouter:
    """The same route serves at root and under /v1."""
    routes = APIRouter()

    @routes.get("/sandboxes/{sandbox_id}/executions")
    async def list_executions(
        sandbox_id: str,
        request: Request,
        page: Annotated[int, Query(ge=1)] = 1,
        page_size: Annotated[int, Query(alias="pageSize", ge=1, le=200)] = 20,
    ) -> Response:
        found = await executions.list(tenant_of(request), sandbox_id, page=page, page_size=page_size)
        items = [_execution(one) for one in found.items]
        return answer({"items": items, "pagination": pagination(found.total, page, page_size)})

    return routes


def _execution(one: Execution) -> dict[str, Any]:
    return given(
        id=one.id,
        content=one.content,
        background=one.background,
        requestId=one.request_id,
        client=one.client,
        userAgent=one.user_agent,
        cwd=one.cwd,
        uid=one.uid,
        startedAt=one.started_at,
        finishedAt=one.finished_at,
        running=one.running,
        reason=one.reason,
        exitCode=one.exit_code,
        signal=one.signal,
        message=one.message,
        outputBytes=one.output_bytes,
    )
