# SPDX-License-Identifier: Apache-2.0
"""What a program inside can do: its own work. System calls, devices, kernel switches, setuid files."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

from live_server import LiveServer, Sandbox

# The numbers of x86_64 and aarch64, and arguments that would do something if the call were let through.
SYSCALLS: dict[str, tuple[int, int, tuple[object, ...]]] = {
    "mount": (165, 40, (b"none", b"/mnt", b"tmpfs", 0, None)),
    "umount2": (166, 39, (b"/proc", 2)),
    "pivot_root": (155, 41, (b"/tmp", b"/tmp")),
    "unshare_user": (272, 97, (0x10000000,)),
    "unshare_mount": (272, 97, (0x00020000,)),
    "setns": (308, 268, (0, 0)),
    "bpf": (321, 280, (0, b"\0" * 128, 128)),
    "perf_event_open": (298, 241, (b"\0" * 128, 0, -1, -1, 0)),
    "keyctl": (250, 219, (0, -3, 1)),
    "add_key": (248, 217, (b"user", b"name", b"x", 1, -3)),
    "request_key": (249, 218, (b"user", b"name", None, -3)),
    "userfaultfd": (323, 282, (1,)),
    "kexec_load": (246, 104, (0, 0, None, 0)),
    "kexec_file_load": (320, 294, (-1, -1, 0, None, 0)),
    "init_module": (175, 105, (b"x", 1, b"")),
    "finit_module": (313, 273, (0, b"", 0)),
    "delete_module": (176, 106, (b"nothing", 0)),
    "ptrace_of_execd": (101, 117, (16, 1, 0, 0)),
    "io_uring_setup": (425, 425, (8, b"\0" * 120)),
    "open_by_handle_at": (304, 265, (-100, b"\0" * 16, 0)),
    "fsopen": (430, 430, (b"tmpfs", 0)),
    "open_tree": (428, 428, (-100, b"/", 1)),
    "move_mount": (429, 429, (-100, b"/tmp", -100, b"/mnt", 0)),
    "mount_setattr": (442, 442, (-100, b"/", 0, b"\0" * 32, 32)),
    "clone3": (435, 435, (b"\0" * 88, 88)),
    "swapon": (167, 224, (b"/tmp/x", 0)),
    "reboot": (169, 142, (0xFEE1DEAD, 0x28121969, 0, None)),
    "settimeofday": (164, 170, (b"\0" * 16, None)),
    "clock_settime": (227, 112, (0, b"\0" * 16)),
    "acct": (163, 89, (b"/tmp/acct",)),
    "syslog": (103, 116, (3, b"\0" * 64, 64)),
    "quotactl": (179, 60, (0, None, 0, None)),
    "lookup_dcookie": (212, 18, (0, b"\0" * 64, 64)),
    "personality_read_implies_exec": (135, 92, (0x0400000,)),
}

TRY = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
number = {numbers}[platform.machine()]
arguments = {arguments}
kinds = {{bytes: ctypes.c_char_p, type(None): ctypes.c_void_p, int: ctypes.c_long}}
converted = [kinds[type(argument)](argument) for argument in arguments]
result = libc.syscall(ctypes.c_long(number), *converted)
print(result, ctypes.get_errno())
"""


@pytest.mark.parametrize("name", SYSCALLS)
def test_this_system_call_is_denied(sandbox: Sandbox, name: str) -> None:
    x86, arm, arguments = SYSCALLS[name]
    script = TRY.format(numbers={"x86_64": x86, "aarch64": arm}, arguments=repr(arguments))
    output = sandbox.python(script)
    if output.end["reason"] == "signalled":
        assert output.end["signal"] == "SIGSYS"
        return
    result, error = output.stdout.split()
    assert result == "-1", f"{name} was let through: {result}"
    assert int(error) in (errno.EPERM, errno.ENOSYS), f"{name}: {errno.errorcode.get(int(error), error)}"


