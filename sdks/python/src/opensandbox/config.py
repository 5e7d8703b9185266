# SPDX-License-Identifier: Apache-2.0
"""Where the server is, and how to speak to it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from opensandbox import tracing
from opensandbox.retry import RetryPolicy

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport, BaseTransport
else:
    # The HTTP client is imported with the first request, not with the configuration.
    AsyncBaseTransport = BaseTransport = Any

__all__ = ["ConnectionConfig", "ConnectionConfigSync", "RetryPolicy"]

_API_KEY = "OPEN_SANDBOX_API_KEY"
_DOMAIN = "OPEN_SANDBOX_DOMAIN"
_DEFAULT_DOMAIN = "localhost:8080"


class ConnectionSettings(BaseModel):
    """What the configurations of asynchronous and synchronous programs have in common.

    What is not given is taken from the environment (`OPEN_SANDBOX_DOMAIN`, `OPEN_SANDBOX_API_KEY`), else
    `localhost:8080` without a key. All sandboxes that use equal configurations share one connection pool.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", defer_build=True)

    api_key: str | None = Field(default=None, repr=False)
    """Sent to the server, and to a sandbox only through the server (`use_server_proxy`)."""
    domain: str | None = None
    """`host[:port][/path]`, or a whole URL, which then also decides the protocol."""
    protocol: str = "http"
    request_timeout: timedelta = timedelta(seconds=30)
    """How long to wait for a connection, and for each piece of an answer. Running commands have no limit."""
    debug: bool = False
    """Log each request to standard error."""
    user_agent: str = "OpenSandbox-Python-SDK/1.2.0"
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Sent with every request, to server and sandboxes."""
    follow_redirects: bool = False
    retry_policy: RetryPolicy = Field(default_factory=RetryPolicy)
    use_server_proxy: bool = False
    """Reach sandboxes through the server, where they cannot be reached directly."""
    endpoint_cache_ttl: timedelta = timedelta(seconds=600)
    endpoint_cache_size: int = Field(default=1024, ge=0)
    endpoint_cache_disabled: bool = False
    disable_metrics: bool = False
    """Taken for compatibility: this SDK sends no usage reports, whatever it says."""
    enable_tracing: bool = False
    """A span of OpenTelemetry for each request. A span that is active already is passed on in any case."""

    @field_validator("protocol")
    @classmethod
    def _known_protocol(cls, protocol: str) -> str:
        if protocol not in ("http", "https"):
            raise ValueError("protocol is http or https")
        return protocol

    @field_validator("request_timeout")
    @classmethod
    def _positive(cls, timeout: timedelta) -> timedelta:
        if timeout <= timedelta():
            raise ValueError("request_timeout must be positive")
        return timeout

    @field_validator("enable_tracing")
    @classmethod
    def _can_trace(cls, wanted: bool) -> bool:
        if wanted and not tracing.available():
            raise ValueError("enable_tracing needs OpenTelemetry: pip install opentelemetry-api")
        return wanted

    def get_api_key(self) -> str | None:
        """The key that is given, else that of the environment."""
        return self.api_key or os.environ.get(_API_KEY) or None

    def get_domain(self) -> str:
        """The domain that is given, else that of the environment, else `localhost:8080`."""
        return self.domain or os.environ.get(_DOMAIN) or _DEFAULT_DOMAIN

    def get_protocol(self) -> str:
        """The protocol in use: that of the domain if it is a whole URL."""
        scheme, separator, _ = self.get_domain().partition("://")
        return scheme if separator else self.protocol

    def get_base_url(self) -> str:
        """Where the lifecycle API is, without a slash at the end."""
        domain = self.get_domain().rstrip("/")
        return f"{domain}/v1" if "://" in domain else f"{self.protocol}://{domain}/v1"


class ConnectionConfig(ConnectionSettings):
    """Where the server is, and how to speak to it, for `Sandbox` and `SandboxManager`.

        ConnectionConfig(domain="sandbox.example.org", protocol="https", api_key="...")

    What is not given is taken from the environment (`OPEN_SANDBOX_DOMAIN`, `OPEN_SANDBOX_API_KEY`), else
    `localhost:8080` without a key. All sandboxes that use equal configurations share one connection pool.
    """

    event_hooks: dict[str, list[Callable[..., Awaitable[None]]]] = Field(default_factory=dict, repr=False)
    """`request` and `response` hooks of the HTTP client."""
    transport: AsyncBaseTransport | None = Field(default=None, repr=False)
    """An httpx2 transport to use instead of the SDK's own; whoever made it closes it."""

    @field_validator("transport")
    @classmethod
    def _ours(cls, transport: Any) -> Any:
        return _of_httpx2(transport, "AsyncBaseTransport")


class ConnectionConfigSync(ConnectionSettings):
    """Where the server is, and how to speak to it, for `SandboxSync` and `SandboxManagerSync`.

        ConnectionConfigSync(domain="sandbox.example.org", protocol="https", api_key="...")

    What is not given is taken from the environment (`OPEN_SANDBOX_DOMAIN`, `OPEN_SANDBOX_API_KEY`), else
    `localhost:8080` without a key. All sandboxes that use equal configurations share one connection pool, in all
    threads.
    """

    event_hooks: dict[str, list[Callable[..., None]]] = Field(default_factory=dict, repr=False)
    """`request` and `response` hooks of the HTTP client."""
    transport: BaseTransport | None = Field(default=None, repr=False)
    """An httpx2 transport to use instead of the SDK's own; whoever made it closes it."""

    @field_validator("transport")
    @classmethod
    def _ours(cls, transport: Any) -> Any:
        return _of_httpx2(transport, "BaseTransport")


def _of_httpx2(transport: Any, kind: str) -> Any:
    if transport is not None:
        import httpx2

        if not isinstance(transport, getattr(httpx2, kind)):
            raise ValueError(f"transport must be an httpx2.{kind}; this SDK uses httpx2, not httpx")
    return transport
