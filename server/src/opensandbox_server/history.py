# SPDX-License-Identifier: Apache-2.0
"""What stays of a sandbox for seven days after it is gone: why, when, how much memory, its last words, what it ran."""

from __future__ import annotations

from datetime import datetime

from .errors import Code, OpenSandboxError, short
from .executions import clean, dump, parsed
from .ports import HistoryEntry, HistoryPage, Remains, Store
from .sandbox import SENTENCES, End, EndReason, Sandbox, SandboxState

OUTPUT_BYTES = 16 * 1024
_LONGEST_MESSAGE = 2000

# The events by which a sandbox goes (`Lifecycle.remove`), and the end they mean for one that had not ended by itself.
_REASONS = {"expired": EndReason.EXPIRED, "create failed": EndReason.START_FAILED, "undone": EndReason.START_FAILED}


def why(event: str) -> tuple[EndReason, str]:
    """How an event ends a sandbox that still lives: the reason and a sentence.

    >>> why("expired")
    (<EndReason.EXPIRED: 'expired'>, 'Its time was over.')
    """
    kind, _, detail = event.partition(": ")
    reason = _REASONS.get(kind, EndReason.KILLED)
    return reason, detail[:_LONGEST_MESSAGE] or SENTENCES[reason]


def stopping(row: Sandbox, event: str, now: datetime) -> Sandbox:
    """The row when it is decided that it goes; one that still lives says why, for a server that takes over."""
    if row.end is not None:
        return row.to(SandboxState.STOPPING, now)
    reason, message = why(event)
    return row.to(SandboxState.STOPPING, now, reason=reason.name, message=message)


def end_of(row: Sandbox, event: str, remains: Remains, now: datetime) -> End:
    """How it ended: as it did by itself, else as whoever took it away meant it."""
    if row.end is not None:
        return row.end
    seen = remains.end
    if seen is not None and seen.reason is not EndReason.KILLED:
        return seen  # it ended by itself just before
    reason, message = why(event)
    if row.state is SandboxState.STOPPING and row.reason is not None and row.reason in EndReason.__members__:
        # A server that stopped in between has left its reason in the row.
        reason, message = EndReason[row.reason], row.message or message
    return End(
        reason=reason,
        at=seen.at if seen is not None else now,
        message=message,
        peak_memory_bytes=seen.peak_memory_bytes if seen is not None else None,
    )


async def entry_of(row: Sandbox, event: str, remains: Remains, now: datetime) -> HistoryEntry:
    """The row that stays."""
    executions = tuple(one.with_its_sandbox() for one in await parsed(remains.journal))
    return HistoryEntry(
        id=row.id,
        tenant=row.tenant,
        image=row.image,
        entrypoint=row.entrypoint,
        metadata=row.metadata,
        created_at=row.created_at,
        gone_at=now,
        end=end_of(row, event, remains, now),
        executions=len(executions),
        output=clean(remains.output[-OUTPUT_BYTES:].decode("utf-8", "replace"), OUTPUT_BYTES),
        journal=dump(executions),
    )


class History:
    """The use case: look at what is gone."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def list(
        self, tenant: str, *, reasons: frozenset[EndReason], metadata: dict[str, str], page: int, page_size: int
    ) -> HistoryPage:
        """Newest first."""
        return await self._store.history(tenant, reasons=reasons, metadata=metadata, page=page, page_size=page_size)

    async def get(self, tenant: str, sandbox_id: str) -> HistoryEntry:
        """One of them, with its last words."""
        entry = await self._store.departed(tenant, sandbox_id)
        if entry is None:
            raise OpenSandboxError(
                Code.SANDBOX_NOT_FOUND,
                f"There is no sandbox {short(sandbox_id)} in the history.",
                hint="Those that are gone stay for seven days, and GET /v1/history lists them; others are in "
                "GET /v1/sandboxes.",
            )
        return entry
