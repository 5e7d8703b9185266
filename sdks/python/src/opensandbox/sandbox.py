# SPDX-License-Identifier: Apache-2.0
"""A sandbox: create one, use it, end it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from opensandbox import models
from opensandbox.commands import Commands
from opensandbox.concurrency import shielded, sleep
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
from opensandbox.lifecycle import Lifecycle, default_config
from opensandbox.metrics import Metrics
from opensandbox.transport import NO_RETRIES, Connection

if TYPE_CHECKING:
    from opensandbox.config import ConnectionConfig

logger = logging.getLogger("opensandbox")

HealthCheck = Callable[["Sandbox"], Awaitable[bool]]

DEFAULT_ENTRYPOINT = ["tail", "-f", "/dev/null"]
DEFAULT_RESOURCE = {"cpu": "1", "memory": "2Gi"}
# Ending a sandbox that could not be used must not hang the error that tells why.
CLEANUP_LIMIT = timedelta(seconds=10)


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
        self._metrics = Metrics(self._execd)
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
    ) -> Sandbox:
        """Create a sandbox. When this returns, its first command works.

        `timeout` is the time after which it ends by itself; None leaves it until it is killed.
        `resource` limits it, by default `{"cpu": "1", "memory": "2Gi"}`. What the server's runtime cannot
        honour is an error that names the field.
        """
        dump = models.base.dump
        wanted = {
            "image": _image(image),
            "snapshotId": snapshot_id,
            "timeout": _seconds(timeout),
            "env": env,
            "metadata": metadata,
            "resourceLimits": DEFAULT_RESOURCE if resource is None else resource,
            "resourceRequests": resource_requests,
            "platform": dump(platform),
            "networkPolicy": dump(network_policy),
            "credentialProxy": dump(credential_proxy),
            "extensions": extensions,
            "secureAccess": secure_access,
            "entrypoint": entrypoint or (DEFAULT_ENTRYPOINT if snapshot_id is None else None),
            "volumes": [dump(volume) for volume in volumes] if volumes else None,
            "lifecycle": dump(lifecycle),
        }
        request = {name: value for name, value in wanted.items() if value is not None}
        config = connection_config or default_config()
        api = Lifecycle(config)
        api.open()
        created: models.SandboxCreateResponse | None = None
        try:
            deadline = time.monotonic() + ready_timeout.total_seconds()
            created = await api.create(request, max(config.request_timeout, ready_timeout))
            sandbox = cls(created.id, api, await api.endpoint(created.id, EXECD_PORT), health_check)
            sandbox._timings, sandbox._warnings = created.timings, created.warnings
            for warning in created.warnings:
                logger.warning("sandbox %s: %s", created.id, warning)
            if not skip_health_check:
                _check_alive(created)
                # An answer that carries the endpoints was given by a sandbox that works already.
                if health_check is not None or str(EXECD_PORT) not in created.endpoints:
                    await sandbox._wait(deadline, health_check_polling_interval)
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
        api.open()
        try:
            deadline = time.monotonic() + connect_timeout.total_seconds()
            sandbox = cls(sandbox_id, api, await api.endpoint(sandbox_id, EXECD_PORT), health_check)
            if not skip_health_check:
                await sandbox._wait(deadline, health_check_polling_interval)
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
    def metrics(self) -> Metrics:
        """What it uses."""
        return self._metrics

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

    async def get_metrics(self) -> models.SandboxMetrics:
        """Processor and memory it uses."""
        return await self._metrics.get_metrics(self._id)

    async def is_healthy(self) -> bool:
        """Whether it answers; with a health check of its own, what that says."""
        try:
            return await self._healthy()
        except SandboxException:
            return False

    async def check_ready(self, timeout: timedelta, polling_interval: timedelta) -> None:
        """Wait until it answers, or raise `SandboxReadyTimeoutException`."""
        await self._wait(time.monotonic() + timeout.total_seconds(), polling_interval)

    # --- its life -----------------------------------------------------------------------------------

    async def renew(self, timeout: timedelta) -> models.SandboxRenewResponse:
        """Let it expire that long from now, sooner or later than before."""
        return await self._lifecycle.renew(self._id, timeout)

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
        await self._execd.call("GET", "/ping", policy=NO_RETRIES)
        return True

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


def _check_alive(created: models.SandboxCreateResponse) -> None:
    if created.status.state not in ("Terminated", "Failed"):
        return
    end = created.end
    how = f"{end.reason}" if end else created.status.reason or created.status.state
    if end and end.exit_code is not None:
        how += f" with code {end.exit_code}"
    said = (end and end.message) or created.status.message
    raise SandboxUnhealthyException(
        f"the entry point {created.entrypoint} ended at once: {how}" + (f" ({said})" if said else ""),
        hint="The sandbox lives as long as its entry point; leave it out, or give one that keeps running.",
    )


async def _undo(api: Lifecycle, created: models.SandboxCreateResponse | None) -> None:
    try:
        if created is not None:
            await api.delete(created.id)
    except SandboxException as error:
        logger.warning("sandbox %s could not be used, and not be deleted either: %s", created and created.id, error)
    finally:
        await api.close()


def _image(image: models.SandboxImageSpec | str | None) -> dict[str, Any] | None:
    if image is None:
        return None
    spec = models.SandboxImageSpec(image) if isinstance(image, str) else image
    return {"uri": spec.image, **({"auth": models.base.dump(spec.auth)} if spec.auth else {})}


def _seconds(timeout: timedelta | None) -> int | None:
    if timeout is None:
        return None
    seconds = int(timeout.total_seconds())
    if seconds < 60:
        raise InvalidArgumentException("timeout is at least 60 seconds", hint="Call kill() to end a sandbox sooner.")
    return seconds
