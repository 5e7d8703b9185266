# SPDX-License-Identifier: Apache-2.0
"""The quickstart runs as it stands: with this SDK and the published one, every published image name and entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from live_server import LiveServer, clean_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "quickstart" / "main.py"
IMAGE = "opensandbox/code-interpreter"
IMAGES = [f"{IMAGE}:v1.0.2", f"{IMAGE}:v1.0.1", f"{IMAGE}:latest", IMAGE]
ENTRY_POINTS = ["/opt/opensandbox/code-interpreter.sh", "/opt/code-interpreter/code-interpreter.sh"]
SAYS = "Hello OpenSandbox!\nHello World\n"


@pytest.fixture(params=["ours", "published"])
def python(request: pytest.FixtureRequest) -> str:
    """The interpreter that has that SDK."""
    if request.param == "ours":
        return sys.executable
    path = ROOT / ".venv-compat" / "bin" / "python"
    if not path.exists():
        pytest.fail("the published clients are not installed; `make setup-test` does it", pytrace=False)
    return str(path)


def run(python: str, server: LiveServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(server.home, OPEN_SANDBOX_DOMAIN=server.address)
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [python, str(PROGRAM), *arguments], env=environment, cwd=server.home, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_as_it_stands(python: str, server: LiveServer) -> None:
    done = run(python, server)
    assert (done.returncode, done.stdout) == (0, SAYS), done.stderr
    assert server.ids() == set(), "it ends what it made"


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_published_names(python: str, server: LiveServer, image: str, entry_point: str) -> None:
    done = run(python, server, image, entry_point)
    assert (done.returncode, done.stdout) == (0, SAYS), done.stderr


def test_an_image_that_is_not_there(server: LiveServer) -> None:
    done = run(sys.executable, server, "nobody/nothing:1")
    assert done.returncode == 1
    assert "IMAGE::NOT_FOUND" in done.stderr
    assert IMAGE in done.stderr, "it lists what is there"
