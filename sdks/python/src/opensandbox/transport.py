# SPDX-License-Identifier: Apache-2.0
"""HTTP: pools of connections, retries, and answers turned into errors.

A `Connection` is one base address with its headers. Requests go `call`/`stream` → `_attempts` (retries) →
`_send` (one attempt, foreign exceptions translated) → the pool's client.
"""

from __future__ import annotations

import json as jsonlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from opensandbox.concurrency import PerLoop, sleep
from opensandbox.exceptions import (
    SandboxApiException,
    SandboxConnectionException,
    SandboxError,
    SandboxException,
    SandboxInternalException,
    SandboxTimeoutException,
    class_of_status,
)
from opensandbox.retry import Failure, JitterMode, RetryEvent, RetryPolicy, parse_retry_after
from opensandbox.wire.errors import Code

if TYPE_CHECKING:
    import httpx2

    from opensandbox.config import ConnectionConfig

__all__ = ["Connection", "JitterMode", "RetryEvent", "RetryPolicy"]

logger = logging.getLogger("opensandbox")

API_KEY_HEADER = "OPEN-SANDBOX-API-KEY"
REQUEST_ID_HEADER = "X-Request-ID"
NO_RETRIES = RetryPolicy(max_retries=0)

Params = Sequence[tuple[str, str]]


class _Pool:
    """One HTTP client, shared by everything that speaks with an equal configuration in one event loop."""

    def __init__(self, config: ConnectionConfig) -> None:
        import httpx2

        self.users = 0
        self._owned = config.transport is None
        limits = httpx2.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=15)
        self.client = httpx2.AsyncClient(
            transport=config.transport or httpx2.AsyncHTTPTransport(verify=_tls(config), limits=limits),
            event_hooks=config.event_hooks or None,
            follow_redirects=config.follow_redirects,
        )

    async def close(self) -> None:
        if self._owned:
            await self.client.aclose()


def _tls(config: ConnectionConfig) -> Any:
    # Loading the certificates of the system takes longer than creating a sandbox. Where nothing but plain
    # HTTP can happen, a context that trusts nobody is as good.
    if config.get_protocol() == "http" and not config.follow_redirects:
        import ssl

        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return True


_pools = PerLoop("opensandbox.pools")


def _pool_key(config: ConnectionConfig) -> tuple[object, ...]:
    hooks = tuple((name, *(id(hook) for hook in hooks)) for name, hooks in sorted(config.event_hooks.items()))
    return (config.get_base_url(), config.get_api_key(), config.follow_redirects, id(config.transport), hooks)


