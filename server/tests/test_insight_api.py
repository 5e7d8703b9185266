# SPDX-License-Identifier: Apache-2.0
"""Events, history, executions, diagnostics, the runtime and figures over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from test_api_sandbox import create, is_error, no_nulls
from world import NODE, eventually

from opensandbox_server.app import Deps, create_app
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.store import open_store
from opensandbox_server.wire import lifecycle as wire

pytestmark = pytest.mark.anyio
KEY = "correct-horse"


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
async def client(runtime: FakeRuntime, tmp_path: Path, no_blocking: None) -> AsyncIterator[httpx2.AsyncClient]:
    async with open_store(tmp_path / "a.db", node=NODE, runtime=runtime.name) as store:
        app = create_app(Deps(store, runtime, b"k" * 32, node=NODE, epoch=store.epoch, api_key=KEY))
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app),
                base_url="http://localhost:8080",
                headers={"OPEN-SANDBOX-API-KEY": KEY},
            ) as made,
        ):
            yield made


async def ended(client: httpx2.AsyncClient, runtime: FakeRuntime, **changes: Any) -> str:
    """A sandbox that ran one command, said something, and is gone."""
    sandbox_id = str((await create(client, **changes))["id"])
    runtime.outputs[sandbox_id] = b"".join(b"line %d\n" % number for number in range(150))
    runtime.journals[sandbox_id] = (
        b'{"id":"a","content":"ls -l","started_at":"2026-01-02T03:04:05Z","client":"10.0.0.1","user_agent":"SDK",'
        b'"finished_at":"2026-01-02T03:04:06Z","end":{"reason":"exited","exit_code":0},"output":5}\n'
    )
    assert (await client.delete(f"/v1/sandboxes/{sandbox_id}")).status_code == 204
    return sandbox_id


async def test_history_as_in_the_contract(client: httpx2.AsyncClient, runtime: FakeRuntime) -> None:
    sandbox_id = await ended(client, runtime, metadata={"team": "blue"})
    page = (await client.get("/v1/history", params={"metadata": "team=blue", "reason": "killed"})).json()
    told = wire.HistoryPage.model_validate(page)
    assert [entry.id for entry in told.items] == [sandbox_id]
    assert told.items[0].executions == 1
    assert "output" not in page["items"][0]
    one = (await client.get(f"/history/{sandbox_id}")).json()
    wire.HistoryEntry.model_validate(one)
    assert one["output"].endswith("line 149\n")
    assert no_nulls(page)
    assert no_nulls(one)
    assert (await client.get("/v1/history?metadata=team%3Dred")).json()["pagination"]["totalItems"] == 0
    assert "/v1/history" in is_error(await client.get("/v1/history/none"), 404, "SANDBOX::NOT_FOUND")["hint"]
    is_error(await client.get("/v1/history?reason=boredom"), 422, "GENERAL::INVALID_REQUEST")


async def test_executions_as_in_the_contract(client: httpx2.AsyncClient, runtime: FakeRuntime) -> None:
    sandbox_id = await ended(client, runtime)
    page = (await client.get(f"/v1/sandboxes/{sandbox_id}/executions")).json()
    [one] = wire.ExecutionPage.model_validate(page).items
    assert (one.content, one.client, one.user_agent, one.exit_code, one.running) == (
        "ls -l",
        "10.0.0.1",
        "SDK",
        0,
        False,
    )
    assert no_nulls(page)
    is_error(await client.get("/v1/sandboxes/none/executions"), 404, "SANDBOX::NOT_FOUND")


async def test_a_stream_of_what_is_gone_ends(client: httpx2.AsyncClient, runtime: FakeRuntime) -> None:
    sandbox_id = await ended(client, runtime)
    stream = await client.get(f"/v1/sandboxes/{sandbox_id}/events")
    assert stream.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in stream.text.split("\n\n") if block.startswith("id: ")]
    told = [wire.SandboxEvent.model_validate(json.loads(block.split("data: ")[1])) for block in blocks]
    assert [event.event for event in told] == ["created", "running", "deleting", "deleted"]
    again = await client.get(f"/sandboxes/{sandbox_id}/events", headers={"Last-Event-ID": str(told[2].seq)})
    assert again.text.count("id: ") == 1
    is_error(await client.get("/v1/sandboxes/none/events"), 404, "SANDBOX::NOT_FOUND")
    for bad in ("-1", "x", str(2**70)):
        answer = await client.get(f"/v1/sandboxes/{sandbox_id}/events", headers={"Last-Event-ID": bad})
        is_error(answer, 422, "GENERAL::INVALID_REQUEST")


async def test_events_say_what_happened(client: httpx2.AsyncClient, runtime: FakeRuntime) -> None:
    made = await create(client, metadata={"old": "value-1"})
    base = f"/v1/sandboxes/{made['id']}"
    until = {"expiresAt": "2099-01-02T03:04:05.5Z"}
    assert (await client.post(f"{base}/renew-expiration", json=until)).status_code == 200
    patch = {"old": None, **{f"key-{number:02}": "value-2" for number in range(12)}}
    assert (await client.patch(f"{base}/metadata", json=patch)).json()["status"]["message"] == "The sandbox is ready."
    runtime.end(made["id"], exit_code=3)

    async def has_ended() -> bool:
        return "end" in (await client.get(base)).json()

    await eventually(has_ended)
    assert (await client.get(base)).json()["status"]["message"] == "The entry point exited with code 3."
    await client.delete(base)
    stream = (await client.get(f"{base}/events?follow=false")).text
    events = [json.loads(block.split("data: ")[1]) for block in stream.split("\n\n") if block.startswith("id: ")]
    told = {event["event"]: (event["state"], event.get("message")) for event in events}
    assert told["renewed"] == ("Running", "It now expires at 2099-01-02T03:04:05Z.")
    changed = f"Set {', '.join(f'key-{number:02}' for number in range(10))} and 2 more; removed old."
    assert told["metadata changed"] == ("Running", changed)
    assert told["ended"] == told["deleted"] == ("Failed", "The entry point exited with code 3.")
    assert "value-" not in stream
    lines = (await client.get(f"{base}/diagnostics/events")).text.splitlines()
    assert [line.split(" ", 1)[1] for line in lines if "renewed" in line or "ended" in line] == [
        "Running renewed: It now expires at 2099-01-02T03:04:05Z.",
        "Failed ended: The entry point exited with code 3.",
    ]


async def test_the_last_event_says_how_a_living_one_went(client: httpx2.AsyncClient, runtime: FakeRuntime) -> None:
    sandbox_id = await ended(client, runtime)
    last = (await client.get(f"/v1/sandboxes/{sandbox_id}/events?follow=false")).text.strip().split("data: ")[-1]
    event = json.loads(last)
    assert (event["event"], event["state"], event["reason"]) == ("deleted", "Terminated", "KILLED")


async def test_without_following_a_stream_ends_at_once(client: httpx2.AsyncClient) -> None:
    sandbox_id = (await create(client))["id"]
    stream = await client.get(f"/v1/sandboxes/{sandbox_id}/events?follow=false")
    assert stream.text.count("\nevent: ") == 2


@pytest.mark.parametrize("is_gone", [False, True])
async def test_diagnostics_with_a_scope(client: httpx2.AsyncClient, runtime: FakeRuntime, is_gone: bool) -> None:
    if is_gone:
        sandbox_id = await ended(client, runtime)
    else:
        sandbox_id = (await create(client))["id"]
        runtime.outputs[sandbox_id] = b"".join(b"line %d\n" % number for number in range(150)) + b"\xff"
    for scope in ("container", "all"):
        body = (await client.get(f"/v1/sandboxes/{sandbox_id}/diagnostics/logs?scope={scope}")).json()
        told = wire.DiagnosticContent.model_validate(body)
        assert told.content is not None
        assert len(told.content.splitlines()) == 100
        assert told.content_length == len(told.content.encode())
        assert (told.truncated, told.scope, told.delivery.value) == (True, scope, "inline")
    body = (await client.get(f"/v1/sandboxes/{sandbox_id}/diagnostics/events?scope=runtime")).json()
    assert body["content"].splitlines()[0].endswith("Pending created")
    assert body["truncated"] is False
    for kind, scope in (("logs", "runtime"), ("events", "container"), ("logs", ""), ("events", "x" * 500)):
        answer = await client.get(f"/v1/sandboxes/{sandbox_id}/diagnostics/{kind}?scope={scope}")
        is_error(answer, 400, "DIAGNOSTICS_SCOPE_UNSUPPORTED")


async def test_diagnostics_as_text(client: httpx2.AsyncClient, runtime: FakeRuntime) -> None:
    made = await create(client, env={"API_KEY": "k-1", "MyToken": "t-1", "DB_PASSWORD": "p\n-1", "HOME": "/root"})
    base = f"/v1/sandboxes/{made['id']}/diagnostics"
    runtime.outputs[made["id"]] = b"one\ntwo\nthree"
    logs = await client.get(f"{base}/logs?tail=2&container=any")
    assert (logs.text, logs.headers["deprecation"]) == ("two\nthree\n", "true")
    assert logs.headers["content-type"] == "text/plain; charset=utf-8"
    events = await client.get(f"{base}/events?limit=1")
    assert (events.text.count("\n"), events.headers["deprecation"]) == (1, "true")
    for text in ((await client.get(f"{base}/inspect")).text, (await client.get(f"{base}/summary")).text):
        assert "API_KEY: ***" in text
        assert "HOME: /root" in text
        assert not [secret for secret in ("k-1", "t-1", "p\n-1", "-1") if f": {secret}" in text]
    assert "three" in (await client.get(f"{base}/summary?tail=1&event_limit=1")).text
    body = is_error(await client.get(f"{base}/logs?since=10m"), 400, "SANDBOX::API_NOT_SUPPORTED")
    assert "tail" in body["hint"]
    is_error(await client.get(f"{base}/logs?tail=0"), 422, "GENERAL::INVALID_REQUEST")
    for kind in ("logs", "events", "inspect", "summary"):
        is_error(await client.get(f"/v1/sandboxes/none/diagnostics/{kind}"), 404, "SANDBOX::NOT_FOUND")


async def test_diagnostics_show_no_secret_and_no_line_of_a_client(client: httpx2.AsyncClient) -> None:
    secrets = ("PGPASSWD", "MYSQL_PWD", "AWS_CREDENTIALS", "Basic_auth", "PASSPHRASE", "SECRETS", "id_token")
    hidden = dict.fromkeys(secrets, "hidden")
    shown = {
        "DATABASE_URL": "postgres://me:hid@den@db.example:5432/x?y=z",
        "PROXY": "a http://hidden@proxy/ b https://u:hidden@[::1]/",
        "PWD": "/srv",
        "MAIL": "somebody@host.example",
    }
    made = await create(client, env=hidden | shown | {"A\nstate: Failed\x1b[2J": "x"})
    text = (await client.get(f"/v1/sandboxes/{made['id']}/diagnostics/inspect")).text
    assert "hid" not in text
    assert "den@" not in text
    lines = text.splitlines()
    for line in (
        "  MYSQL_PWD: ***",
        "  DATABASE_URL: postgres://***@db.example:5432/x?y=z",
        "  PROXY: a http://***@proxy/ b https://***@[::1]/",
        "  PWD: /srv",
        "  MAIL: somebody@host.example",
        '  "A\\nstate: Failed\\u001b[2J": x',
    ):
        assert line in lines, line
    assert "\x1b" not in text
    assert "state: Failed" not in lines


async def test_the_runtime_says_what_it_is(client: httpx2.AsyncClient) -> None:
    await create(client)
    body = (await client.get("/v1/runtime")).json()
    told = wire.RuntimeInfo.model_validate(body)
    assert (told.name, told.sandboxes.now, told.creating.now) == ("fake", 1, 0)
    assert told.abilities["pause"] is False
    assert no_nulls(body)


async def test_figures_need_the_key_and_name_routes_only(client: httpx2.AsyncClient) -> None:
    await create(client)
    await client.get("/v1/sandboxes/made-up-by-a-client")
    await client.get("/made/up/path")
    await client.request("BREW", "/v1/sandboxes")
    text = (await client.get("/metrics")).text
    assert 'opensandbox_creates_total{outcome="created"} 1' in text
    assert 'opensandbox_sandboxes{state="Running"} 1' in text
    assert 'opensandbox_create_duration_seconds_count{stage="total"} 1' in text
    assert 'route="/sandboxes/{sandbox_id}",method="GET",status="404"} 1' in text
    assert 'route="none",method="GET",status="404"} 1' in text
    assert 'method="other"' in text
    assert "made-up" not in text
    assert "/made" not in text
    assert "BREW" not in text
    del client.headers["OPEN-SANDBOX-API-KEY"]
    is_error(await client.get("/metrics"), 401, "MISSING_API_KEY")
    is_error(await client.get("/metrics", headers={"Authorization": "Bearer wrong"}), 401, "INVALID_API_KEY")
    assert (await client.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})).status_code == 200
    # The bearer form is for figures alone.
    is_error(await client.get("/v1/sandboxes", headers={"Authorization": f"Bearer {KEY}"}), 401, "MISSING_API_KEY")
    is_error(await client.get("/v1/metrics", headers={"Authorization": f"Bearer {KEY}"}), 401, "MISSING_API_KEY")
