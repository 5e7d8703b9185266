# SPDX-License-Identifier: Apache-2.0
"""Who ran what in a sandbox. execd keeps the journal inside, so everything in it may be a lie, and is only shown.

>>> [one] = parse(b'{"id": "entrypoint"}\\n{"id": "a", "content": "ls", "started_at": "2026-01-02T03:04:05Z"}\\n')
>>> one.content, one.running
('ls', True)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from anyio import to_thread

from .errors import Code, OpenSandboxError, not_found
from .ports import Runtime, Store
from .sandbox import ENDED

LONGEST_LINE = 256 * 1024
MOST_LINES = 100_000
MOST_RECORDS = 20_000
KEPT_RECORDS = 1_000
KEPT_CHARACTERS = 1024 * 1024
_ON_THE_LOOP = 32 * 1024
"""Journals up to this size are parsed at once; larger ones in a thread."""
_ENTRY_POINT = "entrypoint"


@dataclass(frozen=True)
class Execution:
    """One command or cell."""

    id: str
    content: str
    started_at: datetime
    running: bool
    background: bool | None = None
    request_id: str | None = None
    client: str | None = None
    user_agent: str | None = None
    cwd: str | None = None
    uid: int | None = None
    finished_at: datetime | None = None
    reason: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    message: str | None = None
    output_bytes: int | None = None

    def with_its_sandbox(self) -> Execution:
        """How it stands when the sandbox is no more: nothing runs there."""
        if not self.running:
            return self
        return replace(self, running=False, reason="killed", message="It ended with its sandbox.")


@dataclass(frozen=True)
class ExecutionPage:
    """One page and the number in all."""

    items: tuple[Execution, ...]
    total: int


def parse(journal: bytes) -> tuple[Execution, ...]:
    """The records of a journal in the order they began; the last line of an id counts, lines without sense do not."""
    found: dict[str, Execution] = {}
    for line in journal.split(b"\n")[-MOST_LINES:]:
        if not line or len(line) > LONGEST_LINE:
            continue
        try:
            values = json.loads(line)
            execution = _execution(values)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
        if execution.id != _ENTRY_POINT:
            found[execution.id] = execution  # a dict keeps the place of the first line
    return tuple(found.values())[-MOST_RECORDS:]


def dump(executions: tuple[Execution, ...]) -> str:
    """The newest of them as JSON, for the history."""
    kept: list[str] = []
    size = 0
    for execution in reversed(executions[-KEPT_RECORDS:]):
        text = json.dumps(
            {key: value for key, value in asdict(execution).items() if value is not None}, default=datetime.isoformat
        )
        size += len(text) + 1
        if size > KEPT_CHARACTERS:
            break
        kept.append(text)
    return f"[{','.join(reversed(kept))}]"


def load(text: str) -> tuple[Execution, ...]:
    """What `dump` made."""
    return tuple(_loaded(one) for one in json.loads(text or "[]"))


def _loaded(values: dict[str, Any]) -> Execution:
    for key in values.keys() & {"started_at", "finished_at"}:
        values[key] = datetime.fromisoformat(values[key])
    return Execution(**values)


async def parsed(journal: bytes) -> tuple[Execution, ...]:
    """`parse`, and not on the event loop if it takes long."""
    if len(journal) <= _ON_THE_LOOP:
        return parse(journal)
    return await to_thread.run_sync(parse, journal)


class Executions:
    """The use case: of sandboxes that are there, and of those in the history."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store = store
        self._runtime = runtime

    async def list(self, tenant: str, sandbox_id: str, *, page: int = 1, page_size: int = 20) -> ExecutionPage:
        """Newest first."""
        found = await self.all(tenant, sandbox_id)
        newest = found[::-1]
        start = (page - 1) * page_size
        return ExecutionPage(newest[start : start + page_size], len(newest))

    async def all(self, tenant: str, sandbox_id: str) -> tuple[Execution, ...]:
        """Oldest first."""
        row = await self._store.get(tenant, sandbox_id)
        if row is not None:
            try:
                found = await parsed(await self._runtime.journal(sandbox_id))
            except OpenSandboxError as error:
                if error.code is not Code.SANDBOX_NOT_FOUND:
                    raise
                found = ()  # being made, or lost with its machine; or gone meanwhile
                row = await self._store.get(tenant, sandbox_id)
            if row is not None:
                return tuple(one.with_its_sandbox() for one in found) if row.state in ENDED else found
        entry = await self._store.departed(tenant, sandbox_id)
        if entry is None:
            raise not_found(sandbox_id)
        return load(entry.journal)


def _execution(values: Any) -> Execution:
    if not isinstance(values, dict):
        raise TypeError("no record")
    ended = values.get("end")
    end: dict[str, Any] = ended if isinstance(ended, dict) else {}
    return Execution(
        id=_required(values, "id", 64),
        content=_required(values, "content", 16 * 1024) if values.get("content") else "",
        started_at=_moment(values["started_at"]),
        running=not end,
        background=_flag(values, "background"),
        request_id=_text(values, "request_id", 128),
        client=_text(values, "client", 64),
        user_agent=_text(values, "user_agent", 200),
        cwd=_text(values, "cwd", 4096),
        uid=_number(values, "uid"),
        finished_at=_moment(values["finished_at"]) if values.get("finished_at") else None,
        reason=_text(end, "reason", 64),
        exit_code=_number(end, "exit_code"),
        signal=_text(end, "signal", 32),
        message=_text(end, "message", 1000),
        output_bytes=_number(values, "output"),
    )


def clean(text: str, longest: int) -> str:
    """Text from a sandbox that fits into UTF-8, a database and an answer."""
    return text[:longest].encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")


def _required(values: dict[str, Any], key: str, longest: int) -> str:
    value = _text(values, key, longest)
    if not value:
        raise KeyError(key)
    return value


def _text(values: dict[str, Any], key: str, longest: int) -> str | None:
    value = values.get(key)
    return clean(value, longest) if isinstance(value, str) and value else None


def _flag(values: dict[str, Any], key: str) -> bool | None:
    value = values.get(key)
    return value if isinstance(value, bool) else None


def _number(values: dict[str, Any], key: str) -> int | None:
    value = values.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and -(1 << 53) <= value <= 1 << 53:
        return value
    return None


def _moment(value: Any) -> datetime:
    if not isinstance(value, str) or len(value) > 40:
        raise ValueError("no time")
    at = datetime.fromisoformat(value)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
