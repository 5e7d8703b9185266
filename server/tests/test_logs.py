# SPDX-License-Identifier: Apache-2.0
"""The log: one record is one line, whatever is in it, and says which request, sandbox and trace it belongs to."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import anyio.lowlevel
import httpx2
import pytest
from world import BODY, NODE

from opensandbox_server import context, logs
from opensandbox_server.app import Deps, create_app
from opensandbox_server.context import Trace
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.store import open_store

HOSTILE = "a\nb\r\x1b[2Jc\u2028d\x85e"
SANDBOX = "0f6a7d57-750c-4bcb-8900-3d56cb834018"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = before
    root.setLevel(level)


def test_json_lines_say_what_they_are_about(written: io.StringIO) -> None:
    logs.start("INFO", None, written)
    token = context.request_id.set("r-1")
    logging.getLogger("x").warning("sandbox %s: %s", SANDBOX, HOSTILE)
    context.request_id.reset(token)
    [line] = written.getvalue().splitlines()
    told = json.loads(line)
    assert told["msg"] == f"sandbox {SANDBOX}: {HOSTILE}"
    assert (told["level"], told["logger"], told["requestId"], told["sandboxId"]) == ("warn", "x", "r-1", SANDBOX)
    assert told["ts"].endswith("Z")
    assert "traceId" not in told


def test_text_cannot_begin_a_line_of_its_own(written: io.StringIO) -> None:
    logs.start("INFO", "text", written)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("x").exception("said %s", HOSTILE)
    first, *others = written.getvalue().splitlines()
    assert "a\\nb\\r\\x1b[2Jc\\u2028d\\x85e" in first
    assert all(line.startswith("  | ") for line in others)
    assert "\x1b" not in written.getvalue()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "",
        PARENT.upper(),
        PARENT + "-more",
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        PARENT + "\n",
        PARENT[:-1],
    ],
)
def test_a_trace_that_is_none_is_replaced(bad: str | None) -> None:
    made = Trace.given(bad, "a=b")
    assert made.trace_id != TRACE
    assert made.state == ""
    assert Trace.given(made.headers()["traceparent"], None).trace_id == made.trace_id


def test_a_trace_goes_on_below_us() -> None:
    place = Trace.given(PARENT, "vendor=1,other=2")
    assert place.headers()["traceparent"].startswith(f"00-{TRACE}-")
    assert place.headers()["traceparent"].endswith("-01")
    assert place.span_id not in PARENT
    assert place.headers()["tracestate"] == "vendor=1,other=2"
    assert Trace.given(PARENT, "x" * 600).state == ""
    assert Trace.given(PARENT, "a\nb").state == ""
    assert Trace.given(f"01-{PARENT[3:]}-later", None).trace_id == TRACE


@pytest.mark.anyio
async def test_a_request_is_one_line_with_its_route(tmp_path: Path, written: io.StringIO) -> None:
    runtime = FakeRuntime()
    async with open_store(tmp_path / "a.db", node=NODE, runtime="fake") as store:
        app = create_app(Deps(store, runtime, b"k" * 32, node=NODE, epoch=store.epoch))
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost:8080") as client,
        ):
            logs.start("INFO", "json", written)
            await client.post("/v1/sandboxes", json=BODY)
            await client.get(f"/v1/sandboxes/{SANDBOX}", headers={"traceparent": PARENT, "x-request-id": "r-2"})
            await client.get("/health")
            await client.get("/no/such%0aroute")
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    told = [line for line in lines if line["logger"] == logs.ACCESS]
    assert [(line["method"], line["route"], line["status"]) for line in told] == [
        ("POST", "/sandboxes", 202),
        ("GET", "/sandboxes/{sandbox_id}", 404),
        ("GET", "none", 404),
    ]
    assert (told[1]["requestId"], told[1]["sandboxId"], told[1]["traceId"]) == ("r-2", SANDBOX, TRACE)
    assert told[0]["sandboxId"] in runtime.sandboxes, "the sandbox that was made"
    assert [(line["client"], line["tenant"]) for line in told] == [("127.0.0.1", "default")] * 3
    assert told[2]["path"] == "/no/such\nroute"
    assert told[2]["msg"].startswith("GET /no/such\nroute 404 ")
    assert not [line for line in told[:2] if "path" in line]
    assert all(line["ms"] >= 0 and len(line["traceId"]) == 32 for line in told)


@pytest.mark.anyio
async def test_a_refused_request_is_told_with_its_path_but_not_with_secrets(
    tmp_path: Path, written: io.StringIO
) -> None:
    async with open_store(tmp_path / "a.db", node=NODE, runtime="fake") as store:
        app = create_app(Deps(store, FakeRuntime(), b"k" * 32, node=NODE, epoch=store.epoch, api_key="key"))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost:8080") as client:
            logs.start("INFO", "text", written)
            await client.get(f"/v1/sandboxes/{SANDBOX}/proxy/8000/secret-1?token=secret-2")
            await client.get(f"/{'x' * 5000}")
            await anyio.lowlevel.checkpoint()  # a line is written when its answer is on its way
    refused, long = [line for line in written.getvalue().splitlines() if " access: " in line]
    assert f"GET /v1/sandboxes/{SANDBOX}/proxy/8000/... 401 " in refused
    assert "client=127.0.0.1" in refused
    assert "secret" not in refused
    assert "tenant" not in refused, "nobody knows whose it is"
    assert len(long) < 500
