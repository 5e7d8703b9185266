# SPDX-License-Identifier: Apache-2.0
"""W3C trace context, where the program uses OpenTelemetry. The SDK does not depend on it.

A span that is active travels along with every request. With `enable_tracing` each request also gets a span of
its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def available() -> bool:
    """Whether OpenTelemetry is installed."""
    return find_spec("opentelemetry") is not None


class RequestTrace:
    """One request: the headers that name its span, and what to tell the span about the answer."""

    def __init__(self, span: Any = None, context: Any = None) -> None:
        self._span = span
        self.headers: dict[str, str] = {}
        # A program that never imported OpenTelemetry has no active span either.
        if span is not None or "opentelemetry.trace" in sys.modules:
            tracecontext = import_module("opentelemetry.trace.propagation.tracecontext")
            # This propagator alone, whatever is set up globally: baggage is not meant for a sandbox.
            tracecontext.TraceContextTextMapPropagator().inject(self.headers, context=context)

    def answered(self, status: int) -> None:
        """Keep the status of the answer."""
        if self._span is not None:
            self._span.set_attribute("http.response.status_code", status)


@contextmanager
def traced(enabled: bool, method: str, url: str) -> Iterator[RequestTrace]:
    """The trace of one request; with a span of its own if enabled."""
    if not enabled:
        yield RequestTrace()
        return
    trace = import_module("opentelemetry.trace")
    attributes = {"http.request.method": method, "url.full": url}
    span = trace.get_tracer("opensandbox").start_span(method, kind=trace.SpanKind.CLIENT, attributes=attributes)
    try:
        # Not made the current one: a stream may be closed in another context than it was opened in.
        yield RequestTrace(span, trace.set_span_in_context(span))
    except Exception as error:
        span.set_attribute("error.type", type(error).__name__)
        span.record_exception(error)
        raise
    finally:
        span.end()
