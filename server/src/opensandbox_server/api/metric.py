# SPDX-License-Identifier: Apache-2.0
"""Published clients report how long each create took them."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request, Response

from opensandbox_server.wire.lifecycle import MetricEvent

from .answers import body

log = logging.getLogger(__name__)


def metric_routes() -> APIRouter:
    routes = APIRouter()

    @routes.post("/metrics/events")
    async def report_metric_event(request: Request) -> Response:
        event = await body(request, MetricEvent)
        log.debug(
            "client reports %.64s: %d ms, %s",
            event.event_type,
            event.create_duration_ms,
            "ok" if event.success else "failed",
        )
        return Response(status_code=204)

    return routes
