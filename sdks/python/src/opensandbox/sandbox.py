# SPDX-License-Identifier: Apache-2.0
"""A sandbox: create one, use it, end it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from opensandbox import models
from opensandbox.commands import Commands
from opensandbox.concurrency import shielded, sleep
from opensandbox.constants import CLEANUP_LIMIT
from opensandbox.diagnostics import Diagnostics
from opensandbox.egress import Egress
from opensandbox.endpoints import EXECD_PORT
from opensandbox.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    PermissionDeniedException,
    SandboxException,
    SandboxReadyTimeoutException,
    SandboxUnhealthyException,
)
from opensandbox.files import Files
from opensandbox.health import Health
from opensandbox.isolation import IsolationService
from opensandbox.lifecycle import Lifecycle, default_config
from opensandbox.metrics import Metrics
from opensandbox.pty import Pty
from opensandbox.requests import create_request, seconds_of, why_unusable
from opensandbox.transport import Connection

if TYPE_CHECKING:
    from opensandbox.config import ConnectionConfig

logger = logging.getLogger("opensandbox")

HealthCheck = Callable[["Sandbox"], Awaitable[bool]]


class Sandbox:
    """An isolated machine.

        sandbox = await Sandbox.create("host", timeout=timedelta(minutes=10))
        async with sandbox:
            print((await sandbox.commands.run("uname -a")).text)
        await sandbox.kill()

    Leaving `async with` lets go of the connections and leaves the sandbox running, so that another process
    may go on with `Sandbox.connect(id)`; `kill` ends it, and its timeout ends it in any case.
    """

    def __init__(
        self,
        sandbox_id: str,
        lifecycle: Lifecycle,
        execd: models.SandboxEndpoint,
        health_check: HealthCheck | None = None,
    ) -> None:
        """Use `Sandbox.create` or `Sandbox.connect`."""
        config = lifecycle.config
        self._id = sandbox_id
        self._lifecycle = lifecycle
        self._health_check = health_check
        self._execd = Connection.to_sandbox(config, execd.endpoint, execd.headers)
        self._files = Files(self._execd)
        self._commands = Commands(self._execd)
        self._pty = Pty(self._execd)
        self._isolation = IsolationService(self._execd)
        self._metrics = Metrics(self._execd)
        self._health = Health(self._execd)
        self._diagnostics = Diagnostics(lifecycle)
        self._egress = Egress(lifecycle, sandbox_id)
        self._origin = execd.origin
        self._timings: dict[str, float] = {}
        self._warnings: list[str] = []

    # --- how one gets it ----------------------------------------------------------------------------

    @classmethod
    async def create(
        cls,
        image: models.SandboxImageSpec | str | None = None,
        *,
        snapshot_id: str | None = None,
        timeout: timedelta | None = timedelta(minutes=10),
        ready_timeout: timedelta = timedelta(seconds=30),
        env: dict[str, str] | None = None,
        metadata: dict[str, str] | None = None,
        resource: dict[str, str] | None = None,
        resource_requests: dict[str, str] | None = None,
        platform: models.PlatformSpec | None = None,
        network_policy: models.NetworkPolicy | None = None,
        credential_proxy: models.CredentialProxyConfig | None = None,
        extensions: dict[str, str] | None = None,
        secure_access: bool = False,
        entrypoint: list[str] | None = None,
        volumes: list[models.Volume] | None = None,
        connection_config: ConnectionConfig | None = None,
        health_check: HealthCheck | None = None,
        health_check_polling_interval: timedelta = timedelta(milliseconds=200),
        skip_health_check: bool = False,
        lifecycle: models.SandboxLifecycle | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Create a sandbox. When this returns, its first command works.

        `timeout` is the time after which it ends by itself; None leaves it until it is killed.
        `resource` limits it, by default `{"cpu": "1", "memory": "2Gi"}`. What the server's runtime cannot
        honour is an error that names the field.

        Called again within a day with the same `idempotency_key` and arguments, it gives the sandbox that was
        created then. Without one, each call has a key of its own.
        """
        request = create_request(
            image=image,
            snapshot_id=snapshot_id,
            timeout=timeout,
            env=env,
            metadata=metadata,
            resource=resource,
            resource_requests=resource_requests,
            platform=platform,
            network_policy=network_policy,
            credential_proxy=credential_proxy,
            extensions=extensions,
            secure_access=secure_access,
            entrypoint=entrypoint,
            volumes=volumes,
            lifecycle=lifecycle,
        )
        api = Lifecycle(connection_config or default_config())
        interval = None if skip_health_check else health_check_polling_interval
        return await cls._create(api, request, ready_timeout, health_check, interval, idempotency_key)

    @classmethod
    async def create_from_template(
        cls,
        template_id: str,
        *,
        timeout: timedelta,
        ready_timeout: timedelta = timedelta(seconds=30),
        metadata: dict[str, str] | None = None,
        network_policy: models.NetworkPolicy | None = None,
        extensions: dict[str, str] | None = None,
        connection_config: ConnectionConfig | None = None,
        health_check: HealthCheck | None = None,
        health_check_polling_interval: timedelta = timedelta(milliseconds=200),
        skip_health_check: bool = False,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Create a sandbox from a template, which brings image, resources and entry point."""
        if not template_id:
            raise InvalidArgumentException("the template id is empty")
        request = create_request(
            template_id=template_id,
            timeout=timeout,
            metadata=metadata,
            network_policy=network_policy,
            extensions=extensions,
        )
        api = Lifecycle(connection_config or default_config())
        interval = None if skip_health_check else health_check_polling_interval
        return await cls._create(api, request, ready_timeout, health_check, interval, idempotency_key)

    @classmethod
    async def _create(
        cls,
        api: Lifecycle,
        request: dict[str, Any],
        ready_timeout: timedelta,
        health_check: HealthCheck | None,
        interval: timedelta | None,
        key: str | None,
    ) -> Sandbox:
        created: models.SandboxCreateResponse | None = None
        deadline = time.monotonic() + seconds_of(ready_timeout, "ready_timeout")
        _check_interval(interval)
        api.open()
        try:
            created = await api.create(request, max(api.config.request_timeout, ready_timeout), deadline, key)
            sandbox = cls(created.id, api, await api.endpoint(created.id, EXECD_PORT), health_check)
            sandbox._timings, sandbox._warnings = created.timings, created.warnings
            for warning in created.warnings:
                logger.warning("sandbox %s: %s", created.id, warning)
            if interval is not None:
                _check_alive(created)
                # An answer that carries the endpoints was given by a sandbox that works already.
                if health_check is not None or str(EXECD_PORT) not in created.endpoints:
                    await sandbox._wait(deadline, interval)
            return sandbox
        except BaseException:
            with shielded(CLEANUP_LIMIT):
                await _undo(api, created)
            raise

    @classmethod
    async def connect(
        cls,
        sandbox_id: str,
        connection_config: ConnectionConfig | None = None,
        health_check: HealthCheck | None = None,
        connect_timeout: timedelta = timedelta(seconds=30),
        health_check_polling_interval: timedelta = timedelta(milliseconds=200),
        skip_health_check: bool = False,
    ) -> Sandbox:
        """Use a sandbox that exists already."""
        api = Lifecycle(connection_config or default_config())
        interval = None if skip_health_check else health_check_polling_interval
        return await cls._attach(api, sandbox_id, connect_timeout, health_check, interval, resume=False)

    @classmethod
    async def resume(
        cls,
        sandbox_id: str,
        connection_config: ConnectionConfig | None = None,
        health_check: HealthCheck | None = None,
        resume_timeout: timedelta = timedelta(seconds=30),
        health_check_polling_interval: timedelta = timedelta(milliseconds=200),
        skip_health_check: bool = False,
    ) -> Sandbox:
        """Let a paused sandbox go on, and use it."""
        api = Lifecycle(connection_config or default_config())
        interval = None if skip_health_check else health_check_polling_interval
        return await cls._attach(api, sandbox_id, resume_timeout, health_check, interval, resume=True)

    @classmethod
    async def _attach(
        cls,
        api: Lifecycle,
        sandbox_id: str,
        timeout: timedelta,
        health_check: HealthCheck | None,
        interval: timedelta | None,
        *,
        resume: bool,
    ) -> Sandbox:
        deadline = time.monotonic() + seconds_of(timeout, "resume_timeout" if resume else "connect_timeout")
        _check_interval(interval)
        api.open()
        try:
            if resume:
                await api.resume(sandbox_id)
            sandbox = cls(sandbox_id, api, await api.endpoint(sandbox_id, EXECD_PORT), health_check)
            if interval is not None:
                await sandbox._wait(deadline, interval)
            return sandbox
        except BaseException:
            with shielded(CLEANUP_LIMIT):
                await api.close()
            raise

    # --- what it is ---------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Its id."""
        return self._id

    @property
    def files(self) -> Files:
        """Its files and directories."""
        return self._files

    @property
    def commands(self) -> Commands:
        """Commands to run in it."""
        return self._commands

    @property
    def pty(self) -> Pty:
        """Terminals in it."""
        return self._pty

    @property
    def isolation(self) -> IsolationService:
        """Isolated sessions in it, if it was created with the extension `bootstrap.execd.isolation`: `enable`."""
        return self._isolation

    @property
    def metrics(self) -> Metrics:
        """What it uses."""
        return self._metrics

    @property
    def diagnostics(self) -> Diagnostics:
        """What to look at when it does not do what it should."""
        return self._diagnostics

    @property
    def origin(self) -> str:
        """Where it came from, one of `opensandbox.models.sandboxes.SandboxOrigin`."""
        return self._origin or "unknown"

    @property
    def connection_config(self) -> ConnectionConfig:
        """The configuration it was created or connected with."""
        return self._lifecycle.config

    @property
    def timings(self) -> dict[str, float]:
        """Where the time of its creation went: milliseconds of each stage. Empty after `connect`."""
        return dict(self._timings)

    @property
    def warnings(self) -> list[str]:
        """What the server had to say about the request that created it."""
        return list(self._warnings)

    async def get_info(self) -> models.SandboxInfo:
        """Its state, times, metadata and isolation as the server knows them."""
        return await self._lifecycle.get(self._id)

    async def get_endpoint(self, port: int) -> models.SandboxEndpoint:
        """Where a port of it is reached from outside."""
        return await self._lifecycle.endpoint(self._id, port)

    async def get_signed_endpoint(self, port: int, expires: int) -> models.SandboxEndpoint:
        """Where a port is reached by whoever has this address, until `expires` (seconds since 1970)."""
        return await self._lifecycle.signed_endpoint(self._id, port, expires)

    def files_with_identity(self, uid: int, gid: int) -> Files:
        """Its files, read and written with the rights of that user and group, and owned by them.

            files = sandbox.files_with_identity(1000, 1000)
            await files.write_file("/tmp/of-the-user.txt", "mine")
            info = (await sandbox.files.get_file_info(["/tmp/of-the-user.txt"]))["/tmp/of-the-user.txt"]
            print(info.owner)

        What that user may not read or write inside the sandbox is refused here too.
        """
        if uid < 0 or gid < 0:
            raise InvalidArgumentException("uid and gid are not negative")
        return Files(self._execd.below(f"/v1/filesystem/{uid}/{gid}", "Reading and writing files as another user"))

    async def get_metrics(self) -> models.SandboxMetrics:
        """Processor and memory it uses."""
        return await self._metrics.get_metrics(self._id)

    async def get_diagnostic_logs(self, scope: str) -> models.DiagnosticContent:
        """The end of its entry point's output; `scope` is `container` or `all`."""
        return await self._diagnostics.get_logs(self._id, scope)

    async def get_diagnostic_events(self, scope: str) -> models.DiagnosticContent:
        """What happened to it, a line each; `scope` is `runtime` or `all`."""
        return await self._diagnostics.get_events(self._id, scope)

    def events(self, *, follow: bool = True, after: int | None = None) -> AsyncGenerator[models.SandboxEvent, None]:
        """What happened to it, and, unless `follow` is False, what happens from now on until it is gone.

            async for event in sandbox.events(follow=False):
                print(event.at, event.event, event.state)

        `after` is the `seq` of the last event that was seen. A broken connection is made again and goes on after
        the last event that came.
        """
        return self._lifecycle.events(self._id, follow=follow, after=after)

    async def executions(
        self, *, page: int | None = None, page_size: int | None = None
    ) -> models.PagedExecutionRecords:
        """Who ran what in it, when, and how it ended; newest first."""
        return await self._lifecycle.executions(self._id, page, page_size)

    async def is_healthy(self) -> bool:
        """Whether it answers; with a health check of its own, what that says."""
        try:
            return await self._healthy()
        except SandboxException:
            return False

    async def check_ready(self, timeout: timedelta, polling_interval: timedelta) -> None:
        """Wait until it answers, or raise `SandboxReadyTimeoutException`."""
        seconds_of(polling_interval, "polling_interval")
        await self._wait(time.monotonic() + seconds_of(timeout, "timeout"), polling_interval)

    # --- its life -----------------------------------------------------------------------------------

    async def renew(self, timeout: timedelta) -> models.SandboxRenewResponse:
        """Let it expire that long from now, sooner or later than before."""
        return await self._lifecycle.renew(self._id, timeout)

    async def patch_metadata(self, patch: dict[str, str | None]) -> models.SandboxInfo:
        """Set keys of its metadata, remove those that are None, leave the others."""
        return await self._lifecycle.patch_metadata(self._id, patch)

    async def create_snapshot(self, name: str | None = None) -> models.SnapshotInfo:
        """Keep its file system, to create others from it."""
        return await self._lifecycle.create_snapshot(self._id, name)

    async def get_egress_policy(self) -> models.NetworkPolicy:
        """Which addresses it may reach."""
        return await self._egress.get_policy()

    async def patch_egress_rules(self, rules: list[models.NetworkRule]) -> None:
        """Add rules to what it may reach, in front of those that are there."""
        await self._egress.patch_rules(rules)

    async def delete_egress_rules(self, targets: list[str]) -> None:
        """Remove the rules for these targets."""
        await self._egress.delete_rules(targets)

    async def pause(self) -> None:
        """Stop all its processes where they are; `Sandbox.resume` lets them go on."""
        await self._lifecycle.pause(self._id)

    async def kill(self) -> None:
        """End it. Its files are gone with it."""
        await self._lifecycle.delete(self._id)

    async def close(self) -> None:
        """Let go of the connections; the sandbox lives on, and so does this object."""
        await self._lifecycle.close()

    async def destroy(self) -> None:
        """`kill`, then `close` in any case."""
        try:
            await self.kill()
        finally:
            await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Sandbox({self._id!r})"

    async def _healthy(self) -> bool:
        if self._health_check is not None:
            return bool(await self._health_check(self))
        return await self._health.ping()

    async def _wait(self, deadline: float, interval: timedelta) -> None:
        why: Exception | None = None
        while True:
            try:
                if await self._healthy():
                    return
                why = None
            except (AuthenticationException, PermissionDeniedException):
                raise
            except Exception as error:
                why = error
            left = timedelta(seconds=deadline - time.monotonic())
            if left <= timedelta():
                raise SandboxReadyTimeoutException(
                    f"sandbox {self._id} is not ready: {why or 'its health check says no'}",
                    why,
                    hint="Give it more time (ready_timeout, connect_timeout), or look at its state with get_info().",
                )
            await sleep(min(interval, left))


def _check_interval(interval: timedelta | None) -> None:
    if interval is not None:
        seconds_of(interval, "health_check_polling_interval")


def _check_alive(created: models.SandboxCreateResponse) -> None:
    why = why_unusable(created)
    if why is not None:
        raise SandboxUnhealthyException(
            why, hint="The sandbox lives as long as its entry point; leave it out, or give one that keeps running."
        )


async def _undo(api: Lifecycle, created: models.SandboxCreateResponse | None) -> None:
    try:
        if created is not None:
            await api.delete(created.id)
    except SandboxException as error:
        logger.warning("sandbox %s could not be used, and not be deleted either: %s", created and created.id, error)
    finally:
        await api.close()
