# SPDX-License-Identifier: Apache-2.0
"""sandboxd on its own, for as long as no server is there: it keeps deadlines, and leaves when it holds nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rig import Rig

from live_server import LiveServer, until
from opensandbox_server.runtimes.local import plan, sandboxd
from opensandbox_server.statedir import open_state, run_dir


@pytest.fixture
def hasty(home: Path) -> Iterator[Rig]:
    """A server that finds a sandboxd already running: one that waits a second where another waits minutes."""
    state = open_state(home / "state")
    settings = plan.Settings(
        state_dir=state.path,
        run_dir=run_dir(state.instance),
        instance=state.instance,
        sandboxd=sandboxd.binary("sandboxd"),
        ingress=sandboxd.binary("ingress"),
    )
    # The server below may find it gone already: then the test fails at its first question about the pid.
    command = [*plan.daemon_command(settings), "--deadline-grace", "1s", "--idle-exit", "15s"]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    assert daemon.stdout is not None
    assert b'"ready":true' in daemon.stdout.readline()
    with LiveServer.started(home) as server:
        rig = Rig(server)
        assert rig.sandboxd_pid() == daemon.pid
        yield rig
    daemon.wait(60)


def test_a_deadline_is_kept_without_a_server(hasty: Rig) -> None:
    soon, later = hasty.create(timeout=600), hasty.create(timeout=600)
    at = datetime.now(UTC) + timedelta(seconds=2)
    path = f"/v1/sandboxes/{soon.id}/renew-expiration"
    hasty.server.call("POST", path, body={"expiresAt": at.isoformat()}).expect(200)
    hasty.server.kill()
    until(lambda: len(hasty.marked_processes()) == 1, "sandboxd ends the one whose time is up")
    assert datetime.now(UTC) >= at
    assert later.ping()
    hasty.server.start()
    until(lambda: hasty.server.call("GET", f"/v1/sandboxes/{soon.id}").status == 404, "the expired one is gone")
    assert hasty.settle() == {later.id}
    hasty.server.delete(later.id)


def test_with_neither_sandbox_nor_server_it_leaves(hasty: Rig) -> None:
    pidfd = os.pidfd_open(hasty.sandboxd_pid())
    hasty.server.signal(signal.SIGKILL)
    assert select.select([pidfd], [], [], 60)[0], "sandboxd is still there"
    os.close(pidfd)
    assert hasty.server.leftovers() == []
