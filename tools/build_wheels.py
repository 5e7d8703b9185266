# SPDX-License-Identifier: Apache-2.0
"""`make build`: the wheels, into dist/.

opensandbox-server carries the Go programs, so it is built once for each architecture, each wheel with only its own
programs inside. They are static, so one wheel serves every Linux of that architecture, glibc or musl. Both are
cross-compiled: any machine can build both.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PLATFORMS = {
    "amd64": "manylinux_2_17_x86_64.manylinux2014_x86_64.musllinux_1_1_x86_64",
    "arm64": "manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_1_aarch64",
}
PROGRAMS = {"sandboxd", "execd", "ingress"}


def _copy(project: Path, folder: str) -> Path:
    """The project as it should be packed: without tests and programs, with the licence."""
    copy = Path(folder) / project.name
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("_bin", "__pycache__", "tests", ".*_cache"))
    shutil.copy(ROOT / "LICENSE", copy)
    return copy


def _wheel(project: Path) -> Path:
    """Build in a folder of its own and say where the wheel is."""
    with tempfile.TemporaryDirectory() as folder:
        # The build tool is in this environment already: nothing is fetched.
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, str(project)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"build_wheels: {project.name}:\n{done.stdout}")
        (wheel,) = Path(folder).glob("*.whl")
        return Path(shutil.move(wheel, DIST / wheel.name))


def _server(arch: str, platform: str) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(ROOT / "server", folder)
        programs = copy / "src" / "opensandbox_server" / "_bin" / f"linux-{arch}"
        subprocess.run([ROOT / "tools" / "build-node", arch, programs], check=True)
        plain = _wheel(copy)
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform, str(plain)]
    name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    wheel = DIST / name
    inside = {Path(entry).name for entry in zipfile.ZipFile(wheel).namelist() if f"_bin/linux-{arch}/" in entry}
    if not inside >= PROGRAMS:
        raise SystemExit(f"build_wheels: {name} lacks {', '.join(sorted(PROGRAMS - inside))}")
    return wheel


def main() -> int:
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    wheels = [_server(arch, platform) for arch, platform in PLATFORMS.items()]
    with tempfile.TemporaryDirectory() as folder:
        wheels += [
            _wheel(_copy(ROOT / project, folder)) for project in ("sdks/python", "sdks/python-code-interpreter", "cli")
        ]
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:6.1f} MB  {wheel.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
