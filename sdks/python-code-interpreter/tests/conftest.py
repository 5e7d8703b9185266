# SPDX-License-Identifier: Apache-2.0
"""The stub server of the SDK's tests, and an interpreter in a sandbox that it plays."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "tests"))

from stub import Reply, Stub, against_the_contract, created

from opensandbox import ConnectionConfig, Sandbox
from opensandbox.retry import RetryPolicy


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPEN_SANDBOX_API_KEY", raising=False)
    monkeypatch.delenv("OPEN_SANDBOX_DOMAIN", raising=False)


@pytest.fixture
def stub() -> Iterator[Stub]:
    """Its sandbox can run code."""
    with Stub() as server:
        server.routes["POST", "/v1/sandboxes"] = created(server)
        server.routes["GET", "/e/code/contexts"] = Reply.of([])
        yield server
        for received in server.requests:
            against_the_contract(received)


@pytest.fixture
async def sandbox(stub: Stub) -> AsyncIterator[Sandbox]:
    """A sandbox whose execd the test plays, at /e."""
    policy = RetryPolicy(initial_backoff=timedelta(), max_backoff=timedelta())
    made = await Sandbox.create(
        "host", connection_config=ConnectionConfig(domain=stub.address, api_key="key", retry_policy=policy)
    )
    stub.requests.clear()
    async with made:
        yield made
