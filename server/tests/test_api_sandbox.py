# SPDX-License-Identifier: Apache-2.0
"""The lifecycle API over HTTP: what published clients send, what they must get back, and bad input."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from world import BODY, NODE, eventually

from opensandbox_server.admission import Bounds
from opensandbox_server.app import Deps, create_app
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.sandbox import End, EndReason
from opensandbox_server.store import open_store
from opensandbox_server.wire import lifecycle as wire

pytestmark = pytest.mark.anyio

RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
async def client(runtime: FakeRuntime, tmp_path: Path, no_blocking: None) -> AsyncIterator[httpx2.AsyncClient]:
    async with open_store(tmp_path / "a.db", node=NODE, runtime=runtime.name) as store:
        app = create_app(Deps(store, runtime, b"k" * 32, node=NODE, epoch=store.epoch, max_timeout=86400))
        async with app.router.lifespan_context(app):
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8080") as made:
                yield made


def no_nulls(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(no_nulls, value.values()))
    return all(map(no_nulls, value)) if isinstance(value, list) else value is not None


async def create(client: httpx2.AsyncClient, **changes: Any) -> dict[str, Any]:
    answer = await client.post("/v1/sandboxes", json={**BODY, **changes})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def is_error(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["code"] == code, body
    assert isinstance(body["message"], str)
    assert body["message"]
    assert body["hint"]
    assert body["requestId"] == answer.headers["x-request-id"]
    assert no_nulls(body)
    wire.Error.model_validate({**body, "detail": None})
    return dict(body)


async def test_create_answers_as_published_and_more(client: httpx2.AsyncClient) -> None:
    body = await create(
        client,
        metadata={"team": "blue"},
        extensions={"opensandbox.extensions.x": "y"},
        snapshotId=None,
        networkPolicy=None,
        colour="red",
    )
    wire.CreateSandboxResponse.model_validate(body)
    assert no_nulls(body)
    assert body["status"]["state"] == "Running"
    assert body["entrypoint"] == BODY["entrypoint"]
    assert body["image"] == {"uri": "host"}
    assert (body["metadata"], body["extensions"]) == ({"team": "blue"}, {"opensandbox.extensions.x": "y"})
    for time in (body["createdAt"], body["expiresAt"], body["status"]["lastTransitionAt"]):
        assert RFC3339.fullmatch(time)
    assert body["endpoints"]["44772"]["endpoint"].endswith(f"/{body['id']}/44772")
    assert body["endpoints"]["44772"]["headers"]["X-EXECD-ACCESS-TOKEN"]
    assert body["warnings"] == ["The unknown field 'colour' was ignored."]
    assert body["isolation"]["runtime"] == "fake"
    known = wire.CreateSandboxResponse.model_fields.values()
    assert body.keys() <= {
        field.alias or name for name, field in zip(wire.CreateSandboxResponse.model_fields, known, strict=True)
    }


async def test_optional_fields_are_absent_when_there_is_nothing_to_say(client: httpx2.AsyncClient) -> None:
    body = await create(client, timeout=None, env={"A": None})
    assert body.keys().isdisjoint({"expiresAt", "metadata", "extensions", "platform", "end", "warnings", "snapshotId"})
    assert no_nulls(body)


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_whole_life_at_root_and_under_v1(client: httpx2.AsyncClient, prefix: str) -> None:
    created = (await client.post(f"{prefix}/sandboxes", json=BODY)).json()
    path = f"{prefix}/sandboxes/{created['id']}"
    got = (await client.get(path)).json()
    assert got == {key: value for key, value in created.items() if key not in ("timings", "endpoints")}
    assert (await client.get(f"{prefix}/sandboxes")).json()["items"] == [got]
    later = datetime.now(UTC) + timedelta(hours=1)
    renewed = await client.post(f"{path}/renew-expiration", json={"expiresAt": later.isoformat()})
    assert renewed.status_code == 200
    assert datetime.fromisoformat(renewed.json()["expiresAt"]) == later
    endpoint = await client.get(f"{path}/endpoints/44772?use_server_proxy=false")
    assert endpoint.json() == created["endpoints"]["44772"]
    assert "headers" not in (await client.get(f"{path}/endpoints/18080?use_server_proxy=false")).json()
    gone = await client.delete(path)
    assert (gone.status_code, gone.content) == (204, b"")
    is_error(await client.delete(path), 404, "SANDBOX::NOT_FOUND")
    is_error(await client.get(path), 404, "SANDBOX::NOT_FOUND")


async def test_an_entry_point_that_ended_at_once(client: httpx2.AsyncClient, runtime: FakeRuntime) -> None:
    runtime.end_next_create(End(EndReason.EXITED, datetime.now(UTC), exit_code=3, message="It exited with code 3."))
    body = await create(client)
    assert body["status"]["state"] == "Failed"
    assert body["end"]["exitCode"] == 3
    assert body["end"].keys() == {"reason", "at", "exitCode", "message"}


async def test_an_end_shows_without_asking_the_runtime(client: httpx2.AsyncClient, runtime: FakeRuntime) -> None:
    body = await create(client)
    runtime.end(body["id"], exit_code=0)
    path = f"/sandboxes/{body['id']}"

    async def ended() -> bool:
        return bool((await client.get(path)).json()["status"]["state"] != "Running")

    await eventually(ended)
    shown = (await client.get(path)).json()
    assert shown["status"]["state"] == "Terminated"
    assert shown["status"]["reason"] == "EXITED"


async def test_list_filters_and_pages(client: httpx2.AsyncClient, runtime: FakeRuntime) -> None:
    ids = [(await create(client, metadata={"n": str(number), "all": "yes"}))["id"] for number in range(5)]
    first = (await client.get("/v1/sandboxes?page=1&pageSize=2")).json()
    assert [item["id"] for item in first["items"]] == ids[:2:-1]
    assert first["pagination"] == {"page": 1, "pageSize": 2, "totalItems": 5, "totalPages": 3, "hasNextPage": True}
    assert not (await client.get("/v1/sandboxes?page=3&pageSize=2")).json()["pagination"]["hasNextPage"]
    beyond = (await client.get(f"/v1/sandboxes?page={10**18}")).json()
    assert beyond["items"] == []
    # Encoded twice, as published clients do.
    assert len((await client.get("/v1/sandboxes?metadata=n%3D3%26all%3Dyes")).json()["items"]) == 1
    assert (await client.get("/v1/sandboxes?state=rUNNING&state=Paused")).json()["pagination"]["totalItems"] == 5
    for nothing in ("state=Paused", "state=Allocated", "metadata=n%3D3%26all%3Dno"):
        empty = (await client.get(f"/v1/sandboxes?{nothing}")).json()
        assert empty["items"] == []
        assert empty["pagination"] == {
            "page": 1,
            "pageSize": 20,
            "totalItems": 0,
            "totalPages": 0,
            "hasNextPage": False,
        }


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("page=0", 422, "GENERAL::INVALID_REQUEST"),
        ("page=x", 422, "GENERAL::INVALID_REQUEST"),
        ("pageSize=0", 422, "GENERAL::INVALID_REQUEST"),
        ("pageSize=201", 422, "GENERAL::INVALID_REQUEST"),
        ("metadata=novalue", 400, "INVALID_METADATA_FORMAT"),
        ("state=Sleeping", 400, "SANDBOX::INVALID_PARAMETER"),
    ],
)
async def test_bad_queries(client: httpx2.AsyncClient, query: str, status: int, code: str) -> None:
    body = is_error(await client.get(f"/v1/sandboxes?{query}"), status, code)
    if status == 422:
        assert body["detail"][0]["loc"] == ["query", query.partition("=")[0]]
        assert "body" not in body["hint"]


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"timeout": 10}, 422, "GENERAL::INVALID_REQUEST"),
        ({"timeout": "soon"}, 422, "GENERAL::INVALID_REQUEST"),
        ({"timeout": 86401}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"entrypoint": []}, 422, "GENERAL::INVALID_REQUEST"),
        ({"entrypoint": "sleep 1"}, 422, "GENERAL::INVALID_REQUEST"),
        ({"image": None}, 422, "GENERAL::INVALID_REQUEST"),
        ({"image": {"uri": "unknown:1"}}, 404, "IMAGE::NOT_FOUND"),
        ({"resourceLimits": {"cpu": "abc"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"resourceLimits": {"cpu": 1}}, 422, "GENERAL::INVALID_REQUEST"),
        ({"resourceLimits": {"memory": "1Ki"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"resourceLimits": {"memory": "999Ei"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"metadata": {"a b": "c"}}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"env": {"OPENSANDBOX_LIFECYCLE": "x"}}, 422, "GENERAL::INVALID_REQUEST"),
        ({"platform": {"os": "beos", "arch": "amd64"}}, 422, "GENERAL::INVALID_REQUEST"),
        ({"secureAccess": True}, 400, "SANDBOX::API_NOT_SUPPORTED"),
        ({"networkPolicy": {"defaultAction": "perhaps"}}, 422, "GENERAL::INVALID_REQUEST"),
        ({"image": None, "snapshotId": "s", "entrypoint": None}, 404, "SNAPSHOT::NOT_FOUND"),
    ],
)
async def test_bad_creates_leave_nothing(
    client: httpx2.AsyncClient, runtime: FakeRuntime, changes: dict[str, Any], status: int, code: str
) -> None:
    body = is_error(await client.post("/v1/sandboxes", json={**BODY, **changes}), status, code)
    assert ("detail" in body) == (status == 422)
    if status == 422:
        assert body["detail"][0].keys() >= {"type", "loc", "msg"}
    assert runtime.specs == {}
    assert (await client.get("/v1/sandboxes")).json()["items"] == []


async def test_schema_violations_look_as_published(client: httpx2.AsyncClient) -> None:
    body = (await client.post("/v1/sandboxes", json={**BODY, "timeout": 10})).json()
    assert body["detail"] == [
        {
            "type": "greater_than_equal",
            "loc": ["body", "timeout"],
            "msg": "Input should be greater than or equal to 60",
            "input": 10,
            "ctx": {"ge": 60},
        }
    ]
    body = (await client.post("/v1/sandboxes", json={**BODY, "image": None})).json()
    assert body["detail"][0]["loc"] == ["body"]
    assert body["detail"][0]["msg"] == "Value error, Exactly one of image or snapshotId must be provided."


async def test_secrets_are_not_sent_back(client: httpx2.AsyncClient) -> None:
    wrong = {**BODY, "image": {"uri": "host", "auth": {"username": "u", "password": 12345}}, "env": {"KEY": 67890}}
    answer = await client.post("/v1/sandboxes", json=wrong)
    assert answer.status_code == 422
    assert "12345" not in answer.text
    assert "67890" not in answer.text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        json.dumps({**BODY, "expiresAt": "2099-01-01T00:00:00Z", "x": float("nan")}).encode(),
        b'{"entrypoint": ["\\ud800"]}',
        b"[" * 100_000,
        b'{"a":' * 10_000,
        b" " * (5 << 20),
        json.dumps({**BODY, "env": {"A": "x" * (5 << 20)}}).encode(),
    ],
    ids=lambda content: f"{content[:12]!r}...{len(content)}",
)
async def test_bodies_that_are_no_request(client: httpx2.AsyncClient, content: bytes) -> None:
    for path in ("/v1/sandboxes", "/v1/sandboxes/x/renew-expiration", "/v1/metrics/events"):
        is_error(await client.post(path, content=content), 422, "GENERAL::INVALID_REQUEST")


@pytest.mark.parametrize(
    ("expires", "status", "code"),
    [
        ("2001-01-01T00:00:00Z", 400, "SANDBOX::INVALID_EXPIRATION"),
        ("9999-12-31T23:59:59-23:00", 400, "SANDBOX::INVALID_EXPIRATION"),
        ("soon", 422, "GENERAL::INVALID_REQUEST"),
        (None, 422, "GENERAL::INVALID_REQUEST"),
    ],
)
async def test_bad_renewals(client: httpx2.AsyncClient, expires: str | None, status: int, code: str) -> None:
    path = f"/v1/sandboxes/{(await create(client))['id']}/renew-expiration"
    is_error(await client.post(path, json={"expiresAt": expires}), status, code)


async def test_what_never_expires_cannot_be_renewed(client: httpx2.AsyncClient) -> None:
    path = f"/v1/sandboxes/{(await create(client, timeout=None))['id']}/renew-expiration"
    is_error(await client.post(path, json={"expiresAt": "2099-01-01T00:00:00"}), 409, "SANDBOX::NO_EXPIRATION")


@pytest.mark.parametrize(
    ("tail", "status", "code"),
    [
        ("0", 400, "SANDBOX::INVALID_PORT"),
        ("65536", 400, "SANDBOX::INVALID_PORT"),
        ("http", 422, "GENERAL::INVALID_REQUEST"),
        ("80?expires=1999999999", 400, "SANDBOX::API_NOT_SUPPORTED"),
        ("80?use_server_proxy=true&expires=1999999999", 400, "SANDBOX::INVALID_PARAMETER"),
        ("80?use_server_proxy=perhaps", 422, "GENERAL::INVALID_REQUEST"),
    ],
)
async def test_bad_endpoints(client: httpx2.AsyncClient, tail: str, status: int, code: str) -> None:
    sandbox_id = (await create(client))["id"]
    is_error(await client.get(f"/v1/sandboxes/{sandbox_id}/endpoints/{tail}"), status, code)


@pytest.mark.parametrize("sandbox_id", ["nope", "..", "%2e%2e%2fx", "a" * 5000, "%00", "'; DROP TABLE sandboxes; --"])
async def test_ids_that_are_none(client: httpx2.AsyncClient, sandbox_id: str) -> None:
    answer = await client.get(f"/v1/sandboxes/{sandbox_id}")
    assert answer.status_code == 404
    assert len(answer.content) < 1000


async def test_routes_that_are_none(client: httpx2.AsyncClient) -> None:
    assert is_error(await client.get("/v1/nope"), 404, "GENERAL::NOT_FOUND")["detail"] == "Not Found"
    wrong = await client.put("/v1/sandboxes")
    assert is_error(wrong, 405, "GENERAL::METHOD_NOT_ALLOWED")["detail"] == "Method Not Allowed"
    assert wrong.headers["allow"]
    for path in ("/v1/health", "/v1/version", "/v1/docs"):
        is_error(await client.get(path), 404, "GENERAL::NOT_FOUND")
    is_error(await client.post("/metrics/events", json={}), 404, "GENERAL::NOT_FOUND")


async def test_health_version_and_metrics(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "healthy"}
    assert (await client.get("/version")).json() == {"version": "1.2.0"}
    event = {"eventType": "sandbox.create", "createDurationMs": 12, "success": True}
    answer = await client.post("/v1/metrics/events", json=event)
    assert (answer.status_code, answer.content) == (204, b"")
    is_error(
        await client.post("/v1/metrics/events", json={**event, "createDurationMs": -1}), 422, "GENERAL::INVALID_REQUEST"
    )


# -- request ids and what nobody expected ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/v1/sandboxes", "/v1/sandboxes/nope", "/nope", "/v1/sandboxes?page=0"])
async def test_the_callers_request_id_comes_back_on_every_answer(client: httpx2.AsyncClient, path: str) -> None:
    answer = await client.get(path, headers={"X-Request-ID": "abc-123"})
    assert answer.headers.get_list("x-request-id") == ["abc-123"]
    if answer.status_code >= 400:
        assert answer.json()["requestId"] == "abc-123"


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "ä", "a\tb"])
async def test_a_request_without_a_decent_id_gets_one(client: httpx2.AsyncClient, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-ID": given.encode()}
    answers = [await client.get("/health", headers=headers) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", made) for made in ids)


async def test_a_bug_shows_nothing_but_the_request_id(
    client: httpx2.AsyncClient, runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.fail_next_create(RuntimeError("the secret inside"))
    answer = await client.post("/v1/sandboxes", json=BODY, headers={"X-Request-ID": "r-1"})
    is_error(answer, 500, "GENERAL::UNKNOWN_ERROR")
    assert "secret" not in answer.text
    assert "the secret inside" in caplog.text
    assert "r-1" in caplog.text
    assert (await client.get("/v1/sandboxes")).json()["items"] == []


async def test_a_node_that_is_away_is_told_as_such(client: httpx2.AsyncClient, runtime: FakeRuntime) -> None:
    runtime.unavailable("sandboxd does not answer.")
    is_error(await client.post("/v1/sandboxes", json=BODY), 503, "NODE::UNAVAILABLE")
    assert (await client.get("/v1/sandboxes")).status_code == 200
    runtime.available()


async def test_the_pages_of_a_list_hold_each_sandbox_once(client: httpx2.AsyncClient) -> None:
    made: set[str] = set()

    async def some() -> None:
        for _ in range(30):
            made.add((await create(client, metadata={"all": "yes"}))["id"])

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(some)
    listed: list[str] = []
    for page in range(1, 7):
        answer = await client.get(f"/v1/sandboxes?pageSize=50&page={page}&metadata=all%3Dyes&state=Running")
        listed += [item["id"] for item in answer.json()["items"]]
    assert len(listed) == 300
    assert set(listed) == made


# -- metadata ----------------------------------------------------------------------------------------------------------


async def test_metadata_is_patched_as_published(client: httpx2.AsyncClient) -> None:
    made = await create(client, metadata={"a": "1", "b": "2"})
    path = f"/v1/sandboxes/{made['id']}/metadata"
    told = await client.patch(path, json={"a": None, "c": "3", "example.com/d": ""})
    assert told.status_code == 200
    wire.Sandbox.model_validate(told.json())
    assert told.json()["metadata"] == {"b": "2", "c": "3", "example.com/d": ""}
    assert told.json()["status"] == made["status"], "no transition"
    found = await client.get("/v1/sandboxes", params={"metadata": "c=3"})
    assert [item["id"] for item in found.json()["items"]] == [made["id"]]
    assert (await client.get("/v1/sandboxes", params={"metadata": "a=1"})).json()["items"] == []
    bare = await client.patch(path, json={"b": None, "c": None, "example.com/d": None, "never": None})
    assert "metadata" not in bare.json()
    assert "metadata" not in (await client.get(f"/v1/sandboxes/{made['id']}")).json()


@pytest.mark.parametrize(
    ("patch", "status", "code"),
    [
        ({"opensandbox.io/x": "y"}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"opensandbox.io/x": None}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"no spaces": "y"}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"a": "no spaces"}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({f"k{number}": "v" for number in range(256)}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({f"k{number}": None for number in range(257)}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"a": 1}, 422, "GENERAL::INVALID_REQUEST"),
        ([], 422, "GENERAL::INVALID_REQUEST"),
        (None, 422, "GENERAL::INVALID_REQUEST"),
    ],
)
async def test_bad_patches_change_nothing(client: httpx2.AsyncClient, patch: Any, status: int, code: str) -> None:
    made = await create(client, metadata={"old": "1"})
    is_error(await client.patch(f"/v1/sandboxes/{made['id']}/metadata", json=patch), status, code)
    assert (await client.get(f"/v1/sandboxes/{made['id']}")).json()["metadata"] == {"old": "1"}


async def test_there_is_no_metadata_of_what_is_not_there(client: httpx2.AsyncClient) -> None:
    is_error(await client.patch("/v1/sandboxes/nope/metadata", json={"a": "b"}), 404, "SANDBOX::NOT_FOUND")


# -- Idempotency-Key and capacity --------------------------------------------------------------------------------------


async def test_a_repeated_create_says_that_it_is_one(client: httpx2.AsyncClient) -> None:
    key = {"Idempotency-Key": "7f3a"}
    first = await client.post("/v1/sandboxes", json=BODY, headers=key)
    again = await client.post("/sandboxes", json=BODY, headers=key)
    assert (first.status_code, again.status_code) == (202, 202)
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    wire.CreateSandboxResponse.model_validate(again.json())
    assert again.json() == {name: value for name, value in first.json().items() if name != "timings"}
    other = await client.post("/v1/sandboxes", json={**BODY, "timeout": 700}, headers=key)
    is_error(other, 409, "GENERAL::IDEMPOTENCY_MISMATCH")


@pytest.mark.parametrize("keys", [[""], ["x" * 256], ["a\tb"], ["caf\u00e9"], ["a", "a"]])
async def test_bad_keys_are_refused(client: httpx2.AsyncClient, keys: list[str]) -> None:
    headers = [(b"Idempotency-Key", key.encode()) for key in keys]
    body = is_error(await client.post("/v1/sandboxes", json=BODY, headers=headers), 422, "GENERAL::INVALID_REQUEST")
    assert body["detail"][0]["loc"] == ["header", "Idempotency-Key"]
    assert (await client.get("/v1/sandboxes")).json()["items"] == []


async def test_a_full_server_says_when_to_come_back(runtime: FakeRuntime, tmp_path: Path) -> None:
    async with open_store(tmp_path / "full.db", node=NODE, runtime=runtime.name) as store:
        bounds = Bounds(sandboxes=1)
        app = create_app(Deps(store, runtime, b"k" * 32, node=NODE, epoch=store.epoch, bounds=bounds))
        transport = httpx2.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://localhost:8080") as client,
        ):
            await create(client)
            told = await client.post("/v1/sandboxes", json=BODY)
            body = is_error(told, 429, "SANDBOX::CAPACITY_EXHAUSTED")
            assert told.headers["retry-after"] == "10", "nothing ends within a minute"
            assert body["details"] == {"limit": 1}, "there is no queue"


async def test_an_address_that_ingress_will_refuse_comes_with_a_warning(runtime: FakeRuntime, tmp_path: Path) -> None:
    async with open_store(tmp_path / "open.db", node=NODE, runtime=runtime.name) as store:
        app = create_app(Deps(store, runtime, b"k" * 32, node=NODE, epoch=store.epoch, api_key="key", loopback=False))
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app),
                base_url="http://sandboxes.example:8080",
                headers={"OPEN-SANDBOX-API-KEY": "key"},
            ) as client,
        ):
            made = await create(client)
            base = f"/v1/sandboxes/{made['id']}/endpoints"
            told = (await client.get(f"{base}/8000")).json()
            assert told["endpoint"].endswith(f"/{made['id']}/8000")
            assert "use_server_proxy=true" in told["warnings"][0]
            assert wire.Endpoint.model_validate(told).warnings == told["warnings"]
            for works in (f"{base}/44772", f"{base}/8000?use_server_proxy=true"):
                assert "warnings" not in (await client.get(works)).json()
            assert "warnings" not in made["endpoints"]["44772"]


async def test_on_loopback_every_port_works_and_none_has_a_warning(client: httpx2.AsyncClient) -> None:
    made = await create(client)
    assert "warnings" not in (await client.get(f"/v1/sandboxes/{made['id']}/endpoints/8000")).json()
