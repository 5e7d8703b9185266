# SPDX-License-Identifier: Apache-2.0
"""ingress killed with -9 at any moment: its connections break, nothing else does, and the next one is there at once.

sandboxd keeps the listeners, so that whoever connects meanwhile waits in their queue instead of being refused.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from rig import COUNTED, COUNTING, Rig

from live_server import Sandbox, clean_environment, events_of, until

ROOT = Path(__file__).resolve().parents[2]


def ingress_pid(rig: Rig) -> int:
    """The one that runs now."""

    def found() -> list[int]:
        return [pid for pid, words in rig.server.processes().items() if words.startswith("ingress ")]

    (pid,) = until(found, "there is an ingress")
    return pid


def kill_ingress(rig: Rig) -> int:
    """Kill it, wait until it is gone, and give its pid. The next one is not waited for: that is under test."""
    pid = ingress_pid(rig)
    rig.end(pid)
    return pid


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_at_rest_nobody_is_refused(rig: Rig) -> None:
    made = [rig.create() for _ in range(3)]
    before = [one.address + one.prefix for one in made]
    daemon = rig.sandboxd_pid()
    old = kill_ingress(rig)
    assert all(one.ping() for one in made)  # at once, on the addresses they had
    assert ingress_pid(rig) != old
    assert rig.sandboxd_pid() == daemon
    again = [rig.server.connect(one.id) for one in made]
    assert [one.address + one.prefix for one in again] == before
    assert rig.create().run("echo new").stdout == "new"


def test_connections_that_wait_are_served_by_the_next(rig: Rig) -> None:
    """It is frozen, not gone: connections pile up in the queue. Killed then, its successor finds them there."""
    sandbox = rig.create()
    pid = ingress_pid(rig)
    os.kill(pid, signal.SIGSTOP)
    connection = http.client.HTTPConnection(sandbox.address, timeout=60)
    connection.request("GET", sandbox.prefix + "/ping", headers=sandbox.headers)  # the kernel takes it
    rig.end(pid)
    # Those that were still in the queue are answered; one that had been accepted was broken off.
    assert connection.getresponse().status == 200
    connection.close()


def test_a_streamed_command_runs_on(rig: Rig) -> None:
    """Its stream breaks, and visibly so; the command itself notices nothing."""
    sandbox = rig.create()
    connection = http.client.HTTPConnection(sandbox.address, timeout=60)
    body = json.dumps({"command": f"({COUNTING}) | tee /tmp/told"})
    headers = {**sandbox.headers, "Content-Type": "application/json"}
    connection.request("POST", sandbox.prefix + "/command", body=body, headers=headers)
    stream = connection.getresponse()
    seen = b""
    while seen.count(b"stdout") < 3:
        seen += stream.readline()
    kill_ingress(rig)
    with pytest.raises((http.client.HTTPException, OSError)):  # it does not look whole
        stream.read()
    started = next(event["text"] for event in events_of(seen) if event["type"] == "init")
    assert sandbox.wait(started)["exit_code"] == 0
    assert sandbox.read("/tmp/told") == COUNTED


def test_a_background_command_is_read_on_from_an_offset(rig: Rig) -> None:
    sandbox = rig.create()
    background = sandbox.start(COUNTING)
    read = b""
    for _ in range(3):
        read += until(lambda seen=read: sandbox.logs(background, cursor=len(seen)), "the command says more")
        kill_ingress(rig)
    assert sandbox.wait(background)["exit_code"] == 0
    assert read + sandbox.logs(background, cursor=len(read)) == COUNTED
    assert sandbox.logs(background) == COUNTED


def test_an_upload_that_is_cut_leaves_no_half_file(rig: Rig) -> None:
    sandbox = rig.create()
    sandbox.write("/tmp/kept", b"as it was")
    boundary = "b" * 20
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="metadata"; filename="metadata"\r\n'
        'Content-Type: application/json\r\n\r\n{"path": "/tmp/kept"}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="file"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    ).encode()
    size = 64 << 20
    connection = http.client.HTTPConnection(sandbox.address, timeout=60)
    connection.putrequest("POST", sandbox.prefix + "/files/upload")
    for name, value in sandbox.headers.items():
        connection.putheader(name, value)
    connection.putheader("Content-Type", f"multipart/form-data; boundary={boundary}")
    connection.putheader("Content-Length", str(len(head) + size))
    connection.endheaders()
    connection.send(head)
    for _ in range(32):  # more than the sockets on the way hold: execd has read some of it
        connection.send(b"x" * (1 << 20))
    kill_ingress(rig)
    with pytest.raises(OSError):  # broken pipe or reset, as the moment has it
        connection.send(b"x" * (32 << 20))
    connection.close()
    assert sandbox.read("/tmp/kept") == b"as it was"
    listing = "ls -A /tmp | grep -v -e '^kept$' || true"
    until(lambda: sandbox.run(listing).stdout == "", "execd has removed what it had of the file")
    sandbox.write("/tmp/kept", b"new")
    assert sandbox.read("/tmp/kept") == b"new"


def test_again_and_again_under_load(rig: Rig) -> None:
    """Clients that come back after each broken connection get on, and nothing piles up."""
    made = [rig.create() for _ in range(3)]
    stop = threading.Event()
    done = [0] * len(made)

    def work(number: int, sandbox: Sandbox) -> None:
        while not stop.is_set():
            try:
                assert sandbox.run(f"echo {number}").stdout == str(number)
                done[number] += 1
            except (OSError, http.client.HTTPException):
                continue  # broken off in the middle
            except AssertionError as error:
                if "not exactly one last event" not in str(error):
                    raise

    daemon = rig.sandboxd_pid()
    with ThreadPoolExecutor(len(made)) as pool:
        working = [pool.submit(work, number, sandbox) for number, sandbox in enumerate(made)]
        try:
            for _ in range(8):
                before = list(done)
                kill_ingress(rig)
                until(lambda before=before: all(map(int.__lt__, before, done)), f"everybody gets on: {before} {done}")
        finally:
            stop.set()
        for future in working:
            future.result()
    assert rig.sandboxd_pid() == daemon
    rig.rest()
    open_before = open_descriptors(daemon)
    for _ in range(8):
        kill_ingress(rig)
        assert made[0].ping()
    until(lambda: open_descriptors(daemon) <= open_before, "sandboxd holds no more files than before")
    assert len([words for words in rig.server.processes().values() if words.startswith("ingress ")]) == 1
    rig.all_answer()


@contextmanager
def steady_client(rig: Rig, python: Path) -> Iterator[subprocess.Popen[str]]:
    environment = clean_environment(rig.server.home, OPEN_SANDBOX_DOMAIN=rig.server.address)
    environment.pop("PYTHONPATH", None)
    client = subprocess.Popen(
        [str(python), str(Path(__file__).with_name("steady_client.py"))],
        env=environment, cwd=rig.server.home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield client
    finally:
        client.kill()
        client.wait()


def said(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


@pytest.mark.parametrize("sdk", ["ours", "published"])
def test_an_sdk_does_not_notice(rig: Rig, sdk: str) -> None:
    """Its pooled connections are gone; the next call is made on a new one."""
    python = Path(sys.executable) if sdk == "ours" else ROOT / ".venv-compat" / "bin" / "python"
    assert python.exists(), "the published clients are not installed; `make setup-test` does it"
    with steady_client(rig, python) as client:
        assert len(said(client.stdout)) == 36
        assert client.stdin is not None
        for word in ("first", "second", "third", "fourth"):
            client.stdin.write(word + "\n")
            client.stdin.flush()
            assert said(client.stdout) == word
            kill_ingress(rig)
        client.stdin.close()
        assert client.wait(60) == 0
