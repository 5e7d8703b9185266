# SPDX-License-Identifier: Apache-2.0
"""The program that published quick starts begin with, as it stands, and the forms of it that circulate; and ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from live_server import LiveServer, clean_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "code-interpreter" / "main.py"
IMAGE = "opensandbox/code-interpreter"
ENTRY_POINTS = ["/opt/opensandbox/code-interpreter.sh", "/opt/code-interpreter/code-interpreter.sh"]
SAYS = "Hello OpenSandbox!\nHello World\n4\n"

QUICK_START = """
import asyncio
from datetime import timedelta
from code_interpreter import CodeInterpreter, SupportedLanguage
from opensandbox import Sandbox
from opensandbox.models import WriteEntry

async def main() -> None:
    sandbox = await Sandbox.create(
        "opensandbox/code-interpreter:v1.0.2",
        entrypoint=["/opt/opensandbox/code-interpreter.sh"],
        env={"PYTHON_VERSION": "3.11"},
        timeout=timedelta(minutes=10),
    )
    async with sandbox:
        execution = await sandbox.commands.run("echo 'Hello OpenSandbox!'")
        print(execution.logs.stdout[0].text)
        await sandbox.files.write_files([WriteEntry(path="/tmp/hello.txt", data="Hello World", mode=644)])
        print(await sandbox.files.read_file("/tmp/hello.txt"))
        interpreter = await CodeInterpreter.create(sandbox)
        result = await interpreter.codes.run("import sys\\nprint(sys.version)\\nresult = 2 + 2\\nresult", language=SupportedLanguage.PYTHON)
        print(result.result[0].text)                 # 4
    await sandbox.kill()

asyncio.run(main())
"""  # noqa: E501 (as it stands)
AWAITED = """        interpreter = await CodeInterpreter.create(sandbox)
        result = await interpreter.codes.run("""
NOT_AWAITED = """        result = await CodeInterpreter.create(sandbox).codes.run("""


@pytest.fixture(params=["ours", "published"])
def python(request: pytest.FixtureRequest) -> str:
    """The interpreter that has those packages."""
    if request.param == "ours":
        return sys.executable
    path = ROOT / ".venv-compat" / "bin" / "python"
    if not path.exists():
        pytest.fail("the published clients are not installed; `make setup-test` does it", pytrace=False)
    return str(path)


def run(python: str, server: LiveServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(server.home, OPEN_SANDBOX_DOMAIN=server.address)
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, *arguments], env=environment, cwd=server.home, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert server.ids() == set(), "it ends what it made"
    return done


def test_quick_start(python: str, server: LiveServer) -> None:
    done = run(python, server, "-c", QUICK_START)
    assert (done.returncode, done.stdout) == (0, SAYS), done.stderr


def test_example(server: LiveServer) -> None:
    done = run(sys.executable, server, str(PROGRAM))
    assert (done.returncode, done.stdout) == (0, f"{SAYS}ZeroDivisionError\n40\n"), done.stderr


@pytest.mark.parametrize(
    ("image", "entry_point"),
    [(f"{IMAGE}:v1.0.1", ENTRY_POINTS[1]), (f"{IMAGE}:latest", ENTRY_POINTS[0]), (IMAGE, ENTRY_POINTS[1])],
)
def test_published_names(python: str, server: LiveServer, image: str, entry_point: str) -> None:
    text = QUICK_START.replace(f"{IMAGE}:v1.0.2", image).replace(ENTRY_POINTS[0], entry_point)
    assert text.count(f'"{image}"') == text.count(entry_point) == 1
    done = run(python, server, "-c", text)
    assert (done.returncode, done.stdout) == (0, SAYS), done.stderr


def test_without_waiting_for_the_interpreter(server: LiveServer) -> None:
    text = QUICK_START.replace(AWAITED, NOT_AWAITED)
    assert text != QUICK_START
    done = run(sys.executable, server, "-c", text)
    assert (done.returncode, done.stdout) == (0, SAYS), done.stderr


def test_a_version_that_is_not_there_is_told(server: LiveServer) -> None:
    done = run(sys.executable, server, "-c", QUICK_START.replace("3.11", "3.2"))
    assert (done.returncode, done.stdout) == (0, SAYS), done.stderr
    assert 'PYTHON_VERSION is "3.2"' in done.stderr
