# SPDX-License-Identifier: Apache-2.0
"""What travels with a piece of work: the request it is for, the sandbox it is about, and its W3C trace.

Context variables, so tasks inherit them: a create that goes on after its client has left still logs under the request.

>>> trace = Trace.given("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", None)
>>> trace.trace_id
'0af7651916cd43dd8448eb211c80319c'
"""

from __future__ import annotations

import random
import re
from contextvars import ContextVar
from dataclasses import dataclass

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request at work."""
sandbox_id: ContextVar[str] = ContextVar("sandbox_id", default="")
"""The sandbox that it is about."""

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]{0,72})?")
_STATE = re.compile(r"[ -~]{1,512}")


@dataclass(frozen=True, slots=True)
class Trace:
    """Our place in a trace: calls to others carry it as their parent."""

    trace_id: str
    span_id: str
    flags: str = "00"
    state: str = ""

    @staticmethod
    def given(parent: str | None, state: str | None) -> Trace:
        """A place below the caller's, or in a new trace if the caller sent none that is well formed."""
        span_id = f"{random.getrandbits(64) or 1:016x}"
        match = _PARENT.fullmatch(parent) if parent else None
        if match is None or not _valid(match):
            return Trace(f"{random.getrandbits(128) or 1:032x}", span_id)
        kept = state if state and _STATE.fullmatch(state) else ""
        return Trace(match[2], span_id, match[4], kept)

    def headers(self) -> dict[str, str]:
        """What a call to another program carries."""
        carried = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{self.flags}"}
        return carried | {"tracestate": self.state} if self.state else carried


trace: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""Our place in the trace of the work at hand."""


def outgoing() -> dict[str, str]:
    """Headers for a call that is made for the work at hand: its trace and its request id."""
    headers = {}
    if place := trace.get():
        headers = place.headers()
    if identity := request_id.get():
        headers["x-request-id"] = identity
    return headers


def _valid(match: re.Match[str]) -> bool:
    version, trace_id, span_id, _, more = match.groups()
    if version == "ff" or (version == "00" and more):
        return False
    return bool(trace_id.strip("0") and span_id.strip("0"))
