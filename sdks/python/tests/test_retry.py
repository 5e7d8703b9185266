# SPDX-License-Identifier: Apache-2.0
"""What is tried again, and what never is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest
from stub import Reply, Stub

from opensandbox import ConnectionConfig
from opensandbox.exceptions import SandboxConnectionException, UnavailableException
from opensandbox.retry import Failure, JitterMode, RetryEvent, RetryPolicy, parse_retry_after
from opensandbox.transport import Connection

BUSY = Reply.error(503, "NODE::UNAVAILABLE", "not now")


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_what_does_no_harm_twice_is_repeated(method: str) -> None:
    policy = RetryPolicy()
    assert policy.allows(method, 0, Failure.NOT_SENT)
    assert policy.allows(method, 0, Failure.BROKEN)
    assert all(policy.allows(method, 0, Failure.STATUS, status) for status in (429, 502, 503))
    assert not any(policy.allows(method, 0, Failure.STATUS, status) for status in (400, 401, 404, 409, 500, 501, 504))


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_others_only_if_they_were_never_sent(method: str) -> None:
    policy = RetryPolicy()
    assert policy.allows(method, 0, Failure.NOT_SENT)
    assert not policy.allows(method, 0, Failure.BROKEN)
    assert not any(policy.allows(method, 0, Failure.STATUS, status) for status in (429, 500, 502, 503))


def test_there_is_an_end_to_it() -> None:
    assert RetryPolicy(max_retries=2).allows("GET", 1, Failure.BROKEN)
    assert not RetryPolicy(max_retries=2).allows("GET", 2, Failure.BROKEN)
    assert not RetryPolicy(max_retries=0).allows("GET", 0, Failure.NOT_SENT)


def test_pauses_grow_up_to_a_limit() -> None:
    policy = RetryPolicy(jitter=JitterMode.NONE, max_backoff=timedelta(seconds=3))
    pauses = [policy.delay(attempt, timedelta()) for attempt in range(4)]
    assert pauses == [timedelta(seconds=s) for s in (0.5, 1, 2, 3)]


def test_decorrelated_pauses_stay_between_the_first_and_three_times_the_last() -> None:
    policy = RetryPolicy()
    last = timedelta(seconds=2)
    assert policy.delay(1, last, chance=lambda: 0.0) == timedelta(seconds=0.5)
    assert policy.delay(1, last, chance=lambda: 1.0) == timedelta(seconds=6)


def test_the_server_may_ask_for_a_pause_within_reason() -> None:
    assert RetryPolicy().delay(0, timedelta(), timedelta(seconds=7)) == timedelta(seconds=7)
    assert RetryPolicy().delay(0, timedelta(), timedelta(minutes=5)) is None


def test_retry_after_is_seconds_or_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert parse_retry_after("3") == timedelta(seconds=3)
    assert parse_retry_after("Thu, 01 Jan 2026 00:00:09 GMT", now) == timedelta(seconds=9)
    assert parse_retry_after("Thu, 01 Jan 2025 00:00:09 GMT", now) == timedelta()
    assert parse_retry_after("soon") is None
    assert parse_retry_after(None) is None


@pytest.mark.anyio
async def test_a_busy_server_is_asked_again(stub: Stub, config: ConnectionConfig) -> None:
    told: list[RetryEvent] = []
    policy = RetryPolicy(initial_backoff=timedelta(), max_backoff=timedelta(), on_retry=told.append)
    stub.routes["GET", "/v1/x"] = [BUSY, BUSY, Reply.of({"ok": True})]
    answer = await Connection.to_server(config).call("GET", "/x", policy=policy)
    assert answer.json() == {"ok": True}
    assert [(event.attempt, event.status_code) for event in told] == [(0, 503), (1, 503)]
    assert len({request.headers["x-request-id"] for request in stub.requests}) == 1


@pytest.mark.anyio
async def test_a_busy_server_is_given_up_in_the_end(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["GET", "/v1/x"] = BUSY
    with pytest.raises(UnavailableException, match="not now"):
        await Connection.to_server(config).call("GET", "/x")
    assert len(stub.requests) == 4


@pytest.mark.anyio
async def test_a_post_is_sent_once(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["POST", "/v1/x"] = BUSY
    with pytest.raises(UnavailableException):
        await Connection.to_server(config).call("POST", "/x", json={})
    stub.routes["POST", "/v1/x"] = lambda _: None
    with pytest.raises(SandboxConnectionException, match="broke"):
        await Connection.to_server(config).call("POST", "/x", json={})
    assert len(stub.requests) == 2


@pytest.mark.anyio
async def test_a_get_survives_a_broken_connection(stub: Stub, config: ConnectionConfig) -> None:
    stub.routes["GET", "/v1/x"] = [None, Reply.of({"ok": True})]
    assert (await Connection.to_server(config).call("GET", "/x")).json() == {"ok": True}


@pytest.mark.anyio
async def test_a_post_is_repeated_while_nobody_listens(config: ConnectionConfig) -> None:
    """The server is started by the second attempt: what was never sent may be sent again, body and all."""
    late = Stub()
    late.routes["POST", "/x"] = Reply.of({})

    async def body() -> AsyncIterator[bytes]:
        yield b"hello"

    with ExitStack() as stack:

        def begin(event: RetryEvent) -> None:
            assert event.failure is Failure.NOT_SENT
            if event.attempt == 0:
                stack.enter_context(late)

        policy = RetryPolicy(initial_backoff=timedelta(), max_backoff=timedelta(), on_retry=begin)
        await Connection(config, f"http://{late.address}", {}).call("POST", "/x", body=body, policy=policy)
    assert [received.body for received in late.requests] == [b"hello"]


@pytest.mark.anyio
async def test_a_delete_that_is_repeated_may_find_nothing(stub: Stub, config: ConnectionConfig) -> None:
    gone = Reply.error(404, "SANDBOX::NOT_FOUND", "no such sandbox")
    stub.routes["DELETE", "/v1/x"] = [None, gone]
    assert (await Connection.to_server(config).call("DELETE", "/x")).status_code == 404
