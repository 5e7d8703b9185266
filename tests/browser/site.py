# SPDX-License-Identifier: Apache-2.0
"""A web site that runs inside a sandbox: python3 site.py PORT SECRET. Standard library only.

Every request it gets is noted in /tmp/site.log, so that a test can ask what really arrived.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = """<!doctype html><title>loading</title>
<body style="font: 20px sans-serif; margin: 2em"><h1>Hello from a sandbox</h1><p id="ran">no script ran</p>
<script src="script.js"></script>
"""
SCRIPT = """
document.title = "ran";
document.getElementById("ran").textContent = "the script ran";
"""


class Site(BaseHTTPRequestHandler):
    """A page, a redirect, a cookie, a secret, an echo."""

    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def do_GET(self) -> None:
        with open("/tmp/site.log", "a") as log:
            log.write(f"{self.command} {self.path}\n")
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(PAGE, "text/html")
        elif path == "/script.js":
            self._answer(SCRIPT, "text/javascript")
        elif path == "/go":
            self._answer("", status=302, Location="/there")
        elif path == "/bake":
            self._answer("baked", **{"Set-Cookie": "flavour=chocolate; Path=/; HttpOnly"})
        elif path == "/seen":
            self._answer(f"cookies: {self.headers.get('Cookie', 'none')}")
        elif path == "/secret":
            self._answer(sys.argv[2])
        elif path == "/echo":
            self._echo()
        else:
            self._answer(f"you are at {self.path}")

    do_POST = do_PUT = do_DELETE = do_OPTIONS = do_GET

    def _answer(self, text: str, kind: str = "text/plain", *, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def _echo(self) -> None:
        """A WebSocket by hand: short text messages come back in capitals, until the client closes."""
        key = self.headers.get("Sec-WebSocket-Key", "") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while len(head := self.rfile.read(2)) == 2:
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.rfile.read(head[1] & 0x7F)))
            self.wfile.write(bytes([head[0], len(data)]) + (data if head[0] & 0x0F == 8 else data.upper()))
            if head[0] & 0x0F == 8:
                return

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Site).serve_forever()
