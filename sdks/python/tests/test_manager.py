# SPDX-License-Identifier: Apache-2.0
"""What happened, snapshots, templates, network: each call is the request of the protocol, each refusal is typed."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from stub import ID, TOKEN, Received, Reply, Stub

from opensandbox import ConnectionConfig, Sandbox, SandboxManager
from opensandbox.exceptions import (
    InvalidArgumentException,
    NotFoundException,
    SandboxConnectionException,
    SandboxInternalException,
    UnsupportedException,
)
from opensandbox.models import (
    CreateTemplateRequest,
    HistoryFilter,
    NetworkRule,
    SandboxEndReason,
    SnapshotFilter,
    TemplateFilter,
    TemplatePhase,
    TemplateReadiness,
)

Idle = Callable[[], Awaitable[bool]]
ONE = f"/v1/sandboxes/{ID}"
PAGE = {"page": 1, "pageSize": 20, "totalItems": 1, "totalPages": 1, "hasNextPage": False}
AT = "2026-01-01T00:00:00Z"
INFO = {"id": ID, "status": {"state": "Running"}, "createdAt": AT, "entrypoint": ["a"], "metadata": {"a": "b"}}
SNAPSHOT = {"id": "s1", "sandboxId": ID, "name": "n", "status": {"state": "Ready"}, "createdAt": AT}
TEMPLATE = {
    "templateId": "t1", "image": "i", "publish": "s3://b/k", "format": "native", "createdAt": AT, "updatedAt": AT,
    "status": {"phase": "Succeeded", "manifestRef": "m"}, "readiness": {"warmupSeconds": 3},
}  # fmt: skip
GONE = {
    "id": ID, "image": "host", "entrypoint": ["a"], "createdAt": AT, "goneAt": AT, "executions": 2,
    "end": {"reason": "exited", "exitCode": 3, "at": AT},
}  # fmt: skip


def told(*events: tuple[int, str], cut: bool = False) -> Reply:
    chunks = [b": hello\n\n"]
    for seq, event in events:
        body = {"seq": seq, "sandboxId": ID, "at": AT, "event": event, "state": "Running"}
        chunks.append(f"id: {seq}\nevent: {event}\ndata: {json.dumps(body)}\n\n".encode())
    return Reply(200, headers={"Content-Type": "text/event-stream"}, chunks=chunks, cut=cut)


@pytest.mark.anyio
async def test_metadata_is_patched(stub: Stub, sandbox: Sandbox, config: ConnectionConfig) -> None:
    stub.routes["PATCH", f"{ONE}/metadata"] = Reply.of(INFO)
    assert (await sandbox.patch_metadata({"a": "b", "c": None})).metadata == {"a": "b"}
    async with await SandboxManager.create(config) as manager:
        assert (await manager.patch_sandbox_metadata(ID, {})).id == ID
    assert [request.json() for request in stub.requests] == [{"a": "b", "c": None}, {}]


@pytest.mark.anyio
async def test_diagnostics(stub: Stub, sandbox: Sandbox, config: ConnectionConfig) -> None:
    content: dict[str, Any] = {
        "sandboxId": ID, "delivery": "inline", "contentType": "text/plain", "content": "line\n", "contentLength": 5,
        "truncated": False,
    }  # fmt: skip
    for kind in ("logs", "events"):
        stub.routes["GET", f"{ONE}/diagnostics/{kind}"] = Reply.of({**content, "kind": kind, "scope": "all"})
    assert (await sandbox.get_diagnostic_logs("container")).content == "line\n"
    assert (await sandbox.get_diagnostic_events("runtime")).kind == "events"
    assert (await sandbox.diagnostics.get_logs(ID, "all")).content_length == 5
    assert (await sandbox.diagnostics.get_events(ID, "all")).scope == "all"
    async with await SandboxManager.create(config) as manager:
        assert (await manager.get_diagnostic_logs(ID, "all")).delivery == "inline"
        assert not (await manager.get_diagnostic_events(ID, "all")).truncated
    assert stub.requests[0].params == [("scope", "container")]


@pytest.mark.anyio
async def test_history_executions_and_runtime(stub: Stub, sandbox: Sandbox, config: ConnectionConfig) -> None:
    record = {"id": "e1", "content": "ls", "startedAt": AT, "running": False, "exitCode": 0, "userAgent": "x"}
    stub.routes["GET", f"{ONE}/executions"] = Reply.of({"items": [record], "pagination": PAGE})
    stub.routes["GET", "/v1/history"] = Reply.of({"items": [GONE], "pagination": PAGE})
    stub.routes["GET", f"/v1/history/{ID}"] = Reply.of({**GONE, "output": "bye"})
    stub.routes["GET", "/v1/runtime"] = Reply.of(
        {"name": "local", "version": "1.2.0", "abilities": {"pause": False}, "sandboxes": {"now": 1, "limit": 5},
         "creating": {"now": 0, "waiting": 2}, "host": {"kernel": "6.1"}}
    )  # fmt: skip
    assert [r.content for r in (await sandbox.executions(page=2, page_size=5)).records] == ["ls"]
    assert stub.requests[-1].params == [("page", "2"), ("pageSize", "5")]
    async with await SandboxManager.create(config) as manager:
        assert (await manager.executions(ID)).records[0].user_agent == "x"
        wanted = HistoryFilter(reasons=["exited", "killed"], metadata={"a": "b c"}, page=1, page_size=2)
        gone = (await manager.history(wanted)).entries[0]
        assert (gone.end.reason, gone.end.exit_code, gone.output) == (SandboxEndReason.EXITED, 3, None)
        assert stub.requests[-1].params == [
            ("metadata", "a=b%20c"), ("reason", "exited"), ("reason", "killed"), ("page", "1"), ("pageSize", "2"),
        ]  # fmt: skip
        await manager.history()
        assert stub.requests[-1].params == []
        assert (await manager.get_history(ID)).output == "bye"
        runtime = await manager.runtime()
    assert (runtime.name, runtime.abilities, runtime.sandboxes.limit) == ("local", {"pause": False}, 5)
    assert runtime.creating.waiting == 2


@pytest.mark.anyio
async def test_events_as_they_are(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes["GET", f"{ONE}/events"] = told((1, "created"), (2, "running"))
    assert [event.event async for event in sandbox.events(follow=False)] == ["created", "running"]
    assert stub.requests[-1].params == [("follow", "false")]
    assert "last-event-id" not in stub.requests[-1].headers


@pytest.mark.anyio
async def test_events_go_on_after_a_broken_connection(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes["GET", f"{ONE}/events"] = [
        told((4, "running"), cut=True), None, told((5, "renewed")), told((6, "deleted"), (7, "never read")),
    ]  # fmt: skip
    seen = [event.seq async for event in sandbox.events(after=3)]
    assert seen == [4, 5, 6]
    assert [request.headers["last-event-id"] for request in stub.requests] == ["3", "4", "4", "5"]


@pytest.mark.anyio
async def test_events_of_a_sandbox_that_went_meanwhile_end(stub: Stub, sandbox: Sandbox) -> None:
    gone = Reply.error(404, "SANDBOX::NOT_FOUND", "gone")
    stub.routes["GET", f"{ONE}/events"] = [told((1, "created"), cut=True), gone]
    assert [event.event async for event in sandbox.events()] == ["created"]
    with pytest.raises(NotFoundException):
        assert [event.seq async for event in sandbox.events()] == []


@pytest.mark.anyio
async def test_events_of_all_sandboxes_may_be_left(stub: Stub, config: ConnectionConfig, idle: Idle) -> None:
    stub.routes["GET", "/v1/events"] = told((8, "deleted"), (9, "created"))
    async with await SandboxManager.create(config) as manager:
        events = manager.events(after=7)
        # One sandbox is gone; the others are not.
        assert [(await anext(events)).seq, (await anext(events)).seq] == [8, 9]
        await events.aclose()
    assert await idle()
    assert stub.requests[0].headers["last-event-id"] == "7"


@pytest.mark.anyio
async def test_events_are_given_up_in_the_end(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["GET", "/v1/events"] = lambda _: None
    async with await SandboxManager.create(config) as manager:
        with pytest.raises(SandboxConnectionException):
            await anext(manager.events())
        stub.routes["GET", "/v1/events"] = Reply(200, chunks=[b"data: [1]\n\n"])
        with pytest.raises(SandboxInternalException, match="not a SandboxEvent"):
            await anext(manager.events())


@pytest.mark.anyio
async def test_snapshots(stub: Stub, sandbox: Sandbox, config: ConnectionConfig) -> None:
    stub.routes["POST", f"{ONE}/snapshots"] = Reply.of(SNAPSHOT, 202)
    stub.routes["GET", "/v1/snapshots"] = Reply.of({"items": [SNAPSHOT], "pagination": PAGE})
    stub.routes["GET", "/v1/snapshots/s1"] = Reply.of(SNAPSHOT)
    stub.routes["DELETE", "/v1/snapshots/s1"] = Reply(204)
    assert (await sandbox.create_snapshot()).sandbox_id == ID
    async with await SandboxManager.create(config) as manager:
        assert (await manager.create_snapshot(ID, "n")).name == "n"
        assert [request.json() for request in stub.requests] == [{}, {"name": "n"}]
        wanted = SnapshotFilter(sandbox_id=ID, name="n", states=["Ready", "Failed"], page=1, page_size=3)
        assert (await manager.list_snapshots(wanted)).snapshot_infos[0].status.state == "Ready"
        assert stub.requests[-1].params == [
            ("sandboxId", ID), ("name", "n"), ("state", "Ready"), ("state", "Failed"), ("page", "1"), ("pageSize", "3"),
        ]  # fmt: skip
        assert (await manager.get_snapshot("s1")).id == "s1"
        await manager.delete_snapshot("s1")
        with pytest.raises(InvalidArgumentException, match="snapshot id"):
            await manager.get_snapshot("")


@pytest.mark.anyio
async def test_templates(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", "/v1/templates"] = Reply.of(TEMPLATE, 201)
    stub.routes["GET", "/v1/templates"] = Reply.of({"items": [TEMPLATE], "pagination": PAGE})
    stub.routes["GET", "/v1/templates/t1"] = Reply.of(TEMPLATE)
    stub.routes["DELETE", "/v1/templates/t1"] = Reply(204)
    async with await SandboxManager.create(config) as manager:
        request = CreateTemplateRequest(image="i", publish="s3://b/k", readiness=TemplateReadiness(warmup_seconds=3))
        made = await manager.create_template(request)
        assert stub.requests[0].json() == {"image": "i", "publish": "s3://b/k", "readiness": {"warmupSeconds": 3}}
        assert (made.template_id, made.status.phase) == ("t1", TemplatePhase.SUCCEEDED)
        assert made.readiness == TemplateReadiness(warmup_seconds=3)
        listed = await manager.list_templates(TemplateFilter(metadata={"a": "b"}))
        assert listed.template_infos[0].status.manifest_ref == "m"
        assert stub.requests[-1].params == [("metadata", "a=b")]
        assert (await manager.get_template("t1")).format == "native"
        await manager.delete_template("t1")


@pytest.mark.anyio
async def test_from_a_template(stub: Stub, config: ConnectionConfig) -> None:
    created = {**INFO, "endpoints": {"44772": {"endpoint": f"{stub.address}/e", "headers": TOKEN}}}
    stub.routes["POST", "/v1/sandboxes"] = Reply.of(created, 202)
    async with await Sandbox.create_from_template("t1", timeout=timedelta(minutes=2), connection_config=config):
        pass
    assert stub.requests[0].json() == {"templateId": "t1", "timeout": 120, "secureAccess": False}
    with pytest.raises(InvalidArgumentException):
        await Sandbox.create_from_template("", timeout=timedelta(minutes=2), connection_config=config)


@pytest.mark.anyio
async def test_pause_and_resume(stub: Stub, sandbox: Sandbox, config: ConnectionConfig) -> None:
    stub.routes["POST", f"{ONE}/pause"] = Reply(202)
    stub.routes["POST", f"{ONE}/resume"] = Reply(202)
    stub.routes["GET", f"{ONE}/endpoints/44772"] = Reply.of(
        {"endpoint": f"{stub.address}/e"}, 200, **{"OPEN-SANDBOX-ORIGIN": "template"}
    )
    stub.routes["GET", "/e/ping"] = Reply()
    await sandbox.pause()
    async with await Sandbox.resume(ID, config) as resumed:
        assert (resumed.id, resumed.origin, sandbox.origin) == (ID, "template", "unknown")
    async with await SandboxManager.create(config) as manager:
        await manager.pause_sandbox(ID)
        await manager.resume_sandbox(ID)
    assert stub.calls() == [
        f"POST {ONE}/pause", f"POST {ONE}/resume", f"GET {ONE}/endpoints/44772", "GET /e/ping", f"POST {ONE}/pause",
        f"POST {ONE}/resume",
    ]  # fmt: skip


@pytest.mark.anyio
async def test_what_is_refused_is_typed(stub: Stub, sandbox: Sandbox, config: ConnectionConfig) -> None:
    refusal = Reply.error(400, "SANDBOX::API_NOT_SUPPORTED", "not built yet", hint="See /docs.")
    for method, path in [
        ("POST", "/pause"), ("POST", "/resume"), ("POST", "/snapshots"), ("GET", "/networkpolicy"),
        ("PATCH", "/networkpolicy"), ("DELETE", "/networkpolicy"),
    ]:  # fmt: skip
        stub.routes[method, ONE + path] = refusal
    for call in (
        sandbox.pause,
        sandbox.create_snapshot,
        sandbox.get_egress_policy,
        lambda: sandbox.patch_egress_rules([]),
        lambda: sandbox.delete_egress_rules(["a"]),
        lambda: Sandbox.resume(ID, config),
    ):
        with pytest.raises(UnsupportedException, match="hint: See /docs"):
            await call()


@pytest.mark.anyio
async def test_egress_rules(stub: Stub, sandbox: Sandbox) -> None:
    path = f"{ONE}/networkpolicy"
    policy = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "a.example"}]}
    stub.routes["GET", path] = Reply.of({"status": "ok", "mode": "enforcing", "policy": policy})
    stub.routes["PATCH", path] = stub.routes["DELETE", path] = Reply.of({"status": "ok"})
    found = await sandbox.get_egress_policy()
    assert (found.default_action, found.egress) == ("deny", [NetworkRule(action="allow", target="a.example")])
    await sandbox.patch_egress_rules([NetworkRule(action="deny", target="b.example")])
    assert stub.requests[-1].json() == [{"action": "deny", "target": "b.example"}]
    await sandbox.delete_egress_rules(["b.example"])
    assert stub.requests[-1].json() == ["b.example"]


@pytest.mark.anyio
async def test_a_signed_address_is_asked_for_each_time(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes["GET", f"{ONE}/endpoints/80"] = Reply.of({"endpoint": "h:1/signed"})
    for _ in range(2):
        assert (await sandbox.get_signed_endpoint(80, 1900000000)).endpoint == "h:1/signed"
    assert stub.requests[-1].params == [("use_server_proxy", "false"), ("expires", "1900000000")]
    assert len(stub.requests) == 2


@pytest.mark.anyio
async def test_files_as_somebody_else(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes["GET", "/e/v1/filesystem/5/6/files/download"] = Reply(200, b"mine")
    files = sandbox.files_with_identity(5, 6)
    assert await files.read_file("/x") == "mine"
    assert stub.requests[-1].headers["x-execd-access-token"] == "secret-token"
    # A file that is not there is told apart from a sandbox that cannot do this.
    stub.routes["GET", "/e/v1/filesystem/5/6/files/download"] = Reply.error(404, "FILE_NOT_FOUND", "no such file")
    with pytest.raises(NotFoundException, match="no such file"):
        await files.read_file("/x")
    with pytest.raises(UnsupportedException, match="as another user is not supported"):
        await files.write_file("/x", "y")
    with pytest.raises(InvalidArgumentException):
        sandbox.files_with_identity(-1, 0)


@pytest.mark.anyio
async def test_sessions(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes["POST", "/e/session"] = Reply.of({"session_id": "s"})
    assert await sandbox.commands.create_session() == "s"
    assert stub.requests[-1].body == b""
    assert await sandbox.commands.create_session(working_directory="/w") == "s"
    assert stub.requests[-1].json() == {"cwd": "/w"}

    def run(_: Received) -> Reply:
        done = {"type": "execution_complete", "timestamp": 1, "execution_time": 1}
        events = [{"type": "init", "timestamp": 1, "text": "s"}, {"type": "stdout", "timestamp": 1, "text": "/w"}, done]
        return Reply(200, chunks=[json.dumps(event).encode() + b"\n\n" for event in events])

    stub.routes["POST", "/e/session/s/run"] = run
    execution = await sandbox.commands.run_in_session("s", "pwd", timeout=timedelta(seconds=2), working_directory="/w")
    assert (execution.text, execution.exit_code) == ("/w", 0)
    assert stub.requests[-1].json() == {"command": "pwd", "cwd": "/w", "timeout": 2000}
    stub.routes["DELETE", "/e/session/s"] = Reply()
    await sandbox.commands.delete_session("s")
    with pytest.raises(NotFoundException):
        await sandbox.commands.delete_session("other")
    with pytest.raises(InvalidArgumentException):
        await sandbox.commands.run_in_session("s", "")
