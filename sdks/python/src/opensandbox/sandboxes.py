# SPDX-License-Identifier: Apache-2.0
"""All sandboxes of a server, for programs that look after many."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

from opensandbox import models
from opensandbox.lifecycle import Lifecycle, default_config

if TYPE_CHECKING:
    from opensandbox.config import ConnectionConfig


class SandboxManager:
    """The sandboxes of a server, by id.

    async with await SandboxManager.create() as manager:
        page = await manager.list_sandbox_infos(SandboxFilter(states=["Running"]))
        for info in page.sandbox_infos:
            print(info.id, info.status.state)
    """

    def __init__(self, connection_config: ConnectionConfig) -> None:
        """Use `SandboxManager.create`."""
        self._lifecycle = Lifecycle(connection_config)

    @classmethod
    async def create(cls, connection_config: ConnectionConfig | None = None) -> SandboxManager:
        """A manager; nothing is sent yet."""
        manager = cls(connection_config or default_config())
        manager._lifecycle.open()
        return manager

    @property
    def connection_config(self) -> ConnectionConfig:
        """The configuration it was created with."""
        return self._lifecycle.config

    async def list_sandbox_infos(self, filter: models.SandboxFilter) -> models.PagedSandboxInfos:  # noqa: A002 (the published name)
        """A page of the sandboxes that match, newest first."""
        return await self._lifecycle.list(filter)

    async def get_sandbox_info(self, sandbox_id: str) -> models.SandboxInfo:
        """One sandbox."""
        return await self._lifecycle.get(sandbox_id)

    async def kill_sandbox(self, sandbox_id: str) -> None:
        """End a sandbox."""
        await self._lifecycle.delete(sandbox_id)

    async def renew_sandbox(self, sandbox_id: str, timeout: timedelta) -> models.SandboxRenewResponse:
        """Let a sandbox expire that long from now."""
        return await self._lifecycle.renew(sandbox_id, timeout)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._lifecycle.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
