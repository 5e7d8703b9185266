# SPDX-License-Identifier: Apache-2.0
"""What the SDK does beyond the published one, in a real sandbox: streams that go on, input, terminals, trees."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from live_server import LiveServer, clean_environment, until
from opensandbox import ConnectionConfig, ConnectionConfigSync, Sandbox, SandboxSync
from opensandbox.exceptions import ConflictException, NotFoundException, SandboxConnectionException
from opensandbox.models import ExecutionHandlersSync, OutputBytes, OutputMessage, RunCommandOpts
from opensandbox.retry import RetryEvent, RetryPolicy

LINES = 100_000


@pytest.fixture(scope="module")
def box(server: LiveServer) -> Iterator[SandboxSync]:
    with SandboxSync.create("host", connection_config=ConnectionConfigSync(domain=server.address)) as made:
        yield made
        made.kill()


def ingress_pid(server: LiveServer) -> int:
    def found() -> list[int]:
        return [pid for pid, words in server.processes().items() if words.startswith("ingress ")]

    (pid,) = until(found, "there is an ingress")
    return pid


# --- commands -----------------------------------------------------------------------------------------------


def test_an_ingress_that_is_killed_costs_no_byte(server: LiveServer) -> None:
    """Every byte once, in the middle of much output, as often as it happens."""
    retried: list[RetryEvent] = []
    policy = RetryPolicy(initial_backoff=timedelta(milliseconds=20), on_retry=retried.append)
    config = ConnectionConfigSync(domain=server.address, retry_policy=policy)
    seen = hashlib.sha256()
    count = 0

    def hear(piece: OutputBytes) -> None:
        nonlocal count
        seen.update(piece.data)
        count += len(piece.data)
        if any(count - len(piece.data) < mark <= count for mark in (1, 100_000, 400_000)):
            os.kill(ingress_pid(server), signal.SIGKILL)

    with SandboxSync.create("host", connection_config=config) as sandbox:
        # A pause when it is half done: so that output comes as it is written, too, and not from what is kept alone.
        command = f"echo begun; seq {LINES // 2}; sleep 0.2; seq {LINES // 2 + 1} {LINES}"
        execution = sandbox.commands.run(command, handlers=ExecutionHandlersSync(on_output=hear))
        sandbox.kill()
    whole = b"begun\n" + "".join(f"{n}\n" for n in range(1, LINES + 1)).encode()
    assert (count, seen.hexdigest()) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert (execution.exit_code, execution.offset) == (0, len(whole))
    assert retried, "nothing broke"


def test_a_client_that_is_killed_leaves_all_of_it(server: LiveServer, box: SandboxSync) -> None:
    program = (
        "import sys\nfrom opensandbox import SandboxSync\nfrom opensandbox.models import ExecutionHandlersSync\n"
        f"sandbox = SandboxSync.connect({box.id!r})\n"
        "told = ExecutionHandlersSync(on_init=lambda event: print(event.id, flush=True))\n"
        f"sandbox.commands.run('seq {LINES}; sleep 0.3; seq {LINES}; exit 5', handlers=told)\n"
    )
    environment = clean_environment(server.home, OPEN_SANDBOX_DOMAIN=server.address)
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        execution_id = client.stdout.readline().strip()
        client.kill()
    execution = box.commands.attach(execution_id)
    numbers = "".join(f"{n}\n" for n in range(1, LINES + 1))
    whole = execution.text + "\n" == numbers + numbers
    assert whole
    assert execution.exit_code == 5
    assert execution.end is not None
    assert execution.end.reason == "exited"
    assert execution.cpu_time is not None
    assert execution.peak_memory_bytes
    # Again, from the middle on.
    pieces: list[bytes] = []
    heard = ExecutionHandlersSync(on_output=lambda piece: pieces.append(piece.data))
    box.commands.attach(execution_id, len(numbers), heard)
    half = b"".join(pieces).decode() == numbers
    assert half


def test_one_key_one_command(box: SandboxSync) -> None:
    opts = RunCommandOpts(idempotency_key="only-once")
    first = box.commands.run("echo $$; echo x >> /tmp/runs", opts=opts)
    again = box.commands.run("echo $$; echo x >> /tmp/runs", opts=opts)
    assert (first.id, first.text) == (again.id, again.text)
    assert box.files.read_file("/tmp/runs") == "x\n"
    with pytest.raises(ConflictException):
        box.commands.run("echo other", opts=opts)


def test_input_while_it_runs(box: SandboxSync) -> None:
    data = os.urandom(3_000_000)
    assert box.commands.run("sha256sum", stdin=data).text.split()[0] == hashlib.sha256(data).hexdigest()
    with io.BytesIO(data) as file:
        assert box.commands.run("wc -c", stdin=file).text.strip() == "3000000"
    # Enough is enough, as at the end of a pipe.
    assert box.commands.run("head -c 1 >/dev/null; echo enough", stdin=data).text == "enough"
    started = box.commands.run("cat; exit 6", opts=RunCommandOpts(background=True, stdin=True))
    assert started.id is not None
    assert box.commands.write_stdin(started.id, "one ") == 4
    assert started.id in [one.id for one in box.commands.list(running=True)]
    box.commands.write_stdin(started.id, iter([b"two", b" three"]), close=True)
    execution = box.commands.attach(started.id)
    assert (execution.text, execution.exit_code) == ("one two three", 6)
    with pytest.raises(ConflictException):
        box.commands.write_stdin(started.id, b"x")
    assert started.id in [one.id for one in box.commands.list(running=False)]


def test_streams_of_a_command_in_the_background_apart(box: SandboxSync) -> None:
    opts = RunCommandOpts(background=True, merge=False)
    started = box.commands.run("echo out; echo err >&2; echo out2", opts=opts)
    assert started.id is not None
    execution = box.commands.attach(started.id)
    assert (execution.text, [message.text for message in execution.logs.stderr]) == ("out\nout2", ["err"])
    assert box.commands.get_background_command_logs(started.id, stream="stderr").content == "err\n"
    merged = box.commands.run("echo out; echo err >&2; echo out2", opts=RunCommandOpts(merge=True))
    assert merged.text == "out\nerr\nout2"


@pytest.mark.anyio
async def test_events_of_a_command(server: LiveServer, box: SandboxSync) -> None:
    async with await Sandbox.connect(box.id, ConnectionConfig(domain=server.address)) as sandbox:
        texts = []
        async for event in sandbox.commands.stream("echo one; echo two; exit 3"):
            if isinstance(event, OutputMessage):
                texts.append(event.text)
        assert texts == ["one", "\ntwo"]
        # Input goes its own way while the output is read.
        assert (await sandbox.commands.run("tr a-z A-Z", stdin=iter([b"ab", b"cd"]))).text == "ABCD"
        async with sandbox.commands.session() as shell:
            await shell.run("NAME=Ada")
            apart = await shell.run("echo $NAME; echo careful >&2", separate=True)
            assert (apart.text, apart.logs.stderr[0].text) == ("Ada", "careful")
            assert [one.session_id for one in await sandbox.commands.list_sessions()] == [shell.id]
        assert await sandbox.commands.list_sessions() == []


# --- terminals ----------------------------------------------------------------------------------------------


def test_a_terminal(box: SandboxSync) -> None:
    pty_id = box.pty.create(cols=100, rows=30, envs={"PS1": ""})
    assert box.pty.get(pty_id).running is False
    with box.pty.connect(pty_id) as typist, box.pty.connect(pty_id, viewer=True) as viewer:
        with pytest.raises(ConflictException):
            box.pty.connect(pty_id)
        typist.write("stty size; echo $TERM\n")
        for one in (typist, viewer):
            seen = b""
            while b"30 100\r\nxterm-256color\r\n" not in seen:
                seen += one.read()
        assert box.pty.get(pty_id).viewers == 1
        typist.write("sleep 1000\n")
        typist.resize(40, 10)
        with box.pty.connect(pty_id, since=typist.offset, takeover=True) as next_one:
            with pytest.raises(SandboxConnectionException, match="taken over"):
                typist.wait()
            next_one.signal("SIGINT")
            next_one.write("stty size; exit 7\n")
            rest = b"".join(piece.data for piece in next_one)
            assert b"10 40\r\n" in rest
            assert next_one.exit_code == 7
            # Another one sees it all again.
            with box.pty.connect(pty_id, viewer=True) as late:
                assert b"xterm-256color" in b"".join(piece.data for piece in late)
    assert pty_id in [one.session_id for one in box.pty.list()]
    box.pty.delete(pty_id)
    with pytest.raises(NotFoundException):
        box.pty.connect(pty_id)


@pytest.mark.anyio
async def test_a_program_with_pipes_through_the_server(server: LiveServer, box: SandboxSync) -> None:
    config = ConnectionConfig(domain=server.address, use_server_proxy=True)
    async with await Sandbox.connect(box.id, config) as sandbox:
        async with sandbox.pty.open(["sh", "-c", "read x; echo got $x; echo bad >&2; exit 4"], pipes=True) as program:
            assert program.mode == "pipe"
            await program.write("it\n")
            pieces = {piece.is_error: piece.data async for piece in program}
            assert pieces == {False: b"got it\n", True: b"bad\n"}
            assert program.exit_code == 4
        assert await sandbox.pty.list() == []


# --- files --------------------------------------------------------------------------------------------------


def test_large_files_pass_through_little_memory(box: SandboxSync, tmp_path: Path) -> None:
    local = tmp_path / "large"
    with local.open("wb") as file:
        file.truncate(120 << 20)
    box.commands.run("true")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    written = box.files.upload(local, "/tmp/large", mode=600)
    with local.open("rb") as file:
        box.files.write_file("/tmp/large2", file)
    size = sum(len(chunk) for chunk in box.files.read_bytes_stream("/tmp/large"))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert written.size == size == 120 << 20
    assert grown < 40 << 10, f"{grown} KiB more than before"
    box.files.delete_files(["/tmp/large", "/tmp/large2"])


def test_an_upload_is_resumed(box: SandboxSync, tmp_path: Path) -> None:
    data = os.urandom(200_000)
    (tmp_path / "local").write_bytes(data)
    # What another client began: the beginning of the same file.
    endpoint = box.get_endpoint(44772)
    import httpx2

    address = f"http://{endpoint.endpoint}/files/content"
    part = {"path": "/tmp/resumed", "offset": "0"}
    httpx2.put(address, params=part, content=data[:150_000], headers=endpoint.headers).raise_for_status()
    written = box.files.upload(tmp_path / "local", "/tmp/resumed", resume=True)
    assert written.sha256 == hashlib.sha256(data).hexdigest()
    assert box.files.read_bytes("/tmp/resumed") == data
    # And of another one.
    httpx2.put(address, params=part, content=b"x" * 1000, headers=endpoint.headers).raise_for_status()
    assert box.files.upload(tmp_path / "local", "/tmp/resumed", resume=True).sha256 == written.sha256


def test_trees_both_ways(box: SandboxSync, tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "empty").mkdir(parents=True)
    (top / "ü.txt").write_text("text")
    (top / "ü.txt").chmod(0o640)
    os.utime(top / "ü.txt", ns=(1, 1_600_000_000_123_456_789))
    (top / "link").symlink_to("ü.txt")
    sent = box.files.upload_tar(top, "/srv/tree")
    assert (sent.entries, sent.bytes) == (4, 4)
    assert box.commands.run("stat -c '%a %U %.9Y' /srv/tree/*.txt").text == "640 root 1600000000.123456789"
    box.commands.run("mkfifo /srv/tree/pipe; ln -s /etc /srv/tree/away; chmod 600 /srv/tree/*.txt")
    archive = io.BytesIO()
    box.files.download_tar("/srv/tree", archive, gzip=True)
    archive.seek(0)
    box.files.upload_tar(archive, "/srv/copy")
    assert box.commands.run("readlink /srv/copy/away; ls /srv/copy").text == "/etc\naway\nempty\nlink\nü.txt"
    box.commands.run("rm /srv/tree/away")
    box.files.download_tar("/srv/tree", tmp_path / "back")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["empty", "link", "ü.txt"]
    assert (tmp_path / "back" / "link").read_text() == "text"
    assert (tmp_path / "back" / "ü.txt").stat().st_mode & 0o777 == 0o600


def test_changes_and_figures(box: SandboxSync) -> None:
    box.commands.run("mkdir -p /srv/watched/deep")
    with box.files.watch("/srv/watched", recursive=True) as changes:
        box.files.write_file("/srv/watched/deep/a", "x")
        box.commands.run("mv /srv/watched/deep/a /srv/watched/b")
        seen = []
        for change in changes:
            seen.append((change.type, change.path, change.to))
            if change.type == "move":
                break
    assert seen[0] == ("create", "/srv/watched/deep/a", None)
    assert seen[-1] == ("move", "/srv/watched/deep/a", "/srv/watched/b")
    with box.metrics.watch() as figures:
        now, later = next(figures), next(figures)
    assert later.timestamp > now.timestamp
    assert now.pids
    assert box.metrics.prometheus().endswith("# EOF\n")


def test_a_session_waits_in_threads(box: SandboxSync) -> None:
    """Runs of one session queue; those of another do not wait for them."""
    with box.commands.session() as slow, box.commands.session() as quick:
        begun = threading.Event()
        told = ExecutionHandlersSync(on_stdout=lambda _: begun.set())
        waiting = "echo begun; until test -e /tmp/go; do sleep 0.02; done"
        runner = threading.Thread(target=slow.run, args=(waiting,), kwargs={"handlers": told})
        runner.start()
        assert begun.wait(10)
        assert quick.run("echo quick").text == "quick"
        busy = {one.session_id: one.running for one in box.commands.list_sessions()}
        assert busy == {slow.id: True, quick.id: False}
        box.files.write_file("/tmp/go", "")
        runner.join(10)
        assert not runner.is_alive()
        assert slow.run("echo next").text == "next"
