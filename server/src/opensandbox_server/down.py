# SPDX-License-Identifier: Apache-2.0
"""`opensandbox-server down`: stop the server of a state directory and, when asked or when it is idle, sandboxd too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import statedir
from .errors import CannotStart, OpenSandboxError
from .wire.errors import KIND
from .wire.sandboxd import NodeVersion, ReportState, ShutdownRequestWhen

if TYPE_CHECKING:
    from .config import Local
    from .runtimes.local.plan import Settings
    from .runtimes.local.sandboxd import Client

SERVER_SECONDS = 30.0
NODE_SECONDS = 60.0
Say = Callable[[str], None]


def down(state: Path, local: Local, *, everything: bool, say: Say = print) -> int:
    """Stop what runs on this state directory. Returns the exit code: 0 also when nothing ran.

    >>> down(Path("/var/lib/opensandbox"), Local(), everything=True)       # doctest: +SKIP
    Stopped the server (pid 4711) in 0.1 s.
    Ending 2 sandboxes …
    sandboxd (pid 4712) left after 0.2 s.
    0
    """
    instance = _instance(state)
    if instance is None:
        say(f"Nothing runs: {state} is not a state directory.")
        return 0
    stopped = _stop_server(state, say)
    left = asyncio.run(_stop_node(_settings(state, instance, local), everything=everything, say=say))
    if not stopped and left is None:
        say(f"Nothing runs on {state}.")
    return 0


def _instance(state: Path) -> str | None:
    try:
        return (state / "instance").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(state, error) from None


def _unreadable(state: Path, error: OSError) -> CannotStart:
    return CannotStart(
        f"The state directory {state} cannot be read: {error.strerror}.", "Run as the user the server runs as."
    )


def _settings(state: Path, instance: str, local: Local) -> Settings:
    from .runtimes.local.plan import Settings
    from .runtimes.local.sandboxd import binary

    return Settings(
        state_dir=state,
        run_dir=statedir.run_dir(instance, local.run_dir),
        instance=instance,
        sandboxd=binary("sandboxd"),
        ingress=binary("ingress"),
        free_space_reserve=local.free_space_reserve,
    )


def _stop_server(state: Path, say: Say) -> bool:
    holder = statedir.holder(state)
    if holder is None:
        return False
    try:
        pidfd = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return False
    try:
        # Between the reading and the opening the pid may have become another's: asked again, it cannot any more.
        again = statedir.holder(state)
        if again is None or again.pid != holder.pid:
            return False
        started = time.monotonic()
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not _ended(pidfd, SERVER_SECONDS):
            raise CannotStart(
                f"The server (pid {holder.pid}) did not stop within {SERVER_SECONDS:.0f} s.",
                f"Its sandboxes would survive: kill -9 {holder.pid}",
            )
        say(f"Stopped the server (pid {holder.pid}) in {time.monotonic() - started:.1f} s.")
        return True
    except PermissionError:
        raise CannotStart(
            f"The server (pid {holder.pid}) belongs to another user.", "Run as the user the server runs as."
        ) from None
    finally:
        os.close(pidfd)


async def _stop_node(settings: Settings, *, everything: bool, say: Say) -> bool | None:
    """True: sandboxd left. False: it stays with its sandboxes. None: there was none, and nothing for one to do."""
    from .runtimes.local import sandboxd  # brings pydantic models, which no refusal above should wait for

    state = settings.state_dir
    async with sandboxd.Client(settings.socket) as node:
        version = await _answer(node, state / "sandboxd.lock")
        if version is None and _may_live(state):
            # It was killed, and its sandboxes live on. Only a sandboxd knows which, and only it can end them.
            say("sandboxd is gone but left sandboxes; starting it again to find them.")
            # It may stay, so it gets all that a server would give it.
            await sandboxd.start(replace(settings, pip_dir=sandboxd.pip_directory(state)))
            version = await _answer(node, state / "sandboxd.lock")
        if version is None:
            return None
        if (original := sandboxd.copied_from(version, state)) is not None:
            raise CannotStart(
                f"{state} is a copy of {original}, whose sandboxd runs (pid {version.pid}); nothing of it was stopped.",
                f"To stop that one: opensandbox-server down --state-dir {original}",
            )
        living = sum(1 for report in await node.list() if report.state is not ReportState.ENDED)
        with contextlib.ExitStack() as stack:
            try:
                pidfd = os.pidfd_open(version.pid)
            except ProcessLookupError:
                return None
            stack.callback(os.close, pidfd)
            started = time.monotonic()
            if everything and living:
                say(f"Ending {_count(living)} …")
            try:
                await node.shutdown(ShutdownRequestWhen.ALL if everything else ShutdownRequestWhen.IDLE)
            except sandboxd.Cut:
                pass  # it left before it had answered
            except OpenSandboxError as error:
                if KIND[error.code] != "conflict":
                    raise
                live, them = ("lives", "it") if living == 1 else ("live", "them")
                say(f"{_count(living)} {live} on; `opensandbox-server down --all` ends {them}.")
                return False
            if not await asyncio.to_thread(_ended, pidfd, NODE_SECONDS):
                raise CannotStart(
                    f"sandboxd (pid {version.pid}) did not leave within {NODE_SECONDS:.0f} s.", "See log/sandboxd.log."
                )
            say(f"sandboxd (pid {version.pid}) left after {time.monotonic() - started:.1f} s.")
            return True


def _may_live(state: Path) -> bool:
    """Whether a sandbox was running or being deleted when sandboxd last wrote about it."""
    try:
        return any(file.suffix == ".json" and _phase(file) != "ended" for file in (state / "records").iterdir())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unreadable(state, error) from None


def _phase(record: Path) -> str | None:
    try:
        return str(json.loads(record.read_bytes())["phase"])
    except (ValueError, KeyError, TypeError):
        return None  # sandboxd decides what such a file is


async def _answer(node: Client, lock: Path) -> NodeVersion | None:
    """Which sandboxd it is; None when there is none. One that is just starting is waited for."""
    from .runtimes.local.sandboxd import START_SECONDS, Unreachable

    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return await node.version()
        except Unreachable:
            if not statedir.is_held(lock) or time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.05)


def _ended(pidfd: int, seconds: float) -> bool:
    ready, _, _ = select.select([pidfd], [], [], seconds)
    return bool(ready)


def _count(number: int) -> str:
    return f"{number} sandbox{'' if number == 1 else 'es'}"
