# SPDX-License-Identifier: Apache-2.0
"""`make test`: every suite, one after the other, and a last look that nothing was left behind.

    python tools/run_tests.py [--all] [--only NAME ...]

All suites run even when one fails. The last line is the sum: `N passed, N failed, N skipped`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# A suite that takes longer hangs: it is ended, and the others still run.
SUITE_SECONDS = 900.0
LONG_SECONDS = 3600.0
REPORTS = ROOT / "reports"

# In this order: what fails fast and explains most comes first.
PYTEST = [
    "tests/repository",
    "server/tests",
    "sdks/python/tests",
    "sdks/python-code-interpreter/tests",
    "cli/tests",
    "tests/conformance",
    "tests/e2e",
    "tests/compat",
    "tests/examples",
    "tests/security",
    "tests/faults",
    "tests/browser",
]
# These have no sandboxes and mostly wait: they run beside the Go programs' tests, which take long and one processor.
GO = "node (go)"
BESIDE_GO = ["tests/repository", "server/tests", "sdks/python/tests", "sdks/python-code-interpreter/tests"]
# What runs in process is tested with the race detector, and only so. It needs cgo; that and giving up rights for
# all threads exclude each other: sandboxd, the launcher and what else changes threads are tested without.
RACED = [
    "account",
    "command",
    "control",
    "envfile",
    "file",
    "httpproxy",
    "ingress",
    "metric",
    "portproxy",
    "pty",
    "record",
    "reply",
    "session",
    "spawn",
]
# Of these packages, tests that count memory or move much: the detector would take minutes for them, and find nothing.
UNRACED = (
    "^(TestLargeFilesMoveInConstantMemory|TestLargeBodies.*|TestSlowClientDoesNotFillMemory|TestManyAndHuge|TestHugeLine"
    "|TestFramerSendsEachLineAsOneText|TestResumingAtAnyEventGivesTheRestOnce|TestAttachSaysWhatIsGone"
    # And one that gives up rights for all threads.
    "|TestFilterAndCgroupTogether)$"
)
FUZZ_SECONDS = 2
FUZZ_LONG_SECONDS = 60
# Longer ones, for `make test-all`: programs that exit 0 when all is well.
LONG = ["tests/faults/test_killed_client.py", "tests/cgroupv2/run"]


@dataclass
class Result:
    """What one suite came to."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""

    @property
    def good(self) -> bool:
        return not self.failed and not self.problem