@pytest.mark.parametrize("family", ["AF_PACKET", "AF_VSOCK", "AF_ALG", "AF_NETLINK_AUDIT"])
def test_this_socket_family_is_denied(sandbox: Sandbox, family: str) -> None:
    code = {
        "AF_PACKET": "socket.socket(17, 3, 0)",
        "AF_VSOCK": "socket.socket(40, 1, 0)",
        "AF_ALG": "socket.socket(38, 5, 0)",
        "AF_NETLINK_AUDIT": "socket.socket(16, 3, 9).bind((0, 0xff))",
    }[family]
    output = sandbox.python(
        f"import socket\ntry:\n    {code}\n    print('made')\nexcept OSError as e:\n    print(e.errno)\n"
    )
    assert output.stdout != "made"


def test_no_process_gains_a_namespace_by_clone(sandbox: Sandbox) -> None:
    script = (
        "import ctypes, os, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "n = {'x86_64': 56, 'aarch64': 220}[platform.machine()]\n"
        "r = libc.syscall(ctypes.c_long(n), ctypes.c_long(0x10000000 | 17), None, None, None, None)\n"
        "if r == 0: os._exit(0)\nprint(r, ctypes.get_errno())\n"
    )
    assert sandbox.python(script).stdout == f"-1 {errno.EPERM}"


def status_of(sandbox: Sandbox, name: str, pid: str = "self") -> str:
    match = re.search(rf"^{name}:\s*(.*)$", sandbox.run(f"cat /proc/{pid}/status").stdout, re.MULTILINE)
    assert match, name
    return match[1]


@pytest.mark.parametrize("pid", ["self", "1"])
def test_rights_are_few_and_cannot_grow(sandbox: Sandbox, pid: str) -> None:
    assert int(status_of(sandbox, "CapEff", pid), 16) & ~0x4FB == 0
    assert int(status_of(sandbox, "CapPrm", pid), 16) & ~0x4FB == 0
    assert status_of(sandbox, "CapAmb", pid) == "0" * 16
    assert status_of(sandbox, "NoNewPrivs", pid) == "1"
    assert status_of(sandbox, "Seccomp", pid) == "2"


def test_root_inside_has_exactly_the_promised_capabilities(sandbox: Sandbox) -> None:
    assert int(status_of(sandbox, "CapEff"), 16) == 0x4FB


def test_another_user_inside_has_none(sandbox: Sandbox) -> None:
    output = sandbox.run("grep -E 'CapEff|Uid' /proc/self/status", uid=1000, gid=1000)
    assert "CapEff:\t0000000000000000" in output.stdout
    assert re.search(r"Uid:\s+1000\s+1000", output.stdout)


def test_a_file_with_capabilities_or_setuid_gains_nothing(sandbox: Sandbox) -> None:
    output = sandbox.run(
        "cp /usr/bin/python3 /tmp/suid && chmod 4755 /tmp/suid && chmod 755 /tmp; ls -l /tmp/suid | cut -c1-10",
        cwd="/tmp",
    )
    assert output.stdout.startswith("-rws")
    euid = sandbox.run(["/tmp/suid", "-c", "import os; print(os.geteuid())"], uid=1000, gid=1000)
    assert euid.stdout == "1000"


@pytest.mark.parametrize(
    "path",
    [
        "/var/run/docker.sock",
        "/run/docker.sock",
        "/run/containerd/containerd.sock",
        "/dev/kvm",
        "/dev/mem",
        "/dev/kmsg",
    ],
)
def test_ways_to_the_host_are_absent(sandbox: Sandbox, path: str) -> None:
    assert sandbox.run(f"test -e {path} && echo there").stdout == ""


def test_there_are_no_block_devices_and_none_can_be_made(sandbox: Sandbox) -> None:
    assert sandbox.run("find /dev -type b | head").stdout == ""
    made = sandbox.run("mknod /tmp/disk b 254 0 && head -c 1 /tmp/disk; mknod /tmp/mem c 1 1 && head -c 1 /tmp/mem")
    assert made.exit_code != 0
    assert made.stdout == ""


