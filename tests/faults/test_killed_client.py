#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Commands whose client dies or does not read: they go on, nothing of their output is lost, and execd stays small.

As a program this runs the one that takes minutes: 5 GB that nobody reads (`make test-all`).
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    PYTHON = HERE.parents[1] / ".venv" / "bin" / "python"
    if Path(sys.prefix) != PYTHON.parents[1]:
        os.execv(PYTHON, [str(PYTHON), *sys.argv])
    sys.path[:0] = [str(HERE), str(HERE.parent)]

from rig import Rig  # noqa: E402

from live_server import LiveServer, Sandbox, events_of  # noqa: E402

LINES = 1_000_000
TALKATIVE = f"""awk 'BEGIN {{
    for (i = 1; i <= {LINES}; i++) {{
        print i
        if (i % 500 == 0) {{ printf "%d:", i > "/dev/stderr"; if (i % 1000 == 0) print "" > "/dev/stderr" }}
    }}
    printf "last"
}}'"""
OUTPUT = "".join(f"{number}\n" for number in range(1, LINES + 1)) + "last"
ERRORS = "".join(f"{number}:" + ("\n" if number % 1000 == 0 else "") for number in range(500, LINES + 1, 500))

# Takes a part of the answer, says so, and then takes no more.
CLIENT = """
import http.client, json, signal, sys
address, path, headers, body, enough, kept = json.loads(sys.argv[1])
connection = http.client.HTTPConnection(address)
connection.request("POST", path, json.dumps(body), {**headers, "Content-Type": "application/json"})
answer = connection.getresponse()
with open(kept, "wb") as file:
    while file.tell() < enough:
        file.write(answer.read1(65536))
print("enough", flush=True)
signal.pause()
"""

EXECD_MOST = 32 << 20
GENTLE = 300_000_000
"""Bytes that nobody reads, in `make test`."""


def client(sandbox: Sandbox, kept: Path, body: dict[str, Any], enough: int) -> subprocess.Popen[str]:
    """A client in a process of its own, as far as it goes."""
    task = [sandbox.address, f"{sandbox.prefix}/command", sandbox.headers, body, enough, str(kept)]
    started = subprocess.Popen([sys.executable, "-c", CLIENT, json.dumps(task)], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "enough\n"
    return started


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()


def digests(events: list[dict[str, Any]]) -> dict[str, str]:
    """Of the texts of both streams, put together."""
    sums = {"stdout": hashlib.sha256(), "stderr": hashlib.sha256()}
    for event in events:
        if event["type"] in sums:
            sums[str(event["type"])].update(str(event["text"]).encode())
    return {stream: found.hexdigest() for stream, found in sums.items()}


def test_a_killed_client_comes_back_and_gets_every_byte_once(rig: Rig, tmp_path: Path) -> None:
    sandbox = rig.create()
    kept = tmp_path / "events"
    killed(client(sandbox, kept, {"command": TALKATIVE}, enough=20_000_000))
    # Its last event may be there in part only.
    whole = kept.read_bytes().rpartition(b"\n\n")[0]
    before = events_of(whole)
    offset = max(int(str(event["offset"])) for event in before if "offset" in event)
    assert 0 < offset < len(OUTPUT)
    answer = sandbox.call("GET", f"/command/{before[0]['text']}/attach?offset={offset}").expect(200)
    after = events_of(answer.body)
    assert after[0]["type"] == "init"
    assert after[-1]["type"] == "execution_complete"
    assert after[-1]["offset"] == len(OUTPUT) + len(ERRORS)
    wanted = [{"type": "stdout", "text": OUTPUT}, {"type": "stderr", "text": ERRORS.removesuffix("\n")}]
    assert digests(before + after) == digests(wanted)


def execd_of(rig: Rig) -> int:
    """Its entry point's parent."""
    (entry,) = rig.marked_processes()
    return int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])


def peak(pid: int) -> int:
    """The most that was ever resident, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) << 10


def unread(rig: Rig, kept: Path, size: int) -> int:
    """Let commands write that nobody reads, in the background and for a client that stopped; execd's peak."""
    sandbox = rig.create()
    execd = execd_of(rig)
    write = f"yes 'a line that nobody reads' | head -c {size}"
    stuck = client(sandbox, kept, {"command": write}, enough=100_000)
    ended = sandbox.wait(sandbox.start(write), 3000)
    assert ended["end"]["output_truncated"] is True
    assert ended["output_bytes"] == size
    foreground = json.loads(kept.read_bytes().partition(b"\n")[0])["text"]
    assert sandbox.wait(foreground, 3000)["output_bytes"] == size
    killed(stuck)
    # What is left of it can be had, and what is gone is named.
    first = _second_event(sandbox, foreground)
    assert first["type"] == "status"
    assert "bytes of output were dropped" in str(first["text"])
    return peak(execd)


def _second_event(sandbox: Sandbox, command: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection(sandbox.address)
    try:
        connection.request("GET", f"{sandbox.prefix}/command/{command}/attach", headers=sandbox.headers)
        answer = connection.getresponse()
        lines = [answer.readline() for _ in range(3)]
        return dict(json.loads(lines[2]))
    finally:
        connection.close()


def test_execd_stays_small_while_nobody_reads(rig: Rig, tmp_path: Path) -> None:
    assert unread(rig, tmp_path / "events", GENTLE) < EXECD_MOST


def main() -> int:
    home = Path(tempfile.mkdtemp(prefix="osb-"))
    try:
        with LiveServer.started(home) as server:
            most = unread(Rig(server), home / "events", 5_000_000_000)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(f"execd had at most {most / 2**20:.1f} MiB resident while 5 GB were written that nobody read, twice at once")
    return 0 if most < EXECD_MOST else 1


if __name__ == "__main__":
    sys.exit(main())
