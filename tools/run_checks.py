# SPDX-License-Identifier: Apache-2.0
"""`make check`: everything that can be said about the code without running it.

Runs every check even when one fails, prints the output of those that do, and exits 1 then.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
FOLDERS = (
    "server",
    "sdks/python",
    "sdks/python-code-interpreter",
    "cli",
    "tools",
    "tests",
    "examples",
    "bench",
    "node/code/kernel",
)
PYTHON_CODE = [folder for folder in FOLDERS if (ROOT / folder).is_dir()]


@dataclass(frozen=True)
class Check:
    name: str
    command: list[str]
    folder: str = "."
    fix: str = ""


CHECKS = [
    Check("layout", [sys.executable, "tools/check_tree.py"]),
    Check("generated files", [sys.executable, "tools/generate.py", "--check"], fix="make generate"),
    Check("go generate", [sys.executable, "tools/check_go_generate.py"], fix="make generate"),
    Check(
        "ruff format", [str(BIN / "ruff"), "format", "--check", "--quiet", "--diff", *PYTHON_CODE], fix="make format"
    ),
    Check("ruff", [str(BIN / "ruff"), "check", "--quiet", *PYTHON_CODE]),
    Check("mypy server", [str(BIN / "mypy"), "--config-file", "pyproject.toml", "server/src"]),
    Check("mypy sdk", [str(BIN / "mypy"), "--config-file", "pyproject.toml", "sdks/python/src"]),
    Check(
        "mypy code",
        [str(BIN / "mypy"), "--config-file", "pyproject.toml", "sdks/python-code-interpreter/src"],
    ),
    Check("mypy cli", [str(BIN / "mypy"), "--config-file", "pyproject.toml", "cli/src"]),
    # gofmt -l exits 0 whatever it finds.
    Check(
        "gofmt",
        ["bash", "-c", 'out=$(gofmt -l node bench); [[ -z $out ]] || { echo "$out"; exit 1; }'],
        fix="make format",
    ),
    Check("go vet", ["go", "vet", "./..."], "node"),
    Check("go vet bench", ["go", "vet", "./..."], "bench/fileserver"),
    Check("staticcheck", [str(ROOT / ".tools" / "staticcheck"), "./..."], "node"),
]


def main() -> int:
    failed: list[Check] = []
    for check in CHECKS:
        start = time.monotonic()
        done = subprocess.run(
            check.command, cwd=ROOT / check.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        good = done.returncode == 0
        print(f"  {'ok  ' if good else 'FAIL'}  {check.name:<16} {time.monotonic() - start:5.1f} s", flush=True)
        if not good:
            failed.append(check)
            print("\n".join(f"        {line}" for line in done.stdout.splitlines()[:80]), flush=True)
    for check in failed:
        print(f"check failed: {check.name}" + (f"; `{check.fix}` mends it" if check.fix else ""))
    if not failed:
        print(f"all {len(CHECKS)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
