# SPDX-License-Identifier: Apache-2.0
"""osb as people run it: a process of its own, against a real server with the local runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from live_server import LiveServer, clean_environment

OSB = str(Path(sys.executable).parent / "osb")
Osb = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """One server for all tests; each makes sandboxes of its own, or uses the shared one."""
    if sys.platform != "linux":
        pytest.skip("the local runtime needs Linux")
    home = Path(tempfile.mkdtemp(prefix="osb-"))
    try:
        with LiveServer.started(home) as started:
            yield started
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def sandbox_id(server: LiveServer) -> str:
    """A sandbox that tests may write files into and run commands in."""
    return server.create().id


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An empty home directory and no settings from outside."""
    home = tmp_path / "home"
    home.mkdir()
    unwanted = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    clean = clean_environment(home, HOME=str(home), TERM="xterm-256color", PYTHONWARNINGS="error::ResourceWarning")
    return {name: value for name, value in clean.items() if name not in unwanted and "OPEN_SANDBOX" not in name}


@pytest.fixture
def here(environment: dict[str, str]) -> Osb:
    """Runs osb without a server; fails unless it ends with the expected code."""

    def run(*arguments: str, code: int = 0, stdin: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [OSB, *arguments], env={**environment, **more}, input=stdin, capture_output=True, timeout=60, check=False
        )
        said = f"osb {' '.join(arguments)}: {done.returncode}\n{done.stdout[-2000:]!r}\n{done.stderr[-2000:]!r}"
        assert done.returncode == code, said
        assert b"Traceback" not in done.stderr, said
        return done

    return run


@pytest.fixture
def osb(here: Osb, environment: dict[str, str], server: LiveServer) -> Osb:
    """Runs osb against the server."""
    environment["OPEN_SANDBOX_DOMAIN"] = server.address
    return here


@pytest.fixture
def start(osb: Osb, environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts osb and leaves it running, with pipes; ended after the test."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [OSB, *arguments],
            env=environment,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def terminal(environment: dict[str, str]) -> Callable[..., tuple[int, str]]:
    """Runs osb on a terminal of 80 columns; its exit code, and what it drew."""
    import fcntl
    import pty
    import struct
    import termios

    def run(*arguments: str) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        process = subprocess.Popen([OSB, *arguments], env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        drawn = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # how Linux tells that the other side is closed
                break
            if not piece:
                break
            drawn += piece
        os.close(ours)
        return process.wait(), drawn.decode().replace("\r\n", "\n")

    return run
