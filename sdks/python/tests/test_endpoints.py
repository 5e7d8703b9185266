# SPDX-License-Identifier: Apache-2.0
"""Addresses are remembered: for a while, as many as asked for, and not beyond the sandbox's end."""

from __future__ import annotations

from datetime import timedelta

from opensandbox.endpoints import EndpointCache
from opensandbox.models import SandboxEndpoint

A, B, C = (SandboxEndpoint(endpoint=name) for name in "abc")


def test_for_a_while() -> None:
    now = 0.0
    cache = EndpointCache(timedelta(seconds=10), 5, clock=lambda: now)
    cache.put("x", 1, A)
    now = 9.9
    assert cache.get("x", 1) == A
    assert cache.get("x", 2) is None
    now = 10.0
    assert cache.get("x", 1) is None


def test_the_least_recently_used_goes_first() -> None:
    cache = EndpointCache(timedelta(seconds=10), 2)
    cache.put("x", 1, A)
    cache.put("x", 2, B)
    cache.get("x", 1)
    cache.put("x", 3, C)
    assert [cache.get("x", port) for port in (1, 2, 3)] == [A, None, C]


def test_not_beyond_the_end_of_the_sandbox() -> None:
    cache = EndpointCache(timedelta(seconds=10), 5)
    cache.put("x", 1, A)
    cache.put("y", 1, B)
    cache.drop("x")
    assert (cache.get("x", 1), cache.get("y", 1)) == (None, B)
