# SPDX-License-Identifier: Apache-2.0
"""The lifecycle API: one method for each of its routes."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from opensandbox import models
from opensandbox.endpoints import EndpointCache
from opensandbox.events import watch
from opensandbox.exceptions import InvalidArgumentException, SandboxException
from opensandbox.requests import (
    history_query,
    page_query,
    renew_request,
    sandbox_path,
    sandbox_query,
    segment,
    snapshot_query,
    template_query,
)
from opensandbox.transport import Connection, Lease

if TYPE_CHECKING:
    from opensandbox.config import ConnectionConfig

IDEMPOTENCY_KEY = "Idempotency-Key"
ORIGIN_HEADER = "OPEN-SANDBOX-ORIGIN"


def default_config() -> ConnectionConfig:
    """What applies when no configuration is given: the environment."""
    from opensandbox.config import ConnectionConfig

    return ConnectionConfig()


class Lifecycle:
    """The server's API, spoken with one configuration."""

    def __init__(self, config: ConnectionConfig) -> None:
        from opensandbox.config import ConnectionConfig

        if not isinstance(config, ConnectionConfig):
            raise InvalidArgumentException(
                f"the connection_config is a {type(config).__name__}",
                hint=f"Give a {ConnectionConfig.__name__} ; with and without an event loop differ.",
            )
        self.config = config
        self._server = Connection.to_server(config)
        self._lease: Lease | None = None
        self._endpoints = EndpointCache(
            config.endpoint_cache_ttl, 0 if config.endpoint_cache_disabled else config.endpoint_cache_size
        )

    def open(self) -> None:
        """Keep the connections until `close`. Calls also work before and after, without keeping them."""
        if self._lease is None:
            self._lease = Lease(self.config)

    async def close(self) -> None:
        """Let go of the connections."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.release()

    # --- sandboxes ----------------------------------------------------------------------------------

    async def create(
        self, request: dict[str, Any], timeout: timedelta, deadline: float, key: str | None = None
    ) -> models.SandboxCreateResponse:
        """Create a sandbox, one for each key.

        The key makes it safe to send the request again when it is not known what became of it. Servers that do not
        know the key would make a second sandbox, so before doing that we look who answers.
        """
        honoured: bool | None = None

        async def repeatable(pause: timedelta) -> bool:
            nonlocal honoured
            if time.monotonic() + pause.total_seconds() > deadline:
                return False
            if honoured is None:
                honoured = await self._honours_keys()
            return honoured

        response = await self._server.call(
            "POST",
            "/sandboxes",
            json=request,
            headers={IDEMPOTENCY_KEY: key or os.urandom(16).hex()},
            timeout=timeout,
            repeatable=repeatable,
        )
        created = models.base.parse(models.SandboxCreateResponse, response.content)
        if not self.config.use_server_proxy:
            for port, endpoint in created.endpoints.items():
                if port.isdigit():
                    self._endpoints.put(created.id, int(port), endpoint)
        return created

    async def _honours_keys(self) -> bool:
        # The contract says so: a server that can be asked for its runtime honours the key.
        try:
            await self.runtime()
        except SandboxException:
            return False
        return True

    async def get(self, sandbox_id: str) -> models.SandboxInfo:
        """One sandbox."""
        response = await self._server.call("GET", sandbox_path(sandbox_id))
        return models.base.parse(models.SandboxInfo, response.content)

    async def list(self, wanted: models.SandboxFilter) -> models.PagedSandboxInfos:
        """A page of the sandboxes that match."""
        response = await self._server.call("GET", "/sandboxes", params=sandbox_query(wanted))
        return models.base.parse(models.PagedSandboxInfos, response.content)

    async def delete(self, sandbox_id: str) -> None:
        """End a sandbox; afterwards it does not exist."""
        self._endpoints.drop(sandbox_id)
        await self._server.call("DELETE", sandbox_path(sandbox_id))

    async def renew(self, sandbox_id: str, timeout: timedelta) -> models.SandboxRenewResponse:
        """Let a sandbox expire that long from now."""
        path = f"{sandbox_path(sandbox_id)}/renew-expiration"
        response = await self._server.call("POST", path, json=renew_request(timeout))
        return models.base.parse(models.SandboxRenewResponse, response.content)

    async def patch_metadata(self, sandbox_id: str, patch: dict[str, str | None]) -> models.SandboxInfo:
        """Set keys, remove those that are None, leave the others."""
        response = await self._server.call("PATCH", f"{sandbox_path(sandbox_id)}/metadata", json=patch)
        return models.base.parse(models.SandboxInfo, response.content)

    async def pause(self, sandbox_id: str) -> None:
        """Stop all processes of a sandbox where they are."""
        self._endpoints.drop(sandbox_id)
        await self._server.call("POST", f"{sandbox_path(sandbox_id)}/pause")

    async def resume(self, sandbox_id: str) -> None:
        """Let a paused sandbox go on."""
        self._endpoints.drop(sandbox_id)
        await self._server.call("POST", f"{sandbox_path(sandbox_id)}/resume")

    async def endpoint(self, sandbox_id: str, port: int) -> models.SandboxEndpoint:
        """Where a port of a sandbox is reached."""
        known = self._endpoints.get(sandbox_id, port)
        if known is None:
            known = await self._look_up(sandbox_id, port)
            self._endpoints.put(sandbox_id, port, known)
        return known

    async def signed_endpoint(self, sandbox_id: str, port: int, expires: int) -> models.SandboxEndpoint:
        """An address of a port that is valid until then, for whoever has it."""
        return await self._look_up(sandbox_id, port, ("expires", str(expires)))

    async def _look_up(self, sandbox_id: str, port: int, *more: tuple[str, str]) -> models.SandboxEndpoint:
        params = [("use_server_proxy", "true" if self.config.use_server_proxy else "false"), *more]
        response = await self._server.call("GET", f"{sandbox_path(sandbox_id)}/endpoints/{port}", params=params)
        endpoint = models.base.parse(models.SandboxEndpoint, response.content)
        if ORIGIN_HEADER in response.headers:
            endpoint.origin = response.headers[ORIGIN_HEADER]
        return endpoint

    async def network_policy(self, sandbox_id: str) -> models.NetworkPolicy:
        """What a sandbox may reach."""
        response = await self._server.call("GET", f"{sandbox_path(sandbox_id)}/networkpolicy")
        return models.base.parse(models.NetworkPolicyStatus, response.content).policy

    async def change_network_policy(self, sandbox_id: str, method: str, body: object) -> None:
        """Add or remove rules of it."""
        await self._server.call(method, f"{sandbox_path(sandbox_id)}/networkpolicy", json=body)

    # --- what happened ------------------------------------------------------------------------------

    async def diagnostic(self, sandbox_id: str, kind: str, scope: str) -> models.DiagnosticContent:
        """Logs or events of a sandbox, for people to read."""
        path = f"{sandbox_path(sandbox_id)}/diagnostics/{kind}"
        response = await self._server.call("GET", path, params=[("scope", scope)])
        return models.base.parse(models.DiagnosticContent, response.content)

    def events(
        self, sandbox_id: str | None, *, follow: bool = True, after: int | None = None
    ) -> AsyncGenerator[models.SandboxEvent, None]:
        """What happens to a sandbox, or to all of them."""
        path = "/events" if sandbox_id is None else f"{sandbox_path(sandbox_id)}/events"
        return watch(self._server, path, follow=follow, after=after, of_one=sandbox_id is not None)

    async def executions(
        self, sandbox_id: str, page: int | None = None, page_size: int | None = None
    ) -> models.PagedExecutionRecords:
        """Who ran what in a sandbox."""
        path = f"{sandbox_path(sandbox_id)}/executions"
        response = await self._server.call("GET", path, params=page_query(page, page_size))
        return models.base.parse(models.PagedExecutionRecords, response.content)

    async def history(self, wanted: models.HistoryFilter) -> models.PagedHistoryEntries:
        """A page of the sandboxes that are gone."""
        response = await self._server.call("GET", "/history", params=history_query(wanted))
        return models.base.parse(models.PagedHistoryEntries, response.content)

    async def get_history(self, sandbox_id: str) -> models.HistoryEntry:
        """One sandbox that is gone."""
        response = await self._server.call("GET", f"/history/{segment(sandbox_id, 'sandbox')}")
        return models.base.parse(models.HistoryEntry, response.content)

    async def runtime(self) -> models.RuntimeInfo:
        """What makes the sandboxes there."""
        return models.base.parse(models.RuntimeInfo, (await self._server.call("GET", "/runtime")).content)

    # --- snapshots and templates --------------------------------------------------------------------

    async def create_snapshot(self, sandbox_id: str, name: str | None) -> models.SnapshotInfo:
        """Keep a sandbox's file system."""
        body = {} if name is None else {"name": name}
        response = await self._server.call("POST", f"{sandbox_path(sandbox_id)}/snapshots", json=body)
        return models.base.parse(models.SnapshotInfo, response.content)

    async def get_snapshot(self, snapshot_id: str) -> models.SnapshotInfo:
        """One snapshot."""
        response = await self._server.call("GET", f"/snapshots/{segment(snapshot_id, 'snapshot')}")
        return models.base.parse(models.SnapshotInfo, response.content)

    async def list_snapshots(self, wanted: models.SnapshotFilter) -> models.PagedSnapshotInfos:
        """A page of the snapshots that match."""
        response = await self._server.call("GET", "/snapshots", params=snapshot_query(wanted))
        return models.base.parse(models.PagedSnapshotInfos, response.content)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Remove a snapshot."""
        await self._server.call("DELETE", f"/snapshots/{segment(snapshot_id, 'snapshot')}")

    async def create_template(self, request: models.CreateTemplateRequest) -> models.TemplateInfo:
        """Prepare an image, so that sandboxes start from it at once."""
        response = await self._server.call(
            "POST", "/templates", json=models.base.dump(request, models.CreateTemplateRequest)
        )
        return models.base.parse(models.TemplateInfo, response.content)

    async def get_template(self, template_id: str) -> models.TemplateInfo:
        """One template."""
        response = await self._server.call("GET", f"/templates/{segment(template_id, 'template')}")
        return models.base.parse(models.TemplateInfo, response.content)

    async def list_templates(self, wanted: models.TemplateFilter) -> models.PagedTemplateInfos:
        """A page of the templates that match."""
        response = await self._server.call("GET", "/templates", params=template_query(wanted))
        return models.base.parse(models.PagedTemplateInfos, response.content)

    async def delete_template(self, template_id: str) -> None:
        """Remove a template."""
        await self._server.call("DELETE", f"/templates/{segment(template_id, 'template')}")
