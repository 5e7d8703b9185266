# SPDX-License-Identifier: Apache-2.0
"""What holds for every file of the repository, whatever its language."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Where a file wants one of these names, the idea in it has not been found yet.
SDK = Path("sdks/python/src/opensandbox")
PUBLISHED = {SDK / "manager.py", SDK / "sync" / "manager.py"}  # programs import them by these names
VAGUE = {"utils", "util", "helpers", "helper", "manager", "managers", "common", "misc"}
SOURCES = {".py", ".go", ".sh", ".c", ".h", ".ts", ".tsx", ".js", ".kt", ".java", ".cs"}
SPDX = "SPDX-License-Identifier: Apache-2.0"
# A path that only exists on the machine of whoever wrote it.
MACHINE_PATH = re.compile(r"(?<![\w.])(/home/(?!user\b|you\b|alice\b|bob\b|someone\b)[a-z][\w-]{2,}/|/Users/[\w-]+/)")
LIMIT = 1_000_000


def files() -> list[Path]:
    """Tracked files, and new ones that are not ignored; all files where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    made = {".git", ".venv", ".venv-compat", ".tools", "_bin", "dist", "reports", "__pycache__"}
    return [p for p in ROOT.rglob("*") if p.is_file() and not made.intersection(p.relative_to(ROOT).parts)]


def is_script(path: Path, head: str) -> bool:
    return path.suffix in SOURCES or path.name == "Makefile" or (not path.suffix and head.startswith("#!"))


def problems(path: Path) -> Iterator[str]:
    if path.stem.lower() in VAGUE and path.relative_to(ROOT) not in PUBLISHED:
        yield "a name that says nothing; name the file after its noun"
    if path.stat().st_size > LIMIT:
        yield f"larger than {LIMIT:,} bytes"
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return  # data of a test
    head = text[:400]
    if is_script(path, head) and SPDX not in head:
        yield f"no `{SPDX}` at the top"
    if path != Path(__file__) and (found := MACHINE_PATH.search(text)):
        line = text.count("\n", 0, found.start()) + 1
        yield f"line {line}: {found.group()} is a path of one machine"
    if path.suffix in SOURCES and text and not text.endswith("\n"):
        yield "no newline at the end"


def main() -> int:
    bad = [f"{path.relative_to(ROOT)}: {problem}" for path in files() for problem in problems(path)]
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
