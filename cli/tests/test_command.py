# SPDX-License-Identifier: Apache-2.0
"""Remote commands that feel local: bytes, exit codes, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from conftest import Osb
from live_server import LiveServer, until
from opensandbox.exceptions import SandboxConnectionException
from opensandbox.models import ExecutionHandlers, ExecutionInit, RunCommandOpts
from opensandbox_cli import execution
from opensandbox_cli.failure import Failure
from opensandbox_cli.screen import Screen

Start = Callable[..., subprocess.Popen[bytes]]


def alive(osb: Osb, sandbox: str, mark: str) -> bool:
    """Whether a process with this word in its command line lives in the sandbox; the question is not counted."""
    line = f"grep -la -- '{mark[:8]}''{mark[8:]}' /proc/[0-9]*/cmdline | grep -v self"
    script = f'{line} | while read f; do p=${{f%/cmdline}}; [ "$(cat $p/comm)" = sleep ] && echo $p; done; true'
    return bool(osb("command", "run", sandbox, "--", script).stdout)


def test_streams_are_exact_and_apart(osb: Osb, sandbox_id: str) -> None:
    done = osb("command", "run", sandbox_id, "--", r"printf 'a\377\0\r\n\n'; printf 'e\376' >&2")
    assert done.stdout == b"a\xff\0\r\n\n"
    assert done.stderr == b"e\xfe"


def test_large_output_is_complete(osb: Osb, sandbox_id: str) -> None:
    script = "head -c 5000000 /dev/urandom | tee /tmp/large"
    data = osb("command", "run", sandbox_id, "--", script).stdout
    assert len(data) == 5000000
    assert osb("file", "cat", sandbox_id, "/tmp/large").stdout == data


def test_output_comes_while_the_command_runs(start: Start, osb: Osb, sandbox_id: str) -> None:
    flag = f"/tmp/{uuid.uuid4().hex}"
    process = start("command", "run", sandbox_id, "--", f"printf 'name? '; until [ -e {flag} ]; do sleep 0.01; done")
    assert process.stdout is not None
    assert process.stdout.read(6) == b"name? ", "a line without an end is shown too"
    assert process.poll() is None
    osb("file", "write", sandbox_id, flag, "-c", "go")
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("script", "code"),
    [("true", 0), ("exit 1", 1), ("exit 42", 42), ("exit 255", 255), ("nosuchprogram", 127), ("kill -9 $$", 137),
     ("kill -TERM $$", 143)],
)  # fmt: skip
def test_the_exit_code_is_the_commands(osb: Osb, sandbox_id: str, script: str, code: int) -> None:
    osb("command", "run", sandbox_id, "--", script, code=code)


def test_codes_of_our_own(osb: Osb, sandbox_id: str) -> None:
    assert b"--timeout" in osb("command", "run", sandbox_id, "-t", "300ms", "--", "sleep", "1000", code=124).stderr
    osb("command", "run", sandbox_id, "--argv", "--", "nosuchprogram", code=127)
    osb("command", "run", sandbox_id, "--argv", "--", "/etc/passwd", code=126)
    osb("command", "run", "nope", "--", "true", code=125)
    osb("command", "run", sandbox_id, code=125)
    osb("command", "run", sandbox_id, "--nonsense", "--", "true", code=125)
    osb("command", "run", sandbox_id, "-o", "json", "--", "true", code=125)
    osb("command", "run", sandbox_id, "-e", code=125)
    assert b"leave it out" in osb("command", "run", sandbox_id, "-t", "0", "--", "true", code=125).stderr
    osb("command", "run", sandbox_id, "-w", "/nosuch", "--", "true", code=125)


def test_words_and_lines(osb: Osb, sandbox_id: str) -> None:
    def run(*words: str) -> bytes:
        return osb("command", "run", sandbox_id, *words).stdout

    assert run("--", "echo", "a  b", "$HOME", "*") == b"a  b $HOME *\n"
    assert run("--", "echo $((6*7)) | cat") == b"42\n"
    assert run("--argv", "--", "printf", "%s|", "", "a b", "$HOME") == b"|a b|$HOME|"
    assert run("-w", "/usr", "-e", "X=y z", "--", 'pwd; echo "$X"') == b"/usr\ny z\n"
    assert run("-o", "raw", "--", "sh", "-c", "echo -n $0") == b"sh"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_remote_command_too(start: Start, osb: Osb, sandbox_id: str, number: signal.Signals) -> None:
    mark = f"1000.{uuid.uuid4().int % 10**12:012}"
    process = start("command", "run", sandbox_id, "--", f"echo up; sleep {mark}; true")
    assert process.stdout is not None
    assert process.stdout.read(3) == b"up\n"
    until(lambda: alive(osb, sandbox_id, mark), "it runs")
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert not alive(osb, sandbox_id, mark)


def test_a_reader_that_leaves_ends_the_command(start: Start, osb: Osb, sandbox_id: str) -> None:
    process = start("command", "run", sandbox_id, "--", "yes; true")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(2) == b"y\n"
    process.stdout.close()
    assert process.wait() == 141
    assert process.stderr.read() == b""
    assert osb("command", "run", sandbox_id, "--", "cat /proc/[0-9]*/comm | grep -cx yes; true").stdout == b"0\n"


def test_ctrl_c_is_heard_while_nobody_reads(start: Start, sandbox_id: str) -> None:
    # Nothing on the other stream: two pipes have no order, and osb may be held up by this one first.
    process = start("command", "run", sandbox_id, "--", "yes")
    assert process.stdout is not None
    until(lambda: _waiting(process), "the pipe is full")
    process.send_signal(signal.SIGINT)
    # The first asks the command to end; what is in the pipe is still there to be read.
    rest = process.stdout.read()
    assert set(rest) == set(b"y\n")
    assert process.wait() == 130


def _waiting(process: subprocess.Popen[bytes]) -> bool:
    import array
    import fcntl
    import termios

    assert process.stdout is not None
    held = array.array("i", [0])
    fcntl.ioctl(process.stdout, termios.FIONREAD, held)
    return held[0] >= fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ) - 4096


def test_the_background(osb: Osb, sandbox_id: str) -> None:
    def answer(*arguments: str) -> dict[str, object]:
        found = json.loads(osb("command", *arguments, "-o", "json").stdout)
        assert isinstance(found, dict)
        return found

    begun = json.loads(
        osb("command", "run", sandbox_id, "-d", "-o", "json", "--", "echo one; echo two >&2; sleep 1000").stdout
    )
    execution = begun["execution_id"]
    assert begun == {"execution_id": execution, "sandbox_id": sandbox_id, "mode": "background"}
    assert answer("status", sandbox_id, execution)["running"] is True
    until(lambda: osb("command", "logs", sandbox_id, execution).stdout == b"one\ntwo\n", "both lines are there")
    assert answer("logs", sandbox_id, execution, "--cursor", "4") == {"content": "two\n", "cursor": 8}
    assert answer("interrupt", sandbox_id, execution) == {"status": "ok", "message": f"Interrupted: {execution}"}
    assert answer("status", sandbox_id, execution)["running"] is False
    osb("command", "interrupt", sandbox_id, execution, code=1)


def test_input_list_and_attach(osb: Osb, sandbox_id: str) -> None:
    assert osb("command", "run", "-i", sandbox_id, "--", "sort", stdin=b"b\na\n").stdout == b"a\nb\n"
    started = ["command", "run", "-d", "--keep-stdin", "-o", "raw", sandbox_id]
    execution = osb(*started, "--", "cat; exit 4").stdout.decode().strip()
    listed = json.loads(osb("command", "list", sandbox_id, "--running", "-o", "json").stdout)["items"]
    assert execution in [one["id"] for one in listed]
    osb("command", "stdin", sandbox_id, execution, "--keep-open", "-c", "one ")
    osb("command", "stdin", sandbox_id, execution, stdin=b"two\xff")
    assert osb("command", "attach", sandbox_id, execution, code=4).stdout == b"one two\xff"
    osb("command", "attach", sandbox_id, "nosuch", code=125)


def test_sessions(osb: Osb, sandbox_id: str) -> None:
    made = json.loads(osb("command", "session", "create", sandbox_id, "-w", "/usr", "-o", "json").stdout)["session_id"]
    run = ["command", "session", "run", sandbox_id, made, "--"]
    osb(*run, "NAME=Ada; cd lib")
    done = osb(*run, "echo $NAME in $PWD; echo careful >&2; (exit 9)", code=9)
    assert (done.stdout, done.stderr) == (b"Ada in /usr/lib\n", b"careful\n")
    assert osb(*run, "printf 'a\\xff'; printf 'no end' >&2").stdout == b"a\xff"
    assert made in osb("command", "session", "list", sandbox_id).stdout.decode()
    osb("command", "session", "delete", sandbox_id, made)


@pytest.mark.parametrize(("stays", "hint"), [(True, "`osb command status box run-1`"), (False, "--keep leaves both")])
def test_a_lost_command_is_told_in_words_of_osb(stays: bool, hint: str) -> None:
    class Commands:
        async def run(self, command: str, *, opts: RunCommandOpts, handlers: ExecutionHandlers) -> None:
            assert handlers.on_init is not None
            handlers.on_init(ExecutionInit(id="run-1", timestamp=1))
            raise SandboxConnectionException("the connection broke", hint="commands.get_command_status('run-1')")

    sandbox: Any = SimpleNamespace(id="box", commands=Commands())
    attached = execution.Attached(sandbox, Screen(), stays=stays)
    with pytest.raises(Failure) as lost:
        anyio.run(attached.run, "true", RunCommandOpts())
    assert str(lost.value) == "the connection broke"
    assert hint in (lost.value.hint or "")


# --- osb run --------------------------------------------------------------------------------------------


def test_run_makes_a_sandbox_and_ends_it(osb: Osb, server: LiveServer) -> None:
    before = server.ids()
    done = osb("-v", "run", "-e", "WHO=you", "--", "echo hello $WHO; echo careful >&2; exit 7", code=7)
    assert done.stdout == b"hello you\n"
    said = done.stderr.decode()
    assert "careful" in said
    assert "osb: the command took" in said
    assert server.ids() == before
    quiet = osb("run", "true")
    assert quiet.stdout == quiet.stderr == b""


def test_run_passes_options_of_the_command_on(osb: Osb) -> None:
    assert osb("run", "printf", "%s.", "-t", "-h", "--", "x").stdout == b"-t.-h.--.x."


def test_run_with_files_and_scripts(osb: Osb, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_bytes(b"\xffdata")
    script = tmp_path / "count.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert osb("run", "-f", f"{tmp_path}/data.txt:/srv/d", "--", "cat", "/srv/d").stdout == b"\xffdata"
    assert osb("run", "-f", f"{tmp_path}/data.txt", "--", "cat", "/tmp/data.txt").stdout == b"\xffdata"
    assert osb("run", str(script), "a b", "-x").stdout == b"['a b', '-x']\n"
    assert b"count.py" in osb("run", "--", str(script), code=127).stderr, "after -- it is a command of the sandbox"
    missing = osb("run", "missing.py", code=127).stderr.decode()
    assert "hint: There is no file missing.py here either" in missing
    assert b"hint" not in osb("run", "--", "missing.py", code=127).stderr
    assert b"no file" in osb("run", "-f", "/nosuch", "--", "true", code=125).stderr


def test_run_has_codes_of_its_own(osb: Osb, server: LiveServer) -> None:
    before = server.ids()
    osb("run", "-t", "300ms", "--", "sleep", "1000", code=124)
    osb("run", "-i", "nosuchimage", "--", "true", code=125)
    osb("run", "--nonsense", "true", code=125)
    assert b"Usage: osb run" in osb("run", "-e", code=125).stderr
    osb("run", "-t", "0.0001", "--", "true", code=125)
    assert server.ids() == before


def test_run_can_keep_the_sandbox(osb: Osb, server: LiveServer) -> None:
    before = server.ids()
    said = osb("run", "--keep", "--", "echo kept > /tmp/k").stderr.decode()
    (kept,) = server.ids() - before
    assert kept in said
    assert osb("file", "cat", kept, "/tmp/k").stdout == b"kept\n"
    server.delete(kept)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_ends_the_sandbox_when_stopped(start: Start, server: LiveServer, number: signal.Signals) -> None:
    before = server.ids()
    process = start("run", "--", "echo up; sleep 1000")
    assert process.stdout is not None
    assert process.stdout.read(3) == b"up\n"
    assert len(server.ids() - before) == 1
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert server.ids() == before


def test_run_ends_the_sandbox_when_its_reader_leaves(start: Start, server: LiveServer) -> None:
    before = server.ids()
    process = start("run", "--", "yes")
    assert process.stdout is not None
    assert process.stdout.read(2) == b"y\n"
    process.stdout.close()
    assert process.wait() == 141
    assert server.ids() == before


def test_ctrl_c_on_a_terminal(osb: Osb, server: LiveServer, environment: dict[str, str]) -> None:
    """The key, not the signal: the terminal sends it to the whole foreground group."""
    import pty

    from conftest import OSB

    before = server.ids()
    pid, screen = pty.fork()
    if pid == 0:
        os.execve(OSB, [OSB, "run", "--", "echo up; sleep 1000"], environment)
    drawn = b""
    while b"up" not in drawn:
        drawn += os.read(screen, 1024)
    os.write(screen, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(screen)
    assert os.waitstatus_to_exitcode(status) == 130
    assert server.ids() == before
