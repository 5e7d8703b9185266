# SPDX-License-Identifier: Apache-2.0
"""Isolated sessions beyond the published SDK: what they changed, and making it count."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

import pytest

from live_server import LiveServer, until
from opensandbox import ConnectionConfigSync, SandboxSync
from opensandbox.exceptions import ConflictException
from opensandbox.models import CreateIsolatedSessionRequest, IsolatedWorkspaceSpec


@pytest.fixture(scope="module")
def box(server: LiveServer) -> Iterator[SandboxSync]:
    extensions = {"bootstrap.execd.isolation": "enable"}
    config = ConnectionConfigSync(domain=server.address)
    with SandboxSync.create("host", connection_config=config, extensions=extensions) as made:
        yield made
        made.kill()


def test_look_and_then_commit(box: SandboxSync) -> None:
    for name in ("kept", "changed", "removed"):
        box.files.write_file(f"/project/{name}", name)
    request = CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/project"))
    with box.isolation.session(request) as session:
        assert session.diff().changes == []
        session.run("echo more >> changed; rm removed; mkdir new; echo x > new/file")
        told = {(one.change, one.type, one.path) for one in session.diff().changes}
        assert told == {
            ("modified", "file", "/project/changed"),
            ("deleted", "file", "/project/removed"),
            ("created", "directory", "/project/new"),
            ("created", "file", "/project/new/file"),
        }
        with tarfile.open(fileobj=io.BytesIO(session.diff_tar())) as archive:
            assert set(archive.getnames()) == {
                "project/changed", "project/.wh.removed", "project/new", "project/new/file",
            }  # fmt: skip
        assert box.files.read_file("/project/changed") == "changed"
        busy = session.run_background("exec sleep 1000")
        with pytest.raises(ConflictException) as refused:
            session.commit()
        assert refused.value.error.code == "SESSION_BUSY"
        session.run("pkill sleep")
        until(lambda: not session.run_status(busy.run_id).running, "it has ended")
        done = session.commit()
        assert (done.created, done.modified, done.deleted, done.skipped) == (2, 1, 1, [])
    assert box.commands.run("cd /project; find . -type f | sort; cat changed").text.split() == [
        "./changed", "./kept", "./new/file", "changedmore",
    ]  # fmt: skip


def test_a_watch_sees_what_the_session_sees(box: SandboxSync) -> None:
    box.commands.run("mkdir -p /watched")
    request = CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/watched"))
    with box.isolation.session(request) as session, session.files.watch("/watched") as changes:
        session.run("echo x > new")
        change = next(changes)
        assert (change.type, change.path) == ("create", "/watched/new")
    assert box.commands.run("ls /watched").text == ""


def test_the_sandbox_tells_that_commands_are_as_confined_as_ever(box: SandboxSync) -> None:
    isolation = box.get_info().isolation
    assert isolation is not None
    assert isolation.seccomp == "strict"
    assert box.commands.run("unshare -U true").exit_code != 0
