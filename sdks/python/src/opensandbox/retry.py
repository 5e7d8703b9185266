# SPDX-License-Identifier: Apache-2.0
"""When to try a request again, and after how long. Pure: no clock, no I/O."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from http import HTTPStatus

IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})
# A server that asks for more patience than this is not worth blocking a caller for.
LONGEST_RETRY_AFTER = timedelta(seconds=60)


class JitterMode(StrEnum):
    """How much chance there is in a pause, so that many clients do not return at the same instant."""

    NONE = "none"
    FULL = "full"
    DECORRELATED = "decorrelated"


class Failure(StrEnum):
    """What became of an attempt."""

    NOT_SENT = "not_sent"
    """No connection: nothing of the request left this machine, so any method may be tried again."""
    BROKEN = "broken"
    """The connection broke after sending: it may have been carried out."""
    STATUS = "status"
    """It was answered with an error status."""


@dataclass(frozen=True)
class RetryEvent:
    """Told to `RetryPolicy.on_retry` before each pause."""

    method: str
    url: str
    attempt: int
    failure: Failure
    status_code: int | None
    delay: timedelta


@dataclass(frozen=True)
class RetryPolicy:
    """Requests that cannot do harm twice are repeated; others only if they were never sent.

    GET, HEAD, PUT, DELETE and OPTIONS are tried again after a broken connection and after the listed
    statuses; POST and PATCH only when no connection could be made, or after the statuses listed for
    them (none, unless set). `RetryPolicy(max_retries=0)` switches it off.
    """

    max_retries: int = 3
    initial_backoff: timedelta = timedelta(milliseconds=500)
    max_backoff: timedelta = timedelta(seconds=30)
    backoff_multiplier: float = 2.0
    jitter: JitterMode = JitterMode.DECORRELATED
    retryable_status_codes_idempotent: frozenset[HTTPStatus] = frozenset(
        {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE}
    )
    retryable_status_codes_non_idempotent: frozenset[HTTPStatus] = field(default_factory=frozenset)
    on_retry: Callable[[RetryEvent], None] | None = None

    def allows(self, method: str, attempt: int, failure: Failure, status: int | None = None) -> bool:
        """Whether attempt number `attempt` (from 0) that failed like this may be followed by another."""
        if attempt >= self.max_retries:
            return False
        if failure is Failure.NOT_SENT:
            return True
        idempotent = method.upper() in IDEMPOTENT
        if failure is Failure.BROKEN:
            return idempotent
        codes = self.retryable_status_codes_idempotent if idempotent else self.retryable_status_codes_non_idempotent
        return status in codes

    def delay(
        self,
        attempt: int,
        previous: timedelta,
        retry_after: timedelta | None = None,
        chance: Callable[[], float] = random.random,
    ) -> timedelta | None:
        """How long to pause after attempt `attempt`; None if the server asks for more than is reasonable."""
        if retry_after is not None:
            return retry_after if retry_after <= LONGEST_RETRY_AFTER else None
        ceiling = min(self.max_backoff, self.initial_backoff * self.backoff_multiplier**attempt)
        if self.jitter is JitterMode.FULL:
            return ceiling * chance()
        if self.jitter is JitterMode.DECORRELATED:
            upper = min(self.max_backoff, max(self.initial_backoff, previous * 3))
            return self.initial_backoff + (upper - self.initial_backoff) * chance()
        return ceiling


def parse_retry_after(value: str | None, now: datetime | None = None) -> timedelta | None:
    """The pause a `Retry-After` header asks for: seconds, or a date."""
    if not value:
        return None
    if value.strip().isdigit():
        return timedelta(seconds=int(value))
    from email.utils import parsedate_to_datetime

    try:
        until = parsedate_to_datetime(value)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(timedelta(), until - (now or datetime.now(UTC)))
