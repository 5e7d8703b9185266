# SPDX-License-Identifier: Apache-2.0
"""`make bench`: measure everything, print a table, write reports/bench.json.

python -m bench [--only NAME …] [--rounds N] [--quick] [--check] [--json FILE] [--list]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import ROOT
from .figure import ABOVE, BELOW, Book, Measured
from .register import BENCHES, Bench
from .report import machine, table
from .world import Options, World

SCHEMA = 1


def _arguments(words: Sequence[str] | None, benches: Sequence[Bench]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="measure what bench/README.md lists")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these benches; see --list")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each figure that is taken from many")
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes: does it run, not how fast")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--json", type=Path, default=ROOT / "reports" / "bench.json", metavar="FILE")
    parser.add_argument("--list", action="store_true", help="what there is to measure, and its targets")
    arguments = parser.parse_args(words)
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds is at least 1")
    arguments.only = [name for word in arguments.only for name in word.split(",") if name]
    known = [bench.name for bench in benches]
    if unknown := [name for name in arguments.only if name not in known]:
        parser.error(f"no bench is called {', '.join(unknown)}; there are: {', '.join(known)}")
    return arguments


def _show_list(benches: Sequence[Bench]) -> None:
    for bench in benches:
        print(bench.name)
        for figure in bench.figures:
            print(f"  {figure.name:<28}{figure.target:<14}{figure.what}".rstrip())


def _run(benches: Sequence[Bench], options: Options) -> tuple[list[list[Measured]], list[dict[str, str]]]:
    """All of them, whatever becomes of one: the lines of each, and what failed."""
    groups: list[list[Measured]] = []
    failed: list[dict[str, str]] = []
    with World(options) as world:
        for bench in benches:
            print(f"  {bench.name:<12}", end="", flush=True)
            book = Book(bench.figures)
            start = time.perf_counter()
            try:
                bench.measure(world, book)
                book.left_out("not measured")
                print(f"{time.perf_counter() - start:6.1f} s", flush=True)
            except Exception as error:
                print("FAILED", flush=True)
                traceback.print_exc(limit=-3)
                failed.append({"bench": bench.name, "error": f"{type(error).__name__}: {error}"})
            groups.append(book.lines)
    return groups, failed


def main(words: Sequence[str] | None = None, benches: Sequence[Bench] = BENCHES) -> int:
    """The exit code: 1 when something could not be measured, or with --check is not as it should be."""
    arguments = _arguments(words, benches)
    if arguments.list:
        _show_list(benches)
        return 0
    chosen = [bench for bench in benches if not arguments.only or bench.name in arguments.only]
    facts, start = machine(), time.perf_counter()
    print(f"{facts['cores']} cores, {facts['cpu'] or 'unknown processor'}, Linux {facts['kernel']}")
    print(f"load {facts['load'][0]:.2f}: times of a busy machine mean little, ratios to the floor mean more\n")
    groups, failed = _run(chosen, Options(arguments.rounds, arguments.quick))
    lines = [line for group in groups for line in group]
    missed = [line for line in lines if line.verdict in (ABOVE, BELOW)]
    print("", *table(groups), "", sep="\n")
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - start, 1),
        "options": {"only": arguments.only, "rounds": arguments.rounds, "quick": arguments.quick},
        "machine": facts,
        "figures": [line.json() for line in lines],
        "failed": failed,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    promised = sum(1 for line in lines if line.verdict in ("ok", ABOVE, BELOW))
    print(f"{promised - len(missed)} of {promised} targets met in {document['seconds']:.0f} s; {arguments.json}")
    for problem in failed:
        print(f"failed: {problem['bench']}: {problem['error'].splitlines()[0]}")
    return 1 if failed or (arguments.check and missed) else 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:
        # Whoever read has gone, as `| head` does. Python would try to flush once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; what was started is ended")
