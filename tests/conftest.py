# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the suites that need a real server: one for a module, or one of its own for a test that hurts it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, Sandbox


@pytest.fixture(scope="session")
def linux() -> None:
    """Without Linux there is no local runtime; as root on Linux there is no excuse."""
    if sys.platform != "linux":
        pytest.skip("the local runtime needs Linux")


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory with a short path, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="osb-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def server(linux: None) -> Iterator[LiveServer]:
    """A server that the tests of a module share; none of them may stop it."""
    path = Path(tempfile.mkdtemp(prefix="osb-"))
    try:
        with LiveServer.started(path) as started:
            yield started
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def own_server(linux: None, home: Path) -> Iterator[LiveServer]:
    """A server of one test, to be killed, stopped and started again."""
    with LiveServer.started(home) as started:
        yield started


@pytest.fixture
def new_sandbox(server: LiveServer) -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes on the module's server and deletes them after the test."""
    made: list[Sandbox] = []

    def create(**fields: Any) -> Sandbox:
        made.append(server.create(**fields))
        return made[-1]

    yield create
    for sandbox in made:
        server.call("DELETE", f"/v1/sandboxes/{sandbox.id}")


@pytest.fixture(scope="module")
def sandbox(server: LiveServer) -> Sandbox:
    """One sandbox that the tests of a module share."""
    return server.create()
