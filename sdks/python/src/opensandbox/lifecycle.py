# SPDX-License-Identifier: Apache-2.0
"""The lifecycle API: one method for each of its routes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from opensandbox import models
from opensandbox.endpoints import EndpointCache
from opensandbox.exceptions import InvalidArgumentException
from opensandbox.transport import Connection, Lease

if TYPE_CHECKING:
    from opensandbox.config import ConnectionConfig


def default_config() -> ConnectionConfig:
    """What applies when no configuration is given: the environment."""
    from opensandbox.config import ConnectionConfig

    return ConnectionConfig()


class Lifecycle:
    """The server's API, spoken with one configuration."""

    def __init__(self, config: ConnectionConfig) -> None:
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

    async def create(self, request: dict[str, Any], timeout: timedelta) -> models.SandboxCreateResponse:
        """Create a sandbox."""
        response = await self._server.call("POST", "/sandboxes", json=request, timeout=timeout)
        created = models.base.parse(models.SandboxCreateResponse, response.content)
        if not self.config.use_server_proxy:
            for port, endpoint in created.endpoints.items():
                if port.isdigit():
                    self._endpoints.put(created.id, int(port), endpoint)
        return created

    async def get(self, sandbox_id: str) -> models.SandboxInfo:
        """One sandbox."""
        return models.base.parse(models.SandboxInfo, (await self._server.call("GET", _of(sandbox_id))).content)

    async def list(self, wanted: models.SandboxFilter) -> models.PagedSandboxInfos:
        """A page of the sandboxes that match."""
        params = [("state", state) for state in wanted.states or ()]
        if wanted.metadata:
            # Quoted here and once more with the query string, as the protocol has it.
            pairs = (f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in wanted.metadata.items())
            params.append(("metadata", "&".join(pairs)))
        if wanted.page is not None:
            params.append(("page", str(wanted.page)))
        if wanted.page_size is not None:
            params.append(("pageSize", str(wanted.page_size)))
        return models.base.parse(
            models.PagedSandboxInfos, (await self._server.call("GET", "/sandboxes", params=params)).content
        )

    async def delete(self, sandbox_id: str) -> None:
        """End a sandbox; afterwards it does not exist."""
        self._endpoints.drop(sandbox_id)
        await self._server.call("DELETE", _of(sandbox_id))

    async def renew(self, sandbox_id: str, timeout: timedelta) -> models.SandboxRenewResponse:
        """Let a sandbox expire that long from now."""
        if timeout <= timedelta():
            raise InvalidArgumentException("the time to renew for must be positive")
        body = {"expiresAt": (datetime.now(UTC) + timeout).isoformat()}
        response = await self._server.call("POST", f"{_of(sandbox_id)}/renew-expiration", json=body)
        return models.base.parse(models.SandboxRenewResponse, response.content)

    async def endpoint(self, sandbox_id: str, port: int) -> models.SandboxEndpoint:
        """Where a port of a sandbox is reached."""
        known = self._endpoints.get(sandbox_id, port)
        if known is not None:
            return known
        params = [("use_server_proxy", "true" if self.config.use_server_proxy else "false")]
        response = await self._server.call("GET", f"{_of(sandbox_id)}/endpoints/{port}", params=params)
        endpoint = models.base.parse(models.SandboxEndpoint, response.content)
        self._endpoints.put(sandbox_id, port, endpoint)
        return endpoint


def _of(sandbox_id: str) -> str:
    if not sandbox_id:
        raise InvalidArgumentException("the sandbox id is empty")
    return f"/sandboxes/{quote(sandbox_id, safe='')}"
