# SPDX-License-Identifier: Apache-2.0
"""Nobody comes in without a key, and nobody into the sandboxes of others: every route, as the contract lists them.

The routes are read from spec/, so that one which is added tomorrow is walked tomorrow. A sandbox of tenant `red` lives
all the while; `blue` and callers without a key try everything on it, and at the end it is as it was.
"""

from __future__ import annotations

import http.client
import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import websockets
import yaml
from websockets.sync.client import connect

from live_server import SLEEP_FOREVER, Answer, LiveServer, Sandbox
from opensandbox_server.api.not_built import TABLE

ROOT = Path(__file__).resolve().parents[2]
KEY, TOKEN = "OPEN-SANDBOX-API-KEY", "X-EXECD-ACCESS-TOKEN"
RED, BLUE = "red-" + uuid.uuid4().hex, "blue-" + uuid.uuid4().hex
MARK = "mark-of-red"
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
OPEN = {"/health", "/version", "/docs", "/redoc", "/openapi.json"}
# Bodies that would be obeyed if the caller were the right one.
BODIES: dict[str, Any] = {
    "createSandbox": {"image": {"uri": "host"}, "entrypoint": list(SLEEP_FOREVER), "resourceLimits": {}},
    "renewSandbox": {"expiresAt": "2099-01-01T00:00:00Z"},
    "patchMetadata": {"owner": "blue"},
    "reportMetricEvent": {"eventType": "sandbox.create", "createDurationMs": 1, "success": True},
}


@dataclass(frozen=True)
class Operation:
    """One method of one path of a contract."""

    method: str
    path: str
    name: str = ""
    places: tuple[str, ...] = ("", "/v1")
    proxied: bool = False

    def at(self, sandbox_id: str, place: str | None = None) -> str:
        path = self.path.replace("{sandboxId}", sandbox_id).replace("{port}", "44772")
        return (self.places[-1] if place is None else place) + path.replace("{id}", "f" * 32)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def operations(spec: str) -> list[Operation]:
    found = []
    for path, item in yaml.safe_load((ROOT / "spec" / f"{spec}.yaml").read_text())["paths"].items():
        proxied = bool(item.get("x-proxy"))
        for method in METHODS:
            operation = item.get(method.lower(), item["get"] if proxied else None)
            if operation is None:
                continue
            places: tuple[str, ...] = ("", "/v1") if spec == "lifecycle" else ("",)
            if operation.get("x-root-only"):
                places = ("",)
            if operation.get("x-v1-only"):
                places = ("/v1",)
            found.append(Operation(method, path, operation["operationId"], places, proxied))
            if proxied:
                found.append(Operation(method, path + "/files/info?path=/", operation["operationId"], places, True))
    return found


def refused_by_name() -> list[Operation]:
    """Served, though the contract does not show them."""
    return [
        Operation(method, path.replace("{sandbox_id}", "{sandboxId}"))
        for methods, path, *_ in TABLE
        for method in methods
    ]


LIFECYCLE = operations("lifecycle")
LOCKED = [one for one in [*LIFECYCLE, *refused_by_name()] if one.path not in OPEN]
OF_A_SANDBOX = [one for one in LIFECYCLE if "{sandboxId}" in one.path]
LISTS = [one for one in LIFECYCLE if one.method == "GET" and "{" not in one.path and one.path not in OPEN]
EXECD = operations("execd")


@dataclass(frozen=True)
class Scene:
    """A server with two tenants; what belongs to red."""

    server: LiveServer
    alive: Sandbox
    gone: str
    own: str
    """A sandbox of blue."""

    def ask(self, method: str, path: str, key: str | None = None, body: Any = None, **headers: str) -> Answer:
        """As `LiveServer.call`, but of a stream that has begun only the head is read."""
        sent = {**headers, **({KEY: key} if key is not None else {})}
        connection = http.client.HTTPConnection(self.server.address, timeout=30)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {**sent, "Content-Type": "application/json"} if data else sent)
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            streams = told.get("content-type", "").startswith("text/event-stream")
            return Answer(answer.status, told, b"" if streams else answer.read())
        finally:
            connection.close()

    def red(self) -> dict[str, Any]:
        """Everything that others could have changed."""
        base = f"/v1/sandboxes/{self.alive.id}"
        events = self.server.call("GET", f"{base}/events?follow=false", headers={KEY: RED}).expect(200).body
        return {
            "sandbox": self.ask("GET", base, RED).expect(200).json(),
            "events": [line for line in events.splitlines() if line.startswith((b"id:", b"data:"))],
            "executions": self.ask("GET", f"{base}/executions", RED).expect(200).json(),
            "history": self.ask("GET", f"/v1/history/{self.gone}", RED).expect(200).json(),
            "files": self.alive.run("ls -A /root; cat /tmp/mine").stdout,
        }


