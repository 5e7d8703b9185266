# SPDX-License-Identifier: Apache-2.0
"""Pools, headers, and answers that become errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach
from pydantic import ValidationError
from stub import ID, Received, Reply, Stub, created

from opensandbox import ConnectionConfig, Sandbox, SandboxException, SandboxManager, exceptions
from opensandbox.models import SandboxEndpoint, SandboxFilter
from opensandbox.retry import RetryPolicy
from opensandbox.transport import Connection

Idle = Callable[[], Awaitable[bool]]
PAGE = Reply.of(
    {"items": [], "pagination": {"page": 1, "pageSize": 20, "totalItems": 0, "totalPages": 0, "hasNextPage": False}}
)


@pytest.mark.anyio
async def test_equal_configurations_share_one_pool(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["GET", "/v1/sandboxes"] = PAGE
    async with await SandboxManager.create(config) as one:
        async with await SandboxManager.create(config.model_copy()) as two:
            await one.list_sandbox_infos(SandboxFilter())
            await two.list_sandbox_infos(SandboxFilter())
        await one.list_sandbox_infos(SandboxFilter())
    assert stub.connections == 1


@pytest.mark.anyio
async def test_the_last_one_closes_the_pool(stub: Stub, config: ConnectionConfig, idle: Idle) -> None:
    stub.routes["GET", "/v1/sandboxes"] = PAGE
    manager = await SandboxManager.create(config)
    await manager.list_sandbox_infos(SandboxFilter())
    assert stub.open == 1
    await manager.close()
    await manager.close()
    assert await idle()


@pytest.mark.anyio
async def test_calls_after_close_still_work(stub: Stub, config: ConnectionConfig) -> None:
    """As in `async with sandbox: ...` followed by `await sandbox.kill()`."""
    stub.routes["POST", "/v1/sandboxes"] = created(stub)
    stub.routes["DELETE", f"/v1/sandboxes/{ID}"] = Reply(204)
    async with await Sandbox.create("host", connection_config=config) as sandbox:
        pass
    await sandbox.kill()
    assert stub.calls()[-1] == f"DELETE /v1/sandboxes/{ID}"


# Asynchronous only: threads have no loops.
def test_a_sandbox_may_be_used_in_another_event_loop(stub: Stub) -> None:
    stub.routes["POST", "/v1/sandboxes"] = created(stub)
    stub.routes["DELETE", f"/v1/sandboxes/{ID}"] = Reply(204)
    config = ConnectionConfig(domain=stub.address)

    async def create() -> Sandbox:
        sandbox = await Sandbox.create("host", connection_config=config)
        await sandbox.close()
        return sandbox

    sandbox = asyncio.run(create())
    asyncio.run(sandbox.destroy())
    assert stub.calls()[-1] == f"DELETE /v1/sandboxes/{ID}"


@pytest.mark.anyio
async def test_the_key_goes_to_the_server_and_the_token_to_the_sandbox(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes["GET", "/e/metrics"] = Reply.of(
        {"cpu_count": 1, "cpu_used_pct": 2, "mem_total_mib": 3, "mem_used_mib": 4, "timestamp": 5}
    )
    stub.routes["GET", f"/v1/sandboxes/{ID}"] = Reply.of(
        {"id": ID, "status": {"state": "Running"}, "createdAt": "2026-01-01T00:00:00Z", "entrypoint": ["a"]}
    )
    await sandbox.get_metrics()
    await sandbox.get_info()
    execd, server = stub.requests
    assert execd.headers["x-execd-access-token"] == "secret-token"
    assert "open-sandbox-api-key" not in execd.headers
    assert server.headers["open-sandbox-api-key"] == "key"
    assert "x-execd-access-token" not in server.headers


@pytest.mark.anyio
async def test_through_the_server_the_key_goes_along(stub: Stub, config: ConnectionConfig) -> None:
    proxied = config.model_copy(update={"use_server_proxy": True})
    stub.routes["POST", "/v1/sandboxes"] = created(stub)
    stub.routes["GET", f"/v1/sandboxes/{ID}/endpoints/44772"] = Reply.of({"endpoint": f"{stub.address}/p"})
    stub.routes["GET", "/p/ping"] = Reply()
    async with await Sandbox.create("host", connection_config=proxied) as sandbox:
        assert await sandbox.is_healthy()
    lookup, ping = stub.requests[1], stub.requests[-1]
    assert lookup.params == [("use_server_proxy", "true")]
    assert ping.path == "/p/ping"
    assert ping.headers["open-sandbox-api-key"] == "key"

    web = SandboxEndpoint(endpoint="h:1", headers={"T": "token"})
    named = {"User-Agent": config.user_agent, "T": "token"}
    assert web.build_request_headers(config) == named
    assert web.build_request_headers(proxied) == {**named, "OPEN-SANDBOX-API-KEY": "key"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, exceptions.InvalidRequestException),
        (401, exceptions.AuthenticationException),
        (403, exceptions.PermissionDeniedException),
        (404, exceptions.NotFoundException),
        (409, exceptions.ConflictException),
        (416, exceptions.InvalidRequestException),
        (422, exceptions.InvalidRequestException),
        (429, exceptions.SandboxRateLimitException),
        (500, exceptions.ServerException),
        (501, exceptions.UnsupportedException),
        (502, exceptions.UnavailableException),
        (503, exceptions.UnavailableException),
        (504, exceptions.UnavailableException),
        (418, exceptions.SandboxApiException),
    ],
)
@pytest.mark.anyio
async def test_an_error_carries_all_that_the_answer_says(
    stub: Stub, config: ConnectionConfig, status: int, kind: type[exceptions.SandboxApiException]
) -> None:
    stub.routes["POST", "/v1/x"] = Reply.of(
        {"code": "A::B", "message": "It broke.", "hint": "Mend it.", "requestId": "r-1"}, status, **{"Retry-After": "4"}
    )
    with pytest.raises(SandboxException) as raised:
        await Connection.to_server(config).call("POST", "/x", json={})
    error = raised.value
    assert type(error) is kind
    assert (error.code, error.message, error.hint, error.request_id, error.status) == (
        "A::B",
        "It broke.",
        "Mend it.",
        "r-1",
        status,
    )
    assert str(error) == f"[A::B] It broke. (HTTP {status}, request r-1) — hint: Mend it."
    assert isinstance(error, exceptions.SandboxApiException)
    assert error.status_code == status
    assert error.retry_after == timedelta(seconds=4)


@pytest.mark.parametrize("sent", [{}, {"hint": "Send the key in the OPEN-SANDBOX-API-KEY header."}])
@pytest.mark.anyio
async def test_a_missing_key_says_how_to_give_one_here(
    stub: Stub, config: ConnectionConfig, sent: dict[str, str]
) -> None:
    stub.routes["GET", "/v1/x"] = Reply.error(401, "MISSING_API_KEY", "This server asks for an API key.", **sent)
    with pytest.raises(exceptions.AuthenticationException) as raised:
        await Connection.to_server(config).call("GET", "/x")
    ours = "Give api_key in the connection_config, or set OPEN_SANDBOX_API_KEY."
    assert raised.value.hint == " ".join([*sent.values(), ours])
    assert str(raised.value).endswith(ours)
    stub.routes["GET", "/v1/x"] = Reply.error(401, "INVALID_API_KEY", "Not that one.")
    with pytest.raises(exceptions.AuthenticationException) as raised:
        await Connection.to_server(config).call("GET", "/x")
    assert raised.value.hint is None


@pytest.mark.anyio
async def test_errors_of_other_shapes_are_understood_too(stub: Stub, config: ConnectionConfig) -> None:
    server = Connection.to_server(config)
    stub.routes["POST", "/v1/x"] = Reply(500, b"<html>oh\xff</html>")
    with pytest.raises(exceptions.ServerException, match="<html>oh�</html>") as raised:
        await server.call("POST", "/x")
    assert raised.value.request_id == stub.requests[-1].headers["x-request-id"]
    stub.routes["POST", "/v1/x"] = Reply.of(
        {"detail": [{"loc": ["body", "timeout"], "msg": "Input should be at least 60"}]}, 422
    )
    with pytest.raises(exceptions.InvalidRequestException, match=r"body\.timeout: Input should be at least 60"):
        await server.call("POST", "/x")
    stub.routes["POST", "/v1/x"] = Reply.of({"detail": "Not Found"}, 404)
    with pytest.raises(exceptions.NotFoundException, match="Not Found"):
        await server.call("POST", "/x")
    stub.routes["POST", "/v1/x"] = Reply.of([1], 400)
    with pytest.raises(exceptions.InvalidRequestException):
        await server.call("POST", "/x")


@pytest.mark.anyio
async def test_no_server_says_how_to_start_one() -> None:
    config = ConnectionConfig(domain="127.0.0.1:1", retry_policy=RetryPolicy(max_retries=0))
    with pytest.raises(exceptions.SandboxConnectionException) as raised:
        await Sandbox.create("host", connection_config=config)
    assert "127.0.0.1:1" in str(raised.value)
    assert "opensandbox-server" in str(raised.value)


@pytest.mark.anyio
async def test_silence_is_a_timeout_and_is_not_repeated(stub: Stub, config: ConnectionConfig) -> None:
    asked, silent = threading.Event(), threading.Event()

    def hang(_: Received) -> Reply | None:
        asked.set()
        silent.wait(10)
        return None

    stub.routes["GET", "/v1/x"] = hang
    with pytest.raises(exceptions.SandboxTimeoutException, match="took too long"):
        await Connection.to_server(config).call("GET", "/x", timeout=timedelta(milliseconds=500))
    assert asked.wait(10)
    silent.set()
    assert len(stub.requests) == 1


@pytest.mark.anyio
async def test_a_nonsense_address_is_named(config: ConnectionConfig) -> None:
    wrong = ConnectionConfig(domain="ftp://example.invalid")
    with pytest.raises(exceptions.SandboxInternalException, match=r"ftp://example.invalid"):
        await Connection.to_server(wrong).call("GET", "/x")


@pytest.mark.anyio
async def test_an_answer_of_another_shape_is_not_taken(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["GET", "/v1/sandboxes"] = Reply(200, b"<html>a proxy's page</html>")
    async with await SandboxManager.create(config) as manager:
        with pytest.raises(exceptions.SandboxInternalException, match="not a PagedSandboxInfos"):
            await manager.list_sandbox_infos(SandboxFilter())


@pytest.mark.anyio
async def test_a_transport_of_the_user_is_used_and_left_open(stub: Stub) -> None:
    class Counting(httpx2.AsyncHTTPTransport):
        requests = 0
        closed = False

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            self.requests += 1
            return await super().handle_async_request(request)

        async def aclose(self) -> None:
            self.closed = True
            await super().aclose()

    transport = Counting()
    stub.routes["GET", "/v1/sandboxes"] = PAGE
    async with await SandboxManager.create(ConnectionConfig(domain=stub.address, transport=transport)) as manager:
        await manager.list_sandbox_infos(SandboxFilter())
    assert (transport.requests, transport.closed) == (1, False)
    await transport.aclose()


def test_configuration_is_checked() -> None:
    for wrong in (
        {"protocol": "ftp"},
        {"request_timeout": timedelta()},
        {"surprise": 1},
        {"transport": object()},
    ):
        with pytest.raises(ValidationError):
            ConnectionConfig(**wrong)


def test_the_environment_fills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ConnectionConfig().get_base_url() == "http://localhost:8080/v1"
    assert ConnectionConfig().get_api_key() is None
    monkeypatch.setenv("OPEN_SANDBOX_DOMAIN", "https://box.example.org/")
    monkeypatch.setenv("OPEN_SANDBOX_API_KEY", "from outside")
    assert ConnectionConfig().get_base_url() == "https://box.example.org/v1"
    assert ConnectionConfig().get_protocol() == "https"
    assert ConnectionConfig().get_api_key() == "from outside"
    assert ConnectionConfig(domain="h:1", protocol="https", api_key="own").get_base_url() == "https://h:1/v1"
    assert ConnectionConfig(api_key="own").get_api_key() == "own"


def test_secrets_are_not_shown() -> None:
    assert "hunter2" not in repr(ConnectionConfig(api_key="hunter2", headers={"Authorization": "hunter2"}))


@pytest.mark.anyio
async def test_a_redirect_elsewhere_does_not_get_the_secrets(stub: Stub, config: ConnectionConfig) -> None:
    with Stub() as other:
        other.routes["GET", "/x"] = Reply.of({})
        stub.routes["GET", "/v1/there"] = Reply(307, headers={"Location": f"http://{other.address}/x"})
        stub.routes["GET", "/v1/here"] = Reply(307, headers={"Location": "/v1/x"})
        stub.routes["GET", "/v1/x"] = Reply.of({})
        server = Connection.to_server(config.model_copy(update={"follow_redirects": True}))
        await server.call("GET", "/there")
        await server.call("GET", "/here")
    assert "open-sandbox-api-key" not in other.requests[0].headers
    assert [request.headers["open-sandbox-api-key"] for request in stub.requests] == ["key"] * 3


@pytest.mark.anyio
async def test_the_active_span_is_passed_on(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["GET", "/v1/x"] = Reply.of({})
    server = Connection.to_server(config)
    await server.call("GET", "/x")
    assert "traceparent" not in stub.requests[-1].headers
    context = trace.SpanContext(0xA1, 0xB2, is_remote=False, trace_flags=trace.TraceFlags(1))
    carried = baggage.set_baggage("user", "ada", trace.set_span_in_context(trace.NonRecordingSpan(context)))
    token = attach(carried)
    try:
        await server.call("GET", "/x")
    finally:
        detach(token)
    assert stub.requests[-1].headers["traceparent"] == f"00-{0xA1:032x}-{0xB2:016x}-01"
    assert "baggage" not in stub.requests[-1].headers


@pytest.mark.anyio
async def test_each_request_may_have_a_span(
    stub: Stub, config: ConnectionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[Recorded] = []

    def start_span(name: str, **options: Any) -> Recorded:
        spans.append(Recorded(name, options["attributes"]))
        return spans[-1]

    monkeypatch.setattr(trace, "get_tracer", lambda name: SimpleNamespace(start_span=start_span))
    stub.routes["GET", "/v1/x"] = Reply.of({})
    server = Connection.to_server(config.model_copy(update={"enable_tracing": True}))
    await server.call("GET", "/x", params=[("secret", "1")])
    with pytest.raises(exceptions.NotFoundException):
        await server.call("GET", "/y")
    good, bad = spans
    assert stub.requests[0].headers["traceparent"] == f"00-{1:032x}-{2:016x}-00"
    assert good.told == {
        "http.request.method": "GET",
        "url.full": f"http://{stub.address}/v1/x",
        "http.response.status_code": 200,
    }
    assert bad.told["error.type"] == "NotFoundException"
    assert [span.ended for span in spans] == [True, True]


class Recorded(trace.NonRecordingSpan):
    """A span that remembers."""

    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        super().__init__(trace.SpanContext(1, 2, is_remote=False))
        self.name = name
        self.told = dict(attributes)
        self.ended = False

    def set_attribute(self, key: str, value: Any) -> None:
        self.told[key] = value

    def end(self, end_time: int | None = None) -> None:
        self.ended = True
