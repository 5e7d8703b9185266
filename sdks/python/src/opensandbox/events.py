# SPDX-License-Identifier: Apache-2.0
"""What happens to sandboxes, as it happens."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import timedelta

from opensandbox import models
from opensandbox.concurrency import sleep
from opensandbox.exceptions import NotFoundException, SandboxConnectionException, UnavailableException
from opensandbox.transport import Connection

logger = logging.getLogger("opensandbox")

# The last thing that is ever told about a sandbox.
LAST = "deleted"


async def watch(
    server: Connection, path: str, *, follow: bool, after: int | None, of_one: bool
) -> AsyncGenerator[models.SandboxEvent, None]:
    """The events of a stream; when the connection breaks it goes on after the last one that came."""
    policy = server.config.retry_policy
    params = [] if follow else [("follow", "false")]
    failures, pause, begun = 0, timedelta(), False
    while True:
        why: Exception
        try:
            headers = {"Last-Event-ID": str(after)} if after is not None else {}
            async with aclosing(server.events("GET", path, params=params, headers=headers)) as stream:
                async for data in stream:
                    event = models.base.parse(models.SandboxEvent, data.encode())
                    failures, pause, begun, after = 0, timedelta(), True, event.seq
                    yield event
                    if of_one and event.event == LAST:
                        return
            if not follow:
                return
            why = SandboxConnectionException("the stream of events ended")
        except NotFoundException:
            # It went while nobody was listening.
            if begun:
                return
            raise
        except (SandboxConnectionException, UnavailableException) as error:
            why = error
        delay = policy.delay(failures, pause)
        if failures >= policy.max_retries or delay is None:
            raise why
        logger.debug("%s; again in %.1f s", why, delay.total_seconds())
        failures, pause = failures + 1, delay
        await sleep(pause)
