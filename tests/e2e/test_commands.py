# SPDX-License-Identifier: Apache-2.0
"""Commands through server and ingress, as a client on the wire sees them: input, replay, lists, keys, ends."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from live_server import Sandbox, events_of, until


class Stream:
    """The events of a command, one by one."""

    def __init__(self, sandbox: Sandbox, **body: Any) -> None:
        self._connection = http.client.HTTPConnection(sandbox.address, timeout=60)
        headers = {**sandbox.headers, "Content-Type": "application/json"}
        self._connection.request("POST", f"{sandbox.prefix}/command", json.dumps(body), headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self.id = str(self.until("init")["text"])

    def until(self, kind: str, text: str = "") -> dict[str, Any]:
        while line := self._answer.readline():
            if line.strip():
                event: dict[str, Any] = json.loads(line)
                if event["type"] == kind and event.get("text", "").endswith(text):
                    return event
        raise AssertionError(f"the stream ended without {kind} {text}")

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def stream(sandbox: Sandbox, request: pytest.FixtureRequest) -> Callable[..., Stream]:
    def start(**body: Any) -> Stream:
        made = Stream(sandbox, **body)
        request.addfinalizer(made.close)
        return made

    return start


def send(sandbox: Sandbox, command: str, data: bytes, query: str = "") -> Any:
    """Write to a command's input."""
    return sandbox.call("POST", f"/command/{command}/stdin{query}", body=data, content_type="application/octet-stream")


def test_input_reaches_a_running_program(sandbox: Sandbox, stream: Callable[..., Stream]) -> None:
    talk = stream(argv=["sed", "-u", "s/^/got /"], stdin=True)
    for word in ("one", "two"):
        assert send(sandbox, talk.id, f"{word}\n".encode()).expect(200).json() == {"bytes": 4}
        talk.until("stdout", f"got {word}")
    assert sandbox.status(talk.id)["stdin_open"] is True
    assert send(sandbox, talk.id, b"", "?close=true").expect(200).json() == {"bytes": 0}
    assert talk.until("execution_complete")["end"]["exit_code"] == 0
    refused = send(sandbox, talk.id, b"more").expect(409).json()
    assert refused["code"] == "STDIN_NOT_OPEN"
    assert refused["hint"]


def test_ten_megabytes_of_input_arrive(sandbox: Sandbox, stream: Callable[..., Stream]) -> None:
    data = bytes(range(256)) * 40_000
    count = stream(argv=["wc", "-c"], stdin=True)
    assert send(sandbox, count.id, data, "?close=true").expect(200).json() == {"bytes": len(data)}
    assert count.until("stdout")["text"].strip() == str(len(data))


def test_any_client_attaches_to_a_foreground_command(sandbox: Sandbox, stream: Callable[..., Stream]) -> None:
    first = stream(command="echo one; echo two; read line; echo $line; printf end; exit 3", stdin=True)
    taken = first.until("stdout", "one")
    first.close()
    found: list[bytes] = []
    path = f"/command/{first.id}/attach?offset={taken['offset']}"
    other = threading.Thread(target=lambda: found.append(sandbox.call("GET", path).expect(200).body))
    other.start()
    send(sandbox, first.id, b"three\n").expect(200)
    other.join()
    for body in (found[0], sandbox.call("GET", path).expect(200).body):
        events = events_of(body)
        assert events[0]["text"] == first.id
        assert "".join(event["text"] for event in events if event["type"] == "stdout") == "\ntwo\nthree\nend"
        assert events[-1]["end"]["exit_code"] == 3
        assert events[-1]["end"]["cpu_ms"] >= 0
        assert events[-1]["end"]["peak_memory_bytes"] > 0


def test_commands_are_listed(sandbox: Sandbox, stream: Callable[..., Stream]) -> None:
    ended = sandbox.run("true").id
    running = stream(command="sleep 1000").id

    def listed(query: str) -> list[str]:
        items = sandbox.call("GET", f"/commands{query}").expect(200).json()["items"]
        return [item["id"] for item in items]

    assert listed("?limit=2") == [running, ended]
    assert running in listed("?running=true")
    assert ended not in listed("?running=true")
    assert listed("?running=false&limit=1") == [ended]
    sandbox.call("DELETE", f"/command?id={running}").expect(200)
    assert running not in listed("?running=true")


def test_streams_of_a_background_command(sandbox: Sandbox) -> None:
    command = sandbox.start("for i in 1 2 3; do echo out$i; echo err$i >&2; done", merge=False)
    sandbox.wait(command)
    for name, text in (("stdout", b"out1\nout2\nout3\n"), ("stderr", b"err1\nerr2\nerr3\n")):
        answer = sandbox.call("GET", f"/command/{command}/logs?stream={name}&cursor=5").expect(200)
        assert answer.body == text[5:]
        assert answer.headers["execd-commands-tail-cursor"] == "15"


def test_a_repeated_request_runs_once(sandbox: Sandbox) -> None:
    def run(key: str, **body: Any) -> Any:
        return sandbox.call("POST", "/command", body=body, headers={"Idempotency-Key": key})

    body = {"command": "echo ran >>/tmp/runs; echo done"}
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(run("k", **body).expect(200).body)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({events_of(answer)[0]["text"] for answer in answers}) == 1
    assert sandbox.read("/tmp/runs") == b"ran\n"
    assert run("k", command="echo other").expect(409).json()["code"] == "GENERAL::IDEMPOTENCY_MISMATCH"


def test_an_interrupt_ends_daemons_too(sandbox: Sandbox, stream: Callable[..., Stream]) -> None:
    daemon = "(setsid sh -c 'trap \"\" TERM; echo daemon $$; exec sleep 4711' &); sleep 1000"
    command = stream(command=daemon)
    pid = command.until("stdout")["text"].split()[1]
    # Nothing but its origin connects it with the command: its parent is execd by now.
    until(lambda: sandbox.run(f"cut -d' ' -f4,6 /proc/{pid}/stat").stdout == f"1 {pid}", "it is an orphan")
    sandbox.call("DELETE", f"/command?id={command.id}").expect(200)
    assert sandbox.run("pgrep -fx 'sleep 4711' || echo gone").stdout == "gone"


def test_user_environment_and_directory(sandbox: Sandbox) -> None:
    sandbox.run("getent group extra || echo extra:x:4242:daemon >>/etc/group")
    assert sandbox.run("id -u; id -g; id -G", uid=1).stdout == "1\n1\n1 4242"
    assert sandbox.run("id -g", uid=1, gid=7).stdout == "7"
    written = r"""
# a comment
export PLAIN=a b
SINGLE='$HOME "x"'
DOUBLE="$PLAIN \"q\""
"""
    path = sandbox.run("echo $EXECD_ENVS").stdout
    before = sandbox.run(f"cat {path} || true").stdout.encode()
    sandbox.write(path, written.encode())
    try:
        said = sandbox.run('echo "$PLAIN|$SINGLE|$DOUBLE|$MINE"', envs={"MINE": "m", "PLAIN": "p"}).stdout
        assert said == 'p|$HOME "x"|a b "q"|m'
        home = sandbox.run("echo $HOME").stdout
        assert sandbox.run("pwd", cwd="~").stdout == home
        assert sandbox.run("pwd", cwd="$D/tmp", envs={"D": ""}).stdout == "/tmp"
    finally:
        sandbox.write(path, before)
    refused = sandbox.call("POST", "/command", body={"command": "pwd", "cwd": "$NO_SUCH/x"}).expect(400).json()
    assert refused["code"] == "INVALID_REQUEST_BODY"