def made(server: LiveServer, key: str, **fields: Any) -> Sandbox:
    body = {**BODIES["createSandbox"], **fields}
    created = server.call("POST", "/v1/sandboxes", body=body, headers={KEY: key}).expect(202).json()
    return Sandbox.of(created["id"], created["endpoints"]["44772"], created)


@pytest.fixture(scope="module")
def scene(linux: None) -> Iterator[Scene]:
    home = Path(tempfile.mkdtemp(prefix="osb-"))
    (home / ".opensandbox").mkdir()
    tenants = "".join(
        f'[[tenants]]\nname = "{name}"\napi_keys = ["{key}"]\n' for name, key in (("red", RED), ("blue", BLUE))
    )
    (home / ".opensandbox" / "tenants.toml").write_text(tenants)
    try:
        with LiveServer.started(home, config='[tenants]\nprovider = "file"\n') as server:
            alive = made(
                server,
                RED,
                timeout=3600,
                metadata={"owner": MARK},
                entrypoint=["sh", "-c", f"echo {MARK}; sleep infinity"],
            )
            alive.write("/tmp/mine", MARK.encode())
            gone = made(server, RED, metadata={"owner": MARK})
            server.call("DELETE", f"/v1/sandboxes/{gone.id}", headers={KEY: RED}).expect(204)
            yield Scene(server, alive, gone.id, made(server, BLUE).id)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def red_stays_as_it_was(scene: Scene) -> Iterator[None]:
    scene.red()  # looking is a command too
    before = scene.red()
    yield
    after = scene.red()
    for seen in (before, after):
        seen["executions"] = {item["content"] for item in seen["executions"]["items"]}
    assert after == before


def code_of(answer: Answer) -> str:
    return str(answer.json()["code"]) if answer.body else ""


def disguises(path: str) -> list[str]:
    """The same path, written so that one part of the server might read it differently from another."""
    first, *rest = path.lstrip("/").split("/")
    tail = "/".join(rest)
    encoded = "".join(f"%{ord(letter):02x}" for letter in first)
    return [
        f"{path}/",
        f"/{path}",
        f"//health{path}",
        f"/{encoded}/{tail}",
        f"{path}%2f",
        f"/health/..{path}",
        f"/health/%2e%2e{path}",
        f"/health%2f..{path}",
        f"/./{path.lstrip('/')}",
        f"{path};/health",
        f"{path}#/health",
        f"/docs{path}",
        f"/openapi.json{path}",
        path.upper(),
        path.replace("/", "\\"),
    ]


# -- the key -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", LOCKED, ids=str)
def test_without_the_key_nothing_answers(scene: Scene, operation: Operation) -> None:
    for place in operation.places:
        path = operation.at(scene.alive.id, place)
        for key, expected in (
            (None, "MISSING_API_KEY"),
            ("", "MISSING_API_KEY"),
            ("wrong", "INVALID_API_KEY"),
            (RED[:-1], "INVALID_API_KEY"),
        ):
            answer = scene.ask(operation.method, path, key, BODIES.get(operation.name))
            assert (answer.status, code_of(answer)) in ((401, expected), (401, "")), (path, key, answer)
            assert answer.body or operation.method == "HEAD"


