# SPDX-License-Identifier: Apache-2.0
"""Requests made up from the contract: whatever they ask, the answer is one the contract describes, and never a 500.

Some of them name a sandbox that exists, or else they would all be answered with 404. Streams of events never end by
themselves, so of those only the beginning is read. The proxy is left out: what it answers is not ours but the
sandbox's program's; `test_proxy.py` has it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import requests
import schemathesis
import uvicorn
import yaml
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from world import BODY, NODE

from opensandbox_server.app import Deps, create_app
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.serve import bind
from opensandbox_server.store import open_store
from opensandbox_server.wire.errors import STATUS, Code

SPEC = yaml.safe_load((Path(__file__).resolve().parents[2] / "spec" / "lifecycle.yaml").read_text())
STREAMS = ("watchEvents", "watchSandboxEvents")
PROXIED = [path for path, item in SPEC["paths"].items() if item.get("x-proxy")]
SOME = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)

schema = schemathesis.openapi.from_dict(SPEC)
answered = schema.exclude(path=PROXIED).exclude(operation_id=list(STREAMS))
streamed = schema.include(operation_id=list(STREAMS))


def code_and_status_belong_together(_: Any, response: Any, __: Any) -> None:
    """Every error is one of spec/errors.yaml, sent with its own status."""
    if response.status_code >= 400:
        body = response.json()
        assert STATUS[Code(body["code"])] == response.status_code, body
        assert body["message"], body
        assert body["requestId"] == response.headers["x-request-id"][0], body


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    code_and_status_belong_together,
]


class Served:
    """The server, and sandboxes on it that requests can be about."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kept = self.create()
        self._turn = itertools.count()

    def create(self) -> str:
        return str(requests.post(f"{self.url}/v1/sandboxes", json=BODY, timeout=30).json()["id"])

    def place(self, case: Any) -> str:
        """Where the operation is served; of what is served twice, once here and once there."""
        operation = case.operation.definition.raw
        if operation.get("x-root-only"):
            return self.url
        return self.url if next(self._turn) % 4 == 0 and not operation.get("x-v1-only") else f"{self.url}/v1"

    def aim(self, case: Any) -> None:
        """Two of three requests are about a sandbox that exists."""
        if "sandboxId" in (case.path_parameters or {}) and next(self._turn) % 3:
            gone = case.operation.definition.raw["operationId"] == "deleteSandbox"
            case.path_parameters = {**case.path_parameters, "sandboxId": self.create() if gone else self.kept}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    sockets = bind(("127.0.0.1",), 0)
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with open_store(tmp_path_factory.mktemp("store") / "a.db", node=NODE, runtime="fake") as store:
            app = create_app(Deps(store, FakeRuntime(), b"k" * 32, node=NODE, epoch=store.epoch))
            servers.append(uvicorn.Server(uvicorn.Config(app, http="httptools", lifespan="on", log_config=None)))
            await servers[0]._serve(sockets)

    thread = threading.Thread(target=anyio.run, args=(serve,))
    thread.start()
    yield Served(f"http://127.0.0.1:{sockets[0].getsockname()[1]}")
    servers[0].should_exit = True
    thread.join()


@answered.parametrize()
@SOME
def test_every_operation_answers_as_described(case: Any, served: Served) -> None:
    served.aim(case)
    case.call_and_validate(base_url=served.place(case), checks=CHECKS, timeout=30)


@streamed.parametrize()
@SOME
def test_every_stream_begins_as_described(case: Any, served: Served) -> None:
    served.aim(case)
    asked = case.as_transport_kwargs(base_url=served.place(case))
    with requests.request(**asked, stream=True, timeout=30) as answer:
        if answer.status_code == 200:
            assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        else:
            case.validate_response(answer, checks=CHECKS)
