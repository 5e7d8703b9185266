# SPDX-License-Identifier: Apache-2.0
"""Isolated sessions: shells that see the sandbox read-only, except for what they were given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

from checks import check, raises, run, until
from sdk import Sandbox, config

from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import ExecutionHandlers
from opensandbox.models.filesystem import MoveEntry, SearchEntry, WriteEntry
from opensandbox.models.isolated import (
    BindMount,
    CreateIsolatedSessionRequest,
    EnvPassthroughSpec,
    IsolatedOverlaySpec,
    IsolatedRunOpts,
    IsolatedWorkspaceSpec,
)

WORKSPACE = "/workspace"


@asynccontextmanager
async def opened() -> AsyncIterator[Any]:
    """A sandbox that was made for it, with something in its workspace."""
    extensions = {"bootstrap.execd.isolation": "enable"}
    env = {"DEPLOY_TOKEN": "hush", "COLOUR": "blue"}
    sandbox = await Sandbox.create("host", connection_config=config(), extensions=extensions, env=env)
    try:
        await sandbox.files.write_file(f"{WORKSPACE}/readme.txt", "original")
        yield sandbox
    finally:
        await sandbox.destroy()


def request(**fields: Any) -> CreateIsolatedSessionRequest:
    return CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path=WORKSPACE), **fields)


@check
async def capabilities(sandbox: Any) -> None:
    """Told truthfully: all of it works, but for the user mode that each session has anyhow."""
    told = await sandbox.isolation.capabilities()
    assert told.available, told
    assert told.isolator
    assert (told.setpriv_available, told.commit_supported, told.diff_supported) == (True, True, True)
    assert told.hardening.init_mode == "pid1"
    assert (told.hardening.cap_drop.state, told.hardening.seccomp.state) == ("active", "active")


@check
async def not_available_without_the_extension(sandbox: Any) -> None:
    plain = await Sandbox.create("host", connection_config=config())
    try:
        told = await plain.isolation.capabilities()
        assert not told.available
        assert "bootstrap.execd.isolation" in told.message
        error = await raises(SandboxApiException, plain.isolation.create(request()))
        assert error.status_code == 503, error
    finally:
        await plain.destroy()


@check
async def create_and_get(sandbox: Any) -> None:
    session = await sandbox.isolation.create(request(idle_timeout_seconds=600))
    assert str(UUID(session.session_id)) == session.session_id
    assert session.info.session_id == session.session_id
    assert session.info.created_at
    assert (session.info.profile, session.info.workspace.path, session.info.workspace.mode) == (
        "strict",
        WORKSPACE,
        "overlay",
    )
    state = await session.get()
    assert state.status == "active"
    assert 500 < state.idle_remaining_seconds <= 600
    assert state.share_net is False
    await session.delete()
    error = await raises(SandboxApiException, session.get())
    assert error.status_code == 404, error


@check
async def a_shell_that_stays(sandbox: Any) -> None:
    async with sandbox.isolation.session(request()) as session:
        first = await session.run("mkdir deep; cd deep; export KEPT=yes")
        assert first.exit_code == 0
        second = await session.run('pwd; echo "$KEPT"; echo bad >&2; exit 3')
        assert [line.text.strip() for line in second.logs.stdout] == [f"{WORKSPACE}/deep", "yes"]
        assert [line.text for line in second.logs.stderr] == ["bad"]
        assert second.exit_code == 3
        assert second.error.name == "CommandExecError"


@check
async def options_of_a_run(sandbox: Any) -> None:
    async with sandbox.isolation.session(request()) as session:
        heard: list[str] = []

        async def hear(message: Any) -> None:
            heard.append(message.text)

        done = await session.run(
            'echo "$GREETING"',
            opts=IsolatedRunOpts(envs={"GREETING": "it's me"}),
            handlers=ExecutionHandlers(on_stdout=hear),
        )
        assert (done.text, heard) == ("it's me", ["it's me"])
        late = await session.run("sleep 60", opts=IsolatedRunOpts(timeout_seconds=1))
        assert late.exit_code != 0
        assert late.error is not None


@check
async def changes_stay_inside(sandbox: Any) -> None:
    async with sandbox.isolation.session(request()) as session:
        done = await session.run(
            "echo changed > readme.txt; touch new; rm -rf /etc/hostname /usr/local; touch /outside"
        )
        assert done.exit_code != 0
        assert (await session.run("cat readme.txt; ls")).text.split() == ["changed", "new", "readme.txt"]
    assert await sandbox.files.read_file(f"{WORKSPACE}/readme.txt") == "original"
    assert (await sandbox.commands.run(f"ls {WORKSPACE}; ls -d /usr/local")).text.split() == [
        "readme.txt",
        "/usr/local",
    ]


@check
async def run_once(sandbox: Any) -> None:
    done = await sandbox.isolation.run_once("echo $((6 * 7)); id -u", workspace=WORKSPACE)
    assert done.text.split() == ["42", "0"]
    written = await sandbox.isolation.run_once(
        f"echo shared > {WORKSPACE}/shared",
        workspace=WORKSPACE,
        workspace_mode="rw",
        profile="balanced",
        share_net=True,
    )
    assert written.exit_code == 0
    assert await sandbox.files.read_file(f"{WORKSPACE}/shared") == "shared\n"
    await sandbox.files.delete_files([f"{WORKSPACE}/shared"])
    refused = await sandbox.isolation.run_once("touch x", workspace=WORKSPACE, workspace_mode="ro")
    assert refused.exit_code != 0
    bound = await sandbox.isolation.run_once(
        "cat /tmp/there/readme.txt",
        workspace="/root",
        binds=[BindMount(source=WORKSPACE, dest="/tmp/there", readonly=True)],
    )
    assert bound.text == "original"


@check
async def the_environment(sandbox: Any) -> None:
    """What looks like a secret stays outside, unless it is asked for."""
    show = 'echo "$COLOUR/$DEPLOY_TOKEN"'
    async with sandbox.isolation.session(request()) as session:
        assert (await session.run(show)).text == "blue/"
    for mode, keys, expected in (("allow", ["DEPLOY_TOKEN"], "/hush"), ("deny", ["COLOUR"], "/")):
        spec = EnvPassthroughSpec(mode=mode, keys=keys)
        async with sandbox.isolation.session(request(env_passthrough=spec)) as session:
            assert (await session.run(show)).text == expected, mode


@check
async def overlays_and_users(sandbox: Any) -> None:
    await sandbox.commands.run("mkdir -p /data/a /data/b; chmod 777 /data/a /data/b; echo a > /data/a/f")
    asked = CreateIsolatedSessionRequest(
        overlays=[IsolatedOverlaySpec(path="/data/a"), IsolatedOverlaySpec(path="/data/b", mode="rw")],
        uid=1000, gid=1000, extra_writable=[WORKSPACE],
    )  # fmt: skip
    async with sandbox.isolation.session(asked) as session:
        assert [one.path for one in session.info.overlays] == ["/data/a", "/data/b"]
        done = await session.run("id -u; id -g; cat /data/a/f; echo x > /data/a/x; echo y > /data/b/y")
        assert done.text.split() == ["1000", "1000", "a"]
    assert (await sandbox.commands.run("ls /data/a /data/b; stat -c %u /data/b/y")).text.split() == [
        "/data/a:", "f", "/data/b:", "y", "1000",
    ]  # fmt: skip


@check
async def background(sandbox: Any) -> None:
    async with sandbox.isolation.session(request()) as session:
        run_ = await session.run_background("echo one; echo two >&2; exit 4", opts=IsolatedRunOpts(envs={"A": "b"}))
        assert run_.session_id == session.session_id
        assert run_.started_at
        status = await until(lambda: session.run_status(run_.run_id), lambda told: not told.running)
        assert (status.exit_code, status.run_id) == (4, run_.run_id)
        assert status.finished_at >= status.started_at
        logs = await session.run_logs(run_.run_id)
        assert (logs.text, logs.cursor) == ("one\ntwo\n", 8)
        rest = await session.run_logs(run_.run_id, 4)
        assert (rest.text, rest.cursor) == ("two\n", 8)
        assert (await session.run_logs(run_.run_id, cursor=8)).text == ""
        error = await raises(SandboxApiException, session.run_status(str(uuid4())))
        assert error.status_code == 404, error


@check
async def files(sandbox: Any) -> None:
    """The session's own view, through the same calls as the sandbox's."""
    async with sandbox.isolation.session(request()) as session:
        view = session.files
        await view.write_file(f"{WORKSPACE}/sub dir/a.txt", "alpha", mode=640)
        seen = await session.run("cd 'sub dir'; cat a.txt; echo; stat -c %a a.txt; cd ..")
        assert seen.text.split() == ["alpha", "640"]
        await session.run("echo beta > b.txt; rm readme.txt")
        assert await view.read_file(f"{WORKSPACE}/b.txt") == "beta\n"
        assert await view.read_bytes(f"{WORKSPACE}/b.txt", range_header="bytes=0-1") == b"be"
        assert await view.read_bytes(f"{WORKSPACE}/b.txt") == b"beta\n"
        error = await raises(SandboxApiException, view.read_file(f"{WORKSPACE}/readme.txt"))
        assert error.status_code == 404, error
        await view.create_directories([WriteEntry(path=f"{WORKSPACE}/d", mode=755)])
        await view.move_files([MoveEntry(src=f"{WORKSPACE}/b.txt", dest=f"{WORKSPACE}/d/c.txt")])
        found = await view.search(SearchEntry(path=WORKSPACE, pattern="*.txt"))
        assert sorted(one.path for one in found) == [f"{WORKSPACE}/d/c.txt", f"{WORKSPACE}/sub dir/a.txt"]
        info = await view.get_file_info([f"{WORKSPACE}/d/c.txt"])
        assert info[f"{WORKSPACE}/d/c.txt"].size == 5
        await view.delete_files([f"{WORKSPACE}/d/c.txt"])
        await view.delete_directories([f"{WORKSPACE}/d"])
        await raises(SandboxApiException, view.write_file("/etc/intruder", "x"))
    assert (await sandbox.commands.run(f"ls {WORKSPACE}")).text == "readme.txt"


@check
async def list_and_attach(sandbox: Any) -> None:
    session = await sandbox.isolation.create(request(profile="balanced"))
    await session.run("remembered=1")
    listed = {one.session_id: one for one in await sandbox.isolation.list()}
    assert listed[session.session_id].status == "active"
    assert listed[session.session_id].last_run_at >= listed[session.session_id].created_at
    again = await sandbox.isolation.attach(session.session_id)
    assert again.info.profile == "balanced"
    assert again.info.workspace.mode == "rw"
    assert (await again.run("echo $remembered")).text == "1"
    await again.delete()
    assert session.session_id not in {one.session_id for one in await sandbox.isolation.list()}
    error = await raises(SandboxApiException, sandbox.isolation.attach(session.session_id))
    assert error.status_code == 404, error


@check
async def what_cannot_be_honoured_is_refused(sandbox: Any) -> None:
    for asked in (
        CreateIsolatedSessionRequest(),
        CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/not/there")),
        CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/")),
        request(overlays=[IsolatedOverlaySpec(path=WORKSPACE)]),
        request(binds=[BindMount(source="/etc/../root")]),
        request(uid=5, uid_mode="userns"),
    ):
        error = await raises(SandboxApiException, sandbox.isolation.create(asked))
        assert error.status_code == 400, (asked, error)


run(opened)
