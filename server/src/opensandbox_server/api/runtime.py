# SPDX-License-Identifier: Apache-2.0
"""The route that says what makes the sandboxes here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

from opensandbox_server.admission import Admission, Occupancy
from opensandbox_server.ports import Runtime

from .answers import answer
from .shape import given


def runtime_routes(runtime: Runtime, admission: Admission) -> APIRouter:
    """The same route serves at root and under /v1."""
    routes = APIRouter()

    @routes.get("/runtime")
    async def get_runtime() -> Response:
        told = await runtime.describe()
        content: dict[str, Any] = {
            "name": told.name,
            "version": told.version,
            "abilities": told.abilities,
            "images": told.images,
            "missing": told.missing,
            "sandboxes": _occupancy(await admission.sandboxes()),
            "creating": _occupancy(admission.creating),
        }
        return answer(content | {"host": told.host} if told.host else content)

    return routes


def _occupancy(occupancy: Occupancy) -> dict[str, Any]:
    return given(**asdict(occupancy))
