# SPDX-License-Identifier: Apache-2.0
"""The published command line 1.1.1 against this server."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from live_server import LiveServer, clean_environment

Osb = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def osb(published: Path, server: LiveServer) -> Osb:
    """Runs the program; fails when it does, unless told which code to expect."""
    environment = clean_environment(server.home, OPEN_SANDBOX_DOMAIN=server.address, NO_COLOR="1", TERM="dumb")

    def run(*arguments: str, code: int = 0, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(published / "osb"), *arguments], env=environment, cwd=server.home,
            input=stdin, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"osb {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    return run


@pytest.fixture(scope="module")
def sandbox_id(osb: Osb, server: LiveServer) -> Iterator[str]:
    made = json.loads(osb("sandbox", "create", "-i", "host", "-t", "10m", "-o", "json").stdout)
    assert made["status"] == "created"
    yield str(made["id"])
    server.delete(made["id"])


def test_sandboxes(osb: Osb, sandbox_id: str) -> None:
    listed = json.loads(osb("sandbox", "list", "-o", "json").stdout)
    assert sandbox_id in [item["id"] for item in listed["items"]]
    assert json.loads(osb("sandbox", "get", sandbox_id, "-o", "json").stdout)["id"] == sandbox_id
    assert json.loads(osb("sandbox", "health", sandbox_id, "-o", "json").stdout)["healthy"] is True
    osb("sandbox", "renew", sandbox_id, "-t", "20m", "-o", "json")
    endpoint = json.loads(osb("sandbox", "endpoint", sandbox_id, "-p", "8000", "-o", "json").stdout)
    assert endpoint["endpoint"].endswith("/8000")
    assert json.loads(osb("sandbox", "metrics", sandbox_id, "-o", "json").stdout)["cpu_count"] > 0


def test_a_command_prints_what_it_printed(osb: Osb, sandbox_id: str) -> None:
    """The texts are printed one after the other, so line breaks must be in them."""
    done = osb("command", "run", sandbox_id, "-o", "raw", "--", "printf", "line1\\nline2\\nline3\\n")
    assert done.stdout.removesuffix("\n") == "line1\nline2\nline3"
    done = osb("command", "run", sandbox_id, "-o", "raw", "--", "python3", "-c", "print(6*7)")
    assert done.stdout.strip() == "42"


def test_a_command_that_fails(osb: Osb, sandbox_id: str) -> None:
    osb("command", "run", sandbox_id, "-o", "raw", "--", "sh", "-c", "exit 3", code=1)


def test_a_command_in_the_background(osb: Osb, sandbox_id: str) -> None:
    started = json.loads(osb("command", "run", sandbox_id, "-d", "-o", "json", "--", "sleep", "1000").stdout)
    status = json.loads(osb("command", "status", sandbox_id, started["execution_id"], "-o", "json").stdout)
    assert status["running"] is True
    osb("command", "interrupt", sandbox_id, started["execution_id"])
    status = json.loads(osb("command", "status", sandbox_id, started["execution_id"], "-o", "json").stdout)
    assert status["running"] is False
    osb("command", "logs", sandbox_id, started["execution_id"])


def test_files(osb: Osb, sandbox_id: str, tmp_path: Path) -> None:
    osb("file", "write", sandbox_id, "/tmp/cli.txt", "-c", "from the command line")
    assert osb("file", "cat", sandbox_id, "/tmp/cli.txt").stdout.strip() == "from the command line"
    local = tmp_path / "up.bin"
    local.write_bytes(bytes(range(256)) * 1000)
    osb("file", "upload", sandbox_id, str(local), "/tmp/up.bin")
    osb("file", "download", sandbox_id, "/tmp/up.bin", str(tmp_path / "down.bin"))
    assert (tmp_path / "down.bin").read_bytes() == local.read_bytes()
    assert "/tmp/up.bin" in osb("file", "search", sandbox_id, "/tmp", "-p", "up.*", "-o", "json").stdout


def test_errors_are_shown(osb: Osb) -> None:
    done = osb("sandbox", "get", str(uuid.uuid4()), code=1)
    assert "SANDBOX::NOT_FOUND" in done.stdout + done.stderr


def test_kill(osb: Osb) -> None:
    made = json.loads(osb("sandbox", "create", "-i", "host", "-o", "json").stdout)
    osb("sandbox", "kill", made["id"], "-o", "json")
    osb("sandbox", "get", made["id"], code=1)
