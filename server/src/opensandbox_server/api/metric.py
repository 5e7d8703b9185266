# SPDX-License-Identifier: Apache-2.0
"""Figures of this server for whoever collects them, and the times that published clients report."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request, Response

from opensandbox_server.admission import Admission
from opensandbox_server.events import Events
from opensandbox_server.metrics import CONTENT_TYPE, Gauge, Labels, Metrics
from opensandbox_server.ports import Store
from opensandbox_server.sandbox import SandboxState
from opensandbox_server.wire.lifecycle import MetricEvent

from .answers import body

log = logging.getLogger(__name__)


def metric_routes() -> APIRouter:
    """What clients report, under /v1 only."""
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


def server_metric_routes(metrics: Metrics, store: Store, admission: Admission, events: Events) -> APIRouter:
    """What this server counts, at root only."""
    routes = APIRouter()

    @routes.get("/metrics")
    async def get_server_metrics() -> Response:
        counts = await store.counts()
        creating = admission.creating
        states: dict[Labels, float] = {(state.value,): counts.get(state.value, 0) for state in SandboxState}
        text = metrics.text(
            (
                Gauge("opensandbox_sandboxes", "Sandboxes of this node by state.", states, ("state",)),
                Gauge("opensandbox_creating", "Sandboxes being made.", {(): creating.now}),
                Gauge("opensandbox_creates_waiting", "Creates that wait for a turn.", {(): creating.waiting or 0}),
                Gauge("opensandbox_event_followers", "Clients that follow events.", {(): events.followers}),
            )
        )
        return Response(text, headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})

    return routes
