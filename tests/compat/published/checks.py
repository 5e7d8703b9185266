# SPDX-License-Identifier: Apache-2.0
"""Runs checks with the published SDK and tells the outcome of each as a line of JSON.

The files beside this one are programs: they run under the interpreter that has the published clients installed,
and import nothing of this repository.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import recording

Check = Callable[[Any], Awaitable[None]]
_CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Marks a check. Its name is the name of the test, its docstring what it shows."""
    _CHECKS.append(function)
    return function


async def raises(expected: type[Exception], call: Awaitable[object]) -> Any:
    """The exception that the call must end with."""
    try:
        outcome = await call
    except expected as error:
        return error
    raise AssertionError(f"no {expected.__name__}, but {outcome!r}")


async def until(ask: Callable[[], Awaitable[Any]], enough: Callable[[Any], bool]) -> Any:
    """Ask until the answer is enough; the published SDK has no other way to wait for a background command."""
    while not enough(answer := await ask()):  # noqa: ASYNC110 (see above)
        await asyncio.sleep(0.01)
    return answer


def run(opened: Callable[[], Any]) -> None:
    """Run all checks in order, inside one `async with opened() as world`."""

    async def all_of_them() -> None:
        async with opened() as world:
            for function in _CHECKS:
                begun = time.monotonic()
                try:
                    await asyncio.wait_for(function(world), 60)
                    problem = ""
                except Exception:
                    problem = traceback.format_exc()
                line: dict[str, Any] = {
                    "check": function.__name__,
                    "problem": problem,
                    "seconds": round(time.monotonic() - begun, 3),
                }
                line["calls"] = sorted(set(recording.CALLS))
                recording.CALLS.clear()
                print(json.dumps(line), flush=True)

    asyncio.run(all_of_them())
