# SPDX-License-Identifier: Apache-2.0
"""Figures, and their text."""

from __future__ import annotations

import asyncio

import pytest

from opensandbox_server.errors import unavailable
from opensandbox_server.metrics import Counter, Gauge, Histogram, Metrics


def test_buckets_add_up() -> None:
    seconds = Histogram("h", "About.", ("route",), buckets=(0.1, 1.0))
    for taken in (0.05, 0.1, 0.5, 3.0):
        seconds.observe(taken, "/x")
    assert list(seconds.lines()) == [
        "# HELP h About.",
        "# TYPE h histogram",
        'h_bucket{route="/x",le="0.1"} 2',
        'h_bucket{route="/x",le="1.0"} 3',
        'h_bucket{route="/x",le="+Inf"} 4',
        'h_sum{route="/x"} 3.65',
        'h_count{route="/x"} 4',
    ]


def test_labels_are_escaped_and_what_never_happened_is_zero() -> None:
    assert list(Gauge("g", "About.", {('a"\\\n',): 0.5}, ("l",)).lines())[-1] == 'g{l="a\\"\\\\\\n"} 0.5'
    assert list(Counter("c", "About.").lines())[-1] == "c 0"


def test_outcomes_of_creates() -> None:
    metrics = Metrics("1.0")
    with metrics.creating() as timings:
        timings.update({"total": 12.0, "launch.of-a-newer-sandboxd": 1.0})
    for error in (unavailable("x"), ValueError(), asyncio.CancelledError()):
        with pytest.raises(type(error)), metrics.creating():
            raise error
    assert {
        outcome: metrics.creates.value(outcome) for outcome in ("created", "unavailable", "internal", "cancelled")
    } == {
        "created": 1,
        "unavailable": 1,
        "internal": 1,
        "cancelled": 1,
    }
    text = metrics.text()
    assert 'opensandbox_create_duration_seconds_bucket{stage="total",le="0.025"} 1' in text
    assert 'stage="other"' in text
    assert 'opensandbox_build_info{version="1.0"} 1' in text
    metrics.found({"lost": 2, "adopted": 0})
    assert 'opensandbox_reconciled_total{found="lost"} 2' in metrics.text()
    assert "adopted" not in metrics.text()
