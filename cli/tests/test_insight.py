# SPDX-License-Identifier: Apache-2.0
"""`osb events`, `executions`, `history` and `runtime`."""

from __future__ import annotations

import json

from conftest import Osb
from live_server import LiveServer


def test_what_happened(osb: Osb, server: LiveServer) -> None:
    made = server.create(metadata={"job": "insight"})
    made.run("exit 3")
    told = [json.loads(line) for line in osb("events", made.id, "-o", "json").stdout.splitlines()]
    assert told[0]["event"] == "created"
    assert {event["sandbox_id"] for event in told} == {made.id}
    ran = json.loads(osb("executions", made.id, "-o", "json").stdout)["items"]
    assert [(one["content"], one["exit_code"]) for one in ran] == [("exit 3", 3)]
    server.delete(made.id)
    gone = osb("history", "-m", "job=insight").stdout.decode()
    assert made.id in gone
    assert "killed" in gone
    assert b"local" in osb("runtime").stdout
