# SPDX-License-Identifier: Apache-2.0
"""The ports: what the use cases need from the world, as small Protocols.

A runtime makes sandboxes, the store remembers them. Neither knows the other; only the use cases
(`lifecycle`, `expiry`, `reconcile`) hold both. What not every runtime can do (pause, snapshot, pools) will be
separate Protocols, asked for by `isinstance`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from .sandbox import End, EndReason, Limits, Sandbox, SandboxState


@dataclass(frozen=True)
class LaunchSpec:
    """Everything a runtime needs to make one sandbox. Validated: a runtime never sees a raw request."""

    id: str
    image: str
    entrypoint: tuple[str, ...]
    env: dict[str, str]
    limits: Limits
    generation: int
    token_sha256: str
    """Hex digest; the token itself never reaches a runtime."""
    deadline: datetime | None = None
    request_id: str | None = None
    isolates: bool = False
    """execd may make namespaces for isolated runs; nothing else in the sandbox may."""


@dataclass(frozen=True)
class Report:
    """What a runtime says about one sandbox: what is, not what should be."""

    id: str
    generation: int
    running: bool
    end: End | None = None
    image: str | None = None
    """The image the requested name resolved to."""
    isolation: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    acknowledged: bool = False


@dataclass(frozen=True)
class Address:
    """Where a port of a sandbox is reached from this host: a Unix socket, and how to speak on it.

    `kind` is "api" (HTTP, execd) or "ports" (send `CONNECT <port>\\n`, read `OK\\n`, then bytes).
    """

    socket: str
    kind: str


@dataclass(frozen=True)
class Remains:
    """What is left of a sandbox at the moment it is forgotten. Both texts are hostile bytes."""

    end: End | None = None
    """How it ended, as the runtime saw it: a living one was killed."""
    output: bytes = b""
    """The end of what its entry point wrote."""
    journal: bytes = b""
    """The records of its commands, as `Runtime.journal` gives them."""


@dataclass(frozen=True)
class Description:
    """A runtime: which one it is, what may be asked of it, and what it stands on."""

    name: str
    version: str
    abilities: dict[str, bool]
    """Only what works now is true."""
    images: tuple[dict[str, str], ...] = ()
    host: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """What it cannot enforce, each with what would grant it."""


ABILITIES = ("pause", "snapshot", "fork", "pools", "templates", "volumes", "networkPolicy", "images", "signedEndpoints")
"""What a client may ask for and not every runtime can do."""


@runtime_checkable
class Runtime(Protocol):
    """Makes sandboxes and tells what became of them.

    Order of calls: `start` once, then any of the others in any order and at once, then `stop`. All errors are
    `errors.OpenSandboxError`; a runtime translates foreign exceptions itself.
    """

    name: str

    async def start(self) -> None:
        """Connect; make ready. Raises `unavailable` or `unsupported` with a hint when the host cannot."""

    async def stop(self) -> None:
        """Let go. Sandboxes live on."""

    async def check(self, spec: LaunchSpec) -> None:
        """Refuse what this runtime cannot make (unknown image, unsupported limit) before a row exists."""

    async def create(self, spec: LaunchSpec) -> Report:
        """Make it and wait until execd answers, or until its entry point has ended (`end` is set).

        On any failure nothing of it is left and an error is raised.
        """

    async def inspect(self, sandbox_id: str) -> Report | None:
        """What is known, or None when this runtime never heard of it."""

    async def list(self) -> list[Report]:
        """All of them, ended ones too until they are deleted."""

    async def delete(self, sandbox_id: str) -> Remains:
        """End it and forget it, and say what is left of it. Not an error when there is nothing."""

    async def set_deadline(self, sandbox_id: str, deadline: datetime | None) -> None:
        """Remember when it must end even if no server is there to say so."""

    async def acknowledge(self, sandbox_id: str) -> None:
        """The end of this sandbox is stored; it need not be told again."""

    async def output(self, sandbox_id: str) -> bytes:
        """The last MiB of the entry point's output. Hostile bytes."""

    async def journal(self, sandbox_id: str) -> bytes:
        """The records of its commands, at most the last 4 MiB: JSON lines, the last of an id counts. Hostile bytes."""

    async def describe(self) -> Description:
        """What it is and what it can do."""

    def address(self, sandbox_id: str, port: int) -> Address:
        """Where to connect for that port. Pure: does not check that it lives."""

    def public_address(self) -> str:
        """host:port of the ingress that clients use."""

    def watch(self) -> AsyncIterator[Report]:
        """Ends, as they happen; those not yet acknowledged first. Reconnects by itself; ends when stopped."""