@contextlib.contextmanager
def _started(
    command: list[str], folder: Path = ROOT, seconds: float = SUITE_SECONDS, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A program in a session of its own, ended with all its children when it takes too long or we are interrupted."""
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **options
    )

    def end() -> None:
        print(f"\n{command[0]} took longer than {seconds:.0f} s and is ended", flush=True)
        os.killpg(process.pid, signal.SIGKILL)

    alarm = threading.Timer(seconds, end)
    alarm.start()
    try:
        yield process
        process.wait()
    except BaseException:
        # Interrupted tests still clean up; only what does not listen is killed.
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        alarm.cancel()


def _run(command: list[str], seconds: float = SUITE_SECONDS, **options: Any) -> int:
    with _started(command, seconds=seconds, **options) as process:
        return process.wait()


def _pytest(folder: str, output: Any = None) -> Result:
    report = REPORTS / f"{folder.replace('/', '-')}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", folder, "-q", "--durations=5", "--junit-xml", str(report)]
    code = _run(command, stdout=output, stderr=subprocess.STDOUT if output else None)
    result = Result(folder)
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            outcomes = {child.tag: child for child in case}
            if "skipped" in outcomes:
                result.skipped.append(f"{case.get('name')}: {outcomes['skipped'].get('message', 'no reason given')}")
            elif "failure" in outcomes or "error" in outcomes:
                result.failed += 1
            else:
                result.passed += 1
    if code and not result.failed:
        result.problem = f"pytest ended with {code}"
    elif not result.passed and not result.failed:
        result.problem = "no test ran"
    return result


def _go_event(line: str, said: dict[tuple[str, str], list[str]], result: Result) -> None:
    """One line of `go test -json`."""
    try:
        event = json.loads(line)
    except ValueError:
        print(line, end="", flush=True)
        return
    package, test, action = (
        event.get("Package", event.get("ImportPath", "")),
        event.get("Test", ""),
        event["Action"],
    )
    if action in ("output", "build-output"):
        said.setdefault((package, test), []).append(event["Output"])
    elif action == "build-fail":
        print("".join(said.pop((package, ""), [])), end="", flush=True)
    elif action in ("pass", "fail", "skip"):
        text = "".join(said.pop((package, test), []))
        if test:
            result.passed += action == "pass"
            result.failed += action == "fail"
            if action == "skip":
                result.skipped.append(f"{test}: {' '.join(text.split())[-160:]}")
            if action == "fail":
                print(text, end="", flush=True)
        elif action == "fail" or "[no test files]" not in text:
            shown = text if action == "fail" else text.splitlines(keepends=True)[-1] if text else ""
            print(shown, end="", flush=True)


def _go_test(folder: str, arguments: list[str], result: Result, **environment: str) -> None:
    """`go test -json`, shown as go test shows it: a line for each package, the output of what failed."""
    # One package at a time: several of them take whole cgroups, uid blocks and namespaces of this machine.
    command = ["go", "test", "-json", "-p", "1", "-count", "1", "-timeout", "5m", *arguments]
    said: dict[tuple[str, str], list[str]] = {}
    failed = result.failed
    with _started(command, ROOT / folder, stdout=subprocess.PIPE, env={**os.environ, **environment}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            _go_event(line, said, result)
    if process.wait() and result.failed == failed:
        result.problem = f"go test ended with {process.returncode}"


def _go(folder: str) -> Result:
    """Each test once: with the race detector where it can be, without where it cannot."""
    result = Result(f"{folder} (go)")
    listed = subprocess.run(
        ["go", "list", "./..."], cwd=ROOT / folder, capture_output=True, text=True, check=False
    ).stdout.split()
    raced = [package for package in listed if package.split("/", 2)[-1] in RACED]
    if len(raced) != len(RACED):
        result.problem = f"of the packages {RACED} go list finds {raced}"
        return result
    _go_test(folder, [package for package in listed if package not in raced], result)
    _go_test(folder, ["-race", "-skip", UNRACED, *raced], result, CGO_ENABLED="1")
    _go_test(folder, ["-run", UNRACED, *raced], result)
    return result


def _fuzz(folder: str, seconds: int) -> Result:
    """Every fuzz target for so long. What one finds it leaves in testdata/fuzz of its package, to be kept as a test."""
    result = Result(f"{folder} (fuzz)")
    for source in sorted((ROOT / folder).rglob("*_test.go")):
        for target in re.findall(r"^func (Fuzz\w+)\(", source.read_text(), re.MULTILINE):
            package = f"./{source.parent.relative_to(ROOT / folder)}"
            command = ["go", "test", "-run", "^$", "-fuzz", f"^{target}$", "-fuzztime", f"{seconds}s", package]
            with _started(command, ROOT / folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
                assert process.stdout is not None
                said = process.stdout.read()
            good = process.wait() == 0
            result.passed += good
            result.failed += not good
            counts = [line for line in said.splitlines() if "execs:" in line]
            print(f"{package} {target}: {counts[-1] if good and counts else said}", flush=True)
    if not result.passed and not result.failed:
        result.problem = "no target ran"
    return result


class Beside:
    """Suites that run while others do. What they say is kept and shown when their turn comes."""

    def __init__(self, folders: list[str]) -> None:
        self._ended = {folder: threading.Event() for folder in folders}
        self._results: dict[str, Result] = {}
        self._said = {folder: REPORTS / f"{folder.replace('/', '-')}.txt" for folder in folders}
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for folder, ended in self._ended.items():
            start = time.monotonic()
            with self._said[folder].open("w") as output:
                try:
                    self._results[folder] = _pytest(folder, output)
                except Exception as error:
                    self._results[folder] = Result(folder, problem=f"it could not be run: {error}")
            self._results[folder].seconds = time.monotonic() - start
            ended.set()

    def result(self, folder: str) -> Result:
        """What one of them came to; waits for it."""
        self._ended[folder].wait()
        print(self._said[folder].read_text(), end="", flush=True)
        return self._results[folder]


def _program(path: str) -> Result:
    result = Result(path)
    if _run([str(ROOT / path)], LONG_SECONDS) == 0:
        result.passed = 1
    else:
        result.failed = 1
    return result


def _check() -> Result:
    result = Result("make check")
    result.problem = "a check failed" if _run([sys.executable, "tools/run_checks.py"]) else ""
    return result


def _processes() -> Iterator[tuple[str, str, list[str]]]:
    """Pid, program and words of the command line, of every process that lets itself be looked at."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
                yield process.name, os.readlink(process / "exe"), words


def leftovers() -> set[str]:
    """Processes, mounts, cgroups and run directories of ours that exist on this machine right now.

    Another installation may be at work here: what a living sandboxd or test of another folder holds is not ours.
    """
    found: set[str] = set()
    theirs: set[str] = set()
    for pid, program, words in _processes():
        if any(word.startswith(f"{ROOT}/") for word in (program, *words[:2])):
            name = Path(words[0]).name
            if (
                program.startswith(f"{ROOT}/server/")
                or name == "opensandbox-server"
                or words[1:2] == [f"{ROOT}/.venv/bin/opensandbox-server"]
            ):
                found.add(f"process {pid}: {' '.join(words)[:120]}")
        else:
            theirs.add(f"test-{pid}")
            if Path(program).name == "sandboxd":
                theirs |= {Path(word).name for word in words}
    with open("/proc/self/mountinfo") as mounts:
        found |= {f"mount {line.split()[4]}" for line in mounts if "opensandbox" in line.split()[4]}
    for top in {Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*")}:
        if top.is_dir() and not top.is_symlink():
            for group in top.glob("opensandbox-*"):
                owner = group.name.removeprefix("opensandbox-")
                if not any(owner == other or owner.startswith(f"{other}-") for other in theirs):
                    found.add(f"cgroup {group}")
    runs = Path("/run/opensandbox")
    if runs.is_dir():
        # The locks of uid blocks are the whole machine's and stay.
        found |= {f"run directory {run}" for run in runs.iterdir() if run.name not in theirs | {"blocks"}}
    return found


def _wait_for_quiet(before: set[str]) -> set[str]:
    """What the suites left. A daemon that has nothing to hold leaves by itself after ten seconds."""
    deadline = time.monotonic() + 30
    while (left := leftovers() - before) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description="run the suites")
    parser.add_argument("--all", action="store_true", help="also what takes longer")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only suites whose name contains this")
    arguments = parser.parse_args()
    REPORTS.mkdir(exist_ok=True)

    suites: list[tuple[str, Callable[[], Result]]] = [("make check", _check), (GO, partial(_go, "node"))]
    suites += [("node (fuzz)", partial(_fuzz, "node", FUZZ_LONG_SECONDS if arguments.all else FUZZ_SECONDS))]
    suites += [(folder, partial(_pytest, folder)) for folder in PYTEST]
    if arguments.all:
        suites += [(path, partial(_program, path)) for path in LONG]
    if arguments.only:
        suites = [suite for suite in suites if any(word in suite[0] for word in arguments.only)]

    who = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    print(
        f"testing as {who} on {platform.system()} {platform.release()} with Python {platform.python_version()}",
        flush=True,
    )
    before = leftovers()
    results: list[Result] = []
    beside: Beside | None = None
    for name, run in suites:
        print(f"\n=== {name}", flush=True)
        if name == GO and not arguments.only:
            beside = Beside(BESIDE_GO)
        if beside is not None and name in BESIDE_GO:
            results.append(beside.result(name))
            continue
        start = time.monotonic()
        result = run()
        result.seconds = time.monotonic() - start
        results.append(result)

    left = _wait_for_quiet(before)
    print("\n=== summary")
    for result in results:
        mark = "ok  " if result.good else "FAIL"
        counts = f"{result.passed:5} passed {result.failed:4} failed {len(result.skipped):4} skipped"
        print(f"  {mark}  {result.name:<22} {counts} {result.seconds:7.1f} s  {result.problem}")
        for reason in result.skipped:
            print(f"          skipped {reason}")
    for thing in sorted(left):
        print(f"  LEFT BEHIND  {thing}")
    passed = sum(result.passed for result in results)
    failed = sum(result.failed for result in results)
    skipped = sum(len(result.skipped) for result in results)
    # A suite that could not even start, and things left behind, count as failures too.
    failed += sum(1 for result in results if result.problem) + bool(left)
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
