# SPDX-License-Identifier: Apache-2.0
"""Fetching Python packages when the registry does not do its part: quick, one clear line, details in a log."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNREACHABLE = "Could not fetch URL https://pypi.org/simple/x/: connection error"
NOISE = "NOISE: Retrying after connection broken"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The scripts, and a uv that fails with noise."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "lock.txt").touch()
    script(tmp_path / ".tools/uv/bin/uv", f"[[ $1 == venv ]] && exit; echo '{NOISE}' >&2; exit 1")
    # An environment that exists: what is installed into it is the subject here.
    script(tmp_path / "venv/bin/python", "exit 1")
    return tmp_path


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def pip_that(clone: Path, body: str) -> None:
    """A pip that notes how it was called, makes noise, and then does this; $log is the file it was told to write."""
    script(
        clone / ".tools/uv/bin/python",
        '[[ " $* " == *" config "* ]] && exit 1\n'
        f'echo "$*" >> calls; echo "{NOISE}" | tee /dev/stderr; log=.tools/pip.log\n{body}',
    )


def make_venv(clone: Path) -> tuple[int, str, list[str]]:
    done = subprocess.run(
        ["bash", "tools/make-venv", "venv", "lock.txt"],
        cwd=clone,
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    calls = (clone / "calls").read_text().splitlines()
    return done.returncode, done.stdout + done.stderr, calls


def test_a_registry_out_of_reach_is_asked_once_and_briefly(clone: Path) -> None:
    pip_that(clone, f'echo "{UNREACHABLE}" >> $log; exit 1')
    code, said, calls = make_venv(clone)
    assert code == 1
    assert len(calls) == 1
    assert "--timeout 5 --retries 0" in calls[0]
    assert said.split("\n") == [
        "",
        "  No Python package registry is reachable.",
        "    → what uv and pip said: .tools/pip.log",
        "",
        "",
    ]
    log = (clone / ".tools/pip.log").read_text()
    assert NOISE in log, "what uv said"
    assert UNREACHABLE in log, "what pip said"
    assert not (clone / "venv/.installed").exists()


def test_a_registry_that_answers_slowly_gets_a_second_chance(clone: Path) -> None:
    pip_that(clone, 'echo "Read timed out." >> $log; [[ $* == *"--retries 3"* ]]')
    code, said, calls = make_venv(clone)
    assert (code, said) == (0, "")
    assert ["--retries 0" in calls[0], "--retries 3" in calls[1], len(calls)] == [True, True, 2]
    assert (clone / "venv/.installed").exists()
    assert not (clone / ".tools/pip.log").exists()


def test_packages_that_cannot_be_had_are_not_blamed_on_the_network(clone: Path) -> None:
    pip_that(clone, 'echo "THESE PACKAGES DO NOT MATCH THE HASHES" >> $log; exit 1')
    code, said, _ = make_venv(clone)
    assert code == 1
    assert "The Python package registry answers, but" in said
    assert NOISE not in said
    assert "HASHES" in (clone / ".tools/pip.log").read_text()
