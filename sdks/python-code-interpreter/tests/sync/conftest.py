# SPDX-License-Identifier: Apache-2.0
"""What the generated tests get instead of its asynchronous twin."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from stub import Stub

from opensandbox import ConnectionConfigSync, SandboxSync
from opensandbox.retry import RetryPolicy


@pytest.fixture
def sandbox(stub: Stub) -> Iterator[SandboxSync]:
    """A sandbox whose execd the test plays, at /e."""
    policy = RetryPolicy(initial_backoff=timedelta(), max_backoff=timedelta())
    made = SandboxSync.create(
        "host", connection_config=ConnectionConfigSync(domain=stub.address, api_key="key", retry_policy=policy)
    )
    stub.requests.clear()
    with made:
        yield made
