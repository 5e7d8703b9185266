# SPDX-License-Identifier: Apache-2.0
"""Create, connect, list, renew, endpoints, kill: every call of the lifecycle API."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from checks import check, raises, run
from sdk import Sandbox, SandboxManager, config

from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule, SandboxFilter

# With the fake runtime there is nothing to ping.
PINGS = os.environ["COMPAT_PINGS"] == "yes"
FOREVER = ["tail", "-f", "/dev/null"]


@dataclass
class World:
    config: Any
    manager: Any
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    sandbox: Any = None

    async def create(self, **options: Any) -> Any:
        options.setdefault("metadata", {"run": self.run})
        return await Sandbox.create(
            options.pop("image", "host"), connection_config=self.config, skip_health_check=not PINGS, **options
        )


@asynccontextmanager
async def opened() -> AsyncIterator[World]:
    where = config()
    manager = await SandboxManager.create(where)
    yield World(where, manager)
    await manager.close()


@check
async def create(world: World) -> None:
    """With nothing but an image: id, defaults, Running."""
    world.sandbox = await world.create()
    assert str(uuid.UUID(world.sandbox.id)) == world.sandbox.id


@check
async def get_info(world: World) -> None:
    info = await world.sandbox.get_info()
    now = datetime.now(UTC)
    assert info.id == world.sandbox.id
    assert info.status.state == "Running", info.status
    assert info.entrypoint == FOREVER
    assert info.image.image == "host"
    assert info.metadata == {"run": world.run}
    assert timedelta() <= now - info.created_at < timedelta(minutes=1)
    assert timedelta(minutes=9) < info.expires_at - now <= timedelta(minutes=10)


@check
async def create_with_everything_a_plain_sandbox_takes(world: World) -> None:
    sandbox = await world.create(
        env={"A": "b"}, resource={"cpu": "500m", "memory": "256Mi"}, timeout=timedelta(minutes=2),
        metadata={"run": world.run, "kind": "full"}, extensions={"opensandbox.extensions.colour": "red"},
        entrypoint=["sleep", "infinity"],
    )  # fmt: skip
    info = await sandbox.get_info()
    assert info.entrypoint == ["sleep", "infinity"]
    assert info.metadata == {"run": world.run, "kind": "full"}
    assert info.extensions == {"opensandbox.extensions.colour": "red"}
    await sandbox.destroy()


@check
async def create_without_expiry(world: World) -> None:
    """`timeout=None` is sent as null; the answer has no expiry, and renewing is a conflict."""
    sandbox = await world.create(timeout=None, metadata={"run": world.run, "kind": "manual"})
    assert (await sandbox.get_info()).expires_at is None
    error = await raises(SandboxApiException, sandbox.renew(timedelta(minutes=5)))
    assert error.status_code == 409, error
    await sandbox.destroy()


@check
async def connect(world: World) -> None:
    again = await Sandbox.connect(world.sandbox.id, world.config, skip_health_check=not PINGS)
    assert again.id == world.sandbox.id
    assert (await again.get_info()).id == world.sandbox.id


@check
async def is_healthy(world: World) -> None:
    assert await world.sandbox.is_healthy() == PINGS


@check
async def list_by_state_and_metadata(world: World) -> None:
    other = await world.create(metadata={"run": world.run, "team": "red.1_a-b"})
    found = await world.manager.list_sandbox_infos(SandboxFilter(states=["running"], metadata={"run": world.run}))
    assert [info.id for info in found.sandbox_infos] == [other.id, world.sandbox.id], "newest first"
    both = {"run": world.run, "team": "red.1_a-b"}
    found = await world.manager.list_sandbox_infos(SandboxFilter(states=["Running", "Paused"], metadata=both))
    assert [info.id for info in found.sandbox_infos] == [other.id]
    found = await world.manager.list_sandbox_infos(SandboxFilter(states=["Failed"], metadata={"run": world.run}))
    assert found.sandbox_infos == []
    assert (found.pagination.total_items, found.pagination.total_pages) == (0, 0)
    await other.destroy()


@check
async def list_in_pages(world: World) -> None:
    more = [await world.create() for _ in range(2)]
    pages = [
        await world.manager.list_sandbox_infos(SandboxFilter(metadata={"run": world.run}, page=page, page_size=2))
        for page in (1, 2)
    ]
    assert [len(page.sandbox_infos) for page in pages] == [2, 1]
    assert [page.pagination.has_next_page for page in pages] == [True, False]
    assert (pages[0].pagination.total_items, pages[0].pagination.total_pages) == (3, 2)
    for sandbox in more:
        await sandbox.destroy()


@check
async def renew(world: World) -> None:
    """Later and sooner, counted from now."""
    for minutes in (30, 5):
        answer = await world.sandbox.renew(timedelta(minutes=minutes))
        left = answer.expires_at - datetime.now(UTC)
        assert timedelta(minutes=minutes - 1) < left <= timedelta(minutes=minutes), left
        assert (await world.sandbox.get_info()).expires_at == answer.expires_at


@check
async def manager_get_and_renew(world: World) -> None:
    assert (await world.manager.get_sandbox_info(world.sandbox.id)).id == world.sandbox.id
    answer = await world.manager.renew_sandbox(world.sandbox.id, timedelta(minutes=20))
    assert answer.expires_at > datetime.now(UTC) + timedelta(minutes=19)


@check
async def get_endpoint(world: World) -> None:
    """Without a scheme; with a path it ends with the port; 18080 answers though there is no egress."""
    for port in (44772, 18080, 8000, 65535):
        endpoint = await world.sandbox.get_endpoint(port)
        assert "://" not in endpoint.endpoint
        assert endpoint.endpoint.endswith(f"/{port}" if "/" in endpoint.endpoint else f":{port}"), endpoint
    headers = (await world.sandbox.get_endpoint(44772)).headers
    assert headers["X-EXECD-ACCESS-TOKEN"]


@check
async def get_endpoint_of_an_impossible_port(world: World) -> None:
    error = await raises(SandboxApiException, world.sandbox.get_endpoint(70000))
    assert error.status_code == 400, error


@check
async def errors_have_code_message_and_request_id(world: World) -> None:
    error = await raises(SandboxApiException, world.create(image="no-such-image:1"))
    assert error.status_code == 404, error
    # 1.1.1 knows no 404 of a create and shows the whole answer instead of its parts.
    assert "IMAGE::NOT_FOUND" in str(error), error
    assert error.request_id
    error = await raises(SandboxApiException, world.manager.get_sandbox_info(str(uuid.uuid4())))
    assert error.status_code == 404, error
    assert (error.error.code, bool(error.error.message)) == ("SANDBOX::NOT_FOUND", True), error
    assert error.request_id


@check
async def a_limit_that_makes_no_sense_is_refused(world: World) -> None:
    error = await raises(SandboxApiException, world.create(resource={"cpu": "abc"}))
    assert error.status_code == 400, error
    assert "cpu" in error.error.message


@check
async def metadata_of_the_wrong_form_is_refused(world: World) -> None:
    for metadata in ({"a b": "c"}, {"a": "b c"}, {"opensandbox.io/x": "y"}):
        error = await raises(SandboxApiException, world.create(metadata=metadata))
        assert error.status_code == 400, error


@check
async def what_the_runtime_cannot_do_is_refused(world: World) -> None:
    policy = NetworkPolicy(default_action="deny", egress=[NetworkRule(action="allow", target="allowed.example")])
    error = await raises(SandboxApiException, world.create(network_policy=policy))
    assert error.status_code == 400, error
    assert "networkPolicy" in error.error.message


@check
async def patch_metadata(world: World) -> None:
    """A merge patch: null removes a key, others stay; by the sandbox and by the manager."""
    info = await world.sandbox.patch_metadata({"colour": "red", "size": "1"})
    assert info.metadata == {"run": world.run, "colour": "red", "size": "1"}
    info = await world.manager.patch_sandbox_metadata(world.sandbox.id, {"colour": None, "size": "2"})
    assert info.metadata == {"run": world.run, "size": "2"}
    error = await raises(SandboxApiException, world.sandbox.patch_metadata({"opensandbox.io/x": "y"}))
    assert error.status_code == 400, error
    assert (await world.sandbox.get_info()).metadata == {"run": world.run, "size": "2"}


@check
async def diagnostics(world: World) -> None:
    sandbox, manager = world.sandbox, world.manager
    for logs in (
        await sandbox.get_diagnostic_logs("container"),
        await sandbox.diagnostics.get_logs(sandbox.id, "container"),
        await manager.get_diagnostic_logs(sandbox.id, "container"),
    ):
        assert (logs.kind, logs.scope, logs.delivery, logs.sandbox_id) == ("logs", "container", "inline", sandbox.id)
    for events in (
        await sandbox.get_diagnostic_events("runtime"),
        await sandbox.diagnostics.get_events(sandbox.id, "runtime"),
        await manager.get_diagnostic_events(sandbox.id, "runtime"),
    ):
        assert (events.kind, events.truncated) == ("events", False), events
        assert "created" in events.content, events
        assert events.content_length == len(events.content.encode())
    error = await raises(SandboxApiException, sandbox.get_diagnostic_logs("nothing"))
    assert (error.status_code, error.error.code) == (400, "DIAGNOSTICS_SCOPE_UNSUPPORTED"), error


@check
async def what_a_sandbox_knows_of_itself(world: World) -> None:
    assert world.sandbox.connection_config.get_domain() == world.config.get_domain()
    assert world.manager.connection_config.get_domain() == world.config.get_domain()
    assert str(world.sandbox.origin) != "template", world.sandbox.origin


@check
async def close(world: World) -> None:
    """Only lets go: the sandbox lives on."""
    again = await Sandbox.connect(world.sandbox.id, world.config, skip_health_check=not PINGS)
    await again.close()
    manager = await SandboxManager.create(config())
    assert (await manager.get_sandbox_info(world.sandbox.id)).status.state == "Running"
    await manager.close()


@check
async def kill(world: World) -> None:
    """Afterwards it does not exist: get, kill again and connect are 404."""
    await world.sandbox.kill()
    for call in (world.sandbox.get_info(), world.sandbox.kill(), Sandbox.connect(world.sandbox.id, world.config)):
        error = await raises(SandboxApiException, call)
        assert error.status_code == 404, error


@check
async def manager_kill(world: World) -> None:
    sandbox = await world.create()
    await world.manager.kill_sandbox(sandbox.id)
    error = await raises(SandboxApiException, world.manager.get_sandbox_info(sandbox.id))
    assert error.status_code == 404, error


@check
async def nothing_is_left(world: World) -> None:
    found = await world.manager.list_sandbox_infos(SandboxFilter(metadata={"run": world.run}))
    assert found.sandbox_infos == []


run(opened)
