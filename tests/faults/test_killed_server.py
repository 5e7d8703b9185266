# SPDX-License-Identifier: Apache-2.0
"""The server killed with -9 at any moment: sandboxes live on, and the next server knows them all."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from rig import COUNTED, COUNTING, MOMENTS, Rig, answers, attempt, failed_with

from live_server import Answer, until


def test_at_rest_nothing_changes(rig: Rig) -> None:
    made = [rig.create(metadata={"number": str(number)}) for number in range(3)]
    before = {one.id: rig.server.get(one.id) for one in made}
    rig.server.kill()
    assert len(rig.marked_processes()) == 3
    rig.server.start()
    assert {one: rig.server.get(one) for one in rig.settle()} == before
    rig.all_answer()
    # Endpoints that clients keep stay valid: same ingress port, same token.
    assert [rig.server.connect(one.id).address for one in made] == [one.address for one in made]
    assert all(one.ping() for one in made)


def test_sandboxes_are_used_while_there_is_no_server(rig: Rig) -> None:
    sandbox = rig.create()
    rig.server.kill()
    assert sandbox.run("echo nobody watches").stdout == "nobody watches"
    sandbox.write("/tmp/x", b"kept")
    rig.server.start()
    assert sandbox.read("/tmp/x") == b"kept"


def test_commands_run_on_and_no_output_is_missing(rig: Rig) -> None:
    sandbox = rig.create()
    background = sandbox.start(COUNTING)
    foreground: list[str] = []
    thread = threading.Thread(target=lambda: foreground.append(sandbox.run(COUNTING).stdout))
    thread.start()
    until(lambda: sandbox.logs(background), "the command says something")
    rig.server.kill()
    rig.server.start()
    again = rig.server.connect(sandbox.id)
    assert again.wait(background)["exit_code"] == 0
    assert again.logs(background) == COUNTED
    thread.join(60)
    assert foreground == [COUNTED.decode().rstrip("\n")]


def test_expiry_fires_after_a_restart(rig: Rig) -> None:
    soon, later = rig.create(timeout=600), rig.create(timeout=600)
    at = datetime.now(UTC) + timedelta(seconds=2)
    renew = rig.server.call("POST", f"/v1/sandboxes/{soon.id}/renew-expiration", body={"expiresAt": at.isoformat()})
    renew.expect(200)
    rig.server.kill()
    rig.server.start()
    until(lambda: rig.server.call("GET", f"/v1/sandboxes/{soon.id}").status == 404, "the expired one is gone")
    assert datetime.now(UTC) >= at
    assert rig.settle() == {later.id}


def test_an_end_that_nobody_watched_is_told_afterwards(rig: Rig) -> None:
    sandbox = rig.server.create(entrypoint=("sh", "-c", "until [ -e /tmp/end ]; do sleep 0.05; done; exit 4"))
    rig.server.kill()
    sandbox.run("touch /tmp/end")
    until(lambda: not answers(sandbox), "the sandbox has ended")
    rig.server.start()
    until(lambda: failed_with(rig.server, sandbox.id, 4), "the end is in the store")
    assert rig.server.get(sandbox.id)["end"]["reason"] == "exited"
    rig.server.delete(sandbox.id)


@pytest.mark.parametrize("moment", MOMENTS)
def test_during_creates_nothing_is_half_made(rig: Rig, moment: float) -> None:
    rig.create()
    body = {"image": {"uri": "host"}, "entrypoint": ["sleep", rig.mark], "resourceLimits": {}}
    with ThreadPoolExecutor(6) as pool:
        creating = [pool.submit(attempt, lambda: rig.server.call("POST", "/v1/sandboxes", body=body)) for _ in range(6)]
        time.sleep(moment)  # not to wait for something: this is the instant under test
        rig.server.kill()
        answered = [future.result() for future in creating]
    rig.server.start()
    ids = rig.settle()
    # Who was answered has a sandbox; who was not may have one, never a half one.
    assert len(ids) >= 1 + answered.count(202)
    rig.all_answer()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_create_with_a_key_is_repeated_and_makes_one(rig: Rig, moment: float) -> None:
    body = {"image": {"uri": "host"}, "entrypoint": ["sleep", rig.mark], "resourceLimits": {}}

    def create(key: int) -> Answer:
        return rig.server.call("POST", "/v1/sandboxes", body=body, headers={"Idempotency-Key": f"{rig.mark} {key}"})

    with ThreadPoolExecutor(6) as pool:
        creating = [pool.submit(attempt, partial(create, key)) for key in range(6)]
        time.sleep(moment)  # not to wait for something: this is the instant under test
        rig.server.kill()
        answered = [future.result() for future in creating]
    rig.server.start()
    again = [create(key).expect(202) for key in range(6)]
    # Who was answered gets the same one; who was not gets one, made before the end or now.
    assert all("idempotency-replayed" in told.headers for told, was in zip(again, answered, strict=True) if was == 202)
    assert rig.settle() == {told.json()["id"] for told in again}
    assert len(rig.server.ids()) == 6
    rig.all_answer()


@pytest.mark.parametrize("moment", MOMENTS)
def test_during_deletes_what_was_begun_is_ended(rig: Rig, moment: float) -> None:
    made = [rig.create() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        deleting = {
            one.id: pool.submit(attempt, lambda one=one: rig.server.call("DELETE", f"/v1/sandboxes/{one.id}"))
            for one in made
        }
        time.sleep(moment)  # not to wait for something: this is the instant under test
        rig.server.kill()
        answered = {one: future.result() for one, future in deleting.items()}
    rig.server.start()
    left = rig.settle()
    assert not left & {one for one, status in answered.items() if status == 204}
    rig.all_answer()


def test_again_and_again(rig: Rig) -> None:
    made = {rig.create().id}
    for _ in range(5):
        rig.server.kill()
        rig.server.start()
        made.add(rig.create().id)
    assert rig.settle() == made
    rig.all_answer()
