# SPDX-License-Identifier: Apache-2.0
"""Every Python example of the SDK's README runs, against a real server, and says what it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from live_server import LiveServer, clean_environment

README = Path(__file__).resolve().parents[2] / "sdks" / "python" / "README.md"
EXAMPLES = re.findall(r"^## ([^\n]+)(?:(?!^## ).)*?```python\n(.*?)```", README.read_text(), re.DOTALL | re.MULTILINE)
SAYS = {
    "A sandbox, a command, a file": "hello from Linux\nremember me\n",
    "Without an event loop": "now: remember me\n['0', '1', '4', '9']\n",
    "Commands": "now: 1\nnow: 2\nnow: 3\nended: timed_out\nlogs: begun up to byte 6\nruns: False\n",
    "Connections that break": "apple\npear\nevent: one\nevent: two\ntyped later 4 exited\nlater\n",
    "Shells and terminals": "hello from /usr/lib\n['Ada', 'hello', 'Ada', '30', '100']\nexit code 0\n",
    "Files": "['/srv/app/app.py']\n['/srv/app/app.py', '/srv/app/data.bin']\n1000000\n",
    "Large files, trees, changes": "5000000\n['empty', 'large.bin']\ncreate /srv/tree/empty/new.txt\n"
    "memory limit: 2048.0\n",
    "Many sandboxes": "red Running\n['job', 'stage', 'team']\ngone: killed\nmade by: local\n",
    "Where the server is": "https://sandbox.example.org/v1\n",
    "When something goes wrong": "IMAGE::NOT_FOUND *\n",
}


def test_no_example_is_forgotten() -> None:
    assert [title for title, _ in EXAMPLES] == list(SAYS)
    assert README.read_text().count("```python") == len(EXAMPLES), "one in each section, or it is not found"


@pytest.mark.parametrize(("title", "program"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_example(server: LiveServer, title: str, program: str) -> None:
    bystander = server.create().id
    environment = clean_environment(server.home, OPEN_SANDBOX_DOMAIN=server.address)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=server.home, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # A star stands for advice in the server's words.
    expected, star, _ = SAYS[title].partition("*")
    assert (done.stdout[: len(expected)] if star else done.stdout) == expected
    assert server.ids() == {bystander}, "it ends what it made, and nothing else"
    server.delete(bystander)
