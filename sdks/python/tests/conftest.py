# SPDX-License-Identifier: Apache-2.0
"""What the tests of the SDK share: a stub server that plays lifecycle API and execd at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta

import anyio.to_thread
import pytest
from stub import Stub, against_the_contract, created

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
    with Stub() as server:
        yield server
        for received in server.requests:
            against_the_contract(received)


@pytest.fixture
def idle(stub: Stub) -> Callable[[], Awaitable[bool]]:
    """Waits until the stub has no connection left."""
    return lambda: anyio.to_thread.run_sync(stub.idle.wait, 5)


@pytest.fixture
def config(stub: Stub) -> ConnectionConfig:
    """Retries without a pause, so that tests need none either."""
    return ConnectionConfig(
        domain=stub.address,
        api_key="key",
        retry_policy=RetryPolicy(initial_backoff=timedelta(), max_backoff=timedelta()),
    )


@pytest.fixture
async def sandbox(stub: Stub, config: ConnectionConfig) -> AsyncIterator[Sandbox]:
    """A sandbox whose execd the test plays, at /e."""
    stub.routes["POST", "/v1/sandboxes"] = created(stub)
    made = await Sandbox.create("host", connection_config=config)
    stub.requests.clear()
    async with made:
        yield made
