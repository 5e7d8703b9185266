# SPDX-License-Identifier: Apache-2.0
"""What is the matter with a sandbox: its last output, what happened to it, and all that is known, as text for people.

Works for those that live, those that have ended and those that are gone but still in the history.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime

from .errors import Code, OpenSandboxError, not_found
from .ports import HistoryEntry, Runtime, SandboxEvent, Store
from .sandbox import End, Sandbox

LOG_LINES = 100
EVENT_LINES = 50
_SECRET_WORDS = ("SECRET", "TOKEN", "PASSWORD", "PASSWD", "PASSPHRASE", "PWD", "CREDENTIAL", "AUTH", "KEY")
_NO_SECRETS = frozenset({"PWD", "OLDPWD"})
"""Every shell sets them, to a directory."""
# Up to the last @ before the path: a password may have one of its own.
_USER_IN_URL = re.compile(r"(?<=://)[^/?#\s]*(?=@)")
MASK = "***"


@dataclass(frozen=True)
class Excerpt:
    """Some lines, and whether there are more."""

    text: str
    truncated: bool = False


class Diagnostics:
    """The use case."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store = store
        self._runtime = runtime

    async def logs(self, tenant: str, sandbox_id: str, tail: int = LOG_LINES) -> Excerpt:
        """The last lines of the entry point's output."""
        return last_lines(await self._output(await self._known(tenant, sandbox_id)), tail)

    async def events(self, tenant: str, sandbox_id: str, limit: int = EVENT_LINES) -> Excerpt:
        """The first lines of what happened."""
        await self._known(tenant, sandbox_id)
        return await self._events(tenant, sandbox_id, limit)

    async def inspect(self, tenant: str, sandbox_id: str) -> str:
        """All that is known."""
        return _described(await self._known(tenant, sandbox_id))

    async def summary(self, tenant: str, sandbox_id: str, *, tail: int, event_limit: int) -> str:
        """Everything in one text."""
        known = await self._known(tenant, sandbox_id)
        events = await self._events(tenant, sandbox_id, event_limit)
        output = last_lines(await self._output(known), tail)
        return "\n".join(
            (
                "== Inspect ==",
                _described(known),
                f"== Events (first {event_limit}) ==",
                events.text or "none\n",
                f"== Logs (last {tail} lines) ==",
                output.text or "none\n",
            )
        )

    async def _known(self, tenant: str, sandbox_id: str) -> Sandbox | HistoryEntry:
        found = await self._store.get(tenant, sandbox_id) or await self._store.departed(tenant, sandbox_id)
        if found is None:
            raise not_found(sandbox_id)
        return found

    async def _events(self, tenant: str, sandbox_id: str, limit: int) -> Excerpt:
        rows = await self._store.events_after(0, tenant=tenant, sandbox_id=sandbox_id, most=limit + 1)
        return Excerpt("".join(f"{_event_line(event)}\n" for event in rows[:limit]), len(rows) > limit)

    async def _output(self, known: Sandbox | HistoryEntry) -> str:
        if isinstance(known, HistoryEntry):
            return known.output
        try:
            return (await self._runtime.output(known.id)).decode("utf-8", "replace")
        except OpenSandboxError as error:
            if error.code is not Code.SANDBOX_NOT_FOUND:
                raise
            entry = await self._store.departed(known.tenant, known.id)  # gone this very moment
            return entry.output if entry else ""


def last_lines(text: str, tail: int) -> Excerpt:
    """
    >>> last_lines("a\\nb\\nc\\n", 2)
    Excerpt(text='b\\nc\\n', truncated=True)
    """
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    kept = lines[-tail:]
    return Excerpt("".join(f"{line}\n" for line in kept), len(lines) > len(kept))


def masked(env: dict[str, str]) -> dict[str, str]:
    """The environment without what looks like a secret.

    >>> masked({"API_KEY": "k", "HOME": "/root"})
    {'API_KEY': '***', 'HOME': '/root'}
    >>> masked({"DATABASE": "postgres://me:pw@db/x"})
    {'DATABASE': 'postgres://***@db/x'}
    """
    return {key: MASK if _is_secret(key.upper()) else _USER_IN_URL.sub(MASK, value) for key, value in env.items()}


def _is_secret(name: str) -> bool:
    return name not in _NO_SECRETS and any(word in name for word in _SECRET_WORDS)


def _described(known: Sandbox | HistoryEntry) -> str:
    facts: list[tuple[str, object]] = [("id", known.id), ("image", known.image), ("entrypoint", list(known.entrypoint))]
    if isinstance(known, Sandbox):
        status = ": ".join(filter(None, (known.reason, known.message)))
        facts += [
            ("state", f"{known.state.value} ({status})" if status else known.state.value),
            ("runtime", known.runtime),
            ("created", _time(known.created_at)),
            ("changed", _time(known.changed_at)),
            ("expires", _time(known.expires_at) if known.expires_at else "never"),
            ("limits", _limits(known)),
            ("metadata", known.metadata),
            ("extensions", known.extensions),
            ("platform", known.platform or {}),
            ("env", masked(known.env)),
            ("end", _ended(known.end) if known.end else {}),
            ("isolation", known.isolation),
        ]
    else:
        facts += [
            ("state", "gone"),
            ("created", _time(known.created_at)),
            ("gone", _time(known.gone_at)),
            ("metadata", known.metadata),
            ("executions", known.executions),
            ("end", _ended(known.end)),
        ]
    return "".join(line for name, value in facts for line in _lines(name, value))


def _lines(name: str, value: object) -> list[str]:
    """One fact; JSON keeps whatever a client put in on its line."""
    if isinstance(value, dict):
        if not value:
            return []
        return [f"{name}:\n", *(f"  {_plain(key)}: {_plain(inner)}\n" for key, inner in value.items())]
    return [f"{name}: {_plain(value)}\n"]


def _plain(value: object) -> str:
    if isinstance(value, str) and value.isprintable():
        return value
    return json.dumps(value, default=str)


def _limits(sandbox: Sandbox) -> dict[str, object]:
    limits = sandbox.limits
    wanted = {"cpu": f"{limits.cpu_millis}m" if limits.cpu_millis else None, "memory": limits.memory_bytes}
    return {name: value for name, value in {**wanted, "pids": limits.pids}.items() if value is not None}


def _ended(end: End) -> dict[str, object]:
    facts = {
        "reason": end.reason.value,
        "at": _time(end.at),
        "exitCode": end.exit_code,
        "signal": end.signal,
        "message": end.message,
        "peakMemoryBytes": end.peak_memory_bytes,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _event_line(event: SandboxEvent) -> str:
    line = f"{_time(event.at)} {event.state.value} {event.kind}"
    if event.told:
        line += f": {event.told}"
    return line if line.isprintable() else json.dumps(line)


def _time(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