def test_the_device_directory_holds_the_usual_ones_and_is_read_only(sandbox: Sandbox) -> None:
    for device in ("null", "zero", "full", "random", "urandom", "tty"):
        assert sandbox.run(f"test -c /dev/{device}").exit_code == 0, device
    assert sandbox.run("touch /dev/mine").exit_code != 0
    assert sandbox.run("echo x > /dev/null && head -c 4 /dev/zero | wc -c && touch /dev/shm/x").stdout == "4"


@pytest.mark.parametrize(
    "path",
    [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sys/kernel/hotplug",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sysrq-trigger",
        "/sys/kernel/uevent_helper",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/power/state",
        "/proc/irq/default_smp_affinity",
        "/proc/acpi",
    ],
)
def test_this_switch_of_the_kernel_cannot_be_written(sandbox: Sandbox, path: str) -> None:
    before = Path(path).read_bytes() if Path(path).is_file() and os.access(path, os.R_OK) else None
    output = sandbox.run(f"[ -e {path} ] || exit 9; [ -d {path} ] && {{ touch {path}/x; exit; }}; echo x > {path}")
    assert output.exit_code != 0
    if before is not None:
        assert Path(path).read_bytes() == before


@pytest.mark.parametrize("path", ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kallsyms", "/sys/firmware"])
def test_this_window_into_the_kernel_shows_nothing(sandbox: Sandbox, path: str) -> None:
    hide_zeros = "grep -av '^0000000000000000'"
    shown = sandbox.run(f"head -c 4096 {path} 2>/dev/null | {hide_zeros}; ls {path}/ 2>/dev/null")
    assert shown.stdout == ""


def test_no_cgroup_can_be_changed_from_inside(sandbox: Sandbox) -> None:
    script = (
        "import glob\nwritten = []\n"
        "for name in ('release_agent', 'notify_on_release', 'memory.limit_in_bytes', 'memory.max', 'pids.max',\n"
        "             'cpu.max', 'cpu.cfs_quota_us', 'cgroup.procs', 'tasks'):\n"
        "    for path in glob.glob(f'/sys/fs/cgroup/**/{name}', recursive=True):\n"
        "        try:\n"
        "            open(path, 'w').write('0')\n            written.append(path)\n"
        "        except OSError: pass\n"
        "print(written)\n"
    )
    assert sandbox.python(script).stdout == "[]"


def test_a_setuid_file_made_inside_is_out_of_reach_on_the_host(server: LiveServer, sandbox: Sandbox) -> None:
    """It is a real setuid-root file on the host's disk; nobody there may get to it or run it."""
    name = "planted-setuid"
    planted = f"/workspace/{name}"
    made = sandbox.run(f"cp /usr/bin/id {planted} && chmod 4755 {planted} && stat -c %a {planted}")
    assert made.stdout == "4755"
    on_disk = list((server.state / "fs").rglob(name))
    if os.geteuid() == 0 and not on_disk:
        # sandboxd keeps its files on a mount of its own namespace; the directories below are the same.
        on_disk = [server.state / "fs" / "sandboxes" / sandbox.id / "upper" / "workspace" / name]
    # Through a shell: setpriv itself still holds root's rights when it executes a program.
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", 'exec "$@"', "sh"]
    mode = server.home.stat().st_mode
    server.home.chmod(0o755)  # so that it is the state directory that keeps them out, not the test's own
    try:
        for file in on_disk:
            for command in (["cat", str(file)], [str(file)], ["ls", str(file.parent)]):
                tried = subprocess.run([*as_nobody, *command], capture_output=True, text=True, check=False)
                assert tried.returncode != 0, f"{command}: {tried.stdout}"
        # Nor through a process of the sandbox, whose root /proc would show.
        pids = [pid for pid, command in server.processes().items() if command.startswith("sleep infinity")]
        assert pids
        for pid in pids:
            command = [f"/proc/{pid}/root/workspace/{name}"]
            tried = subprocess.run([*as_nobody, *command], capture_output=True, text=True, check=False)
            assert tried.returncode != 0, tried.stdout
    finally:
        server.home.chmod(mode)
