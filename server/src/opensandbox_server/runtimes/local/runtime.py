# SPDX-License-Identifier: Apache-2.0
"""The local runtime: asks sandboxd, and sees to it that there is one to ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from opensandbox_server.errors import OpenSandboxError, unsupported_field
from opensandbox_server.ports import Address, Description, LaunchSpec, Remains, Report
from opensandbox_server.wire import sandboxd as wire
from opensandbox_server.wire.errors import Code

from . import plan, sandboxd

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

_RECONNECT_FIRST = 0.05
_RECONNECT_MOST = 2.0


class LocalRuntime:
    """Makes sandboxes on this machine. Satisfies `ports.Runtime`.

    >>> runtime = LocalRuntime(settings)        # doctest: +SKIP
    >>> await runtime.start()                   # doctest: +SKIP
    """

    name = "local"

    def __init__(self, settings: plan.Settings) -> None:
        self._settings = settings
        self._node = sandboxd.Client(settings.socket)
        self._starting = asyncio.Lock()
        self._ingress: wire.Ingress | None = None
        self._stopped = asyncio.Event()
        self.host: wire.Host | None = None
        """What this machine can enforce; known once started."""
        self.left_behind = False
        """After `stop`: sandboxd stayed, because it holds sandboxes."""

    async def start(self) -> None:
        """Find sandboxd or start it, and have ingress listen."""
        await self._node.__aenter__()
        try:
            await self._ensure()
            self.host = await self._node.host()
            if self._settings.require_full_isolation and self.host.missing:
                raise OpenSandboxError(
                    Code.NODE_UNSUPPORTED_HOST,
                    f"This host cannot enforce everything: {'; '.join(self.host.missing)}",
                    hint="Grant what is missing, or set [local] require_full_isolation = false.",
                )
        except BaseException:
            await self._node.__aexit__()
            raise

    async def stop(self) -> None:
        """Let go; sandboxd leaves by itself when it holds nothing."""
        self._stopped.set()
        try:
            await self._node.shutdown(wire.ShutdownRequestWhen.IDLE)
        except OpenSandboxError as error:
            self.left_behind = error.kind == "conflict"
            _log.debug("sandboxd stays: %s", error)
        finally:
            await self._node.__aexit__()

    async def check(self, spec: LaunchSpec) -> None:
        """Refuse what sandboxd would, as far as it is known here: limits below what a sandbox can start with, and
        isolated runs where sandboxes have one user; names are sandboxd's to judge."""
        if spec.isolates and self.host is not None and self.host.rootless:
            raise unsupported_field(
                self.name,
                "extensions.bootstrap.execd.isolation",
                hint="Rootless sandboxes have too few users: run opensandbox-server as root, or leave it out.",
            )
        limits = spec.limits
        for name, value, least in (
            ("cpu", limits.cpu_millis, 10),
            ("memory", limits.memory_bytes, 16 * 1024 * 1024),
            ("pids", limits.pids, 8),
        ):
            if value is not None and value < least:
                unit = {"cpu": "10m", "memory": "16Mi", "pids": "8"}[name]
                raise OpenSandboxError(
                    Code.SANDBOX_INVALID_PARAMETER,
                    f"resourceLimits.{name} is below what a sandbox can start with ({unit}).",
                    hint=f"Give at least {unit}.",
                )

    async def create(self, spec: LaunchSpec) -> Report:
        """Make it; whatever goes wrong, also a caller that gives up, leaves nothing behind."""
        request = plan.launch_request(spec)
        try:
            try:
                told = await self._node.launch(request)
            except sandboxd.Unreachable:
                # Nothing was sent, so a second try cannot make a second sandbox.
                await self._ensure()
                told = await self._node.launch(request)
        except sandboxd.Unreachable:
            raise
        except OpenSandboxError as error:
            if isinstance(error, sandboxd.Cut) or error.code is Code.NODE_UNAVAILABLE:
                await self._undo(spec.id)
            raise self._with_images(error) from None
        except asyncio.CancelledError:
            await asyncio.shield(self._undo(spec.id))
            raise
        return plan.report(told)

    async def inspect(self, sandbox_id: str) -> Report | None:
        """What sandboxd knows of it."""
        try:
            return plan.report(await self._again(lambda: self._node.get(sandbox_id)))
        except OpenSandboxError as error:
            if error.code is Code.SANDBOX_NOT_FOUND:
                return None
            raise

    async def list(self) -> list[Report]:
        """All that sandboxd knows."""
        return [plan.report(told) for told in await self._again(self._node.list)]

    async def delete(self, sandbox_id: str) -> Remains:
        """End it and forget it; nothing there is fine. What is left comes with the answer: no question more."""
        left = await self._unless_gone(lambda: self._node.remove(sandbox_id))
        return plan.remains(left) if left is not None else Remains()

    async def set_deadline(self, sandbox_id: str, deadline: datetime | None) -> None:
        """sandboxd keeps it, for the time when no server is there."""
        request = wire.DeadlineRequest(deadline=deadline)
        await self._again(lambda: self._node.set_deadline(sandbox_id, request))

    async def acknowledge(self, sandbox_id: str) -> None:
        """Its end is stored; gone already is fine too."""
        await self._unless_gone(lambda: self._node.acknowledge(sandbox_id))

    async def output(self, sandbox_id: str) -> bytes:
        """The last MiB of the entry point's output."""
        return await self._again(lambda: self._node.output(sandbox_id))

    async def journal(self, sandbox_id: str) -> bytes:
        """What its execd wrote about the commands it ran."""
        return await self._again(lambda: self._node.journal(sandbox_id))

    async def describe(self) -> Description:
        """sandboxd's version, and this machine as it is now."""
        version = await self._again(self._node.version)
        self.host = await self._again(self._node.host)
        return plan.description(self.name, version, self.host)

    def address(self, sandbox_id: str, port: int) -> Address:
        """Its `api` or its `ports` socket."""
        return plan.address(self._settings, sandbox_id, port)

    def public_address(self) -> str:
        """The ingress, as clients reach it."""
        if self._ingress is None:
            raise OpenSandboxError(Code.NODE_UNAVAILABLE, "The runtime is not started.")
        host = self._settings.public_host
        return f"[{host}]:{self._ingress.port}" if ":" in host else f"{host}:{self._ingress.port}"

    async def watch(self) -> AsyncIterator[Report]:
        """Ends as they happen; a sandboxd that died is started again, and what it missed comes first."""
        delay = _RECONNECT_FIRST
        while not self._stopped.is_set():
            try:
                await self._ensure()
                async for event in self._node.events():
                    delay = _RECONNECT_FIRST
                    if event.report is not None:
                        yield plan.report(event.report)
            except OpenSandboxError as error:
                if not self._stopped.is_set():
                    _log.warning("watch of sandboxd was interrupted: %s", error)
            if await self._paused(delay):
                return
            delay = min(delay * 2, _RECONNECT_MOST)

    async def _paused(self, seconds: float) -> bool:
        """Wait; True when the runtime was stopped meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    async def _ensure(self) -> None:
        """sandboxd answers and ingress listens when this returns, however many ask for it at once."""
        async with self._starting:
            try:
                version = await self._node.version()
            except (sandboxd.Unreachable, sandboxd.Cut):
                # Cut: one that is just dying may still take a connection.
                await sandboxd.start(self._settings)
                version = await self._first_answer()
            await self._check_version(version)
            told = await self._node.set_ingress(plan.ingress_request(self._settings))
            if set(told.hosts) != set(self._settings.ingress_hosts) and told != self._ingress:
                _log.warning(
                    "ingress listens on %s only, not on all of %s",
                    ", ".join(told.hosts),
                    ", ".join(self._settings.ingress_hosts),
                )
            self._ingress = told

    async def _first_answer(self) -> wire.NodeVersion:
        """Its answer; one that another server is just starting may take a moment."""
        deadline = asyncio.get_running_loop().time() + sandboxd.START_SECONDS
        while True:
            try:
                return await self._node.version()
            except (sandboxd.Unreachable, sandboxd.Cut):
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_RECONNECT_FIRST)

    async def _check_version(self, version: wire.NodeVersion) -> None:
        original = await asyncio.to_thread(sandboxd.copied_from, version, self._settings.state_dir)
        if original is not None:
            # Its sandboxes have no rows in our database, and would all be ended as nobody's.
            raise OpenSandboxError(
                Code.NODE_UNAVAILABLE,
                f"{self._settings.state_dir} is a copy of {original}, whose sandboxd runs (pid {version.pid}).",
                hint=f"Stop that one for good (opensandbox-server down --all --state-dir {original}), "
                "or give this server an empty --state-dir.",
            )
        if version.instance != self._settings.instance:
            raise OpenSandboxError(
                Code.NODE_UNAVAILABLE,
                f"The sandboxd on {self._settings.socket} (pid {version.pid}) belongs to another instance.",
                hint="Set [local] run_dir to a directory of its own.",
            )
        if version.protocol not in (plan.PROTOCOL, plan.PROTOCOL - 1):
            raise OpenSandboxError(
                Code.NODE_UNAVAILABLE,
                f"sandboxd {version.version} (pid {version.pid}) speaks protocol {version.protocol}, "
                f"this server {plan.PROTOCOL}.",
                hint="Run `opensandbox-server down --all` with the version that started it, then start this one.",
            )

    async def _again(self, call: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Make a call that may safely be made twice; once more after sandboxd had to be started."""
        try:
            return await call()
        except (sandboxd.Unreachable, sandboxd.Cut):
            await self._ensure()
            return await call()

    async def _unless_gone(self, call: Callable[[], Awaitable[_Answer]]) -> _Answer | None:
        try:
            return await self._again(call)
        except OpenSandboxError as error:
            if error.code is not Code.SANDBOX_NOT_FOUND:
                raise
            return None

    async def _undo(self, sandbox_id: str) -> None:
        try:
            await self.delete(sandbox_id)
        except OpenSandboxError as error:
            # The row of this create is undone by the reconcile, which deletes what no row wants.
            _log.warning("sandbox %s could not be removed after its create failed: %s", sandbox_id, error)

    def _with_images(self, error: OpenSandboxError) -> OpenSandboxError:
        """An unknown image is answered with what is there."""
        images = self.host.images if self.host else []
        if error.code is not Code.IMAGE_NOT_FOUND or any(image.name in error.message for image in images):
            return error
        return OpenSandboxError(error.code, f"{error.message} Here are: {plan.image_list(images)}.", hint=error.hint)
