# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that are only remembered. Keeps the promises of `ports.Runtime` and breaks down on request."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import anyio

from opensandbox_server.errors import Code, OpenSandboxError, not_found, unavailable
from opensandbox_server.ports import ABILITIES, Address, Description, LaunchSpec, Remains, Report
from opensandbox_server.sandbox import End, EndReason

IMAGES = ("host", "opensandbox/code-interpreter")


class Gate:
    """Open: everybody passes. Closed: they wait, and a test can wait for them.

    >>> gate.close(); ...; await gate.reached(); gate.open()       # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._open = anyio.Event()
        self._open.set()
        self._somebody = anyio.Event()
        self._error: Exception | None = None

    def close(self) -> None:
        self._open = anyio.Event()
        self._somebody = anyio.Event()

    def open(self) -> None:
        self._open.set()

    def fail(self, error: Exception) -> None:
        """Whoever waits, or comes next, gets this instead of passing."""
        self._error = error
        self._open.set()

    async def reached(self) -> None:
        """Until somebody stands before it."""
        await self._somebody.wait()

    async def passed(self) -> None:
        self._somebody.set()
        await self._open.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


@dataclass
class FakeRuntime:
    """Satisfies `ports.Runtime`. What it remembers outlives `stop`, as real sandboxes outlive a server."""

    name: str = "fake"
    sandboxes: dict[str, Report] = field(default_factory=dict)
    deadlines: dict[str, datetime | None] = field(default_factory=dict)
    specs: dict[str, LaunchSpec] = field(default_factory=dict)
    outputs: dict[str, bytes] = field(default_factory=dict)
    """What an entry point is to have written."""
    journals: dict[str, bytes] = field(default_factory=dict)
    """The records of commands that are to have run."""
    deleted: list[str] = field(default_factory=list)
    """Every delete asked for, in order, also of what was not there."""

    def __post_init__(self) -> None:
        self.gate = Gate()
        """Creates wait here, after the sandbox has come to be and before the answer."""
        self.delete_gate = Gate()
        self.down: OpenSandboxError | None = None
        """While set, every call fails with it."""
        self._failures: list[Exception] = []
        self._ends_next: End | None = None
        self._watchers: list[Any] = []

    def fail_next_create(self, error: Exception) -> None:
        self._failures.append(error)

    def end_next_create(self, end: End) -> None:
        """The entry point of the next sandbox ends before it is ready."""
        self._ends_next = end

    def end(self, sandbox_id: str, *, exit_code: int = 0, reason: EndReason = EndReason.EXITED) -> End:
        """Its main process ends; watchers are told."""
        end = End(
            reason, datetime.now(UTC), exit_code=exit_code, message=f"The entry point exited with code {exit_code}."
        )
        self.sandboxes[sandbox_id] = report = replace(self.sandboxes[sandbox_id], running=False, end=end)
        for watcher in self._watchers:
            watcher.send_nowait(report)
        return end

    def lose(self, sandbox_id: str) -> None:
        """Gone, and nobody saw it go."""
        del self.sandboxes[sandbox_id]

    async def start(self) -> None:
        self._check_up()

    async def stop(self) -> None:
        for watcher in self._watchers:
            watcher.close()

    async def check(self, spec: LaunchSpec) -> None:
        if spec.image.partition(":")[0] not in IMAGES:
            raise OpenSandboxError(
                Code.IMAGE_NOT_FOUND, f"There is no image {spec.image}; there are: {', '.join(IMAGES)}."
            )

    async def create(self, spec: LaunchSpec) -> Report:
        self._check_up()
        await self.check(spec)
        if spec.id in self.sandboxes:
            raise OpenSandboxError(Code.SANDBOX_START_FAILED, f"There already is a sandbox {spec.id}.")
        if self._failures:
            raise self._failures.pop(0)
        end, self._ends_next = self._ends_next, None
        report = Report(
            id=spec.id,
            generation=spec.generation,
            running=end is None,
            end=end,
            image=spec.image,
            isolation={"runtime": self.name, "limits": {}, "network": {"means": "none"}},
            timings={"remember": 0.0},
        )
        self.specs[spec.id], self.sandboxes[spec.id], self.deadlines[spec.id] = spec, report, spec.deadline
        try:
            await self.gate.passed()
        except BaseException:
            self._forget(spec.id)
            raise
        return report

    async def inspect(self, sandbox_id: str) -> Report | None:
        self._check_up()
        return self.sandboxes.get(sandbox_id)

    async def list(self) -> list[Report]:
        self._check_up()
        return [*self.sandboxes.values()]

    async def delete(self, sandbox_id: str) -> Remains:
        self.deleted.append(sandbox_id)
        self._check_up()
        await self.delete_gate.passed()
        report = self.sandboxes.get(sandbox_id)
        remains = Remains()
        if report is not None:
            remains = Remains(
                end=report.end or End(EndReason.KILLED, datetime.now(UTC), peak_memory_bytes=1 << 20),
                output=self.outputs.get(sandbox_id, b""),
                journal=self.journals.get(sandbox_id, b""),
            )
        self._forget(sandbox_id)
        return remains

    async def set_deadline(self, sandbox_id: str, deadline: datetime | None) -> None:
        self._check_up()
        if sandbox_id not in self.sandboxes:
            raise not_found(sandbox_id)
        self.deadlines[sandbox_id] = deadline

    async def acknowledge(self, sandbox_id: str) -> None:
        self._check_up()
        if report := self.sandboxes.get(sandbox_id):
            self.sandboxes[sandbox_id] = replace(report, acknowledged=True)

    async def output(self, sandbox_id: str) -> bytes:
        self._check_up()
        return self.outputs.get(self._known(sandbox_id), b"")

    async def journal(self, sandbox_id: str) -> bytes:
        self._check_up()
        return self.journals.get(self._known(sandbox_id), b"")

    async def describe(self) -> Description:
        self._check_up()
        return Description(
            name=self.name,
            version="0",
            abilities=dict.fromkeys(ABILITIES, False),
            images=tuple({"name": image, "description": "only remembered"} for image in IMAGES),
        )

    def address(self, sandbox_id: str, port: int) -> Address:
        kind = "api" if port == 44772 else "ports"
        return Address(f"/nonexistent/{sandbox_id}/{kind}", kind)

    def public_address(self) -> str:
        return "127.0.0.1:28888"

    async def watch(self) -> AsyncIterator[Report]:
        send, receive = anyio.create_memory_object_stream[Report](math.inf)
        self._watchers.append(send)
        try:
            for report in [*self.sandboxes.values()]:
                if report.end is not None and not report.acknowledged:
                    yield report
            async with receive:
                async for report in receive:
                    yield report
        finally:
            self._watchers.remove(send)
            send.close()

    def unavailable(self, message: str = "The fake is down.") -> None:
        """Every call fails from now on, until `available`."""
        self.down = unavailable(message)

    def available(self) -> None:
        self.down = None

    def _check_up(self) -> None:
        if self.down is not None:
            raise self.down

    def _known(self, sandbox_id: str) -> str:
        if sandbox_id not in self.sandboxes:
            raise not_found(sandbox_id)
        return sandbox_id

    def _forget(self, sandbox_id: str) -> None:
        self.outputs.pop(sandbox_id, None)
        self.journals.pop(sandbox_id, None)
        self.sandboxes.pop(sandbox_id, None)
        self.deadlines.pop(sandbox_id, None)
