# SPDX-License-Identifier: Apache-2.0
"""Confinement that breaks ordinary work would be switched off: installing a package is ordinary work."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile

from live_server import Sandbox

METADATA = "Metadata-Version: 2.1\nName: tiny-greeting\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
ENTRY = "[console_scripts]\ntiny-greeting = tiny_greeting:main\n"
MODULE = "def main():\n    print('hello from a wheel')\n"


def tiny_wheel() -> bytes:
    """A wheel with one module and one program, made with nothing but a zip file."""
    files = {
        "tiny_greeting.py": MODULE,
        "tiny_greeting-1.0.dist-info/METADATA": METADATA,
        "tiny_greeting-1.0.dist-info/WHEEL": WHEEL,
        "tiny_greeting-1.0.dist-info/entry_points.txt": ENTRY,
    }
    record = "tiny_greeting-1.0.dist-info/RECORD"
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text)}")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    return packed.getvalue()


def test_pip_installs_a_local_wheel_for_root(sandbox: Sandbox) -> None:
    wheel = "/tmp/tiny_greeting-1.0-py3-none-any.whl"
    sandbox.write(wheel, tiny_wheel())
    installed = sandbox.run(f"pip install --no-index {wheel}", timeout=120)
    assert installed.exit_code == 0, installed.stdout + installed.stderr
    assert sandbox.run("tiny-greeting").stdout == "hello from a wheel"
    assert sandbox.run("python -c 'import tiny_greeting; tiny_greeting.main()'").stdout == "hello from a wheel"


def test_a_sandbox_can_look_up_its_own_name(sandbox: Sandbox) -> None:
    name = sandbox.run("hostname").stdout
    assert len(name) == 12
    assert sandbox.run("cat /etc/hostname").stdout == name
    lookup = "import socket; print(sorted({entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), 80)}))"
    assert sandbox.run(f"python3 -c '{lookup}'").stdout == "['127.0.0.1', '::1']"
    assert sandbox.run("grep -c localhost /etc/hosts").stdout == "2"


def test_what_is_written_to_the_system_is_kept_in_this_sandbox(sandbox: Sandbox) -> None:
    assert sandbox.run("touch /usr/local/bin/mine && echo hosts >> /etc/hosts && echo ok").stdout == "ok"
    assert sandbox.run("touch /usr/bin/mine").exit_code != 0