@pytest.mark.parametrize("path", sorted({one.path for one in LOCKED}))
def test_no_other_method_and_no_disguise_helps(scene: Scene, path: str) -> None:
    named = Operation("", path).at(scene.alive.id, "/v1")
    for method in (*METHODS, "TRACE", "PROPFIND"):
        answer = scene.ask(method, named)
        assert answer.status == 401, (method, answer)
    for disguise in disguises(named):
        for method in ("GET", "POST", "DELETE"):
            answer = scene.ask(method, disguise)
            assert answer.status in (400, 401), (method, disguise, answer)
            assert MARK.encode() not in answer.body


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {RED}"},
        {"Cookie": f"{KEY}={RED}"},
        {"X-" + KEY: RED},
        {"X-Original-URL": "/health"},
        {"X-Forwarded-Prefix": "/health"},
        {"X-HTTP-Method-Override": "OPTIONS"},
        {"Access-Control-Request-Method": "GET", "Origin": "http://127.0.0.1"},
    ],
    ids=lambda headers: next(iter(headers)),
)
def test_the_key_counts_in_its_header_only(scene: Scene, headers: dict[str, str]) -> None:
    for method in ("GET", "OPTIONS"):
        answer = scene.ask(method, f"/v1/sandboxes/{scene.alive.id}?{KEY}={RED}", **headers)
        assert answer.status == 401, answer


def test_what_is_open_is_open_and_says_nothing(scene: Scene) -> None:
    for path in OPEN:
        answer = scene.ask("GET", path).expect(200)
        assert scene.alive.id.encode() not in answer.body
        assert MARK.encode() not in answer.body


@pytest.mark.parametrize("place", ["", "/v1"])
@pytest.mark.parametrize("key", [None, "wrong"])
def test_no_websocket_without_the_key(scene: Scene, place: str, key: str | None) -> None:
    for path in (
        f"/sandboxes/{scene.alive.id}/proxy/8000",
        f"/sandboxes/{scene.alive.id}/proxy/8000/x",
        "/health",
        "/nowhere",
    ):
        with pytest.raises(websockets.InvalidStatus) as refused:
            connect(
                f"ws://{scene.server.address}{place}{path}", additional_headers={KEY: key} if key else {}, proxy=None
            )
        assert refused.value.response.status_code in (401, 403)


# -- the other tenant ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OF_A_SANDBOX, ids=str)
def test_a_sandbox_of_another_tenant_does_not_exist(scene: Scene, operation: Operation) -> None:
    for place in operation.places:
        for sandbox_id in (scene.alive.id, scene.gone):
            answer = scene.ask(operation.method, operation.at(sandbox_id, place), BLUE, BODIES.get(operation.name))
            assert (answer.status, code_of(answer)) in ((404, "SANDBOX::NOT_FOUND"), (404, "")), answer
            assert answer.body or operation.method == "HEAD"


@pytest.mark.parametrize("operation", [*OF_A_SANDBOX, *refused_by_name()], ids=str)
def test_it_is_not_even_told_apart_from_one_that_never_was(scene: Scene, operation: Operation) -> None:
    never = str(uuid.uuid4())
    told = []
    for sandbox_id in (never, scene.alive.id, scene.gone):
        answer = scene.ask(
            operation.method, operation.at(sandbox_id), BLUE, BODIES.get(operation.name), **{"X-Request-ID": "same"}
        )
        told.append((answer.status, answer.body.replace(sandbox_id.encode(), never.encode())))
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("operation", LISTS, ids=str)
def test_lists_of_another_tenant_show_nothing(scene: Scene, operation: Operation) -> None:
    for place in operation.places:
        for query in ("", f"?metadata=owner%3D{MARK}", "?tenant=red&namespace=red"):
            answer = scene.ask("GET", operation.at("", place) + query, BLUE).expect(200)
            for secret in (scene.alive.id, scene.gone, MARK, *scene.alive.headers.values()):
                assert secret.encode() not in answer.body, (operation, query)
            if answer.headers["content-type"] == "application/json" and "items" in answer.json():
                assert {item["id"] for item in answer.json()["items"]} <= {scene.own}


def test_events_of_another_tenant_are_not_sent(scene: Scene) -> None:
    """From the very beginning on; blue's own event ends the look."""
    connection = http.client.HTTPConnection(scene.server.address, timeout=30)
    connection.request("GET", "/v1/events", headers={KEY: BLUE, "Last-Event-ID": "0"})
    stream = connection.getresponse()
    assert stream.status == 200
    scene.server.call("PATCH", f"/v1/sandboxes/{scene.own}/metadata", body={"end": "here"}, headers={KEY: BLUE}).expect(
        200
    )
    told = b""
    while b"metadata" not in told:
        line = stream.readline()
        assert line, "the stream ended before blue's own event"
        told += line
    connection.close()
    assert scene.own.encode() in told
    assert scene.alive.id.encode() not in told
    assert scene.gone.encode() not in told


