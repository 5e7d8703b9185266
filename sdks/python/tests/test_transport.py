# SPDX-License-Identifier: Apache-2.0
"""Pools, headers, and answers that become errors."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import httpx2
import pytest
from pydantic import ValidationError
from stub import ID, Received, Reply, Stub, created

from opensandbox import ConnectionConfig, Sandbox, SandboxException, SandboxManager, exceptions
from opensandbox.models import SandboxFilter
from opensandbox.retry import RetryPolicy
from opensandbox.transport import Connection

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
async def test_the_last_one_closes_the_pool(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["GET", "/v1/sandboxes"] = PAGE
    manager = await SandboxManager.create(config)
    await manager.list_sandbox_infos(SandboxFilter())
    assert stub.open == 1
    await manager.close()
    await manager.close()
    async with asyncio.timeout(5):
        await stub.idle.wait()


@pytest.mark.anyio
async def test_calls_after_close_still_work(stub: Stub, config: ConnectionConfig) -> None:
    """As in `async with sandbox: ...` followed by `await sandbox.kill()`."""
    stub.routes["POST", "/v1/sandboxes"] = created(stub)
    stub.routes["DELETE", f"/v1/sandboxes/{ID}"] = Reply(204)
    async with await Sandbox.create("host", connection_config=config) as sandbox:
        pass
    await sandbox.kill()
    assert stub.calls()[-1] == f"DELETE /v1/sandboxes/{ID}"


def test_a_sandbox_may_be_used_in_another_event_loop() -> None:
    ready, stop = threading.Event(), threading.Event()
    stub = Stub()

    async def serve() -> None:
        async with stub:
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(5)
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
    finally:
        stop.set()
        thread.join()


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
    ours = "Pass api_key= to ConnectionConfig or set OPEN_SANDBOX_API_KEY."
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
    silent = asyncio.Event()

    async def hang(_: Received) -> Reply | None:
        await silent.wait()
        return None

    stub.routes["GET", "/v1/x"] = hang
    with pytest.raises(exceptions.SandboxTimeoutException, match="took too long"):
        await Connection.to_server(config).call("GET", "/x", timeout=timedelta(milliseconds=50))
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
        {"enable_tracing": True},
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
