# SPDX-License-Identifier: Apache-2.0
"""The published SDK 1.1.1, unmodified, against this server: every call a named check.

The same programs also run with this repository's SDK: what works with the one works with the other.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_server import LiveServer, clean_environment

HERE = Path(__file__).parent
PROGRAMS = HERE / "published"
LIMIT = 240


def checks_of(program: str) -> list[str]:
    """The names of a program's checks, read without running it."""
    tree = ast.parse((PROGRAMS / f"{program}.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.AsyncFunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "check" for mark in node.decorator_list)
    ]


class Outcomes:
    """Runs each program once, when its first check is asked for."""

    def __init__(self, python: Path, home: Path, address: str, pings: bool = True, **environment: str) -> None:
        self._python = python
        self._home = home
        told = {"OPEN_SANDBOX_DOMAIN": address, "COMPAT_PINGS": "yes" if pings else "no"}
        self._environment = clean_environment(home, **told, **environment)
        self._environment.pop("PYTHONPATH", None)
        self._told: dict[str, tuple[dict[str, str], str]] = {}

    def verify(self, program: str, check: str) -> None:
        """Fail as the check did."""
        if program not in self._told:
            self._told[program] = self._run(program)
        problems, rest = self._told[program]
        if check not in problems:
            pytest.fail(f"{program} told nothing about {check}:\n{rest}", pytrace=False)
        if problems[check]:
            pytest.fail(problems[check], pytrace=False)

    def _run(self, program: str) -> tuple[dict[str, str], str]:
        process = subprocess.Popen(
            [str(self._python), str(PROGRAMS / f"{program}.py")],
            env=self._environment, cwd=self._home, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nnot done after {LIMIT} s"
        problems: dict[str, str] = {}
        rest: list[str] = []
        for line in output.splitlines():
            try:
                told = json.loads(line)
                problems[told["check"]] = told["problem"]
            except (ValueError, KeyError, TypeError):
                rest.append(line)
        return problems, "\n".join(rest)


@pytest.fixture(scope="module", params=["published", "ours"])
def local(request: pytest.FixtureRequest, published: Path, server: LiveServer) -> Outcomes:
    python = published / "python" if request.param == "published" else Path(sys.executable)
    return Outcomes(python, server.home, server.address)


@pytest.fixture(scope="module")
def local_published(published: Path, server: LiveServer) -> Outcomes:
    return Outcomes(published / "python", server.home, server.address)


@pytest.fixture(scope="module")
def fake(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    home = tmp_path_factory.mktemp("fake")
    with subprocess.Popen(
        [sys.executable, str(HERE / "fake_server.py"), str(home)],
        env=clean_environment(home), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, "the server on the fake runtime did not start"
            yield Outcomes(published / "python", home, address, pings=False)
        finally:
            process.terminate()


@pytest.mark.parametrize("check", checks_of("lifecycle"))
def test_lifecycle_on_the_fake_runtime(fake: Outcomes, check: str) -> None:
    fake.verify("lifecycle", check)


@pytest.mark.parametrize("check", checks_of("lifecycle"))
def test_lifecycle(local: Outcomes, check: str) -> None:
    local.verify("lifecycle", check)


@pytest.mark.parametrize("check", checks_of("commands"))
def test_commands(local: Outcomes, check: str) -> None:
    local.verify("commands", check)


@pytest.mark.parametrize("check", checks_of("files"))
def test_files(local: Outcomes, check: str) -> None:
    local.verify("files", check)


@pytest.mark.parametrize("check", checks_of("metrics"))
def test_metrics(local: Outcomes, check: str) -> None:
    local.verify("metrics", check)


@pytest.mark.parametrize("check", checks_of("synchronous"))
def test_synchronous(local_published: Outcomes, check: str) -> None:
    local_published.verify("synchronous", check)


@pytest.fixture(scope="module", params=["published", "ours"])
def locked(
    request: pytest.FixtureRequest, published: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcomes]:
    python = published / "python" if request.param == "published" else Path(sys.executable)
    with LiveServer.started(tmp_path_factory.mktemp("locked"), config='[server]\napi_key = "open-sesame"\n') as server:
        yield Outcomes(python, server.home, server.address, OPEN_SANDBOX_API_KEY="open-sesame")


@pytest.mark.parametrize("check", checks_of("key"))
def test_key(locked: Outcomes, check: str) -> None:
    locked.verify("key", check)
