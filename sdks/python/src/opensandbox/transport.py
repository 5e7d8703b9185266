# SPDX-License-Identifier: Apache-2.0
"""HTTP: pools of connections, retries, and answers turned into errors.

A `Connection` is one base address with its headers. Requests go `call`/`stream` → `_attempts` (retries) →
`_send` (one attempt, foreign exceptions translated) → the pool.
"""

from __future__ import annotations

import json as jsonlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from opensandbox.answers import error_of_body, log_to_stderr, translated, unsupported_route
from opensandbox.concurrency import SharedDict, sleep
from opensandbox.exceptions import (
    InvalidArgumentException,
    SandboxApiException,
    SandboxConnectionException,
    SandboxException,
)
from opensandbox.retry import Failure, JitterMode, RetryEvent, RetryPolicy, parse_retry_after
from opensandbox.sse import EventSplitter
from opensandbox.tracing import traced

if TYPE_CHECKING:
    import httpx2

    from opensandbox.config import ConnectionConfig

__all__ = ["Connection", "JitterMode", "RetryEvent", "RetryPolicy"]

logger = logging.getLogger("opensandbox")

API_KEY_HEADER = "OPEN-SANDBOX-API-KEY"
REQUEST_ID_HEADER = "X-Request-ID"
NO_RETRIES = RetryPolicy(max_retries=0)
# Where a request carries the names of its secrets, for when it is redirected.
_SECRETS = "opensandbox.secrets"

Params = Sequence[tuple[str, str]]
# Asked, with the pause that would come first, whether a request may be sent again although its method forbids it.
Repeatable = Callable[[timedelta], Awaitable[bool]]