class Lease:
    """A hold on the pool of a configuration; the pool is closed when the last one lets go."""

    def __init__(self, config: ConnectionConfig) -> None:
        pools: dict[object, _Pool] = _pools.get()
        self._key = _pool_key(config)
        pool = pools.get(self._key) or _Pool(config)
        pools[self._key] = pool
        pool.users += 1
        self._pool: _Pool | None = pool

    @property
    def client(self) -> httpx2.AsyncClient:
        """The client of the pool."""
        assert self._pool is not None
        return self._pool.client

    async def release(self) -> None:
        """Let go. Harmless when repeated."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        pool.users -= 1
        pools: dict[object, _Pool] = _pools.get()
        # In another event loop than the one it was made in, the pool's connections are dead already.
        if pool.users == 0 and pools.get(self._key) is pool:
            del pools[self._key]
            await pool.close()


class Connection:
    """One base address, with the headers it wants."""

    def __init__(self, config: ConnectionConfig, base_url: str, headers: Mapping[str, str]) -> None:
        self.config = config
        self.base_url = base_url.rstrip("/")
        self._headers = {
            "User-Agent": config.user_agent,
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            **config.headers,
            **headers,
        }
        if config.debug:
            _log_to_stderr()

    @classmethod
    def to_server(cls, config: ConnectionConfig) -> Connection:
        """To the lifecycle API."""
        key = config.get_api_key()
        return cls(config, config.get_base_url(), {API_KEY_HEADER: key} if key else {})

    @classmethod
    def to_sandbox(cls, config: ConnectionConfig, endpoint: str, headers: Mapping[str, str]) -> Connection:
        """To a port of a sandbox. Only a way through the server gets to see the API key."""
        key = config.get_api_key() if config.use_server_proxy else None
        return cls(
            config, f"{config.get_protocol()}://{endpoint}", {**({API_KEY_HEADER: key} if key else {}), **headers}
        )

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Params = (),
        json: object = None,
        body: Callable[[], AsyncIterator[bytes]] | None = None,
        headers: Mapping[str, str] | None = None,
        policy: RetryPolicy | None = None,
        timeout: timedelta | None = None,
    ) -> httpx2.Response:
        """Send a request and read the whole answer; an error status is raised."""
        async with self.stream(
            method, path, params=params, json=json, body=body, headers=headers, policy=policy, timeout=timeout
        ) as response:
            with translated(method, self.base_url):
                await response.aread()
            return response

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        params: Params = (),
        json: object = None,
        body: Callable[[], AsyncIterator[bytes]] | None = None,
        headers: Mapping[str, str] | None = None,
        policy: RetryPolicy | None = None,
        timeout: timedelta | None = None,
        endless: bool = False,
    ) -> AsyncIterator[httpx2.Response]:
        """Send a request and hand out the answer unread; an error status is raised.

        `body` is called for each attempt. `endless` answers may be silent for as long as they like.
        """
        import httpx2

        seconds = (timeout or self.config.request_timeout).total_seconds()
        limit = httpx2.Timeout(seconds, read=None if endless else seconds)
        all_headers = {**self._headers, REQUEST_ID_HEADER: os.urandom(16).hex(), **(headers or {})}
        if json is not None:
            content: bytes | None = jsonlib.dumps(json, separators=(",", ":")).encode()
            all_headers["Content-Type"] = "application/json"
        else:
            content = None

        lease = Lease(self.config)
        try:

            def build() -> httpx2.Request:
                return lease.client.build_request(
                    method,
                    self.base_url + path,
                    params=list(params) or None,
                    content=body() if body is not None else content,
                    headers=all_headers,
                    timeout=limit,
                )

            response = await self._attempts(lease.client, build, policy or self.config.retry_policy)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            await lease.release()

    async def _attempts(
        self, client: httpx2.AsyncClient, build: Callable[[], httpx2.Request], policy: RetryPolicy
    ) -> httpx2.Response:
        attempt, pause = 0, timedelta()
        while True:
            request = build()
            try:
                response = await self._send(client, request)
                # A DELETE that was repeated finds nothing when the first one did its work.
                if response.status_code < 300 or (
                    attempt and request.method == "DELETE" and response.status_code == 404
                ):
                    return response
                answer = await _error_of(response, request)
                failed: SandboxException = answer
                failure, retry_after = Failure.STATUS, answer.retry_after
            except SandboxConnectionException as error:
                failed, retry_after = error, None
                failure = Failure.NOT_SENT if error.is_retryable else Failure.BROKEN
            if not policy.allows(request.method, attempt, failure, failed.status):
                raise failed
            delay = policy.delay(attempt, pause, retry_after)
            if delay is None:
                raise failed
            pause = delay
            logger.debug("%s %s: %s; again in %.1f s", request.method, request.url, failed, pause.total_seconds())
            if policy.on_retry:
                policy.on_retry(RetryEvent(request.method, str(request.url), attempt, failure, failed.status, pause))
            await sleep(pause)
            attempt += 1

    async def _send(self, client: httpx2.AsyncClient, request: httpx2.Request) -> httpx2.Response:
        with translated(request.method, self.base_url, request.headers.get(REQUEST_ID_HEADER)):
            response = await client.send(request, stream=True)
        logger.debug("%s %s: %d", request.method, request.url, response.status_code)
        return response


@contextmanager
def translated(method: str, base_url: str, request_id: str | None = None) -> Iterator[None]:
    import httpx2

    try:
        yield
    except httpx2.ConnectError as error:
        raise SandboxConnectionException(
            f"cannot connect to {base_url}: {error}",
            error,
            hint="Is the server running there? `opensandbox-server` starts one on localhost:8080;"
            " OPEN_SANDBOX_DOMAIN or ConnectionConfig(domain=...) names another.",
            is_retryable=True,
            request_id=request_id,
        ) from error
    except httpx2.TimeoutException as error:
        raise SandboxTimeoutException(
            f"{method} to {base_url} took too long",
            error,
            hint="Raise ConnectionConfig(request_timeout=...) if it may take longer.",
            request_id=request_id,
        ) from error
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        raise SandboxInternalException(
            f"{base_url} is not an address this SDK can use: {error}",
            error,
            hint="Correct ConnectionConfig(domain=...).",
        ) from error
    except httpx2.TransportError as error:
        raise SandboxConnectionException(
            f"the connection to {base_url} broke: {error or type(error).__name__}", error, request_id=request_id
        ) from error


async def _error_of(response: httpx2.Response, request: httpx2.Request) -> SandboxApiException:
    """The exception for an answer with an error status."""
    try:
        with translated(request.method, str(request.url)):
            body = await response.aread()
    finally:
        await response.aclose()
    return error_of_body(
        response.status_code,
        body,
        request_id=response.headers.get(REQUEST_ID_HEADER) or request.headers.get(REQUEST_ID_HEADER),
        retry_after=parse_retry_after(response.headers.get("Retry-After")),
    )


def error_of_body(
    status: int, body: bytes, *, request_id: str | None = None, retry_after: timedelta | None = None
) -> SandboxApiException:
    """The exception for an error document, whatever of the expected shape it has."""
    try:
        document = jsonlib.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        document = {}
    message = document.get("message") or _schema_violations(document.get("detail"))
    if not message:
        message = body[:500].decode("utf-8", "replace").strip() or f"answered with status {status}"
    kind = class_of_status(status)
    code = document.get("code") or kind.default_code
    hint = document.get("hint")
    if code == Code.MISSING_API_KEY:
        # The server names the header, as it must for every client; here there are shorter ways.
        hint = " ".join(filter(None, [hint, "Pass api_key= to ConnectionConfig or set OPEN_SANDBOX_API_KEY."]))
    return kind(
        str(message),
        status_code=status,
        error=SandboxError(str(code), str(message), hint),
        request_id=document.get("requestId") or request_id,
        response_body=body,
        is_retryable=status in (429, 502, 503),
        retry_after=retry_after,
    )


def _schema_violations(detail: object) -> str:
    if isinstance(detail, str):
        return detail
    if not isinstance(detail, list):
        return ""
    lines = []
    for entry in detail:
        if isinstance(entry, dict):
            place = ".".join(str(step) for step in entry.get("loc", ()))
            lines.append(f"{place}: {entry.get('msg', 'invalid')}" if place else str(entry.get("msg", "invalid")))
    return "; ".join(lines)


def _log_to_stderr() -> None:
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
