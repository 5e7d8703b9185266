# SPDX-License-Identifier: Apache-2.0
"""What a real server tells about real sandboxes: while they run, and when they are gone."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from live_server import LiveServer, until


def stream(server: LiveServer, path: str) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=30)
    made.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return made


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    received = b""
    while wanted not in received:
        chunk = connection.recv(65536)
        assert chunk, received
        received += chunk
    return received


def test_a_life_from_its_first_event_to_its_history(server: LiveServer) -> None:
    sandbox = server.create(entrypoint=["sh", "-c", "echo first words; exec sleep infinity"])
    with stream(server, f"/v1/sandboxes/{sandbox.id}/events") as events:
        read_until(events, b"event: running")
        sandbox.run("echo of a command; exit 3", timeout=60)
        page = server.call("GET", f"/v1/sandboxes/{sandbox.id}/executions").expect(200).json()
        [one] = page["items"]
        assert (one["content"], one["exitCode"], one["client"]) == ("echo of a command; exit 3", 3, "127.0.0.1")
        logs = server.call("GET", f"/v1/sandboxes/{sandbox.id}/diagnostics/logs?scope=all").expect(200).json()
        assert logs["content"] == "first words\n"
        server.delete(sandbox.id)
        told = read_until(events, b"\r\n0\r\n\r\n")
    assert told.index(b"event: deleting") < told.index(b"event: deleted")
    entry = server.call("GET", f"/v1/history/{sandbox.id}").expect(200).json()
    assert (entry["end"]["reason"], entry["output"], entry["executions"]) == ("killed", "first words\n", 1)
    assert entry["end"]["peakMemoryBytes"] > 0
    assert server.call("GET", f"/v1/sandboxes/{sandbox.id}/executions").expect(200).json() == page
    logs = server.call("GET", f"/v1/sandboxes/{sandbox.id}/diagnostics/logs").expect(200)
    assert logs.body == b"first words\n"


def test_the_log_leads_from_a_request_to_sandboxd(server: LiveServer) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "x-request-id": "of-this-test"}
    made = server.call(
        "POST", "/v1/sandboxes", body={"image": {"uri": "host"}, "entrypoint": ["sleep", "9"]}, headers=headers
    )
    sandbox_id = made.expect(202).json()["id"]
    server.delete(sandbox_id)

    def logged() -> list[dict[str, object]]:
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        return [line for line in lines if line.get("traceId") == trace and line.get("requestId") == "of-this-test"]

    until(logged, "the request is in the log with its trace")
    assert trace in (server.state / "log" / "sandboxd.log").read_text()


def test_a_stop_does_not_wait_for_streams(home: Path) -> None:
    with LiveServer.started(home) as server, stream(server, "/v1/events") as events:
        read_until(events, b": events")
        assert server.stop() == 0
        assert b"event: cut" in read_until(events, b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("style", ["text", "json"])
def test_the_log_has_the_form_that_was_asked_for(home: Path, style: str) -> None:
    with LiveServer.started(home, config=f'[log]\nformat = "{style}"\n') as server:
        server.call("GET", "/v1/sandboxes").expect(200)
        # The line is written behind the answer.
        line = until(lambda: server.log.read_text(), "the request is logged").splitlines()[-1]
        assert line.startswith("{") is (style == "json")
        assert "GET /sandboxes 200" in line
