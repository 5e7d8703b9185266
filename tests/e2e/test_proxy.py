# SPDX-License-Identifier: Apache-2.0
"""Ports of a real sandbox through the real server."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from websockets.sync.client import connect

from live_server import LiveServer, Sandbox, until

SITE = (Path(__file__).parents[1] / "browser" / "site.py").read_bytes()
SIZE = 1 << 30
NewSandbox = Callable[..., Sandbox]


def proxied(server: LiveServer, sandbox: Sandbox, port: int = 44772) -> Sandbox:
    """The same, by the endpoint that leads through the server."""
    path = f"/v1/sandboxes/{sandbox.id}/endpoints/{port}?use_server_proxy=true"
    return replace(Sandbox.of(sandbox.id, server.call("GET", path).expect(200).json()), created=sandbox.created)


def most_memory(server: LiveServer) -> int:
    """The most the server ever had, in bytes."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_commands_and_files(server: LiveServer, new_sandbox: NewSandbox) -> None:
    sandbox = proxied(server, new_sandbox())
    assert sandbox.address == server.address
    assert sandbox.run("echo in").stdout == "in"
    sandbox.write("/tmp/x", bytes(range(256)))
    assert sandbox.read("/tmp/x") == bytes(range(256))
    assert replace(sandbox, headers={}).call("GET", "/metrics").status == 401, "execd asks for its token also here"


def test_a_web_site_and_its_websocket(server: LiveServer, new_sandbox: NewSandbox) -> None:
    sandbox = new_sandbox()
    there = proxied(server, sandbox, 8000)
    told = there.call("GET", "/")
    assert (told.status, told.json()["code"]) == (502, "BACKEND_CONNECTION_FAILED")
    sandbox.write("/tmp/site.py", SITE)
    sandbox.start("python3 /tmp/site.py 8000 secret")
    until(lambda: there.call("GET", "/secret").body == b"secret", "the site answers")
    assert there.call("GET", "/a%2Fb/../c?d=%20").body == b"you are at /a%2Fb/../c?d=%20"
    assert there.call("GET", "/go").headers["location"] == f"{there.prefix}/there"
    with connect(f"ws://{there.address}{there.prefix}/echo") as socket:
        socket.send("hello")
        assert socket.recv(30) == "HELLO"


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_gibibyte_passes_with_little_memory(server: LiveServer, new_sandbox: NewSandbox, way: str) -> None:
    sandbox = new_sandbox()
    there = proxied(server, sandbox, 8000)
    piece = bytes(1 << 20)
    # Counts what it is sent, then sends as much.
    sandbox.write(
        "/tmp/count.py",
        b"""
import http.server
class Count(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        left = size = int(self.headers["Content-Length"])
        while left: left -= len(self.rfile.read(min(left, 1 << 20)))
        self.send_response(200); self.end_headers(); self.wfile.write(str(size).encode())
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", str(1 << 30)); self.end_headers()
        for _ in range(1 << 10): self.wfile.write(bytes(1 << 20))
    def do_HEAD(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", 8000), Count).serve_forever()
""",
    )
    sandbox.start("python3 /tmp/count.py")
    until(lambda: there.call("HEAD", "/").status == 200, "the program answers")
    before = most_memory(server)
    connection = http.client.HTTPConnection(there.address, timeout=120)
    received = 0
    if way == "up":
        connection.request(
            "PUT", f"{there.prefix}/", body=(piece for _ in range(1024)), headers={"Content-Length": str(SIZE)}
        )
        received = int(connection.getresponse().read())
    else:
        connection.request("GET", f"{there.prefix}/")
        answer = connection.getresponse()
        while chunk := answer.read(1 << 20):
            received += len(chunk)
    connection.close()
    assert received == SIZE
    assert most_memory(server) - before < 16 << 20


def test_a_sandbox_that_has_ended(server: LiveServer) -> None:
    sandbox = server.create()
    there = proxied(server, sandbox)
    there.run("kill $(pgrep -f 'sleep infinity')")
    until(lambda: there.call("GET", "/ping").status == 409, "the end is known")
    assert there.call("GET", "/ping").json()["code"] == "SANDBOX::NOT_RUNNING"
    server.delete(sandbox.id)
    assert there.call("GET", "/ping").json()["code"] == "SANDBOX::NOT_FOUND"