class _Pool:
    """One HTTP client, shared by everything that speaks with an equal configuration in one event loop."""

    def __init__(self, config: ConnectionConfig) -> None:
        from opensandbox.plain_http import PlainTransport

        self.users = 0
        self._owned = config.transport is None
        self._transport = config.transport or PlainTransport(lambda: _general(config))
        hooks = _hooks(config)
        # The client of httpx2 is for what only it can do; without it a request costs a third less.
        self._client = _client(config, self._transport, hooks) if hooks or config.follow_redirects else None

    async def send(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; the answer is not read yet."""
        if self._client is not None:
            return await self._client.send(request, stream=True)
        response = await self._transport.handle_async_request(request)
        response.request = request
        return response

    async def close(self) -> None:
        if self._owned:
            await self._transport.aclose()


def _general(config: ConnectionConfig) -> httpx2.AsyncBaseTransport:
    import httpx2

    limits = httpx2.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=15)
    return httpx2.AsyncHTTPTransport(verify=_tls(config), limits=limits)


def _client(
    config: ConnectionConfig, transport: httpx2.AsyncBaseTransport, hooks: dict[str, list[Callable[..., Any]]]
) -> httpx2.AsyncClient:
    import httpx2

    return httpx2.AsyncClient(transport=transport, event_hooks=hooks, follow_redirects=config.follow_redirects)


def _tls(config: ConnectionConfig) -> Any:
    # Loading the certificates of the system takes longer than creating a sandbox. Where nothing but plain
    # HTTP can happen, a context that trusts nobody is as good.
    if config.get_protocol() == "http" and not config.follow_redirects:
        return _trusting_nobody()
    return True


@cache
def _trusting_nobody() -> Any:
    import ssl

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def _keep_secrets(request: httpx2.Request) -> None:
    """A redirect to somewhere else must not take keys and tokens along."""
    origin, names = request.extensions.get(_SECRETS, (None, ()))
    if origin is not None and _origin(request.url) != origin:
        for name in names:
            request.headers.pop(name, None)


@lru_cache(256)
def _url(text: str) -> httpx2.URL:
    import httpx2

    return httpx2.URL(text)


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _hooks(config: ConnectionConfig) -> dict[str, list[Callable[..., Any]]]:
    hooks: dict[str, list[Callable[..., Any]]] = {kind: list(found) for kind, found in config.event_hooks.items()}
    if config.follow_redirects:
        # Last, so that it has the last word.
        hooks.setdefault("request", []).append(_keep_secrets)
    return hooks


_pools: SharedDict[tuple[object, ...], _Pool] = SharedDict("opensandbox.pools")


def _pool_key(config: ConnectionConfig) -> tuple[object, ...]:
    hooks = tuple((name, *(id(hook) for hook in hooks)) for name, hooks in sorted(config.event_hooks.items()))
    return (config.get_base_url(), config.get_api_key(), config.follow_redirects, id(config.transport), hooks)


class Lease:
    """A hold on the pool of a configuration; the pool is closed when the last one lets go."""

    def __init__(self, config: ConnectionConfig) -> None:
        self._key = _pool_key(config)
        with _pools.open() as pools:
            pool = pools.get(self._key) or _Pool(config)
            pools[self._key] = pool
            pool.users += 1
        self._pool: _Pool | None = pool

    @property
    def pool(self) -> _Pool:
        """What it holds."""
        assert self._pool is not None
        return self._pool

    async def release(self) -> None:
        """Let go. Harmless when repeated."""
        with _pools.open() as pools:
            pool, self._pool = self._pool, None
            if pool is None:
                return
            pool.users -= 1
            # A pool of another event loop, or of the process that forked this one, is not ours to close.
            last = pool.users == 0 and pools.get(self._key) is pool
            if last:
                del pools[self._key]
        if last:
            await pool.close()


class Connection:
    """One base address, with the headers it wants.

    `headers` are secrets of that address. `optional` names what is below it, where not every server has that.
    """

    def __init__(
        self, config: ConnectionConfig, base_url: str, headers: Mapping[str, str], optional: str | None = None
    ) -> None:
        self.config = config
        self.base_url = base_url.rstrip("/")
        self._secrets = dict(headers)
        self._optional = optional
        self._headers = {
            "User-Agent": config.user_agent,
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            **config.headers,
            **headers,
        }
        if config.debug:
            log_to_stderr()

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

    @property
    def headers(self) -> dict[str, str]:
        """What every request to there carries, for those that are not sent here."""
        return dict(self._headers)

    def below(self, path: str, what: str) -> Connection:
        """The same, at an address further down that not every server has."""
        return Connection(self.config, self.base_url + path, self._secrets, what)

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
        repeatable: Repeatable | None = None,
    ) -> httpx2.Response:
        """Send a request and read the whole answer; an error status is raised."""
        async with self.stream(
            method,
            path,
            params=params,
            json=json,
            body=body,
            headers=headers,
            policy=policy,
            timeout=timeout,
            repeatable=repeatable,
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
        repeatable: Repeatable | None = None,
        endless: bool = False,
    ) -> AsyncIterator[httpx2.Response]:
        """Send a request and hand out the answer unread; an error status is raised.

        `body` is called for each attempt. `endless` answers may be silent for as long as they like.
        """
        import httpx2

        seconds = (timeout or self.config.request_timeout).total_seconds()
        limits = {"connect": seconds, "read": None if endless else seconds, "write": seconds, "pool": seconds}
        all_headers = {**self._headers, REQUEST_ID_HEADER: os.urandom(16).hex(), **(headers or {})}
        if json is not None:
            content: bytes | None = _written(json)
            all_headers["Content-Type"] = "application/json"
        else:
            content = None

        secrets = (_origin(_url(self.base_url)), tuple(self._secrets)) if self.config.follow_redirects else ()
        lease = Lease(self.config)
        try:
            with traced(self.config.enable_tracing, method, self.base_url + path) as trace:
                all_headers |= trace.headers

                def build() -> httpx2.Request:
                    return httpx2.Request(
                        method,
                        _url(self.base_url + path),
                        params=list(params) or None,
                        content=body() if body is not None else content,
                        headers=all_headers,
                        extensions={"timeout": limits, _SECRETS: secrets} if secrets else {"timeout": limits},
                    )

                response = await self._attempts(lease.pool, build, policy or self.config.retry_policy, repeatable)
                trace.answered(response.status_code)
                try:
                    yield response
                finally:
                    await response.aclose()
        finally:
            await lease.release()

    async def events(
        self,
        method: str,
        path: str,
        *,
        params: Params = (),
        json: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[str, None]:
        """The data of each server-sent event of an answer. Whoever stops before its end closes it."""
        wanted = {"Accept": "text/event-stream", "Cache-Control": "no-cache", **(headers or {})}
        splitter = EventSplitter()
        async with self.stream(method, path, params=params, json=json, headers=wanted, endless=True) as response:
            chunks = response.aiter_raw()
            request_id = response.request.headers.get(REQUEST_ID_HEADER)
            while True:
                with translated(method, self.base_url, request_id):
                    chunk = await anext(chunks, None)
                for data in splitter.finish() if chunk is None else splitter.feed(chunk):
                    yield data
                if chunk is None:
                    return

    async def _attempts(
        self,
        pool: _Pool,
        build: Callable[[], httpx2.Request],
        policy: RetryPolicy,
        repeatable: Repeatable | None,
    ) -> httpx2.Response:
        attempt, pause = 0, timedelta()
        while True:
            request = build()
            try:
                response = await self._send(pool, request)
                # A DELETE that was repeated finds nothing when the first one did its work.
                if response.status_code < 300 or (
                    attempt and request.method == "DELETE" and response.status_code == 404
                ):
                    return response
                answer = await _error_of(response, request)
                failed: SandboxException = unsupported_route(answer, self._optional) if self._optional else answer
                failure, retry_after = Failure.STATUS, answer.retry_after
            except SandboxConnectionException as error:
                failed, retry_after = error, None
                failure = Failure.NOT_SENT if error.is_retryable else Failure.BROKEN
            allowed = policy.allows(request.method, attempt, failure, failed.status)
            if not allowed and (repeatable is None or not policy.allows("PUT", attempt, failure, failed.status)):
                raise failed
            delay = policy.delay(attempt, pause, retry_after)
            if delay is None or (repeatable is not None and not allowed and not await repeatable(delay)):
                raise failed
            pause = delay
            logger.debug("%s %s: %s; again in %.1f s", request.method, request.url, failed, pause.total_seconds())
            if policy.on_retry:
                policy.on_retry(RetryEvent(request.method, str(request.url), attempt, failure, failed.status, pause))
            await sleep(pause)
            attempt += 1

    async def _send(self, pool: _Pool, request: httpx2.Request) -> httpx2.Response:
        with translated(request.method, self.base_url, request.headers.get(REQUEST_ID_HEADER)):
            response = await pool.send(request)
        logger.debug("%s %s: %d", request.method, request.url, response.status_code)
        return response


def _written(document: object) -> bytes:
    try:
        return jsonlib.dumps(document, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgumentException(
            f"an argument cannot be sent: {error}", error, hint="Give texts, such as metadata={'build': '7'}."
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
