# SPDX-License-Identifier: Apache-2.0
"""One fixture: the runtime under test, with a last look that it holds nothing any more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conformance.runtimes import RUNTIMES, Bench


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


async def _tested(name: str, home: Path) -> AsyncIterator[Bench]:
    async with RUNTIMES[name](home) as made:
        yield made
        for sandbox_id in made.made:
            await made.runtime.delete(sandbox_id)
        assert await made.runtime.list() == []


@pytest.fixture(params=RUNTIMES)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """Every runtime."""
    async for made in _tested(request.param, tmp_path):
        yield made


@pytest.fixture(params=[name for name in RUNTIMES if name != "fake"])
async def real_bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """Every runtime that makes something: one with a real execd, real limits, real namespaces."""
    async for made in _tested(request.param, tmp_path):
        yield made