@dataclass(frozen=True)
class SandboxEvent:
    """One thing that happened to a sandbox."""

    seq: int
    """Grows with every event of the store."""
    sandbox_id: str
    tenant: str
    at: datetime
    event: str
    """What happened, in words; what follows a colon is detail."""
    state: SandboxState
    version: int
    reason: str | None
    message: str | None

    @property
    def kind(self) -> str:
        """What happened, without detail: `create failed: why` is of the kind `create failed`."""
        return self.event.partition(": ")[0]

    @property
    def told(self) -> str | None:
        """What there is to say about it: its own detail, else what the sandbox's row said then."""
        return self.event.partition(": ")[2] or self.message


@dataclass(frozen=True)
class HistoryEntry:
    """A sandbox that is gone."""

    id: str
    tenant: str
    image: str
    entrypoint: tuple[str, ...]
    metadata: dict[str, str]
    created_at: datetime
    gone_at: datetime
    end: End
    executions: int = 0
    output: str = ""
    """The end of its output; empty in a list."""
    journal: str = ""
    """Its last executions as JSON; empty in a list."""


@dataclass(frozen=True)
class HistoryPage:
    """One page of the history and the number of entries in all."""

    items: tuple[HistoryEntry, ...]
    total: int


@dataclass(frozen=True)
class Page:
    """One page of a list and the number of rows in all."""

    items: tuple[Sandbox, ...]
    total: int


@dataclass(frozen=True)
class KeyedCreate:
    """A create that its client named with an Idempotency-Key, so that it may be sent again."""

    tenant: str
    key: str
    body: str
    """SHA-256 of the request."""
    sandbox_id: str
    created_at: datetime
    warnings: tuple[str, ...] | None = None
    """What the answer said besides the sandbox; None as long as there was no answer."""


class Store(Protocol):
    """The truth about sandboxes. Every change is a compare-and-set on `version` and leaves an event row."""

    async def insert(self, sandbox: Sandbox, *, at_most: int | None = None, keyed: KeyedCreate | None = None) -> bool:
        """Reserve a row (state Pending), and with it the key it was asked for with.

        False when there are already `at_most` sandboxes of this node that live: counted and inserted in one.
        """

    async def get(self, tenant: str, sandbox_id: str) -> Sandbox | None:
        """As a client sees it: only its own."""

    async def find(self, sandbox_id: str) -> Sandbox | None:
        """By id alone, for what the server itself does; only rows of this node and runtime."""

    async def list(
        self,
        tenant: str,
        *,
        states: frozenset[SandboxState] = frozenset(),
        metadata: dict[str, str] | None = None,
        page: int = 1,
        page_size: int = 20,
    ) -> Page:
        """Newest first. Filters and paging happen in the database."""

    async def replace(self, old: Sandbox, new: Sandbox, *, event: str, keyed: KeyedCreate | None = None) -> bool:
        """Store `new` if the row is still at `old.version`; False when somebody was faster.

        `keyed` is set when this answers a create that had a key.
        """

    async def delete(self, sandbox_id: str, *, entry: HistoryEntry | None = None) -> bool:
        """Forget the row (its events stay), and keep `entry` in the history; False when there was none."""

    async def due(self, now: datetime) -> tuple[Sandbox, ...]:
        """Rows of this node whose expiry has come and that are not already Stopping."""

    async def next_expiry(self, *, of_alive: bool = False) -> datetime | None:
        """When the next row of this node is due, or the next one that has not ended."""

    async def mine(self) -> tuple[Sandbox, ...]:
        """All rows of this node and runtime, for the reconcile."""

    async def alive(self) -> int:
        """How many rows of this node have not ended."""

    async def keyed(self, tenant: str, key: str) -> KeyedCreate | None:
        """What was asked under that key."""

    async def forget_keys(self, before: datetime) -> int:
        """Drop keys older than that; how many went."""

    async def forget_events(self, before: datetime) -> int:
        """Drop events and history older than that, and the oldest history over its size; how many events went."""

    async def counts(self) -> dict[str, int]:
        """How many rows of this node are in which state."""

    def listen(self, heard: Callable[[SandboxEvent], None]) -> None:
        """From now on `heard` is called on the event loop with every event this store writes, in order."""

    async def events(self, sandbox_id: str) -> tuple[SandboxEvent, ...]:
        """What happened to a sandbox, oldest first; also after it is gone."""

    async def events_after(
        self, seq: int, *, tenant: str | None = None, sandbox_id: str | None = None, most: int = 500
    ) -> tuple[SandboxEvent, ...]:
        """Events behind that one, oldest first, also those that other servers wrote."""

    async def last_event(self) -> int:
        """The number of the newest event; 0 when there is none."""

    async def history(
        self,
        tenant: str,
        *,
        reasons: frozenset[EndReason] = frozenset(),
        metadata: dict[str, str] | None = None,
        page: int = 1,
        page_size: int = 20,
    ) -> HistoryPage:
        """Sandboxes that are gone, newest first, without their texts."""

    async def departed(self, tenant: str, sandbox_id: str) -> HistoryEntry | None:
        """One that is gone, with its texts."""
