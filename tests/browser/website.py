# SPDX-License-Identifier: Apache-2.0
"""A web site in a sandbox (`site.py`), and the addresses it has outside."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from live_server import LiveServer, Sandbox, request, until

PORT = 8000
SITE = (Path(__file__).parent / "site.py").read_bytes()


@dataclass(frozen=True)
class Website:
    """A web site in a sandbox, and the addresses it has."""

    server: LiveServer
    sandbox: Sandbox
    secret: str

    @property
    def path(self) -> str:
        """Through ingress, by path."""
        return f"http://{self.sandbox.address}/{self.sandbox.id}/{PORT}/"

    @property
    def host(self) -> str:
        """Through ingress, by a host name of its own."""
        return f"http://{self.sandbox.id}-{PORT}.localhost:{self.sandbox.address.rpartition(':')[2]}/"

    @property
    def proxy(self) -> str:
        """Through the server."""
        return f"{self.server.url}/v1/sandboxes/{self.sandbox.id}/proxy/{PORT}/"

    def at(self, way: str) -> str:
        return str(getattr(self, way))

    def log(self) -> list[str]:
        """Every request that arrived."""
        return self.sandbox.read("/tmp/site.log").decode().splitlines()


def start(server: LiveServer) -> Website:
    sandbox = server.create()
    site = Website(server, sandbox, f"secret {secrets.token_hex(8)}")
    sandbox.write("/tmp/site.py", SITE)
    sandbox.start(f"python3 /tmp/site.py {PORT} '{site.secret}'")

    def there() -> bool:
        return request(sandbox.address, "GET", f"/{sandbox.id}/{PORT}/secret").status == 200

    until(there, "the site in the sandbox answers")
    return site
