# SPDX-License-Identifier: Apache-2.0
"""The routes of what is gone."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from opensandbox_server import labels
from opensandbox_server.history import History
from opensandbox_server.ports import HistoryEntry
from opensandbox_server.sandbox import EndReason

from .answers import answer
from .shape import ending, pagination
from .tenant import tenant_of


def history_routes(history: History) -> APIRouter:
    """The same routes serve at root and under /v1."""
    routes = APIRouter()

    @routes.get("/history")
    async def list_history(
        request: Request,
        metadata: str = "",
        reason: Annotated[list[EndReason], Query()] = [],  # noqa: B006 - FastAPI copies it
        page: Annotated[int, Query(ge=1)] = 1,
        page_size: Annotated[int, Query(alias="pageSize", ge=1, le=200)] = 20,
    ) -> Response:
        found = await history.list(
            tenant_of(request),
            reasons=frozenset(reason),
            metadata=labels.parse_filter(metadata),
            page=page,
            page_size=page_size,
        )
        items = [_entry(entry) for entry in found.items]
        return answer({"items": items, "pagination": pagination(found.total, page, page_size)})

    @routes.get("/history/{sandbox_id}")
    async def get_history(sandbox_id: str, request: Request) -> Response:
        entry = await history.get(tenant_of(request), sandbox_id)
        return answer({**_entry(entry), "output": entry.output})

    return routes


def _entry(entry: HistoryEntry) -> dict[str, Any]:
    content: dict[str, Any] = {
        "id": entry.id,
        "image": entry.image,
        "entrypoint": entry.entrypoint,
        "createdAt": entry.created_at,
        "goneAt": entry.gone_at,
        "end": ending(entry.end),
        "executions": entry.executions,
    }
    return content | {"metadata": entry.metadata} if entry.metadata else content
