# SPDX-License-Identifier: Apache-2.0
"""What execd tells and passes on from inside a real sandbox: its figures, and programs behind /proxy/{port}/."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from websockets.sync.client import connect

from live_server import LiveServer, Sandbox, until

SITE = (Path(__file__).parents[1] / "browser" / "site.py").read_bytes()
TOKEN = "X-EXECD-ACCESS-TOKEN"
# Says what it is asked, headers in their order, and reads bodies to their end.
MIRROR = """
import http.server, sys
class Mirror(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        told = f"{self.command} {self.path} {len(body)}\\n{self.headers}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(told)
    do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_GET
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Mirror).serve_forever()
"""


def answers(sandbox: Sandbox, port: int) -> bool:
    return sandbox.call("GET", f"/proxy/{port}/").status == 200


@pytest.fixture(scope="module")
def sandbox(server: LiveServer) -> Iterator[Sandbox]:
    made = server.create(resourceLimits={"cpu": "1", "memory": "256Mi", "pids": "64"})
    made.write("/tmp/mirror.py", MIRROR.encode())
    made.write("/tmp/site.py", SITE)
    made.start("exec python3 /tmp/mirror.py 127.0.0.1 8001")
    made.start("exec python3 /tmp/site.py 8000 secret")
    for port in (8000, 8001):
        until(partial(answers, made, port), f"port {port} answers")
    yield made
    server.delete(made.id)


def through_the_server(server: LiveServer, sandbox: Sandbox) -> Sandbox:
    path = f"/v1/sandboxes/{sandbox.id}/endpoints/44772?use_server_proxy=true"
    return Sandbox.of(sandbox.id, server.call("GET", path).expect(200).json())


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE"])
def test_a_program_behind_the_endpoint_of_execd(server: LiveServer, sandbox: Sandbox, method: str) -> None:
    for way in (sandbox, through_the_server(server, sandbox)):
        answer = way.call(method, "/proxy/8001/a//b/%2e%2e?c=d", body=b"12345").expect(200)
        if method == "HEAD":
            assert answer.body == b""
            continue
        line, _, headers = answer.body.decode().partition("\n")
        assert line == f"{method} /a//b/%2e%2e?c=d 5"
        told = {name.lower(): value for name, _, value in (one.partition(": ") for one in headers.splitlines())}
        assert told["x-forwarded-prefix"] == f"{way.prefix}/proxy/8001"
        assert told["x-forwarded-for"] == "127.0.0.1"
        assert told["x-forwarded-proto"] == "http"
        assert told["x-forwarded-host"] == told["host"] == way.address
        assert TOKEN.lower() not in told
        assert sandbox.headers[TOKEN] not in headers


def test_its_redirects_and_websockets(sandbox: Sandbox) -> None:
    assert sandbox.call("GET", "/proxy/8000/secret").body == b"secret"
    assert sandbox.call("GET", "/proxy/8000/go").headers["location"] == f"{sandbox.prefix}/proxy/8000/there"
    address = f"ws://{sandbox.address}{sandbox.prefix}/proxy/8000/echo"
    with connect(address, additional_headers=sandbox.headers, proxy=None) as socket:
        socket.send("hello")
        assert socket.recv(30) == "HELLO"


def test_what_is_not_a_program(sandbox: Sandbox) -> None:
    stranger = replace(sandbox, headers={})
    assert stranger.call("GET", "/proxy/8001/").status == 401
    for path, expected in (
        ("/proxy/44772/ping", (403, "PORT_REFUSED")),
        ("/proxy/1/", (502, "PORT_CLOSED")),
        ("/proxy/0/", (400, "INVALID_PORT")),
    ):
        answer = sandbox.call("GET", path)
        assert (answer.status, answer.json()["code"]) == expected
        assert answer.json()["hint"]


def test_figures(sandbox: Sandbox) -> None:
    told = sandbox.call("GET", "/metrics").expect(200).json()
    assert told["cpu_count"] == 1
    assert told["mem_total_mib"] == 256
    assert 0 < told["mem_used_mib"] <= told["mem_peak_mib"] <= 256
    assert 3 < told["pids"] <= told["pids_limit"] == 64
    assert told["cpu_time_ms"] > 0
    assert told["oom_kills"] == 0
    assert (told["network_received_bytes"], told["network_sent_bytes"]) == (0, 0), "it has loopback only"
    assert told["disk_total_mib"] > 0
    assert "disk_used_mib" not in told, "nobody can tell it: absent, not wrong"


def test_figures_are_those_of_the_sandbox(sandbox: Sandbox) -> None:
    def used() -> int:
        return int(sandbox.call("GET", "/metrics").expect(200).json()["cpu_time_ms"])

    before = used()
    spent = sandbox.python("import time\nwhile time.process_time() < 0.3: pass\nprint('spent')").stdout
    assert spent == "spent"
    assert used() - before >= 300


def test_figures_every_second(sandbox: Sandbox) -> None:
    connection = http.client.HTTPConnection(sandbox.address, timeout=30)
    connection.request("GET", f"{sandbox.prefix}/metrics/watch", headers=sandbox.headers)
    stream = connection.getresponse()
    assert stream.getheader("Content-Type") == "application/x-ndjson"
    first, second = (json.loads(stream.readline()) for _ in range(2))
    connection.close()
    assert second["timestamp"] > first["timestamp"]
    assert second["pids"] > 0


def test_figures_for_prometheus(sandbox: Sandbox) -> None:
    answer = sandbox.call("GET", "/metrics/prometheus").expect(200)
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    lines = answer.body.decode().splitlines()
    assert lines[-1] == "# EOF"
    samples = dict(line.split(" ") for line in lines if not line.startswith("#"))
    described = {line.split(" ")[2] for line in lines if line.startswith("# HELP")}
    assert {name.removesuffix("_total") for name in samples} == described
    assert float(samples["opensandbox_sandbox_memory_total_bytes"]) == 256 << 20
    assert float(samples["opensandbox_sandbox_cpu_seconds_total"]) > 0
    assert float(samples["opensandbox_sandbox_pids"]) > 3
