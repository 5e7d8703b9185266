# SPDX-License-Identifier: Apache-2.0
"""The fake's own promises, beyond those of every runtime, which the conformance suite holds it to."""

from __future__ import annotations

import anyio
import pytest

from opensandbox_server.ports import LaunchSpec, Runtime
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.sandbox import Limits

pytestmark = pytest.mark.anyio
SPEC = LaunchSpec("id-1", "host", ("sleep", "infinity"), {}, Limits(), 1, "ab" * 32)


async def test_it_is_a_runtime() -> None:
    assert isinstance(FakeRuntime(), Runtime)


async def test_a_create_that_is_cancelled_leaves_nothing() -> None:
    runtime = FakeRuntime()
    runtime.gate.close()
    async with anyio.create_task_group() as group:
        group.start_soon(runtime.create, SPEC)
        await runtime.gate.reached()
        assert list(runtime.sandboxes) == ["id-1"]
        group.cancel_scope.cancel()
    assert runtime.sandboxes == {}


async def test_the_watch_ends_when_it_is_stopped() -> None:
    runtime = FakeRuntime()
    await runtime.create(SPEC)
    heard = []
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            heard.extend([report.id async for report in runtime.watch()])

        group.start_soon(watch)
        await anyio.wait_all_tasks_blocked()
        runtime.end("id-1")
        await anyio.wait_all_tasks_blocked()
        await runtime.stop()
    assert heard == ["id-1"]
