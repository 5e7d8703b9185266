# SPDX-License-Identifier: Apache-2.0
"""What a sandbox says it uses, and that it is ready."""

from __future__ import annotations

import time
from datetime import timedelta

from checks import check, run
from sdk import Sandbox
from world import opened


@check
async def get_metrics(sandbox: Sandbox) -> None:
    """Of the sandbox, not of the host: the memory is the limit that was given, 2 GiB."""
    metrics = await sandbox.get_metrics()
    assert metrics.cpu_count > 0
    assert 0 <= metrics.cpu_used_percentage <= 100
    assert metrics.memory_total_in_mib == 2048, metrics
    assert 0 <= metrics.memory_used_in_mib < metrics.memory_total_in_mib
    assert abs(time.time() * 1000 - metrics.timestamp) < 60_000


@check
async def metrics_service(sandbox: Sandbox) -> None:
    assert (await sandbox.metrics.get_metrics(sandbox.id)).cpu_count > 0


@check
async def check_ready(sandbox: Sandbox) -> None:
    await sandbox.check_ready(timedelta(seconds=5), timedelta(milliseconds=50))


run(opened)
