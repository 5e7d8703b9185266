# SPDX-License-Identifier: Apache-2.0
"""Creating, connecting, renewing, ending; and listing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from stub import ID, TOKEN, Received, Reply, Stub, created

from opensandbox import ConnectionConfig, Sandbox, SandboxManager
from opensandbox.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    NotFoundException,
    SandboxConnectionException,
    SandboxRateLimitException,
    SandboxReadyTimeoutException,
    SandboxUnhealthyException,
    UnsupportedException,
)
from opensandbox.models import Host, NetworkPolicy, NetworkRule, SandboxFilter, SandboxImageSpec, SandboxState, Volume
from opensandbox.models.sandboxes import SandboxImageAuth

SOON = timedelta(milliseconds=1)
CREATE, ONE = "/v1/sandboxes", f"/v1/sandboxes/{ID}"
INFO = {
    "id": ID,
    "status": {"state": "Running", "reason": "RUNNING", "lastTransitionAt": "2026-01-01T00:00:00.5Z"},
    "image": {"uri": "host"},
    "createdAt": "2026-01-01T00:00:00Z",
    "expiresAt": "2026-01-01T00:10:00Z",
    "entrypoint": ["tail", "-f", "/dev/null"],
    "metadata": {"team": "red"},
    "isolation": {"runtime": "local", "limits": {"disk": {"means": "none"}}, "noNewPrivileges": True},
    "somethingNew": {"from": "a newer server"},
}


@pytest.mark.anyio
async def test_create_is_one_round_trip(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", CREATE] = created(stub, timings={"total": 5.5}, warnings=["unknown field: x"])
    async with await Sandbox.create("host", connection_config=config) as sandbox:
        assert sandbox.id == ID
        assert sandbox.timings == {"total": 5.5}
        assert sandbox.warnings == ["unknown field: x"]
    assert stub.calls() == [f"POST {CREATE}"]
    assert stub.requests[0].json() == {
        "image": {"uri": "host"},
        "timeout": 600,
        "resourceLimits": {"cpu": "1", "memory": "2Gi"},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "secureAccess": False,
    }


@pytest.mark.anyio
async def test_everything_given_is_sent(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", CREATE] = created(stub)
    sandbox = await Sandbox.create(
        SandboxImageSpec("private:1", auth=SandboxImageAuth(username="u", password="p")),
        timeout=None,
        env={"A": "b"},
        metadata={"team": "red"},
        resource={},
        extensions={"opensandbox.extensions.x": "y"},
        entrypoint=["sleep", "60"],
        network_policy=NetworkPolicy(egress=[NetworkRule(action="allow", target="allowed.example")]),
        volumes=[Volume(name="data", host=Host(path="/srv/data"), mount_path="/data", read_only=True)],
        secure_access=True,
        connection_config=config,
    )
    await sandbox.close()
    assert stub.requests[0].json() == {
        "image": {"uri": "private:1", "auth": {"username": "u", "password": "p"}},
        "env": {"A": "b"},
        "metadata": {"team": "red"},
        "resourceLimits": {},
        "extensions": {"opensandbox.extensions.x": "y"},
        "entrypoint": ["sleep", "60"],
        "networkPolicy": {"defaultAction": "deny", "egress": [{"action": "allow", "target": "allowed.example"}]},
        "volumes": [{"name": "data", "host": {"path": "/srv/data"}, "mountPath": "/data", "readOnly": True}],
        "secureAccess": True,
    }


@pytest.mark.anyio
async def test_without_endpoints_in_the_answer_it_looks_them_up_and_waits(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", CREATE] = created(stub, endpoints=None)
    stub.routes["GET", f"{ONE}/endpoints/44772"] = Reply.of({"endpoint": f"{stub.address}/e", "headers": TOKEN})
    stub.routes["GET", "/e/ping"] = [Reply.error(502, "INGRESS::PORT_CLOSED", "not yet"), Reply()]
    async with await Sandbox.create("host", connection_config=config, health_check_polling_interval=SOON):
        pass
    assert stub.calls() == [f"POST {CREATE}", f"GET {ONE}/endpoints/44772", "GET /e/ping", "GET /e/ping"]
    assert stub.requests[1].params == [("use_server_proxy", "false")]


@pytest.mark.anyio
async def test_a_health_check_of_the_user_decides(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", CREATE] = created(stub)
    answers = [False, True, False]

    async def check(sandbox: Sandbox) -> bool:
        assert sandbox.id == ID
        return answers.pop(0)

    async with await Sandbox.create(
        "host", connection_config=config, health_check=check, health_check_polling_interval=SOON
    ) as sandbox:
        assert answers == [False]
        assert not await sandbox.is_healthy()
    assert stub.calls() == [f"POST {CREATE}"]


@pytest.mark.anyio
async def test_what_cannot_be_used_is_deleted_and_the_reason_told(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["DELETE", ONE] = Reply(204)
    stub.routes["GET", f"{ONE}/endpoints/44772"] = Reply.of({"endpoint": f"{stub.address}/e"})
    stub.routes["GET", "/e/ping"] = Reply.error(502, "INGRESS::PORT_CLOSED", "nobody there")
    stub.routes["POST", CREATE] = created(stub, endpoints=None)
    with pytest.raises(SandboxReadyTimeoutException, match="nobody there") as raised:
        await Sandbox.create(
            "host", connection_config=config, ready_timeout=SOON * 20, health_check_polling_interval=SOON
        )
    assert raised.value.code == "READY_TIMEOUT"
    assert stub.calls()[-1] == f"DELETE {ONE}"

    # A wrong token does not become right by waiting.
    stub.requests.clear()
    stub.routes["GET", "/e/ping"] = Reply.error(401, "UNAUTHORIZED", "wrong token")
    with pytest.raises(AuthenticationException):
        await Sandbox.create("host", connection_config=config)
    assert stub.calls()[-2:] == ["GET /e/ping", f"DELETE {ONE}"]


@pytest.mark.anyio
async def test_an_entry_point_that_ends_at_once_is_told(stub: Stub, config: ConnectionConfig) -> None:
    end = {"reason": "exited", "exitCode": 3, "at": "2026-01-01T00:00:01Z"}
    stub.routes["POST", CREATE] = created(stub, status={"state": "Failed"}, end=end, entrypoint=["false"])
    stub.routes["DELETE", ONE] = Reply(204)
    with pytest.raises(SandboxUnhealthyException, match=r"\['false'\] ended at once: exited with code 3"):
        await Sandbox.create("host", entrypoint=["false"], connection_config=config)
    assert stub.calls()[-1] == f"DELETE {ONE}"


@pytest.mark.anyio
async def test_an_error_of_the_delete_does_not_hide_the_first_one(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", CREATE] = created(stub, status={"state": "Failed"})
    stub.routes["DELETE", ONE] = Reply.error(500, "GENERAL::UNKNOWN_ERROR", "and this too")
    with pytest.raises(SandboxUnhealthyException):
        await Sandbox.create("host", connection_config=config)


@pytest.mark.anyio
async def test_what_the_runtime_cannot_do_is_an_error(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", CREATE] = Reply.error(501, "NODE::UNSUPPORTED_HOST", "no user namespaces", hint="sysctl …")
    with pytest.raises(UnsupportedException, match=r"no user namespaces \(HTTP 501, .*\) — hint: sysctl …"):
        await Sandbox.create("host", connection_config=config)
    assert len(stub.requests) == 1


@pytest.mark.anyio
async def test_a_timeout_below_a_minute_is_refused_before_sending(stub: Stub, config: ConnectionConfig) -> None:
    with pytest.raises(InvalidArgumentException, match="60 seconds"):
        await Sandbox.create("host", timeout=timedelta(seconds=5), connection_config=config)
    assert not stub.requests


@pytest.mark.anyio
async def test_connect_use_and_end(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["GET", f"{ONE}/endpoints/44772"] = Reply.of({"endpoint": f"{stub.address}/e", "headers": TOKEN})
    stub.routes["GET", "/e/ping"] = Reply()
    stub.routes["GET", ONE] = Reply.of(INFO)
    stub.routes["DELETE", ONE] = [Reply(204), Reply.error(404, "SANDBOX::NOT_FOUND", "gone")]
    sandbox = await Sandbox.connect(ID, connection_config=config)
    info = await sandbox.get_info()
    assert info.image is not None
    assert info.image.image == "host"
    assert info.status.state == SandboxState.RUNNING
    assert info.expires_at == datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
    assert info.isolation is not None
    assert info.isolation.limits is not None
    assert info.isolation.limits["disk"].means == "none"
    assert info.isolation.no_new_privileges
    assert info.model_dump()["created_at"] == datetime(2026, 1, 1, tzinfo=UTC)
    assert await sandbox.is_healthy()
    await sandbox.check_ready(timedelta(seconds=1), SOON)
    await sandbox.destroy()
    with pytest.raises(NotFoundException):
        await sandbox.kill()


@pytest.mark.anyio
async def test_connect_without_a_health_check_only_looks_it_up(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["GET", f"{ONE}/endpoints/44772"] = Reply.of({"endpoint": f"{stub.address}/e"})
    async with await Sandbox.connect(ID, config, skip_health_check=True) as sandbox:
        stub.routes["GET", "/e/ping"] = Reply.error(502, "INGRESS::PORT_CLOSED", "no")
        assert not await sandbox.is_healthy()
    assert stub.calls() == [f"GET {ONE}/endpoints/44772", "GET /e/ping"]


@pytest.mark.anyio
async def test_connect_to_nothing(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["GET", f"{ONE}/endpoints/44772"] = Reply.error(404, "SANDBOX::NOT_FOUND", "no such sandbox")
    with pytest.raises(NotFoundException, match="no such sandbox"):
        await Sandbox.connect(ID, config)
    with pytest.raises(InvalidArgumentException):
        await Sandbox.connect("", config)


@pytest.mark.anyio
async def test_endpoints_are_remembered(stub: Stub, sandbox: Sandbox, config: ConnectionConfig) -> None:
    stub.routes["GET", f"{ONE}/endpoints/8000"] = Reply.of({"endpoint": "h:1/x/8000"})
    assert (await sandbox.get_endpoint(8000)).endpoint == "h:1/x/8000"
    assert (await sandbox.get_endpoint(8000)).headers == {}
    assert (await sandbox.get_endpoint(44772)).headers == TOKEN
    assert len(stub.requests) == 1


@pytest.mark.anyio
async def test_endpoints_are_not_remembered_when_switched_off(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", CREATE] = created(stub, endpoints=None)
    stub.routes["GET", f"{ONE}/endpoints/44772"] = Reply.of({"endpoint": f"{stub.address}/e"})
    off = config.model_copy(update={"endpoint_cache_disabled": True})
    async with await Sandbox.create("host", connection_config=off, skip_health_check=True) as sandbox:
        stub.requests.clear()
        await sandbox.get_endpoint(44772)
        await sandbox.get_endpoint(44772)
    assert len(stub.requests) == 2


@pytest.mark.anyio
async def test_renew_counts_from_now(stub: Stub, sandbox: Sandbox) -> None:
    def renew(request: Received) -> Reply:
        return Reply.of({"expiresAt": request.json()["expiresAt"]})

    stub.routes["POST", f"{ONE}/renew-expiration"] = renew
    before = datetime.now(UTC)
    answer = await sandbox.renew(timedelta(minutes=30))
    assert before <= answer.expires_at - timedelta(minutes=30) <= datetime.now(UTC)
    with pytest.raises(InvalidArgumentException):
        await sandbox.renew(timedelta())


@pytest.mark.anyio
async def test_list_with_filters(stub: Stub, config: ConnectionConfig) -> None:
    page = {"page": 2, "pageSize": 5, "totalItems": 6, "totalPages": 2, "hasNextPage": False}
    stub.routes["GET", CREATE] = Reply.of({"items": [INFO], "pagination": page})
    stub.routes["GET", ONE] = Reply.of(INFO)
    stub.routes["DELETE", ONE] = Reply(204)
    async with await SandboxManager.create(config) as manager:
        found = await manager.list_sandbox_infos(
            SandboxFilter(states=["Running", "Paused"], metadata={"a": "b c&d", "e": "f"}, page=2, page_size=5)
        )
        assert (await manager.get_sandbox_info(ID)).id == ID
        await manager.kill_sandbox(ID)
    assert [info.id for info in found.sandbox_infos] == [ID]
    assert found.pagination.total_items == 6
    # After one decoding the server still has to split, and decode again.
    assert stub.requests[0].params == [
        ("state", "Running"),
        ("state", "Paused"),
        ("metadata", "a=b%20c%26d&e=f"),
        ("page", "2"),
        ("pageSize", "5"),
    ]


def test_values_are_checked_before_anything_is_sent() -> None:
    with pytest.raises(ValidationError):
        SandboxFilter(page_size=0)
    with pytest.raises(ValidationError):
        SandboxImageSpec(" ")
    with pytest.raises(ValidationError, match="exactly one of host, pvc and ossfs"):
        Volume(name="x", mount_path="/x")


RUNTIME = Reply.of({"name": "local", "version": "1", "abilities": {}, "sandboxes": {"now": 0}, "creating": {"now": 0}})
FULL = Reply.of(
    {"code": "SANDBOX::CAPACITY_EXHAUSTED", "message": "full", "details": {"queuePosition": 7}},
    429,
    **{"Retry-After": "0"},
)


def keys(stub: Stub) -> list[str]:
    return [received.headers["idempotency-key"] for received in stub.requests if received.method == "POST"]


@pytest.mark.parametrize("failure", [None, FULL, Reply.error(503, "NODE::UNAVAILABLE", "x"), Reply(502)])
@pytest.mark.anyio
async def test_a_create_is_repeated_where_the_key_is_honoured(
    stub: Stub, config: ConnectionConfig, failure: Reply | None
) -> None:
    stub.routes["POST", CREATE] = [failure, failure, created(stub)]
    stub.routes["GET", "/v1/runtime"] = RUNTIME
    async with await Sandbox.create("host", connection_config=config) as sandbox:
        assert sandbox.id == ID
    assert stub.calls() == [f"POST {CREATE}", "GET /v1/runtime", f"POST {CREATE}", f"POST {CREATE}"]
    assert len(set(keys(stub))) == 1


@pytest.mark.anyio
async def test_a_create_is_not_repeated_where_it_would_make_two(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", CREATE] = lambda _: None
    with pytest.raises(SandboxConnectionException, match="broke"):
        await Sandbox.create("host", connection_config=config)
    assert stub.calls() == [f"POST {CREATE}", "GET /v1/runtime"]


@pytest.mark.anyio
async def test_a_full_server_says_when_to_come_again(stub: Stub, config: ConnectionConfig) -> None:
    later = Reply(429, FULL.body, {**FULL.headers, "Retry-After": "45"})
    stub.routes["POST", CREATE] = later
    stub.routes["GET", "/v1/runtime"] = RUNTIME
    # Longer than there is time to wait for the sandbox: the caller decides.
    with pytest.raises(SandboxRateLimitException, match="full") as raised:
        await Sandbox.create("host", connection_config=config)
    assert raised.value.retry_after == timedelta(seconds=45)
    assert raised.value.queue_position == 7
    assert stub.calls() == [f"POST {CREATE}"]


@pytest.mark.anyio
async def test_each_create_has_a_key_of_its_own_unless_given(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", CREATE] = created(stub)
    for key in (None, None, "mine"):
        await (await Sandbox.create("host", connection_config=config, idempotency_key=key)).close()
    first, second, third = keys(stub)
    assert first != second
    assert third == "mine"


@pytest.mark.anyio
async def test_the_other_configuration_is_refused(stub: Stub) -> None:
    class Other:
        pass

    with pytest.raises(InvalidArgumentException, match="is a Other") as raised:
        await Sandbox.create("host", connection_config=Other())  # type: ignore[arg-type]
    assert ConnectionConfig.__name__ in str(raised.value)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("arguments", "said", "right"),
    [
        ({"timeout": 600}, "timeout is a timedelta, not int", "timeout=timedelta(seconds=600)"),
        ({"ready_timeout": 2.5}, "ready_timeout is a timedelta", "ready_timeout=timedelta(seconds=2.5)"),
        ({"health_check_polling_interval": "1s"}, "health_check_polling_interval is a timedelta", "timedelta("),
        ({"image": 123}, "image is a text or a SandboxImageSpec, not int", 'image="host"'),
        ({"image": " "}, "image: must not be blank", '"host"'),
        ({"network_policy": {"egress": []}}, "takes a NetworkPolicy, not dict", "NetworkPolicy.model_validate("),
        ({"volumes": [{"name": "a"}]}, "takes a Volume, not dict", "Volume("),
        ({"metadata": {"a": {1}}}, "cannot be sent", "metadata="),
    ],
)
async def test_a_wrong_argument_is_refused_with_the_right_call(
    stub: Stub, config: ConnectionConfig, arguments: dict[str, Any], said: str, right: str
) -> None:
    with pytest.raises(InvalidArgumentException) as refused:
        await Sandbox.create(**{"image": "host", "connection_config": config, **arguments})
    assert said in refused.value.message
    assert right in (refused.value.hint or "")
    assert stub.requests == []


@pytest.mark.anyio
async def test_spans_of_other_calls_are_checked_too(sandbox: Sandbox, config: ConnectionConfig) -> None:
    number: Any = 30
    with pytest.raises(InvalidArgumentException, match="timeout is a timedelta"):
        await sandbox.renew(number)
    with pytest.raises(InvalidArgumentException, match="polling_interval is a timedelta"):
        await sandbox.check_ready(timedelta(seconds=1), number)
    with pytest.raises(InvalidArgumentException, match="connect_timeout is a timedelta"):
        await Sandbox.connect(ID, config, connect_timeout=number)
    with pytest.raises(InvalidArgumentException, match="resume_timeout is a timedelta"):
        await Sandbox.resume(ID, config, resume_timeout=number)
