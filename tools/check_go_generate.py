# SPDX-License-Identifier: Apache-2.0
"""Fail when a file that `go generate` writes is stale: run it on a copy of node/ and compare."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NODE = Path(__file__).resolve().parent.parent / "node"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "node"
        shutil.copytree(NODE, copy)
        subprocess.run(["go", "generate", "./..."], cwd=copy, check=True)
        names = {p.relative_to(copy) for p in copy.rglob("*.gen.go")} | {
            p.relative_to(NODE) for p in NODE.rglob("*.gen.go")
        }
        stale = [
            name
            for name in sorted(names)
            if not (NODE / name).exists()
            or not (copy / name).exists()
            or (NODE / name).read_bytes() != (copy / name).read_bytes()
        ]
    for name in stale:
        print(f"stale: node/{name}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
