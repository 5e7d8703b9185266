# SPDX-License-Identifier: Apache-2.0
"""Reconcile: the store says what should be, the runtime says what is; where they differ, act.

It runs at start, whenever something could not be done, once a minute as a net below the others, and on every end
that the runtime reports. It may run beside creates and deletes, and this makes it safe:

* the runtime is asked before the store. A row exists before its sandbox does, so a sandbox without a row is one whose
  row was deleted, never one that is about to appear;
* before a row is called lost the runtime is asked again about that one;
* every change is a compare-and-set, so whoever changed the row meanwhile wins.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

import anyio

from .errors import OpenSandboxError
from .expiry import Remove
from .ports import Report, Runtime, Store
from .sandbox import ENDED, End, EndReason, Sandbox, SandboxState

log = logging.getLogger(__name__)

INTERVAL = 60.0
RETRY = 1.0


@dataclass
class Findings:
    """What one pass did, for the log and for tests."""

    adopted: int = 0
    lost: int = 0
    undone: int = 0
    ended: int = 0
    orphans: int = 0
    failed: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in vars(self).items() if count) or "nothing to do"


class Reconcile:
    """Compares store and runtime and acts both ways."""

    def __init__(
        self,
        *,
        store: Store,
        runtime: Runtime,
        epoch: int,
        clock: Callable[[], datetime],
        told: Callable[[dict[str, int]], None] = lambda found: None,
    ) -> None:
        """`told` hears what each pass found."""
        self._told = told
        self._store = store
        self._runtime = runtime
        self._epoch = epoch
        self._clock = clock
        self._woken = anyio.Event()

    def wake(self) -> None:
        """Something was left undone; look soon."""
        self._woken.set()

    async def run(self, remove: Remove) -> None:
        """Until cancelled: a pass a minute, sooner when woken or when the last one failed."""
        failed = deadlines = False
        while True:
            if failed:
                # A failed removal wakes us, and one of this pass would do so at once.
                await anyio.sleep(RETRY)
            else:
                with anyio.move_on_after(INTERVAL):
                    await self._woken.wait()
            deadlines = deadlines or self._woken.is_set()
            self._woken = anyio.Event()
            try:
                failed = (await self.once(remove, deadlines=deadlines)).failed > 0
            except Exception as error:
                failed = True
                _log_failure("store and runtime could not be compared", error)
            deadlines = failed and deadlines

    async def watch(self) -> None:
        """Until cancelled: store every end the runtime tells, then acknowledge it."""
        while True:
            try:
                async for report in self._runtime.watch():
                    await self._heard(report)
            except Exception as error:
                _log_failure("the runtime cannot be watched right now", error)
            await anyio.sleep(RETRY)

    async def _heard(self, report: Report) -> None:
        try:
            await self.report(report)
        except Exception as error:
            _log_failure(f"the end of sandbox {report.id} could not be stored", error)
            self.wake()

    async def once(self, remove: Remove, *, deadlines: bool = True) -> Findings:
        """One pass over everything of this node and runtime."""
        found = Findings()
        reports = {report.id: report for report in await self._runtime.list()}
        rows = {row.id: row for row in await self._store.mine()}
        for sandbox_id in reports.keys() - rows.keys():
            await self._guarded(found, sandbox_id, self._orphan(found, sandbox_id))
        for row in rows.values():
            await self._guarded(found, row.id, self._row(found, remove, row, reports.get(row.id), deadlines))
        self._told(vars(found))
        return found

    async def report(self, report: Report) -> None:
        """The runtime says that one sandbox has ended."""
        if report.end is None:
            return
        while True:
            row = await self._store.find(report.id)
            if row is None or row.generation != report.generation:
                await self._runtime.delete(report.id)
                return
            if row.state is SandboxState.STOPPING:
                return  # whoever wrote that also ends it
            if row.state in ENDED or await self._store.replace(row, row.ended(report.end), event="ended"):
                await self._runtime.acknowledge(report.id)
                return

    async def _guarded(self, found: Findings, sandbox_id: str, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            found.failed += 1
            _log_failure(f"sandbox {sandbox_id} could not be reconciled", error)

    async def _orphan(self, found: Findings, sandbox_id: str) -> None:
        await self._runtime.delete(sandbox_id)
        found.orphans += 1
        log.warning("sandbox %s had no row and was ended", sandbox_id)

    async def _row(self, found: Findings, remove: Remove, row: Sandbox, report: Report | None, deadlines: bool) -> None:
        if row.state is SandboxState.STOPPING:
            found.undone += await remove(row.id, event="deleting")
        elif row.state is SandboxState.PENDING:
            if row.epoch < self._epoch:  # a Pending row of this epoch is a create at work
                found.undone += await remove(row.id, event="undone: the server stopped while it was being made")
        elif row.state in ENDED:
            await self._after_end(row, report)
        elif report is None or report.generation != row.generation:
            await self._missing(found, row)
        elif report.end is not None:
            await self.report(report)
            found.ended += 1
        else:
            found.adopted += 1
            if deadlines:
                await self._runtime.set_deadline(row.id, row.expires_at)

    async def _after_end(self, row: Sandbox, report: Report | None) -> None:
        if report is None:
            return
        if report.end is None or report.generation != row.generation:
            await self._runtime.delete(row.id)  # clients were told it has ended, so it has
        elif not report.acknowledged:
            await self._runtime.acknowledge(row.id)

    async def _missing(self, found: Findings, row: Sandbox) -> None:
        report = await self._runtime.inspect(row.id)
        if report is not None and report.generation == row.generation:
            return  # it appeared between the two questions
        end = End(EndReason.LOST, self._clock(), message="The sandbox is no longer there; nobody saw how it ended.")
        if await self._store.replace(row, row.ended(end), event="lost"):
            found.lost += 1
            log.warning("sandbox %s is lost", row.id)
            if report is not None:
                await self._runtime.delete(row.id)


def _log_failure(what: str, error: Exception) -> None:
    known = isinstance(error, OpenSandboxError)
    log.warning("%s: %s", what, error, exc_info=None if known else error)
