# SPDX-License-Identifier: Apache-2.0
"""Rows to frozen dataclasses and back. Pure."""

from __future__ import annotations

from collections import namedtuple
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic_core import from_json, to_json

from opensandbox_server.ports import HistoryEntry, SandboxEvent
from opensandbox_server.sandbox import End, EndReason, Limits, Sandbox, SandboxState

from .tables import sandboxes

SandboxRow = namedtuple("SandboxRow", [column.name for column in sandboxes.columns])  # type: ignore[misc]
"""A row of `sandboxes` as the driver gives it, with names."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def micros(at: datetime) -> int:
    """
    >>> micros(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))
    1000000
    """
    return (at - _EPOCH) // _MICROSECOND


def moment(at: int) -> datetime:
    """
    >>> moment(1_000_000).isoformat()
    '1970-01-01T00:00:01+00:00'
    """
    return _EPOCH + timedelta(microseconds=at)


def to_row(sandbox: Sandbox) -> dict[str, Any]:
    """All columns of `sandboxes`."""
    return {
        "id": sandbox.id,
        "tenant": sandbox.tenant,
        "node": sandbox.node,
        "runtime": sandbox.runtime,
        "epoch": sandbox.epoch,
        "image": sandbox.image,
        "entrypoint": _json(sandbox.entrypoint),
        "env": _json(sandbox.env),
        "cpu_millis": sandbox.limits.cpu_millis,
        "memory_bytes": sandbox.limits.memory_bytes,
        "pids": sandbox.limits.pids,
        "extensions": _json(sandbox.extensions),
        "platform": _json(sandbox.platform) if sandbox.platform else None,
        "created_at": micros(sandbox.created_at),
        **changing(sandbox),
    }


def changing(sandbox: Sandbox) -> dict[str, Any]:
    """The columns that a transition may change; what was asked for never changes."""
    return {
        "generation": sandbox.generation,
        "version": sandbox.version,
        "state": sandbox.state.value,
        "reason": sandbox.reason,
        "message": sandbox.message,
        "metadata": _json(sandbox.metadata),
        "isolation": _json(sandbox.isolation),
        "ending": _ending(sandbox.end) if sandbox.end else None,
        "changed_at": micros(sandbox.changed_at),
        "expires_at": micros(sandbox.expires_at) if sandbox.expires_at else None,
    }


def from_row(row: Any) -> Sandbox:
    """A row of `sandboxes`, all columns."""
    return Sandbox(
        id=row.id,
        tenant=row.tenant,
        node=row.node,
        runtime=row.runtime,
        epoch=row.epoch,
        state=SandboxState(row.state),
        image=row.image,
        entrypoint=tuple(from_json(row.entrypoint)),
        created_at=moment(row.created_at),
        changed_at=moment(row.changed_at),
        generation=row.generation,
        version=row.version,
        expires_at=moment(row.expires_at) if row.expires_at is not None else None,
        env=from_json(row.env),
        limits=Limits(row.cpu_millis, row.memory_bytes, row.pids),
        metadata=from_json(row.metadata),
        extensions=from_json(row.extensions),
        platform=from_json(row.platform) if row.platform else None,
        reason=row.reason,
        message=row.message,
        end=_end(row.ending) if row.ending else None,
        isolation=from_json(row.isolation),
    )


def event_row(sandbox: Sandbox, event: str, at: int) -> dict[str, Any]:
    """What happened, as it is kept."""
    return {
        "sandbox_id": sandbox.id,
        "tenant": sandbox.tenant,
        "node": sandbox.node,
        "runtime": sandbox.runtime,
        "at": at,
        "event": event,
        "state": sandbox.state.value,
        "version": sandbox.version,
        "reason": sandbox.reason,
        "message": sandbox.message,
    }


def to_event(seq: int, values: Any) -> SandboxEvent:
    """A row of `sandbox_events`, as a mapping."""
    return SandboxEvent(
        seq=seq,
        sandbox_id=values["sandbox_id"],
        tenant=values["tenant"],
        at=moment(values["at"]),
        event=values["event"],
        state=SandboxState(values["state"]),
        version=values["version"],
        reason=values["reason"],
        message=values["message"],
    )


def history_row(entry: HistoryEntry, home: dict[str, Any]) -> dict[str, Any]:
    """All columns of `history`."""
    return {
        **home,
        "sandbox_id": entry.id,
        "tenant": entry.tenant,
        "image": entry.image,
        "entrypoint": _json(entry.entrypoint),
        "metadata": _json(entry.metadata),
        "created_at": micros(entry.created_at),
        "gone_at": micros(entry.gone_at),
        "reason": entry.end.reason.value,
        "ending": _ending(entry.end),
        "executions": entry.executions,
        "size": len(entry.output) + len(entry.journal),
    }


def from_history(row: Any, output: str = "", journal: str = "") -> HistoryEntry:
    """A row of `history`, all columns."""
    return HistoryEntry(
        id=row.sandbox_id,
        tenant=row.tenant,
        image=row.image,
        entrypoint=tuple(from_json(row.entrypoint)),
        metadata=from_json(row.metadata),
        created_at=moment(row.created_at),
        gone_at=moment(row.gone_at),
        end=_end(row.ending),
        executions=row.executions,
        output=output,
        journal=journal,
    )


def _json(value: Any) -> str:
    return to_json(value).decode()


def _ending(end: End) -> str:
    return _json(
        {
            "reason": end.reason.value,
            "at": micros(end.at),
            "exit_code": end.exit_code,
            "signal": end.signal,
            "message": end.message,
            "peak_memory_bytes": end.peak_memory_bytes,
        }
    )


def _end(text: str) -> End:
    values = from_json(text)
    return End(**{**values, "reason": EndReason(values["reason"]), "at": moment(values["at"])})
