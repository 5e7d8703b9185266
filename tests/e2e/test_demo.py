# SPDX-License-Identifier: Apache-2.0
"""`make demo`, the part after the installation: it shows what it promises and leaves nothing, also when interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_server import clean_environment, until

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def start(home: Path) -> subprocess.Popen[str]:
    """Start it in an environment full of settings that it must ignore."""
    (home / ".sandbox.toml").write_text("[nonsense]\n")
    environment = clean_environment(
        home,
        TMPDIR=str(home),
        PYTHONUNBUFFERED="1",
        OPEN_SANDBOX_DOMAIN="127.0.0.1:9",
        OPEN_SANDBOX_API_KEY="wrong",
        OPENSANDBOX_SERVER_API_KEY="other",
        OPENSANDBOX_STATE_DIR="/nonexistent",
        SANDBOX_CONFIG_PATH="/nonexistent",
    )
    return subprocess.Popen(
        [sys.executable, str(DEMO)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_of(home: Path) -> list[str]:
    """Processes that name the demo's folder, and the folder itself."""
    found = [str(path) for path in home.glob("opensandbox-demo-*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if f"{home}/opensandbox-demo-" in command:
                found.append(command)
    return found


@pytest.fixture
def demo(home: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(home)
    yield process
    if process.poll() is None:
        process.kill()
        process.wait()


def test_it_shows_a_sandbox_from_nothing_to_gone(home: Path, demo: subprocess.Popen[str]) -> None:
    shown, _ = demo.communicate(timeout=120)
    assert demo.returncode == 0, shown
    for stage in ("start the server", "create a sandbox", "run a command", "write a file", "read it back", "end it"):
        assert stage in shown
    assert shown.count(" ms ") >= 7
    assert "Hello from" in shown
    # The parts of a create: each number with its unit, no sum beside its own parts, names where there are names.
    for line in (
        r"    at the server +[0-9.]+ ms   validate( [\d.]+ ms, \w+)+ [\d.]+ ms",
        r"      launch +[0-9.]+ ms   ([a-z]+ [0-9.]+ ms(, )?)+",
        r"    client set-up, connection +[0-9.]+ ms",
        r"  look around inside +[0-9.]+ ms   [0-9]+ processes, network devices: lo, home directories:( [a-z]+)*",
    ):
        assert re.search(f"^{line}$", shown, re.MULTILINE), (line, shown)
    assert "total" not in shown
    assert "make serve" in shown
    for row in ("namespaces", "system calls", "capabilities", "limit: memory", "network"):
        assert f"\n  {row}" in shown
    until(lambda: not left_of(home), f"nothing is left: {left_of(home)}", 10)


@pytest.mark.parametrize("moment", ["start the server", "create a sandbox", "run a command", "read it back"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_cleans_up(home: Path, demo: subprocess.Popen[str], moment: str, number: int) -> None:
    assert demo.stdout is not None
    shown = ""
    while moment not in shown:
        character = demo.stdout.read(1)
        assert character, shown
        shown += character
    demo.send_signal(number)
    rest, _ = demo.communicate(timeout=120)
    # A stage that had just ended may have been the last one to notice.
    assert demo.returncode in (0, 130), shown + rest
    assert "Traceback" not in rest, rest
    assert ("Stopped, and nothing is left of it." in rest) == (demo.returncode == 130), rest
    assert ("make serve" in rest) == (demo.returncode == 0), rest
    until(lambda: not left_of(home), f"nothing is left: {left_of(home)}", 15)
