# SPDX-License-Identifier: Apache-2.0
"""The short way: what takes it, and that everything else still goes through the framework."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from opensandbox_server.api.direct import Direct
from opensandbox_server.api.request_id import template
from opensandbox_server.errors import not_found

pytestmark = pytest.mark.anyio


def things() -> APIRouter:
    routes = APIRouter()

    @routes.post("/things")
    async def create_thing(request: Request) -> Response:
        return PlainTextResponse(f"{template(request.scope)} {(await request.body()).decode()}")

    @routes.get("/things/{thing_id}")
    async def get_thing(thing_id: str, request: Request) -> Response:
        if thing_id == "gone":
            raise not_found(thing_id)
        return PlainTextResponse(f"{template(request.scope)} {thing_id}")

    @routes.delete("/things/{thing_id}")
    async def delete_thing(thing_id: str, request: Request) -> Response:
        raise AssertionError("not one of the named")

    return routes


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    async def framework(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("framework", 418)(scope, receive, send)

    app = Direct(framework, things(), {"create_thing", "get_thing"})
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as made:
        yield made


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_the_named_are_called_at_once(client: httpx2.AsyncClient, prefix: str) -> None:
    assert (await client.post(f"{prefix}/things", content="body")).text == "/things body"
    assert (await client.get(f"{prefix}/things/a%20b")).text == "/things/{thing_id} a b"


async def test_a_refusal_has_the_one_shape(client: httpx2.AsyncClient) -> None:
    answer = await client.get("/things/gone")
    assert (answer.status_code, answer.json()["code"]) == (404, "SANDBOX::NOT_FOUND")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/things"),
        ("PUT", "/things"),
        ("POST", "/things/"),
        ("GET", "/things/"),
        ("GET", "/v1/things/"),
        ("GET", "/things/a/b"),
        ("GET", "/things/a%2Fb"),
        ("GET", "/v2/things/a"),
        ("GET", "/things/a/"),
        ("HEAD", "/things/a"),
        ("DELETE", "/things/a"),
        ("GET", "/"),
    ],
)
async def test_everything_else_is_the_frameworks(client: httpx2.AsyncClient, method: str, path: str) -> None:
    assert (await client.request(method, path)).status_code == 418
