# SPDX-License-Identifier: Apache-2.0
"""The ports: what the use cases need from the world, as small Protocols.

A runtime makes sandboxes, the store remembers them. Neither knows the other; only the use cases
(`lifecycle`, `expiry`, `reconcile`) hold both. What not every runtime can do (pause, snapshot, pools) will be
separate Protocols, asked for by `isinstance`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from .sandbox import End, Limits, Sandbox, SandboxState


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

    async def delete(self, sandbox_id: str) -> None:
        """End it and forget it. Not an error when there is nothing."""

    async def set_deadline(self, sandbox_id: str, deadline: datetime | None) -> None:
        """Remember when it must end even if no server is there to say so."""

    async def acknowledge(self, sandbox_id: str) -> None:
        """The end of this sandbox is stored; it need not be told again."""

    async def output(self, sandbox_id: str) -> bytes:
        """The last MiB of the entry point's output. Hostile bytes."""

    def address(self, sandbox_id: str, port: int) -> Address:
        """Where to connect for that port. Pure: does not check that it lives."""

    def public_address(self) -> str:
        """host:port of the ingress that clients use."""

    def watch(self) -> AsyncIterator[Report]:
        """Ends, as they happen; those not yet acknowledged first. Reconnects by itself; ends when stopped."""


@dataclass(frozen=True)
class Page:
    """One page of a list and the number of rows in all."""

    items: tuple[Sandbox, ...]
    total: int


class Store(Protocol):
    """The truth about sandboxes. Every change is a compare-and-set on `version` and leaves an event row."""

    async def insert(self, sandbox: Sandbox) -> None:
        """Reserve a row (state Pending)."""

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

    async def replace(self, old: Sandbox, new: Sandbox, *, event: str) -> bool:
        """Store `new` if the row is still at `old.version`; False when somebody was faster."""

    async def delete(self, sandbox_id: str) -> bool:
        """Forget the row (its events stay); False when there was none."""

    async def due(self, now: datetime) -> tuple[Sandbox, ...]:
        """Rows of this node whose expiry has come and that are not already Stopping."""

    async def next_expiry(self) -> datetime | None:
        """When the next row of this node is due."""

    async def mine(self) -> tuple[Sandbox, ...]:
        """All rows of this node and runtime, for the reconcile."""

    async def forget_events(self, before: datetime) -> int:
        """Drop events older than that; how many went."""
