# SPDX-License-Identifier: Apache-2.0
"""Isolated sessions: shells that see the sandbox read-only, except for what they were given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from opensandbox import models
from opensandbox.commands import events_of, recorded
from opensandbox.concurrency import shielded
from opensandbox.constants import CLEANUP_LIMIT
from opensandbox.exceptions import InvalidArgumentException
from opensandbox.files import Files
from opensandbox.requests import segment
from opensandbox.transport import Connection

_WHAT = "An isolated session"
_CURSOR = "EXECD-ISOLATED-TAIL-CURSOR"

# `list` is a method below.
Summaries: TypeAlias = "list[models.IsolatedSessionSummary]"
Binds: TypeAlias = "list[models.BindMount]"


class IsolationSession:
    """One session. Its shell keeps variables, functions and the directory from run to run."""

    def __init__(self, execd: Connection, info: models.IsolatedSessionInfo) -> None:
        """Use `sandbox.isolation`."""
        self._info = info
        self._execd = execd.below(f"/v1/isolated/session/{segment(info.session_id, 'session')}", _WHAT)
        self._files = Files(self._execd)

    @property
    def session_id(self) -> str:
        """Its id, with which `sandbox.isolation.attach` finds it again."""
        return self._info.session_id

    @property
    def info(self) -> models.IsolatedSessionInfo:
        """What it was made of."""
        return self._info

    @property
    def files(self) -> Files:
        """Files as its programs see them, changes in overlays included."""
        return self._files

    async def run(
        self,
        code: str,
        *,
        opts: models.IsolatedRunOpts | None = None,
        handlers: models.ExecutionHandlers | None = None,
    ) -> models.Execution:
        """Run code in its shell and wait for the end. Runs of one session wait for each other.

        Giving up the wait interrupts the code; the session stays.
        """
        events = events_of(self._execd, "POST", "/run", _request(code, opts))
        return await recorded(events, handlers, goes_on=False)

    async def run_background(
        self, code: str, *, opts: models.IsolatedRunOpts | None = None
    ) -> models.IsolatedBackgroundRun:
        """Start code beside its shell, in a shell of its own. It ends with the session at the latest."""
        response = await self._execd.call("POST", "/run", json={**_request(code, opts), "background": True})
        return models.base.parse(models.IsolatedBackgroundRun, response.content)

    async def run_status(self, run_id: str) -> models.IsolatedRunStatus:
        """How a run in the background goes."""
        response = await self._execd.call("GET", f"/runs/{segment(run_id, 'run')}")
        return models.base.parse(models.IsolatedRunStatus, response.content)

    async def run_logs(self, run_id: str, cursor: int = 0) -> models.IsolatedRunLogs:
        """What a run in the background has written, from the byte `cursor` on; ask again with the one returned."""
        path = f"/runs/{segment(run_id, 'run')}/logs"
        response = await self._execd.call("GET", path, params=[("cursor", str(cursor))])
        after = response.headers.get(_CURSOR, "")
        return models.IsolatedRunLogs(
            text=response.content.decode("utf-8", "replace"),
            cursor=int(after) if after.isdigit() else cursor + len(response.content),
        )

    async def diff(self) -> models.IsolatedDiff:
        """What it changed in its overlays.

        async with sandbox.isolation.session(request) as session:
            await session.run("echo hello > hello.txt")
            for change in (await session.diff()).changes:
                print(change.change, change.path)
        """
        return models.base.parse(models.IsolatedDiff, (await self._execd.call("GET", "/diff")).content)

    async def diff_tar(self) -> bytes:
        """The same as a tar archive, as image layers have it: what is gone is there as `.wh.<name>`."""
        return (await self._execd.call("GET", "/diff", params=[("format", "tar")])).content

    async def commit(self) -> models.IsolatedCommit:
        """Make its changes in overlays those of the sandbox. Refused while a run is on."""
        return models.base.parse(models.IsolatedCommit, (await self._execd.call("POST", "/commit")).content)

    async def get(self) -> models.IsolatedSessionState:
        """How it is now."""
        return models.base.parse(models.IsolatedSessionState, (await self._execd.call("GET", "")).content)

    async def delete(self) -> None:
        """End it and all of its processes. What it changed in overlays and was not committed is gone."""
        await self._execd.call("DELETE", "")


class IsolationService:
    """`sandbox.isolation`, in a sandbox created with `extensions={"bootstrap.execd.isolation": "enable"}`

        request = CreateIsolatedSessionRequest(workspace={"path": "/workspace"})
        async with sandbox.isolation.session(request) as session:
            await session.run("rm -r *")
            print((await session.diff()).changes)

    What code in a session does to its workspace stays there until it is committed.
    """

    def __init__(self, execd: Connection) -> None:
        self._execd = execd
        self._below = execd.below("/v1/isolated", _WHAT)

    async def capabilities(self) -> models.IsolatedCapabilities:
        """Whether this sandbox can have isolated sessions; if not, `message` says why."""
        response = await self._below.call("GET", "/capabilities")
        return models.base.parse(models.IsolatedCapabilities, response.content)

    async def create(self, request: models.CreateIsolatedSessionRequest) -> IsolationSession:
        """A session, which stays until it is deleted, was idle for too long, or the sandbox ends."""
        body = models.base.dump(request, models.CreateIsolatedSessionRequest)
        response = await self._below.call("POST", "/session", json=body)
        return IsolationSession(self._execd, models.base.parse(models.IsolatedSessionInfo, response.content))

    async def attach(self, session_id: str) -> IsolationSession:
        """A session that exists already."""
        response = await self._below.call("GET", f"/session/{segment(session_id, 'session')}")
        return IsolationSession(self._execd, models.base.parse(models.IsolatedSessionInfo, response.content))

    async def list(self) -> Summaries:
        """The sessions that there are, oldest first."""
        response = await self._below.call("GET", "/sessions")
        return models.base.parse(models.IsolatedSessionList, response.content).sessions

    async def run_once(
        self,
        code: str,
        *,
        workspace: str,
        workspace_mode: str | None = None,
        opts: models.IsolatedRunOpts | None = None,
        handlers: models.ExecutionHandlers | None = None,
        profile: str | None = None,
        share_net: bool | None = None,
        binds: Binds | None = None,
    ) -> models.Execution:
        """Run code in a session of its own, which is deleted afterwards.

        execution = await sandbox.isolation.run_once("pytest", workspace="/workspace")
        """
        request = models.CreateIsolatedSessionRequest(
            workspace=models.IsolatedWorkspaceSpec(path=workspace, mode=workspace_mode),
            profile=profile,
            share_net=share_net,
            binds=binds,
        )
        async with self.session(request) as session:
            return await session.run(code, opts=opts, handlers=handlers)

    @asynccontextmanager
    async def session(self, request: models.CreateIsolatedSessionRequest) -> AsyncIterator[IsolationSession]:
        """A session for a block."""
        session = await self.create(request)
        try:
            yield session
        finally:
            with shielded(CLEANUP_LIMIT):
                await session.delete()


def _request(code: str, opts: models.IsolatedRunOpts | None) -> dict[str, object]:
    if not code:
        raise InvalidArgumentException("the code is empty", hint='Give shell code, such as "ls -l".')
    return {"code": code, **(models.base.dump(opts, models.IsolatedRunOpts) or {})}
