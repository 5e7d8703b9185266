# SPDX-License-Identifier: Apache-2.0
"""What happened, as values: events, commands that ran, sandboxes that are gone; and who makes them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import AliasChoices, Field

from opensandbox.models.base import Answer, Asked
from opensandbox.models.sandboxes import PaginationInfo, SandboxEnd

__all__ = [
    "ExecutionRecord",
    "HistoryEntry",
    "HistoryFilter",
    "Occupancy",
    "PagedExecutionRecords",
    "PagedHistoryEntries",
    "RuntimeInfo",
    "SandboxEvent",
]


class SandboxEvent(Answer):
    """Something happened to a sandbox. `seq` grows with time; `state` is the one it was in then."""

    seq: int
    sandbox_id: str
    at: datetime
    event: str
    """Such as `created`, `running`, `renewed`, `ended`, `deleted`."""
    state: str
    reason: str | None = None
    message: str | None = None


class ExecutionRecord(Answer):
    """One command that ran in a sandbox. All of it was told by the sandbox: show it, do not rely on it."""

    id: str
    content: str
    """The command line, or its beginning."""
    background: bool | None = None
    request_id: str | None = None
    client: str | None = None
    """The address the request came from."""
    user_agent: str | None = None
    cwd: str | None = None
    uid: int | None = None
    started_at: datetime
    finished_at: datetime | None = None
    running: bool
    reason: str | None = None
    """How it ended, one of `CommandEndReason` or a newer one."""
    exit_code: int | None = None
    signal: str | None = None
    message: str | None = None
    output_bytes: int | None = None


class PagedExecutionRecords(Answer):
    """A page of commands, newest first."""

    records: list[ExecutionRecord] = Field(validation_alias=AliasChoices("records", "items"))
    pagination: PaginationInfo


class HistoryEntry(Answer):
    """A sandbox that is gone."""

    id: str
    image: str
    entrypoint: list[str]
    metadata: dict[str, str] | None = None
    created_at: datetime
    gone_at: datetime
    end: SandboxEnd
    output: str | None = None
    """The end of its output; only when one entry is asked for."""
    executions: int | None = None
    """How many commands it ran."""


class HistoryFilter(Asked):
    """Which sandboxes that are gone: any of `reasons`, all of `metadata`.

    `HistoryFilter(reasons=["out_of_memory"], metadata={"team": "red"})`
    """

    reasons: list[str] | None = None
    metadata: dict[str, str] | None = None
    page_size: int | None = Field(default=None, gt=0)
    page: int | None = Field(default=None, ge=0)


class PagedHistoryEntries(Answer):
    """A page of sandboxes that are gone, newest end first."""

    entries: list[HistoryEntry] = Field(validation_alias=AliasChoices("entries", "items"))
    pagination: PaginationInfo


class Occupancy(Answer):
    """How many there are, how many there may be, and how many wait for a place."""

    now: int
    limit: int | None = None
    waiting: int | None = None


class RuntimeInfo(Answer):
    """What makes the sandboxes of a server, and what it can do."""

    name: str
    version: str
    abilities: dict[str, bool]
    images: list[dict[str, str]] | None = None
    host: dict[str, Any] | None = None
    """What the machine offers."""
    missing: list[str] | None = None
    """What it cannot enforce, each with the command that grants it."""
    sandboxes: Occupancy
    creating: Occupancy
