# SPDX-License-Identifier: Apache-2.0
"""What the generated tests get instead of its asynchronous twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from stub import Stub, created

from opensandbox import ConnectionConfigSync, SandboxSync
from opensandbox.retry import RetryPolicy


@pytest.fixture
def idle(stub: Stub) -> Callable[[], bool]:
    """Waits until the stub has no connection left."""
    return lambda: stub.idle.wait(5)


@pytest.fixture
def config(stub: Stub) -> ConnectionConfigSync:
    """Retries without a pause, so that tests need none either."""
    return ConnectionConfigSync(
        domain=stub.address,
        api_key="key",
        retry_policy=RetryPolicy(initial_backoff=timedelta(), max_backoff=timedelta()),
    )


@pytest.fixture
def sandbox(stub: Stub, config: ConnectionConfigSync) -> Iterator[SandboxSync]:
    """A sandbox whose execd the test plays, at /e."""
    stub.routes["POST", "/v1/sandboxes"] = created(stub)
    made = SandboxSync.create("host", connection_config=config)
    stub.requests.clear()
    with made:
        yield made