def test_tricks_with_the_id_lead_nowhere(scene: Scene) -> None:
    red, blue = scene.alive.id, scene.own
    for path in (
        f"{blue}/../{red}", f"{blue}%2f..%2f{red}", f"{blue}/%2e%2e/{red}", f"{blue}%00{red}", f"{red}%20", f"{red}%00",
        f"{red};{blue}", f"{red},{blue}", f"{blue},{red}", red.upper(), "*", "%25", f"{red[:-1]}_",
        f"{blue}?sandbox_id={red}&sandboxId={red}", f"../sandboxes/{red}", "%27%20OR%20%271%27=%271",
    ):  # fmt: skip
        for rest in (
            "",
            "/diagnostics/logs",
            "/diagnostics/inspect",
            "/executions",
            "/endpoints/44772",
            "/proxy/44772/files/download?path=/tmp/mine",
        ):
            answer = scene.ask("GET", f"/v1/sandboxes/{path}{rest}", BLUE)
            for secret in (MARK, *scene.alive.headers.values()):
                assert secret.encode() not in answer.body, (path, rest)
        if "?" not in path:  # that one names blue's own
            scene.ask("DELETE", f"/v1/sandboxes/{path}/proxy/44772/directories?path=/tmp", BLUE)


def test_the_wish_of_another_tenant_is_not_replayed(scene: Scene) -> None:
    name = {"Idempotency-Key": "the same"}
    body = BODIES["createSandbox"]
    first, second = (scene.ask("POST", "/v1/sandboxes", key, body, **name).expect(202).json() for key in (RED, BLUE))
    assert first["id"] != second["id"]
    for key, sandbox in ((RED, first), (BLUE, second)):
        scene.ask("DELETE", f"/v1/sandboxes/{sandbox['id']}", key).expect(204)


def test_a_websocket_to_another_tenants_sandbox_is_closed(scene: Scene) -> None:
    for place in ("", "/v1"):
        address = f"ws://{scene.server.address}{place}/sandboxes/{scene.alive.id}/proxy/8000/"
        with (
            connect(address, additional_headers={KEY: BLUE}, proxy=None) as socket,
            pytest.raises(websockets.ConnectionClosed) as closed,
        ):
            socket.recv(timeout=30)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "SANDBOX::NOT_FOUND")


# -- execd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", EXECD, ids=str)
def test_execd_answers_only_to_its_own_token(scene: Scene, operation: Operation) -> None:
    """From outside, and through the server with the right key: the key is not the token."""
    endpoint = scene.ask("GET", f"/v1/sandboxes/{scene.own}/endpoints/44772", BLUE).expect(200).json()
    other, right = endpoint["headers"][TOKEN], scene.alive.headers[TOKEN]
    path = operation.at("")
    for token in (None, "", "wrong", right[:-1], right + "x", right.swapcase(), other, RED):
        headers = {} if token is None else {TOKEN: token}
        for answer in (
            Sandbox(scene.alive.id, scene.alive.address, scene.alive.prefix, {}).call(
                operation.method, path, headers=headers
            ),
            scene.ask(operation.method, f"/v1/sandboxes/{scene.alive.id}/proxy/44772{path}", RED, **headers),
        ):
            assert answer.status == 401, (token, answer)
            assert operation.method == "HEAD" or code_of(answer) == "UNAUTHORIZED", (token, answer)


@pytest.mark.parametrize("path", sorted({one.path for one in EXECD}))
def test_execd_has_no_way_around(scene: Scene, path: str) -> None:
    named = Operation("", path).at("", "")
    stranger = Sandbox(scene.alive.id, scene.alive.address, scene.alive.prefix, {})
    for method in (*METHODS, "TRACE"):
        assert stranger.call(method, named).status == 401, method
    for disguise in (
        f"{named}/",
        f"/{named}",
        f"{named}?{TOKEN}={scene.alive.headers[TOKEN]}",
        f"/ping/..{named}",
        "/v1" + named,
    ):
        # Cleaning a path up is done with a redirection, before anything is asked of execd.
        assert stranger.call("POST", disguise).status in (401, 404, 307, 301), disguise
