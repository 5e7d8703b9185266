# SPDX-License-Identifier: Apache-2.0
"""What a program inside can see: itself, and nothing of the machine around it. Asked from the inside."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_server import LiveServer, Sandbox


@pytest.fixture
def marked_process() -> Iterator[str]:
    """A process of the host with a name that nothing else has."""
    import subprocess

    mark = f"host-process-{uuid.uuid4().hex}"
    process = subprocess.Popen(["sh", "-c", "sleep 300; true", mark])
    yield mark
    process.kill()
    process.wait()


def test_processes_of_the_host_are_invisible(sandbox: Sandbox, marked_process: str) -> None:
    seen = sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert "sleep infinity" in seen
    assert marked_process not in seen
    assert int(sandbox.run("ls -d /proc/[0-9]* | wc -l").stdout) < 10


@pytest.mark.parametrize("place", ["/root", "/home", "/srv", "/var/lib/opensandbox", "/mnt", "/media", "/boot"])
def test_directories_of_the_host_are_empty_or_absent(sandbox: Sandbox, place: str) -> None:
    inside = set(sandbox.run(f"ls -A {place} 2>/dev/null").stdout.split())
    outside = {entry.name for entry in Path(place).iterdir()} if Path(place).is_dir() else set()
    assert not inside & outside


def test_a_secret_file_of_the_host_is_nowhere(sandbox: Sandbox) -> None:
    """Planted in the places where secrets lie, world-readable, and looked for by name in the whole tree."""
    name = f"secret-{uuid.uuid4().hex}"
    planted = []
    for place in ("/etc", "/root", "/opt", "/var/tmp", "/tmp", "/srv", "/run", "/usr/local"):
        if Path(place).is_dir():
            file = Path(place) / name
            file.write_text("secret")
            file.chmod(0o644)
            planted.append(file)
    try:
        found = sandbox.run(f"find / -xdev -name '{name}' 2>/dev/null; find /usr /etc /opt -name '{name}' 2>/dev/null")
        assert found.stdout == ""
    finally:
        for file in planted:
            file.unlink()


@pytest.mark.parametrize(
    "file",
    [
        "/etc/shadow",
        "/etc/gshadow",
        "/etc/ssh",
        "/etc/machine-id",
        "/etc/ssl/private",
        "/etc/sudoers",
        "/var/lib/dpkg/info",
    ],
)
def test_sensitive_files_are_not_there(sandbox: Sandbox, file: str) -> None:
    assert sandbox.run(f"cat {file} 2>/dev/null || ls {file}/ 2>/dev/null").stdout == ""


def test_the_state_of_the_server_is_not_there(server: LiveServer, sandbox: Sandbox) -> None:
    assert sandbox.run(f"ls -A {server.state} {server.run_dir} 2>/dev/null").stdout == ""


def test_the_host_mount_table_does_not_leak_paths(server: LiveServer, sandbox: Sandbox) -> None:
    table = sandbox.run("cat /proc/self/mountinfo").stdout
    assert table
    assert str(server.state) not in table


@pytest.mark.parametrize("name", ["mnt", "pid", "net", "ipc", "uts", "user", "cgroup"])
def test_every_namespace_differs_from_the_host(sandbox: Sandbox, name: str) -> None:
    inside = sandbox.run(f"readlink /proc/self/ns/{name}").stdout
    assert inside.startswith(f"{name}:[")
    assert inside != os.readlink(f"/proc/self/ns/{name}")


def test_the_cgroup_namespace_hides_the_path(sandbox: Sandbox) -> None:
    assert "opensandbox-" not in sandbox.run("cat /proc/self/cgroup /proc/1/cgroup").stdout


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "localhost"])
def test_the_server_and_the_ingress_cannot_be_reached(server: LiveServer, sandbox: Sandbox, address: str) -> None:
    ports = [server.address.rpartition(":")[2], sandbox.address.rpartition(":")[2]]
    for port in ports:
        script = (
            f"import socket\ntry:\n    socket.create_connection(({address!r}, {port}), timeout=3)\n"
            "    print('reached')\n"
            "except OSError as error:\n    print('refused', error)\n"
        )
        assert sandbox.python(script).stdout.startswith("refused")


def test_there_is_only_a_loopback_interface(sandbox: Sandbox) -> None:
    lines = sandbox.run("tail -n +3 /proc/net/dev").stdout.split()
    assert [word for word in lines if word.endswith(":")] == ["lo:"]
    assert sandbox.run("tail -n +2 /proc/net/route").stdout == ""


def test_abstract_sockets_of_the_host_cannot_be_reached(sandbox: Sandbox) -> None:
    name = f"\0osb-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        accepted = threading.Event()

        def accept() -> None:
            try:
                listener.accept()
                accepted.set()
            except OSError:
                pass

        threading.Thread(target=accept, daemon=True).start()
        output = sandbox.python(f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})\n")
        assert output.exit_code != 0
        assert not accepted.is_set()
        with socket.socket(socket.AF_UNIX) as self_check:
            self_check.connect(name)
        assert accepted.wait(5)


# -- execd: pid 1 inside, and nobody's business --------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    ["environ", "mem", "maps", "fd/3", "root/", "cwd/", "syscall", "stack", "auxv", "map_files/", "io", "pagemap"],
)
def test_what_execd_is_cannot_be_read(sandbox: Sandbox, file: str) -> None:
    output = sandbox.run(f"head -c 64 /proc/1/{file} 2>&1 >/dev/null || ls /proc/1/{file} >/dev/null")
    readable = sandbox.run(f"head -c 64 /proc/1/{file} 2>/dev/null | wc -c; ls /proc/1/{file} 2>/dev/null | wc -l")
    counts = readable.stdout.split()
    assert counts in (["0", "0"], ["0", "1"]), output.stderr + readable.stdout


def test_its_open_files_cannot_be_listed(sandbox: Sandbox) -> None:
    assert sandbox.run("ls /proc/1/fd 2>/dev/null | wc -l").stdout == "0"


def test_execd_cannot_be_traced_nor_its_memory_read(sandbox: Sandbox) -> None:
    script = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "class Piece(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]\n"
        "buffer = ctypes.create_string_buffer(64)\n"
        "here, there = Piece(ctypes.addressof(buffer), 64), Piece(0x400000, 64)\n"
        "print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())\n"
        "print(libc.process_vm_readv(1, ctypes.byref(here), 1, ctypes.byref(there), 1, 0), ctypes.get_errno())\n"
    )
    assert sandbox.python(script).stdout.splitlines() == ["-1 1", "-1 1"]


def test_execd_survives_the_signals_that_none_can_catch(sandbox: Sandbox) -> None:
    sandbox.run("kill -9 1; kill -STOP 1")
    assert sandbox.ping()


def test_the_token_is_nowhere_inside(sandbox: Sandbox) -> None:
    token = sandbox.headers["X-EXECD-ACCESS-TOKEN"]
    half = token[: len(token) // 2]
    script = (
        f"a, b = {half!r}, {token[len(half) :]!r}\n"
        "import os\n"
        "found = []\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if int(pid) == os.getpid(): continue\n"
        "    for name in ('environ', 'cmdline', 'comm'):\n"
        "        try:\n"
        "            if (a + b).encode() in open(f'/proc/{pid}/{name}', 'rb').read(): found.append((pid, name))\n"
        "        except OSError: pass\n"
        "if a + b in str(os.environ): found.append('environ')\n"
        "for root, _, names in os.walk('/', onerror=lambda e: None):\n"
        "    if root.startswith(('/proc', '/sys', '/usr')): continue\n"
        "    for name in names:\n"
        "        path = os.path.join(root, name)\n"
        "        try:\n"
        "            if not os.path.isfile(path): continue\n"
        "            if (a + b).encode() in open(path, 'rb').read(1 << 20): found.append(path)\n"
        "        except OSError: pass\n"
        "print(found)\n"
    )
    assert sandbox.python(script).stdout == "[]"


def test_a_command_has_only_the_environment_of_the_image(sandbox: Sandbox) -> None:
    names = {line.partition("=")[0] for line in sandbox.run("env").stdout.splitlines()}
    assert not {name for name in names if name.startswith(("OPENSANDBOX_SERVER", "OPENSANDBOX_STATE", "SSH_", "AWS_"))}
    assert "PATH" in names


def test_a_command_has_no_open_files_but_its_own(sandbox: Sandbox) -> None:
    assert sandbox.run(["python3", "-c", "import os; print(sorted(os.listdir('/proc/self/fd'))[:4])"]).stdout == (
        "['0', '1', '2', '3']"
    )
