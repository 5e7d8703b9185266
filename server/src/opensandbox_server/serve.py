# SPDX-License-Identifier: Apache-2.0
"""Listening: the server's own sockets, who holds a port that is taken, and uvicorn on top."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .config import Server
from .errors import CannotStart

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_ANY_PORT_TRIES = 20
_LISTEN = "0A"


@dataclass(frozen=True)
class PortHolder:
    """The process that listens on a port."""

    pid: int
    program: str
    command: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        """True for another OpenSandbox server."""
        return any("opensandbox-server" in word or "opensandbox_server" in word for word in self.command[:4])


def bind(hosts: Sequence[str], port: int, backlog: int = 2048) -> list[socket.socket]:
    """Listen on every host at one port. The first must exist; others may be missing (no IPv6), not taken.

    >>> [s.getsockname()[1] for s in bind(("127.0.0.1",), 0)]       # doctest: +SKIP
    [40123]
    """
    for attempt in range(_ANY_PORT_TRIES):
        sockets: list[socket.socket] = []
        try:
            for host in hosts:
                chosen = sockets[0].getsockname()[1] if sockets else port
                with contextlib.suppress(_Absent):
                    sockets.append(_bind_one(host, chosen, backlog, first=not sockets))
            return sockets
        except _Taken as taken:
            for bound in sockets:
                bound.close()
            # A free port of one address may be taken at the next: ask the kernel for another.
            if port == 0 and attempt < _ANY_PORT_TRIES - 1:
                continue
            raise _port_taken(taken.host, taken.port) from None
    raise AssertionError("unreachable")


class _Taken(Exception):
    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port


class _Absent(Exception):
    pass


def _bind_one(host: str, port: int, backlog: int, *, first: bool) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise CannotStart(
            f"[server] host {host} has no address: {error.strerror}.", "Give an address of this machine."
        ) from None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        if first:
            raise CannotStart(f"This machine has no {family.name} for {host}.", "Choose another --host.") from None
        raise _Absent from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # [::] alone serves both families; beside 127.0.0.1 it must leave IPv4 to the other socket.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _Taken(host, port) from None
        if error.errno == errno.EADDRNOTAVAIL and not first:
            raise _Absent from None
        hint = (
            "Ports below 1024 need root; choose another --port."
            if error.errno == errno.EACCES
            else "Choose another --host."
        )
        raise CannotStart(f"Cannot listen on {host} port {port}: {error.strerror}.", hint) from None
    listener.setblocking(False)
    return listener


def _port_taken(host: str, port: int) -> CannotStart:
    holder = port_holder(port)
    if holder is None:
        return CannotStart(
            f"Port {port} on {host} is in use by a process of another user.",
            f"Choose another one: --port {_free_port_after(port)}",
        )
    if holder.ours:
        return CannotStart(
            f"Port {port} on {host} is in use by another OpenSandbox server (pid {holder.pid}).",
            f"Use that one, stop it with `kill {holder.pid}`, or give this one its own: "
            f"--port {_free_port_after(port)} --state-dir DIR",
        )
    return CannotStart(
        f"Port {port} on {host} is in use by {holder.program} (pid {holder.pid}).",
        f"Stop it, or choose another port: --port {_free_port_after(port)}",
    )


def _free_port_after(port: int) -> int:
    """A port worth suggesting; nothing is promised about it."""
    for candidate in range(port + 1, min(port + 50, 65536)):
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", candidate))
                return candidate
    return 0


def port_holder(port: int, proc: Path = Path("/proc")) -> PortHolder | None:
    """Who listens on that port; None when this user may not see it."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    if not wanted:
        return None
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for fd in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(fd) in wanted:
                        command = (entry / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
                        program = (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
                        return PortHolder(int(entry.name), program, tuple(command))
    return None


def _listening_inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    yield rest[5]


def public_host(server: Server) -> str:
    """The name or address that clients put in front of a port of this machine."""
    if server.eip:
        return server.eip
    host = server.hosts[0]
    if host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return host
    return _outward_address(host)


def _outward_address(wildcard: str) -> str:
    """The address this machine would send from. Connecting a UDP socket sends nothing."""
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if wildcard == "::" else (socket.AF_INET, "192.0.2.1")
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if wildcard == "::" else "127.0.0.1"


def url(sockets: Sequence[socket.socket]) -> str:
    """The address to print."""
    host, port = sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Stop:
    """SIGTERM and SIGINT, as something that can be asked for: an ordinary end, not a failure."""

    def __init__(self) -> None:
        self.asked = False
        self.now = False
        """Asked twice by Ctrl-C: requests in flight are not waited for."""
        self.first: Callable[[], None] = lambda: None
        """What ends by itself when it is told: streams that would otherwise be waited for."""
        self.then: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """From here to the end of the process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._heard, number)

    def _heard(self, number: int) -> None:
        self.now = self.asked and number == signal.SIGINT
        self.asked = True
        self.first()
        self.then()


async def serve(
    app: ASGIApp, sockets: list[socket.socket], settings: Server, stop: Stop, ready: Callable[[], None]
) -> None:
    """Answer requests until `stop`; `ready` is called once when they are answered. The lifespan is the caller's."""
    # Here, because `down` and every refusal should not wait for them.
    import uvicorn

    from .api.http_limits import BoundedHttp
    from .api.proxy import LARGEST_MESSAGE, READ_SECONDS
    from .api.turns import ClientWebSocket

    class Listener(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started and not self.should_exit:
                ready()

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # uvicorn would send itself the signal again at the end and die of it

        def leave(self) -> None:
            self.should_exit = True
            self.force_exit = stop.now

    listener = Listener(
        uvicorn.Config(
            app,
            loop="none",
            http=BoundedHttp,
            ws=ClientWebSocket,  # type: ignore[arg-type]  # any protocol will do
            ws_max_size=LARGEST_MESSAGE,
            # Long, because a client whose messages wait for a slow program is not heard meanwhile.
            ws_ping_timeout=READ_SECONDS,
            ws_per_message_deflate=False,  # what a program sends is not ours to pack
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.timeout_keep_alive,
            limit_concurrency=settings.limit_concurrency or None,
            timeout_graceful_shutdown=settings.timeout_graceful_shutdown,
            backlog=settings.backlog,
        )
    )
    stop.then = listener.leave
    if not stop.asked:
        await listener.serve(sockets=sockets)
