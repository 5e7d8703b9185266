# SPDX-License-Identifier: Apache-2.0
"""Is it there, and which one."""

from __future__ import annotations

from fastapi import APIRouter, Response

from opensandbox_server import __version__

from .answers import answer


def health_routes() -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def get_health() -> Response:
        return answer({"status": "healthy"})

    @routes.get("/version")
    async def get_version() -> Response:
        return answer({"version": __version__})

    return routes
