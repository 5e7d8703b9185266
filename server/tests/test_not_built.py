# SPDX-License-Identifier: Apache-2.0
"""What published clients may ask for and this server does not do yet is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from world import NODE

from opensandbox_server.api.docs import specification
from opensandbox_server.api.not_built import TABLE
from opensandbox_server.app import Deps, create_app
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.store import open_store

pytestmark = pytest.mark.anyio
KEY = "correct-horse"
VALUES = {"sandbox_id": "x", "snapshot_id": "x", "template_id": "x", "name": "x", "kind": "logs", "port": "8000"}
CALLS = [
    (method, prefix + path.replace("{rest:path}", "a/b?c=d").format(**VALUES), what, code)
    for methods, path, what, code in TABLE
    for method in methods
    for prefix in ("", "/v1")
]


@pytest.fixture
async def client(tmp_path: Path, no_blocking: None) -> AsyncIterator[httpx2.AsyncClient]:
    async with open_store(tmp_path / "a.db", node=NODE, runtime="fake") as store:
        app = create_app(Deps(store, FakeRuntime(), b"k" * 32, node=NODE, epoch=store.epoch, api_key=KEY))
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1:8080") as made,
        ):
            yield made


async def test_each_is_refused_by_name_and_only_to_callers_with_the_key(client: httpx2.AsyncClient) -> None:
    for method, path, what, code in CALLS:
        assert (await client.request(method, path)).status_code == 401
        told = await client.request(method, path, headers={"OPEN-SANDBOX-API-KEY": KEY})
        assert told.status_code == (400 if code == "SANDBOX::API_NOT_SUPPORTED" else 501), (method, path)
        assert told.json()["code"] == code
        assert told.json()["message"] == f"{what} is not built yet."
        assert "/v1/runtime" in told.json()["hint"]
        assert told.headers["x-request-id"]


async def test_figures_name_their_routes(client: httpx2.AsyncClient) -> None:
    client.headers["OPEN-SANDBOX-API-KEY"] = KEY
    await client.post("/v1/sandboxes/x/pause")
    text = (await client.get("/metrics")).text
    assert 'route="/v1/sandboxes/{sandbox_id}/pause",method="POST",status="400"} 1' in text
    assert 'route="other"' not in text


async def test_other_paths_and_methods_are_answered_as_before(client: httpx2.AsyncClient) -> None:
    client.headers["OPEN-SANDBOX-API-KEY"] = KEY
    assert (await client.get("/v1/sandboxes/x/nonsense")).json()["code"] == "GENERAL::NOT_FOUND"
    assert (await client.get("/v1/sandboxes/x/pause")).json()["code"] == "GENERAL::METHOD_NOT_ALLOWED"
    assert (await client.get("/v1/sandboxes/x")).json()["code"] == "SANDBOX::NOT_FOUND"


async def test_what_is_built_is_not_in_the_table() -> None:
    paths = {path.replace("sandboxId", "sandbox_id") for path in specification()["paths"]}
    assert not paths & {path for _, path, _, _ in TABLE}
