# SPDX-License-Identifier: Apache-2.0
"""Requests made up from the contract: whatever they ask, the answer is one the contract describes, and never a 500."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import schemathesis
import uvicorn
import yaml
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from world import NODE

from opensandbox_server.app import Deps, create_app
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.serve import bind
from opensandbox_server.store import open_store

SPEC = yaml.safe_load((Path(__file__).resolve().parents[2] / "spec" / "lifecycle.yaml").read_text())
schema = schemathesis.openapi.from_dict(SPEC)


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    sockets = bind(("127.0.0.1",), 0)
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with open_store(tmp_path_factory.mktemp("store") / "a.db", node=NODE, runtime="fake") as store:
            app = create_app(Deps(store, FakeRuntime(), b"k" * 32, node=NODE, epoch=store.epoch))
            servers.append(uvicorn.Server(uvicorn.Config(app, http="httptools", lifespan="on", log_config=None)))
            await servers[0]._serve(sockets)

    thread = threading.Thread(target=anyio.run, args=(serve,))
    thread.start()
    yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    servers[0].should_exit = True
    thread.join()


@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_operation_answers_as_described(case: Any, base_url: str) -> None:
    operation = case.operation.definition.raw
    prefix = "" if operation.get("x-root-only") else "/v1"
    case.call_and_validate(
        base_url=base_url + prefix,
        checks=(not_a_server_error, status_code_conformance, response_schema_conformance),
    )
