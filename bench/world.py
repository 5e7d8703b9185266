# SPDX-License-Identifier: Apache-2.0
"""What is measured against: private servers, started when first asked for, ended with all they made."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from live_server import LiveServer, clean_environment

from . import ROOT

START_SECONDS = 60.0
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Options:
    """How much to measure."""

    rounds: int | None = None
    quick: bool = False


class World:
    """Everything a bench may need. Use as a context manager: its end is the end of all it started.

    >>> with World(Options(quick=True)) as world:           # doctest: +SKIP
    ...     print(world.server.address)
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="osb-bench-"))
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)

    def __enter__(self) -> World:
        # Nothing in this environment may lead the SDK, or a program started here, elsewhere.
        for name in set(os.environ) - set(clean_environment(self.folder)):
            self._stack.callback(os.environ.__setitem__, name, os.environ.pop(name))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rounds(self, usual: int, quick: int = 3) -> int:
        """How many rounds to make: what was asked for, else few or the usual number."""
        return self.options.rounds or self.sized(usual, quick)

    def sized(self, usual: int, quick: int) -> int:
        """A number of things that does not follow --rounds."""
        return quick if self.options.quick else usual

    @functools.cached_property
    def server(self) -> LiveServer:
        """The server with the local runtime, as `opensandbox-server` starts it."""
        home = self._home("local")
        return self._stack.enter_context(LiveServer.started(home))

    @functools.cached_property
    def stub(self) -> str:
        """host:port of the server that does nothing (stub.py)."""
        return self._program([sys.executable, "-m", "bench.stub"])

    @functools.cached_property
    def fake(self) -> str:
        """host:port of the server with the fake runtime: routes and database are real, sandboxes are not."""
        home = self._home("fake")
        return self._program([sys.executable, str(ROOT / "tests" / "compat" / "fake_server.py"), str(home)])

    @functools.cached_property
    def bare(self) -> str:
        """host:port of the bare Go server (fileserver/main.go)."""
        home = self._home("bare")
        program = self.folder / "fileserver"
        # Go's own cache makes this quick whenever the source is the same.
        subprocess.run(
            ["go", "build", "-buildvcs=false", "-o", str(program), "."],
            cwd=ROOT / "bench" / "fileserver",
            env={**os.environ, "CGO_ENABLED": "0"},
            check=True,
            timeout=300,
        )
        return self._program([str(program), str(home)])

    def _home(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))

    def _program(self, command: list[str]) -> str:
        return self._stack.enter_context(program(command))


@contextlib.contextmanager
def program(command: list[str]) -> Iterator[str]:
    """A program until the end of the block, and the first line it prints: where it listens."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    alarm = threading.Timer(START_SECONDS, process.kill)
    alarm.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        alarm.cancel()
        if not line:
            raise RuntimeError(f"{' '.join(command)} did not start: it ended with {process.wait()}")
        yield line
    finally:
        alarm.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
