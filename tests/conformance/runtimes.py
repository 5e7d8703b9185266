# SPDX-License-Identifier: Apache-2.0
"""The runtimes that the suite runs on. A new runtime adds one factory here and inherits every test."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from live_server import Sandbox
from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.ports import LaunchSpec, Report, Runtime
from opensandbox_server.sandbox import End, EndReason, Limits

TOKEN = "a-token-of-the-conformance-suite"
KEEPS_RUNNING = ("sleep", "infinity")


@dataclass
class Bench:
    """One runtime under test, and what the suite knows about it."""

    runtime: Runtime
    reopen: Callable[[], Runtime]
    """A second runtime object on the same sandboxes, as after a restart of the server."""
    foretell: Callable[[tuple[str, ...]], None] = lambda entrypoint: None
    """Tells a runtime that runs nothing what the entry point of the next sandbox would have done."""
    made: list[str] = field(default_factory=list)

    def spec(
        self, *entrypoint: str, image: str = "host", limits: Limits | None = None, env: dict[str, str] | None = None
    ) -> LaunchSpec:
        made = LaunchSpec(
            id=str(uuid.uuid4()),
            image=image,
            entrypoint=entrypoint or KEEPS_RUNNING,
            env=env or {},
            limits=limits or Limits(),
            generation=1,
            token_sha256=hashlib.sha256(TOKEN.encode()).hexdigest(),
        )
        self.made.append(made.id)
        return made

    async def create(self, *entrypoint: str, **options: Any) -> Report:
        self.foretell(entrypoint)
        return await self.runtime.create(self.spec(*entrypoint, **options))

    def execd(self, sandbox_id: str) -> Sandbox:
        """Its execd, by the address the runtime gives."""
        address = self.runtime.address(sandbox_id, 44772)
        assert address.kind == "api"
        return Sandbox(sandbox_id, address.socket, "", {"X-EXECD-ACCESS-TOKEN": TOKEN})

    async def end_of(self, sandbox_id: str) -> Report:
        """How it ended: at once if the runtime says so already, else as the watch tells."""
        known = await self.runtime.inspect(sandbox_id)
        if known is not None and known.end is not None:
            return known
        async with contextlib.aclosing(self.runtime.watch()) as watch:  # type: ignore[type-var]
            async for report in watch:
                if report.id == sandbox_id:
                    return report
        raise AssertionError("the watch ended")


@contextlib.asynccontextmanager
async def fake(_: Path) -> AsyncIterator[Bench]:
    from opensandbox_server.runtimes.fake.runtime import FakeRuntime

    runtime = FakeRuntime()
    codes = {("true",): 0, ("sh", "-c", "exit 3"): 3}

    def foretell(entrypoint: tuple[str, ...]) -> None:
        if entrypoint in codes:
            runtime.end_next_create(End(EndReason.EXITED, datetime.now(UTC), exit_code=codes[entrypoint]))

    await runtime.start()
    yield Bench(runtime, reopen=lambda: runtime, foretell=foretell)
    await runtime.stop()


@contextlib.asynccontextmanager
async def local(home: Path) -> AsyncIterator[Bench]:
    if sys.platform != "linux":
        pytest.skip("the local runtime needs Linux")
    from opensandbox_server import statedir
    from opensandbox_server.runtimes.local import plan, sandboxd
    from opensandbox_server.runtimes.local.runtime import LocalRuntime

    state = statedir.open_state(home / "state")
    settings = plan.Settings(
        state_dir=state.path,
        run_dir=statedir.run_dir(state.instance),
        instance=state.instance,
        sandboxd=sandboxd.binary("sandboxd"),
        ingress=sandboxd.binary("ingress"),
        free_space_reserve=0,
    )
    runtime = LocalRuntime(settings)
    try:
        await runtime.start()
    except OpenSandboxError as error:
        # Root has no excuse: there the runtime must work, or the suite has found something.
        if error.code is Code.NODE_UNSUPPORTED_HOST and os.geteuid() != 0:
            pytest.skip(error.message)
        raise
    yield Bench(runtime, reopen=lambda: LocalRuntime(settings))
    async with sandboxd.Client(settings.socket) as node:
        pidfd = os.pidfd_open((await node.version()).pid)
        await node.shutdown(sandboxd.wire.ShutdownRequestWhen.ALL)
    await runtime.stop()
    _wait_for_end(pidfd)


def _wait_for_end(pidfd: int) -> None:
    ready, _, _ = select.select([pidfd], [], [], 30)
    os.close(pidfd)
    assert ready, "sandboxd did not leave"


RUNTIMES = {"fake": fake, "local": local}
