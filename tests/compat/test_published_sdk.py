# SPDX-License-Identifier: Apache-2.0
"""The published SDK 1.1.1, unmodified, against this server: every call a named check, and a table of all its methods.

Each check runs in both worlds (async, sync) and on both ways (direct, through the server). The same programs also run
with this repository's SDK: what works with the one works with the other.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from table import Table

from live_server import LiveServer, clean_environment

HERE = Path(__file__).parent
PROGRAMS = HERE / "published"
LIMIT = 240
KEY = "open-sesame"


def checks_of(program: str) -> list[str]:
    """The names of a program's checks, read without running it."""
    tree = ast.parse((PROGRAMS / f"{program}.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.AsyncFunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "check" for mark in node.decorator_list)
    ]


def all_of(*programs: str) -> list[tuple[str, str]]:
    return [(program, check) for program in programs for check in checks_of(program)]


@dataclass(frozen=True)
class Variant:
    """Whose SDK, in which world, on which way."""

    client: str
    world: str
    way: str

    def __str__(self) -> str:
        return f"{self.client}-{self.world}-{self.way}"


WORLDS = [(world, way) for way in ("direct", "proxied") for world in ("async", "sync")]
PUBLISHED = [Variant("published", world, way) for world, way in WORLDS]
# Each world and each way once: that ours agree with each other is shown elsewhere.
OURS = [Variant("ours", "async", "direct"), Variant("ours", "sync", "proxied")]
USED = ("lifecycle", "commands", "sessions", "files", "identity", "metrics", "isolation", "code")


class Outcomes:
    """Runs each program once, when its first check is asked for."""

    def __init__(self, python: Path, home: Path, address: str, pings: bool = True, **environment: str) -> None:
        self._python = python
        self._home = home
        told = {"OPEN_SANDBOX_DOMAIN": address, "COMPAT_PINGS": "yes" if pings else "no"}
        self._environment = clean_environment(home, **told, **environment)
        self._environment.pop("PYTHONPATH", None)
        self._told: dict[str, tuple[dict[str, str], str]] = {}
        self.calls: dict[str, set[str]] = {}
        """Method to the ways its calls ended, in checks that hold."""

    def verify(self, program: str, check: str) -> None:
        """Fail as the check did."""
        self.run(program)
        problems, rest = self._told[program]
        if check not in problems:
            pytest.fail(f"{program} told nothing about {check}:\n{rest}", pytrace=False)
        if problems[check]:
            pytest.fail(problems[check], pytrace=False)

    def run(self, program: str) -> None:
        if program not in self._told:
            self._told[program] = self._run(program)

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
                continue
            self._note(told["calls"], failed=bool(told["problem"]))
        return problems, "\n".join(rest)

    def _note(self, calls: list[tuple[str, str, str]], *, failed: bool) -> None:
        for method, outcome, caller in calls:
            # A call from inside the SDK shows nothing about calling it, but these are reached in no other way.
            if not caller or method.startswith(("Health.", "Egress.")):
                self.calls.setdefault(method, set()).add("FAIL" if failed else outcome)


Get = Callable[[Variant], Outcomes]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that asks for a key."""
    with LiveServer.started(tmp_path_factory.mktemp("locked"), config=f'[server]\napi_key = "{KEY}"\n') as started:
        yield started


@pytest.fixture(scope="module")
def outcomes(published: Path, server: LiveServer, locked: LiveServer) -> Get:
    """What each variant came to. What goes through the server goes to one that asks for its key, also there."""

    @cache
    def get(variant: Variant) -> Outcomes:
        python = published / "python" if variant.client == "published" else Path(sys.executable)
        told = {"COMPAT_WORLD": variant.world, "COMPAT_RECORD": "yes" if variant.client == "published" else "no"}
        if variant.way == "direct":
            return Outcomes(python, server.home, server.address, **told)
        return Outcomes(python, locked.home, locked.address, COMPAT_PROXIED="yes", OPEN_SANDBOX_API_KEY=KEY, **told)

    return get


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


@pytest.mark.parametrize(("program", "check"), all_of(*USED))
@pytest.mark.parametrize("variant", [*PUBLISHED, *OURS], ids=str)
def test_what_is_built_works(outcomes: Get, variant: Variant, program: str, check: str) -> None:
    outcomes(variant).verify(program, check)


@pytest.mark.parametrize(("program", "check"), all_of("later"))
@pytest.mark.parametrize("variant", PUBLISHED, ids=str)
def test_what_comes_later_is_refused_clearly(outcomes: Get, variant: Variant, program: str, check: str) -> None:
    outcomes(variant).verify(program, check)


@pytest.mark.parametrize("client", ["published", "ours"])
@pytest.mark.parametrize("check", checks_of("key"))
def test_key(outcomes: Get, client: str, check: str) -> None:
    world = "async" if client == "published" else "sync"
    outcomes(Variant(client, world, "proxied")).verify("key", check)


def test_every_published_method_is_covered(outcomes: Get, table: Table) -> None:
    """The list comes from the published package itself."""
    for variant in PUBLISHED:
        for program in (*USED, "later"):
            outcomes(variant).run(program)
        table.sdk[f"{variant.world} {variant.way}"] = outcomes(variant).calls
    assert table.uncovered_methods() == []
