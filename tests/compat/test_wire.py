# SPDX-License-Identifier: Apache-2.0
"""Facts of the wire that published clients rely on, looked at without any client in between."""

from __future__ import annotations

import json
from typing import Any

from live_server import LiveServer, Sandbox


def test_events_are_json_and_an_empty_line_each(sandbox: Sandbox) -> None:
    """Bare framing, exactly LF LF, no raw newline in the JSON, type and integer timestamp in each."""
    body = sandbox.call("POST", "/command", body={"command": "printf 'a\\nb\\n\\nc'; echo d >&2"}).expect(200).body
    assert body.endswith(b"\n\n")
    assert b"\r" not in body
    events = []
    for piece in body.removesuffix(b"\n\n").split(b"\n\n"):
        text = piece.removeprefix(b"data: ")
        assert b"\n" not in text
        events.append(json.loads(text))
    assert all(isinstance(event["type"], str) and isinstance(event["timestamp"], int) for event in events)
    assert events[0]["type"] == "init"
    assert len(events[0]["text"]) == 32
    kinds = [event["type"] for event in events]
    assert kinds.count("execution_complete") + kinds.count("error") == 1
    assert kinds[-1] == "execution_complete"
    texts = [event["text"] for event in events if event["type"] == "stdout"]
    assert "".join(texts) == "a\nb\n\nc"


def test_the_stream_has_the_headers_that_proxies_need(sandbox: Sandbox) -> None:
    answer = sandbox.call("POST", "/command", body={"command": "true"}).expect(200)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"


def test_no_answer_of_the_server_has_a_null(server: LiveServer) -> None:
    """The published parser breaks on null where it expects nothing."""

    def nulls(value: Any, at: str = "") -> list[str]:
        if isinstance(value, dict):
            return [found for key, inner in value.items() for found in nulls(inner, f"{at}.{key}")]
        if isinstance(value, list):
            return [found for index, inner in enumerate(value) for found in nulls(inner, f"{at}[{index}]")]
        return [at] if value is None else []

    body = {"image": {"uri": "host"}, "entrypoint": ["sleep", "infinity"], "resourceLimits": {}, "timeout": None}
    created = server.call("POST", "/v1/sandboxes", body=body).expect(202).json()
    try:
        for path in (
            f"/v1/sandboxes/{created['id']}",
            "/v1/sandboxes",
            f"/v1/sandboxes/{created['id']}/endpoints/44772",
        ):
            assert nulls(server.call("GET", path).expect(200).json()) == []
        assert nulls(created) == []
        assert "expiresAt" not in created
    finally:
        server.delete(created["id"])


def test_the_request_id_comes_back_also_with_errors(server: LiveServer, sandbox: Sandbox) -> None:
    for method, path in (
        ("GET", "/health"),
        ("GET", "/v1/sandboxes/nope"),
        ("GET", "/nowhere"),
        ("PUT", "/v1/sandboxes"),
    ):
        answer = server.call(method, path, headers={"X-Request-ID": "my-request-7"})
        assert answer.headers["x-request-id"] == "my-request-7", (method, path, answer)
    for path in ("/ping", "/files/download?path=/nope", "/nowhere"):
        answer = sandbox.call("GET", path, headers={"X-Request-ID": "my-request-8"})
        assert answer.headers["x-request-id"] == "my-request-8", (path, answer)


def test_creates_are_reported_without_an_error(server: LiveServer) -> None:
    event = {"eventType": "sandbox.create", "createDurationMs": 12, "success": True, "sandboxId": "x", "image": "host"}
    server.call("POST", "/v1/metrics/events", body=event).expect(204)
