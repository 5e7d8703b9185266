# SPDX-License-Identifier: Apache-2.0
"""The published SDK 1.1.1 against our server, and against the stub: the difference is what our side takes."""

from __future__ import annotations

import json
import subprocess

from . import ROOT
from .figure import Book, Figure, median
from .world import World

FIGURES = (
    Figure("published.first_output", "create, then `echo`, with the published SDK"),
    Figure("published.first_output_stub", "the same against the stub: that SDK's own time"),
    Figure("published.above_stub", "the difference of the two", most=20),
)
PYTHON = ROOT / ".venv-compat" / "bin" / "python"
SECONDS = 120


def measure(world: World, book: Book) -> None:
    """In one process of its own, server and stub in turn."""
    if not PYTHON.exists():
        book.left_out("the published SDK is not installed; `make setup-test` does it")
        return
    places = [f"server={world.server.address}", f"stub={world.stub}"]
    # -I: neither a module here nor one named by the environment may be taken for the SDK.
    command = [str(PYTHON), "-I", str(ROOT / "bench" / "published_rounds.py"), str(world.rounds(30)), *places]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    taken = json.loads(done.stdout.splitlines()[-1])
    ours, stub = taken["server"]["first_output"], taken["stub"]["first_output"]
    book.times("published.first_output", ours, note=f"create alone {median(taken['server']['create']):.1f} ms")
    book.times("published.first_output_stub", stub, note=f"create alone {median(taken['stub']['create']):.1f} ms")
    book.value("published.above_stub", median(ours) - median(stub))
