# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the server's tests. Those marked anyio run on asyncio, under a guard against blocking the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster
from world import World, world_at


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """Fails the test when code of the server blocks the event loop."""
    guard = BlockBuster(scanned_modules=["opensandbox_server"])
    for name, function in guard.functions.items():
        if name.startswith("sqlite3."):
            # Where it is known to be short, or else left to a thread.
            function.can_block_in("opensandbox_server/store/writer.py", {"write", "read"})
    guard.activate()
    yield
    guard.deactivate()


@pytest.fixture
async def world(tmp_path: Path, no_blocking: None) -> AsyncIterator[World]:
    async with world_at(tmp_path) as made:
        yield made
