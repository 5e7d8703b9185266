# SPDX-License-Identifier: Apache-2.0
"""sandboxd killed with -9 at any moment: sandboxes live on, the server starts another one, and that finds them all."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from rig import COUNTED, COUNTING, MOMENTS, Rig, answers, attempt, failed_with

from live_server import Sandbox, until


def test_at_rest_nothing_changes(rig: Rig) -> None:
    made = [rig.create() for _ in range(3)]
    before = {one.id: rig.server.get(one.id) for one in made}
    rig.kill_sandboxd()
    assert len(rig.marked_processes()) == 3
    assert {one: rig.server.get(one) for one in rig.settle()} == before
    for one in made:
        until(lambda one=one: answers(one), "ingress serves again at the same address")
    rig.all_answer()
    assert rig.create().run("echo new").stdout == "new"


def test_commands_run_on_and_no_output_is_missing(rig: Rig) -> None:
    sandbox = rig.create()
    background = sandbox.start(COUNTING)
    until(lambda: sandbox.logs(background), "the command says something")
    rig.kill_sandboxd()
    until(lambda: answers(sandbox), "ingress serves again")
    assert sandbox.wait(background)["exit_code"] == 0
    assert sandbox.logs(background) == COUNTED


def test_expiry_fires(rig: Rig) -> None:
    soon = rig.create(timeout=600)
    at = datetime.now(UTC) + timedelta(seconds=2)
    path = f"/v1/sandboxes/{soon.id}/renew-expiration"
    rig.server.call("POST", path, body={"expiresAt": at.isoformat()}).expect(200)
    rig.kill_sandboxd()
    until(lambda: rig.server.call("GET", f"/v1/sandboxes/{soon.id}").status == 404, "the expired one is gone")
    assert rig.settle() == set()


def test_an_end_that_nobody_watched_is_told_afterwards(rig: Rig) -> None:
    """The sandbox ends while sandboxd is frozen out of existence: its own record of the end must do."""
    sandbox = rig.server.create(entrypoint=("sh", "-c", "until [ -e /tmp/end ]; do sleep 0.05; done; exit 4"))
    pid = rig.sandboxd_pid()
    os.kill(pid, signal.SIGSTOP)
    sandbox.run("touch /tmp/end")
    until(lambda: not answers(sandbox), "the sandbox has ended")
    os.kill(pid, signal.SIGKILL)
    until(lambda: failed_with(rig.server, sandbox.id, 4), "the end is in the store")
    rig.server.delete(sandbox.id)


@pytest.mark.parametrize("moment", MOMENTS)
def test_during_creates_nothing_is_half_made(rig: Rig, moment: float) -> None:
    rig.create()
    body = {"image": {"uri": "host"}, "entrypoint": ["sleep", rig.mark], "resourceLimits": {}}
    pid = rig.sandboxd_pid()
    with ThreadPoolExecutor(6) as pool:
        creating = [pool.submit(attempt, lambda: rig.server.call("POST", "/v1/sandboxes", body=body)) for _ in range(6)]
        time.sleep(moment)  # not to wait for something: this is the instant under test
        os.kill(pid, signal.SIGKILL)
        answered = [future.result() for future in creating]
    assert set(answered) <= {202, 503}
    assert len(rig.settle()) == 1 + answered.count(202)
    rig.all_answer()


@pytest.mark.parametrize("moment", MOMENTS)
def test_during_deletes_what_was_begun_is_ended(rig: Rig, moment: float) -> None:
    made = [rig.create() for _ in range(6)]
    pid = rig.sandboxd_pid()
    with ThreadPoolExecutor(6) as pool:
        deleting = [
            pool.submit(attempt, lambda one=one: rig.server.call("DELETE", f"/v1/sandboxes/{one.id}")) for one in made
        ]
        time.sleep(moment)  # not to wait for something: this is the instant under test
        os.kill(pid, signal.SIGKILL)
        assert {future.result() for future in deleting} == {204}
    assert rig.settle() == set()


def test_server_and_sandboxd_at_once(rig: Rig) -> None:
    made = [rig.create() for _ in range(3)]
    background = made[0].start(COUNTING)
    pid = rig.sandboxd_pid()
    rig.server.kill()
    os.kill(pid, signal.SIGKILL)
    assert len(rig.marked_processes()) == 3
    rig.server.start()
    assert rig.settle() == {one.id for one in made}
    again = rig.server.connect(made[0].id)
    assert again.wait(background)["exit_code"] == 0
    assert again.logs(background) == COUNTED


def both_killed(rig: Rig, count: int) -> list[Sandbox]:
    """Sandboxes that nobody looks after."""
    made = [rig.create() for _ in range(count)]
    pid = rig.sandboxd_pid()
    rig.server.kill()
    rig.end(pid)
    assert len(rig.marked_processes()) == count
    return made


def test_down_all_ends_what_nobody_looks_after(rig: Rig) -> None:
    made = both_killed(rig, 2)
    ended = rig.server.down("--all")
    assert ended.returncode == 0, ended.stderr
    assert "Ending 2 sandboxes" in ended.stdout
    assert rig.server.leftovers() == []
    again = rig.server.down("--all")
    assert again.stdout == f"Nothing runs on {rig.server.state}.\n"
    rig.server.start()
    for one in made:
        assert rig.server.get(one.id)["status"]["state"] == "Terminated"


def test_down_says_that_they_live_and_has_them_looked_after(rig: Rig) -> None:
    (sandbox,) = both_killed(rig, 1)
    ended = rig.server.down()
    assert ended.returncode == 0, ended.stderr
    assert "1 sandbox lives on; `opensandbox-server down --all` ends it." in ended.stdout
    assert rig.known_to_sandboxd() == {sandbox.id}
    assert len(rig.marked_processes()) == 1


def test_under_load(rig: Rig) -> None:
    """Creates and deletes without pause while sandboxd is killed three times."""
    stop = threading.Event()
    done = [0, 0, 0]
    body = {"image": {"uri": "host"}, "entrypoint": ["sleep", rig.mark], "resourceLimits": {}}

    def churn(number: int) -> None:
        while not stop.is_set():
            answer = rig.server.call("POST", "/v1/sandboxes", body=body)
            if answer.status == 202:
                rig.server.delete(answer.json()["id"])
                done[number] += 1
            else:
                assert answer.status == 503, answer.body

    with ThreadPoolExecutor(3) as pool:
        churning = [pool.submit(churn, number) for number in range(3)]
        try:
            for _ in range(3):
                before = list(done)
                rig.kill_sandboxd()
                rig.create()
                until(lambda before=before: all(map(int.__lt__, before, done)), f"everybody gets on: {before} {done}")
        finally:
            stop.set()
        for future in churning:
            future.result()
    assert len(rig.settle()) == 3
    rig.all_answer()
