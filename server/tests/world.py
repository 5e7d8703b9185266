# SPDX-License-Identifier: Apache-2.0
"""A whole control plane without a network: fake runtime, real store in a temporary file, a clock one can set."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio

from opensandbox_server.access import Access
from opensandbox_server.admission import DEFAULT, Admission, Bounds
from opensandbox_server.background import Background
from opensandbox_server.expiry import Expiry
from opensandbox_server.lifecycle import Created, Lifecycle
from opensandbox_server.reconcile import Reconcile
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.sandbox import Sandbox, SandboxState
from opensandbox_server.store import SqlStore, open_store
from opensandbox_server.validation import Rules
from opensandbox_server.wire.lifecycle import CreateSandboxRequest

NODE, TENANT = "node-1", "default"
START = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
PLATFORM = {"os": "linux", "arch": "amd64"}
BODY: dict[str, Any] = {
    "image": {"uri": "host"},
    "entrypoint": ["tail", "-f", "/dev/null"],
    "timeout": 600,
    "resourceLimits": {"cpu": "1", "memory": "2Gi"},
    "secureAccess": False,
}


class Clock:
    """Stands still until moved."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@dataclass
class World:
    """Everything, wired as `app` wires it, but with nothing running by itself."""

    store: SqlStore
    runtime: FakeRuntime
    clock: Clock
    lifecycle: Lifecycle
    expiry: Expiry
    reconcile: Reconcile
    background: Background
    admission: Admission

    async def create(self, **changes: Any) -> Created:
        request = CreateSandboxRequest.model_validate({**BODY, **changes})
        return await self.lifecycle.create(TENANT, request)

    async def row(self, sandbox_id: str) -> Sandbox:
        row = await self.store.find(sandbox_id)
        assert row is not None
        return row

    async def state(self, sandbox_id: str) -> SandboxState | None:
        row = await self.store.find(sandbox_id)
        return row.state if row else None

    async def reaches(self, sandbox_id: str, state: SandboxState | None) -> None:
        """Until the sandbox is in that state; None: gone."""

        async def there() -> bool:
            return await self.state(sandbox_id) is state

        await eventually(there)

    async def events(self, sandbox_id: str) -> list[str]:
        return [event.kind for event in await self.store.events(sandbox_id)]

    async def compare(self, **options: Any) -> str:
        return str(await self.reconcile.once(self.lifecycle.remove, **options))


@asynccontextmanager
async def world_at(
    path: Path,
    runtime: FakeRuntime | None = None,
    clock: Clock | None = None,
    start_timeout: float = 60.0,
    bounds: Bounds = DEFAULT,
) -> AsyncIterator[World]:
    """A server on that directory; enter it again for a restart."""
    runtime, clock = runtime or FakeRuntime(), clock or Clock()
    async with open_store(path / "opensandbox.db", node=NODE, runtime=runtime.name) as store:
        expiry = Expiry(store, clock)
        reconcile = Reconcile(store=store, runtime=runtime, epoch=store.epoch, clock=clock)
        background = Background(grace=2.0)
        admission = Admission(store, bounds)
        lifecycle = Lifecycle(
            store=store,
            runtime=runtime,
            access=Access(b"k" * 32),
            rules=Rules(runtime=runtime.name, platform=PLATFORM, max_timeout=86400),
            admission=admission,
            node=NODE,
            epoch=store.epoch,
            background=background,
            wake_expiry=expiry.wake,
            wake_reconcile=reconcile.wake,
            clock=clock,
            start_timeout=start_timeout,
        )
        async with background:
            yield World(store, runtime, clock, lifecycle, expiry, reconcile, background, admission)


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Until it holds, for what has no event to wait for; fails after ten seconds."""
    with anyio.fail_after(10):
        while not await holds():  # noqa: ASYNC110
            await anyio.sleep(0.001)


def a_sandbox(number: int = 0, **changes: Any) -> Sandbox:
    """A Pending row; each number its own, a second younger."""
    values: dict[str, Any] = {
        "id": f"00000000-0000-4000-8000-{number:012d}",
        "tenant": TENANT,
        "node": NODE,
        "runtime": "fake",
        "epoch": 1,
        "state": SandboxState.PENDING,
        "image": "host",
        "entrypoint": ("sleep", "infinity"),
        "created_at": START + timedelta(seconds=number),
        "changed_at": START + timedelta(seconds=number),
    }
    return Sandbox(**{**values, **changes})
