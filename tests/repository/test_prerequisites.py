# SPDX-License-Identifier: Apache-2.0
"""What a newcomer reads when something is missing: at once, and with the way to mend it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What the scripts themselves call; everything else is only there when a test says so.
NEEDED = ("bash", "cat", "dirname", "grep", "head", "id", "printf", "sed", "sort", "timeout", "uname")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone, as far as these scripts look."""
    for path in ("tools", "node/go.mod", "requirements-dev.txt", "Makefile"):
        source, target = ROOT / path, tmp_path / "clone" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return tmp_path / "clone"


def run(clone: Path, programs: Mapping[str, str], argument: str = "") -> tuple[int, str]:
    """Run tools/prerequisites where only these programs exist; each value is the body of a shell script."""
    folder = clone.parent / "bin"
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        if found and name not in programs:
            (folder / name).symlink_to(found)
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    started = time.monotonic()
    done = subprocess.run(
        [str(clone / "tools" / "prerequisites"), *([argument] if argument else [])],
        env={"PATH": str(folder), "CI": "true", "PYTHON": str(folder / "python3")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert time.monotonic() - started < 5, "it must say so at once"
    return done.returncode, done.stdout + done.stderr


PYTHON = {"python3": "exit 0"}


def test_not_linux(clone: Path) -> None:
    code, said = run(clone, {"uname": "echo Darwin"})
    assert code == 1
    assert "Linux" in said
    assert "Darwin" in said


def test_no_go(clone: Path) -> None:
    code, said = run(clone, PYTHON)
    assert code == 1
    assert "Go is not there" in said
    assert "go.dev" in said


def test_old_go(clone: Path) -> None:
    code, said = run(clone, {**PYTHON, "go": "echo go1.19.8"})
    assert code == 1
    assert "Go 1.19.8 is too old" in said


def test_go_that_may_not_fetch_a_newer_one(clone: Path) -> None:
    code, said = run(clone, {**PYTHON, "go": "echo 'go.mod requires go >= 1.26 (GOTOOLCHAIN=local)' >&2; exit 1"})
    assert code == 1
    assert "too old" in said
    assert "GOTOOLCHAIN=local" in said


def test_old_python(clone: Path) -> None:
    scripts = dict.fromkeys(("python3", "python3.11", "python3.12", "python3.13", "python3.14"), "exit 1")
    # The system's own Python is tried last, by its full path.
    tools = clone / "tools" / "python.sh"
    tools.write_text(tools.read_text().replace(" /usr/bin/python3;", ";"))
    code, said = run(clone, {**scripts, "go": "echo go1.26.8"})
    assert code == 1
    assert "Python 3.11 or newer" in said
    assert "apt-get install" in said


def test_registry_out_of_reach_is_told_before_anything_is_built(clone: Path) -> None:
    # A Python whose venv has a pip that reaches nothing, and says so where it was told to.
    pip = clone.parent / "pip"
    pip.write_text("#!/bin/bash\necho 'Could not fetch URL' > .tools/pip.log\nexit 1\n")
    pip.chmod(0o755)
    venv = f'if [[ $2 == venv ]]; then /bin/mkdir -p "$3/bin"; /bin/ln -s {pip} "$3/bin/python"; fi'
    programs = {"python3": venv, "go": "[[ $1 == env ]] && echo go1.26.8 || echo compiling >&2"}
    programs |= {name: f'exec /bin/{name} "$@"' for name in ("rm", "mkdir")}
    code, said = run(clone, programs)
    assert code == 1
    assert "No Python package registry is reachable" in said
    assert "compiling" not in said


def test_an_ordinary_user_without_user_namespaces(clone: Path) -> None:
    code, said = run(clone, {"unshare": "exit 1", "id": "echo 1000"}, "demo")
    assert code == 1
    assert "user namespaces" in said
    assert "sudo" in said


def test_system_packages_are_named_when_they_cannot_be_installed(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in {"dpkg-query": "exit 1", "id": "echo 1000"}.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "tools" / "install-system-packages"), "no-such-package"],
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "sudo apt-get install -y no-such-package" in done.stderr
