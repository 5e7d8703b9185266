# SPDX-License-Identifier: Apache-2.0
"""All sandboxes of a server, for programs that look after many."""

from __future__ import annotations

from collections.abc import AsyncGenerator
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

    Leaving the block lets go of the connections; the sandboxes live on.
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

    # --- sandboxes ----------------------------------------------------------------------------------

    async def list_sandbox_infos(self, filter: models.SandboxFilter | None = None) -> models.PagedSandboxInfos:  # noqa: A002 (the published name)
        """A page of the sandboxes that match, newest first."""
        return await self._lifecycle.list(filter or models.SandboxFilter())

    async def get_sandbox_info(self, sandbox_id: str) -> models.SandboxInfo:
        """One sandbox."""
        return await self._lifecycle.get(sandbox_id)

    async def patch_sandbox_metadata(self, sandbox_id: str, patch: dict[str, str | None]) -> models.SandboxInfo:
        """Set keys of a sandbox's metadata, remove those that are None, leave the others."""
        return await self._lifecycle.patch_metadata(sandbox_id, patch)

    async def kill_sandbox(self, sandbox_id: str) -> None:
        """End a sandbox."""
        await self._lifecycle.delete(sandbox_id)

    async def renew_sandbox(self, sandbox_id: str, timeout: timedelta) -> models.SandboxRenewResponse:
        """Let a sandbox expire that long from now."""
        return await self._lifecycle.renew(sandbox_id, timeout)

    async def pause_sandbox(self, sandbox_id: str) -> None:
        """Stop all processes of a sandbox where they are, to go on later."""
        await self._lifecycle.pause(sandbox_id)

    async def resume_sandbox(self, sandbox_id: str) -> None:
        """Let a paused sandbox go on."""
        await self._lifecycle.resume(sandbox_id)

    # --- what happened ------------------------------------------------------------------------------

    async def get_diagnostic_logs(self, sandbox_id: str, scope: str) -> models.DiagnosticContent:
        """The end of the entry point's output; `scope` is `container` or `all`."""
        return await self._lifecycle.diagnostic(sandbox_id, "logs", scope)

    async def get_diagnostic_events(self, sandbox_id: str, scope: str) -> models.DiagnosticContent:
        """What happened to a sandbox, a line each; `scope` is `runtime` or `all`."""
        return await self._lifecycle.diagnostic(sandbox_id, "events", scope)

    def events(self, *, after: int | None = None) -> AsyncGenerator[models.SandboxEvent, None]:
        """What happens to all sandboxes from now on, or after the event with that `seq`; without end.

        A broken connection is made again and goes on after the last event that came.
        """
        return self._lifecycle.events(None, after=after)

    async def executions(
        self, sandbox_id: str, *, page: int | None = None, page_size: int | None = None
    ) -> models.PagedExecutionRecords:
        """Who ran what in a sandbox, when, and how it ended; newest first. Also of sandboxes that are gone."""
        return await self._lifecycle.executions(sandbox_id, page, page_size)

    async def history(self, filter: models.HistoryFilter | None = None) -> models.PagedHistoryEntries:  # noqa: A002 (as its siblings)
        """A page of the sandboxes that are gone, newest end first: when they went, and why.

            for gone in (await manager.history()).entries:
                print(gone.id, gone.end.reason, gone.end.exit_code)

        The server keeps them for some days.
        """
        return await self._lifecycle.history(filter or models.HistoryFilter())

    async def get_history(self, sandbox_id: str) -> models.HistoryEntry:
        """One sandbox that is gone, with the end of its output."""
        return await self._lifecycle.get_history(sandbox_id)

    async def runtime(self) -> models.RuntimeInfo:
        """What makes the sandboxes there, what it can do, and how busy it is."""
        return await self._lifecycle.runtime()

    # --- snapshots and templates --------------------------------------------------------------------

    async def create_snapshot(self, sandbox_id: str, name: str | None = None) -> models.SnapshotInfo:
        """Keep the file system of a sandbox, to create others from it."""
        return await self._lifecycle.create_snapshot(sandbox_id, name)

    async def get_snapshot(self, snapshot_id: str) -> models.SnapshotInfo:
        """One snapshot."""
        return await self._lifecycle.get_snapshot(snapshot_id)

    async def list_snapshots(self, filter: models.SnapshotFilter | None = None) -> models.PagedSnapshotInfos:  # noqa: A002 (the published name)
        """A page of the snapshots that match, newest first."""
        return await self._lifecycle.list_snapshots(filter or models.SnapshotFilter())

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Remove a snapshot."""
        await self._lifecycle.delete_snapshot(snapshot_id)

    async def create_template(self, request: models.CreateTemplateRequest) -> models.TemplateInfo:
        """Prepare an image, so that sandboxes start from it at once."""
        return await self._lifecycle.create_template(request)

    async def get_template(self, template_id: str) -> models.TemplateInfo:
        """One template."""
        return await self._lifecycle.get_template(template_id)

    async def list_templates(self, filter: models.TemplateFilter | None = None) -> models.PagedTemplateInfos:  # noqa: A002 (the published name)
        """A page of the templates that match."""
        return await self._lifecycle.list_templates(filter or models.TemplateFilter())

    async def delete_template(self, template_id: str) -> None:
        """Remove a template."""
        await self._lifecycle.delete_template(template_id)

    # --- its life -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Let go of the connections."""
        await self._lifecycle.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
