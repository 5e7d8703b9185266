# SPDX-License-Identifier: Apache-2.0
"""The contract and the server are one: same paths, methods, operations, statuses; and it is served as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.routing import APIRoute
from world import NODE

from opensandbox_server import __version__
from opensandbox_server.api.docs import specification
from opensandbox_server.app import Deps, create_app
from opensandbox_server.runtimes.fake import FakeRuntime

SPEC = Path(__file__).resolve().parents[2] / "spec" / "lifecycle.yaml"
METHODS = ("get", "post", "put", "patch", "delete")


def operations(paths: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Method, path and operation of everything the contract promises, at every place it promises it."""
    promised = set()
    for path, item in paths.items():
        if item.get("x-proxy"):
            continue  # any method and path below it: no route of FastAPI's; test_proxy.py has it
        for method in METHODS:
            if operation := item.get(method):
                places = {"", "/v1"}
                if operation.get("x-root-only"):
                    places = {""}
                if operation.get("x-v1-only"):
                    places = {"/v1"}
                promised |= {(method.upper(), place + path, operation["operationId"]) for place in places}
    return promised


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    return dict(yaml.safe_load(SPEC.read_text()))


def routes_of(routes: Any, prefix: str = "") -> list[tuple[str, APIRoute]]:
    """FastAPI keeps included routers as they are, each under its prefix."""
    found = []
    for route in routes:
        if isinstance(route, APIRoute):
            found.append((prefix + route.path, route))
        elif hasattr(route, "original_router"):
            found += routes_of(route.original_router.routes, prefix + route.include_context.prefix)
    return found


def test_every_promised_route_is_served_and_no_other(spec: dict[str, Any]) -> None:
    app = create_app(Deps(None, FakeRuntime(), b"k" * 32, node=NODE, epoch=1))  # type: ignore[arg-type]
    served = {
        (method, path.replace("{sandbox_id}", "{sandboxId}"), camel(route.name))
        for path, route in routes_of(app.routes)
        for method in route.methods
        if path not in ("/docs", "/redoc", "/openapi.json")
    }
    assert served == operations(spec["paths"])


def test_the_contract_is_served_as_written(spec: dict[str, Any]) -> None:
    assert specification() == spec, "wire/lifecycle.json is stale: run `make generate`"


def test_the_contract_has_this_version(spec: dict[str, Any]) -> None:
    assert spec["info"]["version"] == __version__
