# SPDX-License-Identifier: Apache-2.0
"""Who may call: keys, and without a key only this machine and no page of another origin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from world import NODE

from opensandbox_server.api.guard import GuardRules, identify, is_loopback_name
from opensandbox_server.app import Deps, create_app
from opensandbox_server.errors import OpenSandboxError
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.store import open_store

pytestmark = pytest.mark.anyio
Serve = Callable[..., AbstractAsyncContextManager[httpx2.AsyncClient]]
KEY = "correct-horse"


@pytest.fixture
def serve(tmp_path: Path, no_blocking: None) -> Serve:
    @asynccontextmanager
    async def served(**settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
        async with open_store(tmp_path / "a.db", node=NODE, runtime="fake") as store:
            app = create_app(Deps(store, FakeRuntime(), b"k" * 32, node=NODE, epoch=store.epoch, **settings))
            async with (
                app.router.lifespan_context(app),
                httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1:8080") as client,
            ):
                yield client

    return served


async def code(client: httpx2.AsyncClient, path: str = "/v1/sandboxes", **headers: str) -> tuple[int, str | None]:
    answer = await client.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    assert answer.headers["x-request-id"]
    return answer.status_code, answer.json().get("code") if answer.status_code >= 400 else None


async def test_with_a_key(serve: Serve) -> None:
    async with serve(api_key=KEY, loopback=False) as client:
        assert await code(client) == (401, "MISSING_API_KEY")
        assert await code(client, OPEN_SANDBOX_API_KEY="") == (401, "MISSING_API_KEY")
        for wrong in ("wrong", KEY + " ", KEY[:-1], KEY.upper(), KEY + "x"):
            assert await code(client, OPEN_SANDBOX_API_KEY=wrong) == (401, "INVALID_API_KEY")
        assert await code(client, OPEN_SANDBOX_API_KEY=KEY) == (200, None)
        # Whoever has the key may come from anywhere.
        everywhere = {"OPEN_SANDBOX_API_KEY": KEY, "Host": "sandbox.example", "Origin": "https://x.example"}
        assert await code(client, **everywhere) == (200, None)


@pytest.mark.parametrize("path", ["/health", "/version", "/docs", "/redoc", "/openapi.json"])
async def test_what_needs_no_key(serve: Serve, path: str) -> None:
    async with serve(api_key=KEY) as client:
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/healthz", "/health/", "/health/../v1/sandboxes", "/docs/x", "/v1/health", "//health", "/nope", "/version%2f"],
)
async def test_a_path_that_only_begins_like_one_needs_the_key(serve: Serve, path: str) -> None:
    async with serve(api_key=KEY) as client:
        assert await code(client, path) == (401, "MISSING_API_KEY")


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "LOCALHOST:1", "127.0.0.1:8080", "127.1.2.3", "[::1]:8080"]
)
async def test_without_a_key_this_machine_may_call(serve: Serve, host: str) -> None:
    async with serve() as client:
        assert await code(client, Host=host) == (200, None)
        assert await code(client, Host=host, Origin=f"http://{host}") == (200, None)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.example:8080",
        "10.0.0.1",
        "0.0.0.0",
        "127.0.0.1.evil.example",
        "[::2]",
        "[::1",
        "localhost:x",
        "localhost:",
        "user@localhost",
        "2130706433",
        "",
        "8000-x.localhost:28888",
    ],
)
async def test_without_a_key_a_foreign_name_is_refused(serve: Serve, host: str) -> None:
    async with serve() as client:
        for path in ("/v1/sandboxes", "/health", "/nope"):
            assert await code(client, path, Host=host) == (403, "FOREIGN_ORIGIN")


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://localhost:3000",
        "http://127.0.0.1:28888",
        "null",
        "http://localhost:8080.evil.example",
        "http://evil.example#http://localhost:8080",
        "",
        "file://",
    ],
)
async def test_without_a_key_a_page_of_another_origin_is_refused(serve: Serve, origin: str) -> None:
    async with serve() as client:
        assert await code(client, Host="localhost:8080", Origin=origin) == (403, "FOREIGN_ORIGIN")
        answer = await client.post("/v1/sandboxes", json={}, headers={"Host": "localhost:8080", "Origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


async def test_no_page_is_told_anything_unless_it_is_configured(serve: Serve) -> None:
    preflight = {"Origin": "https://console.example", "Access-Control-Request-Method": "POST"}
    async with serve() as client:
        answer = await client.options("/v1/sandboxes", headers=preflight)
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]
    for key in (None, KEY):
        async with serve(cors_origins=("https://console.example",), api_key=key) as client:
            answer = await client.options("/v1/sandboxes", headers=preflight)
            assert answer.headers["access-control-allow-origin"] == "https://console.example"
            headers = {"Origin": "https://console.example"} | ({"OPEN-SANDBOX-API-KEY": KEY} if key else {})
            answer = await client.get("/v1/sandboxes", headers=headers)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://console.example"
            other = await client.get("/v1/sandboxes", headers={**headers, "Origin": "https://evil.example"})
            assert "access-control-allow-origin" not in other.headers


async def test_an_open_server_answers_to_any_name_but_to_no_foreign_page(serve: Serve) -> None:
    async with serve(loopback=False) as client:
        assert await code(client, Host="192.0.2.7:8080") == (200, None)
        assert await code(client, Host="192.0.2.7:8080", Origin="http://evil.example") == (403, "FOREIGN_ORIGIN")


@pytest.mark.parametrize(
    ("settings", "headers", "let_in"),
    [
        ({}, [(b"host", b"localhost")], True),
        ({}, [(b"host", b"localhost"), (b"origin", b"https://evil.example")], False),
        ({}, [(b"host", b"evil.example")], False),
        ({"api_key": KEY}, [(b"host", b"localhost")], False),
        ({"api_key": KEY}, [(b"host", b"localhost"), (b"open-sandbox-api-key", KEY.encode())], True),
    ],
)
async def test_a_websocket_is_no_exception(
    tmp_path: Path, settings: dict[str, Any], headers: list[tuple[bytes, bytes]], let_in: bool
) -> None:
    async with open_store(tmp_path / "a.db", node=NODE, runtime="fake") as store:
        app = create_app(Deps(store, FakeRuntime(), b"k" * 32, node=NODE, epoch=store.epoch, **settings))
        sent: list[Any] = []

        async def receive() -> dict[str, str]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "websocket",
            "path": "/health",
            "raw_path": b"/health",
            "headers": headers,
            "query_string": b"",
        }
        await app({**scope, "subprotocols": [], "extensions": {}}, receive, send)
        assert sent[0]["type"] == "websocket.close"
        assert (sent[0]["code"] == 1008) != let_in, "let in, it finds no such route"


def test_two_hosts_or_two_keys_are_suspicious() -> None:
    scope = {"type": "http", "path": "/v1/sandboxes", "headers": [(b"host", b"localhost"), (b"host", b"evil.example")]}
    twice = {**scope, "headers": [(b"open-sandbox-api-key", KEY.encode()), (b"open-sandbox-api-key", b"x")]}
    for asked, rules in ((scope, GuardRules()), (twice, GuardRules(KEY)), ({**scope, "headers": []}, GuardRules())):
        with pytest.raises(OpenSandboxError):
            identify(asked, rules)


def test_the_key_is_not_shown() -> None:
    assert KEY not in repr(GuardRules(KEY))
    assert is_loopback_name("localhost")
