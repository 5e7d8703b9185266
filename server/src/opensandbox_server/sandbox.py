# SPDX-License-Identifier: Apache-2.0
"""A sandbox: its values and its state machine. No I/O, no framework."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any


class SandboxState(StrEnum):
    """The published vocabulary."""

    PENDING = "Pending"
    RUNNING = "Running"
    PAUSING = "Pausing"
    PAUSED = "Paused"
    RESUMING = "Resuming"
    STOPPING = "Stopping"
    TERMINATED = "Terminated"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


ENDED = frozenset({SandboxState.TERMINATED, SandboxState.FAILED})

_NEXT: dict[SandboxState, frozenset[SandboxState]] = {
    SandboxState.PENDING: frozenset({SandboxState.RUNNING, SandboxState.STOPPING, *ENDED}),
    SandboxState.RUNNING: frozenset({SandboxState.PAUSING, SandboxState.STOPPING, *ENDED}),
    SandboxState.PAUSING: frozenset({SandboxState.PAUSED, SandboxState.RUNNING, SandboxState.STOPPING, *ENDED}),
    SandboxState.PAUSED: frozenset({SandboxState.RESUMING, SandboxState.STOPPING, *ENDED}),
    SandboxState.RESUMING: frozenset({SandboxState.RUNNING, SandboxState.PAUSED, SandboxState.STOPPING, *ENDED}),
    SandboxState.STOPPING: ENDED,
    SandboxState.TERMINATED: frozenset({SandboxState.STOPPING}),
    SandboxState.FAILED: frozenset({SandboxState.STOPPING}),
    SandboxState.UNKNOWN: frozenset({SandboxState.RUNNING, SandboxState.STOPPING, *ENDED}),
}


class EndReason(StrEnum):
    """Why a sandbox ended; never a bare number."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"
    EXPIRED = "expired"
    HOST_RESTARTED = "host_restarted"
    LOST = "lost"
    START_FAILED = "start_failed"


SENTENCES = {
    EndReason.EXITED: "The entry point exited.",
    EndReason.SIGNALLED: "The entry point was ended by a signal.",
    EndReason.OUT_OF_MEMORY: "The sandbox ran out of memory.",
    EndReason.KILLED: "It was deleted.",
    EndReason.EXPIRED: "Its time was over.",
    EndReason.HOST_RESTARTED: "The host was restarted.",
    EndReason.LOST: "Nobody saw how it ended.",
    EndReason.START_FAILED: "It did not start.",
}
"""Ends of which no more is known than their kind."""


@dataclass(frozen=True)
class End:
    """How the main process ended."""

    reason: EndReason
    at: datetime
    exit_code: int | None = None
    signal: str | None = None
    message: str | None = None
    peak_memory_bytes: int | None = None

    @property
    def clean(self) -> bool:
        """Terminated rather than Failed."""
        return self.reason in (EndReason.KILLED, EndReason.EXPIRED) or (
            self.reason is EndReason.EXITED and self.exit_code == 0
        )

    @property
    def sentence(self) -> str:
        """How it ended, for people.

        >>> End(EndReason.EXITED, at, exit_code=3).sentence        # doctest: +SKIP
        'The entry point exited with code 3.'
        """
        if self.message:
            return self.message
        if self.reason is EndReason.EXITED and self.exit_code is not None:
            return f"The entry point exited with code {self.exit_code}."
        if self.reason is EndReason.SIGNALLED and self.signal:
            return f"The entry point was ended by {self.signal}."
        return SENTENCES[self.reason]


@dataclass(frozen=True)
class Limits:
    """Resource limits; None leaves the runtime's default, which `isolation` then shows."""

    cpu_millis: int | None = None
    memory_bytes: int | None = None
    pids: int | None = None


@dataclass(frozen=True)
class Sandbox:
    """One row of the store."""

    id: str
    tenant: str
    node: str
    runtime: str
    epoch: int
    """Which start of the server reserved it; a Pending row of an older epoch is undone."""
    state: SandboxState
    image: str
    entrypoint: tuple[str, ...]
    created_at: datetime
    changed_at: datetime
    generation: int = 1
    version: int = 1
    expires_at: datetime | None = None
    env: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    metadata: dict[str, str] = field(default_factory=dict)
    extensions: dict[str, str] = field(default_factory=dict)
    platform: dict[str, str] | None = None
    reason: str | None = None
    message: str | None = None
    end: End | None = None
    isolation: dict[str, Any] = field(default_factory=dict)

    def to(self, state: SandboxState, now: datetime, **changes: Any) -> Sandbox:
        """This sandbox in its next state.

        >>> pending.to(SandboxState.RUNNING, now, reason="RUNNING").version == pending.version + 1
        True
        """
        if state not in _NEXT[self.state]:
            raise ValueError(f"a sandbox cannot go from {self.state} to {state}")
        return replace(self, state=state, changed_at=now, version=self.version + 1, **changes)

    def ended(self, end: End) -> Sandbox:
        """This sandbox after its main process ended."""
        state = SandboxState.TERMINATED if end.clean else SandboxState.FAILED
        return self.to(state, end.at, reason=end.reason.name, message=end.sentence, end=end)
