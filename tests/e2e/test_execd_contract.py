# SPDX-License-Identifier: Apache-2.0
"""Requests made up from spec/execd.yaml, sent to a real execd in a sandbox that is thrown away.

They delete `/`, run whatever comes out of the generator and write anywhere: in there, that harms nobody. Two of three
are turned towards commands and files that exist, or else all of them would only see "not found".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from live_server import LiveServer, Sandbox
from opensandbox_server.wire.errors import STATUS, Code

SPEC = yaml.safe_load((Path(__file__).resolve().parents[2] / "spec" / "execd.yaml").read_text())
PLACE = "/tmp/contract"
PATHS = (f"{PLACE}/file", f"{PLACE}/directory", f"{PLACE}/link", f"{PLACE}/missing", "~", "$HOME/x", PLACE)
RUNS: tuple[dict[str, Any], ...] = (
    {"command": "echo out; echo err >&2; exit 3"},
    {"argv": ["printf", "\\377\\0\\n"], "cwd": "/"},
    {"command": "kill -9 $$", "uid": 65534},
    {"argv": ["/no/such/program"]},
)
TOKEN = "X-EXECD-ACCESS-TOKEN"
LIMIT = 200
"""Milliseconds that a made-up command may take."""

# A watch ends with its client only, and behind /proxy it is a program that answers: other tests are about these.
schema = schemathesis.openapi.from_dict(SPEC).exclude(
    path=["/files/watch", "/metrics/watch", "/proxy/{port}/{path}"],
)


def errors_are_of_the_contract(_: Any, response: Any, case: Any) -> None:
    """Known code, its own status, and no fault of execd's; what the kernel refuses is published as a 500."""
    if response.status_code < 400 or case.method == "HEAD":
        return
    body = response.json()
    code = Code(body["code"])
    assert STATUS[code] == response.status_code, body
    assert body["message"], body
    assert response.status_code < 500 or code is Code.RUNTIME_ERROR, body
    assert not code.startswith("INGRESS::"), f"the sandbox is gone: {body}"
    promised = case.method.lower() in SPEC["paths"][case.operation.path]
    assert not promised or code not in (Code.GENERAL_NOT_FOUND, Code.GENERAL_METHOD_NOT_ALLOWED) or _lost(case), body


def content_is_of_the_contract(context: Any, response: Any, case: Any) -> None:
    """OpenAPI cannot say that a body may also be missing; our contract says it beside."""
    described = case.operation.definition.raw["responses"].get(str(response.status_code), {})
    if response.content or not described.get("x-may-be-empty"):
        content_type_conformance(context, response, case)
        response_schema_conformance(context, response, case)


def _runnable(body: dict[str, Any], turn: int) -> dict[str, Any]:
    """What the contract says in words only: one of command and argv, in a directory that exists."""
    runnable = {name: value for name, value in body.items() if name not in ("command", "argv", "cwd", "uid", "gid")}
    return {**runnable, **RUNS[turn % len(RUNS)]}


def _lost(case: Any) -> bool:
    """A made-up part of the path that makes it another path."""
    return any(not str(value).isalnum() for value in (case.path_parameters or {}).values())


CHECKS = [
    status_code_conformance,
    response_headers_conformance,
    content_is_of_the_contract,
    errors_are_of_the_contract,
]


class Target:
    """The sandbox, and what requests can be about."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.url = f"http://{sandbox.address}{sandbox.prefix}"
        self._turn = itertools.count()
        self.restore()
        self._ended = sandbox.start("printf 'one\\ntwo\\n'")
        self._running = sandbox.start("sleep 1000")

    def restore(self) -> None:
        """Made-up requests may have removed it."""
        for path in (PLACE, "/tmp", "/"):
            self.sandbox.call("POST", "/directories", body={path: {}})
        self.sandbox.write(f"{PLACE}/file", b"one\ntwo\nthree\n")
        self.sandbox.call("POST", "/directories", body={f"{PLACE}/directory": {"mode": 755}}).expect(200)

    def aim(self, case: Any) -> None:
        turn = next(self._turn)
        if case.operation.path == "/command" and isinstance(case.body, dict):
            wanted = case.body.get("timeout", 0)
            if wanted == 0 or (type(wanted) is int and wanted > LIMIT):
                case.body = {**case.body, "timeout": LIMIT}
        if case.operation.path == "/files/tar" and "path" in (case.query or {}):
            # Made up it might be "/", which is all of the machine.
            case.query = {**case.query, "path": PATHS[turn % 4]}
        if turn % 3 == 0:
            return
        # A made-up token only shows again and again that it is refused.
        case.headers = {name: value for name, value in (case.headers or {}).items() if name.upper() != TOKEN}
        if case.operation.path == "/command" and case.method == "POST" and isinstance(case.body, dict):
            case.body = _runnable(case.body, turn)
        if "id" in (case.path_parameters or {}):
            # Who attaches to one that runs stays until its end.
            attach = case.operation.path == "/command/{id}/attach"
            case.path_parameters = {"id": self._running if turn % 2 and not attach else self._ended}
        query = dict(case.query or {})
        if isinstance(query.get("path"), str) and case.operation.path != "/files/tar":
            query["path"] = PATHS[turn % len(PATHS)]
        elif isinstance(query.get("path"), list):
            query["path"] = [PATHS[(turn + index) % len(PATHS)] for index in range(len(query["path"]))]
        if "id" in query:
            query["id"] = self._ended
        case.query = query
        if isinstance(case.body, dict) and case.operation.path in ("/files/permissions", "/files/replace"):
            case.body = {PATHS[(turn + index) % 4]: value for index, value in enumerate(case.body.values())}


@pytest.fixture(scope="module")
def target(server: LiveServer) -> Iterator[Target]:
    limits = {"cpu": "1", "memory": "256Mi", "pids": "64"}
    # Without it the routes of isolated sessions would only say that there are none.
    extensions = {"bootstrap.execd.isolation": "enable"}
    found = Target(server.create(resourceLimits=limits, extensions=extensions))
    yield found
    assert found.sandbox.ping(), "execd did not outlive the requests"


@pytest.fixture(autouse=True)
def something_to_find(target: Target) -> None:
    target.restore()


@schema.parametrize()
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_every_operation_answers_as_described(case: Any, target: Target) -> None:
    target.aim(case)
    case.call_and_validate(base_url=target.url, headers=target.sandbox.headers, checks=CHECKS, timeout=30)
