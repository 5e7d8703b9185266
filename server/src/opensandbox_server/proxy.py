# SPDX-License-Identifier: Apache-2.0
"""Reaching a port of a sandbox through the server: who may, where it is, and what may pass in either direction.

Everything here is decided without a connection. A program in a sandbox is hostile and so may be its clients: the
program never sees what was meant for the server (the key, other cookies, a token), and its answer can say nothing that
holds for more than its own port.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from .access import EXECD_PORT, TOKEN_HEADER
from .errors import Code, OpenSandboxError, not_found, violation
from .ports import Address, Runtime, Store
from .sandbox import SandboxState

EGRESS_PORT = 18080

PAGE_SANDBOX = b"sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts"
"""Keeps a page of one sandbox from acting as a page of another, or of this server: they all share its origin."""

Headers = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# Meant for the server, or written anew by it. `Expect` is answered by the server itself.
_NOT_INWARD = frozenset(
    b"authorization cookie expect forwarded open-sandbox-api-key opensandbox-access-renew opensandbox-secure-access "
    b"x-real-ip x-request-id".split()
)
_TOKEN = TOKEN_HEADER.lower().encode()
# The server writes its own of these.
_NOT_OUTWARD = frozenset({b"date", b"x-request-id"})
# These speak for the whole host, not for one port of one sandbox.
_HOST_WIDE = frozenset(
    b"alt-svc clear-site-data nel public-key-pins report-to service-worker-allowed strict-transport-security".split()
)
# What HTTP allows in a name and in a value; clients and servers in between disagree about everything else.
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


@dataclass(frozen=True)
class Target:
    """One port of one running sandbox, and where clients see it."""

    sandbox_id: str
    port: int
    prefix: str
    """What stands before the program's own path, without a slash at the end."""

    @property
    def is_execd(self) -> bool:
        return self.port == EXECD_PORT

    @property
    def cookie_mark(self) -> bytes:
        """Begins the names of the cookies this port has set: no others are its to see."""
        return f"osb-{self.sandbox_id}-{self.port}-".encode()


@dataclass(frozen=True)
class Caller:
    """What the server knows about who asks, and tells the program in the place of what the caller says."""

    scheme: str
    host: str
    """The Host header."""
    client: str
    request_id: str = ""
    trace: tuple[tuple[str, str], ...] = ()
    """Our place in the caller's trace, as headers."""


class Proxy:
    """Finds targets."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store = store
        self._runtime = runtime

    async def target(self, tenant: str, sandbox_id: str, port: str, *, root: str) -> Target:
        """The port of a running sandbox of that tenant. `root` is "" or "/v1", as it was asked."""
        number = parse_port(port)
        row = await self._store.get(tenant, sandbox_id)
        if row is None:
            raise not_found(sandbox_id)
        if number == EGRESS_PORT:
            raise OpenSandboxError(Code.INGRESS_NO_EGRESS, "This sandbox has no way out to the network.")
        if row.state is not SandboxState.RUNNING:
            raise OpenSandboxError(Code.SANDBOX_NOT_RUNNING, f"The sandbox is {row.state.value}, not Running.")
        return Target(row.id, number, f"{root}/{path_of(row.id, number)}")

    def address(self, sandbox_id: str, port: int) -> Address:
        """Where to connect for a target."""
        return self._runtime.address(sandbox_id, port)


def path_of(sandbox_id: str, port: int) -> str:
    """The path of a port below the server's root or /v1."""
    return f"sandboxes/{sandbox_id}/proxy/{port}"


def parse_port(text: str) -> int:
    """A port as a path writes it; only its one canonical spelling, so that one port is one address.

    >>> parse_port("8000")
    8000
    """
    if not (text.isascii() and text.isdigit()):
        raise violation("port: a whole number is wanted.", ("path", "port"), "int_parsing")
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise OpenSandboxError(Code.SANDBOX_INVALID_PORT, "There is no such port.")
    return int(text)


# -- inward ------------------------------------------------------------------------------------------------------------


def inward(headers: Headers, target: Target, caller: Caller) -> list[tuple[str, str]]:
    """The headers of a request, as the program may see them."""
    headers = list(headers)
    unwanted = _HOP_BY_HOP | _NOT_INWARD | _named_in_connection(headers)
    if not target.is_execd:
        unwanted |= {_TOKEN}
    if caller.trace:
        unwanted |= {b"traceparent", b"tracestate"}
    passed = [
        (name.decode("latin-1"), _text(value))
        for name, value in headers
        if name not in unwanted and not name.startswith(b"x-forwarded-")
    ]
    cookies = b"; ".join(_own_cookies(headers, target.cookie_mark))
    if cookies and not target.is_execd:
        passed.append(("cookie", _text(cookies)))
    passed += [
        ("x-forwarded-proto", caller.scheme),
        ("x-forwarded-host", caller.host),
        ("x-forwarded-for", caller.client),
        ("x-forwarded-prefix", target.prefix),
    ]
    if caller.request_id:
        passed.append(("x-request-id", caller.request_id))
    passed += caller.trace
    return passed


def _named_in_connection(headers: Headers) -> set[bytes]:
    """A sender may declare more headers to be for the next hop only."""
    return {
        word.strip().lower() for name, value in headers if name.lower() == b"connection" for word in value.split(b",")
    }


def _own_cookies(headers: Headers, mark: bytes) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"cookie":
            for pair in value.split(b";"):
                if (stripped := pair.strip()).startswith(mark):
                    yield stripped[len(mark) :]


def _text(value: bytes) -> str:
    """Bytes as a client library takes them, which writes UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


# -- outward -----------------------------------------------------------------------------------------------------------


def outward(
    headers: Headers, target: Target, caller: Caller, *, status: int = 200, page_sandbox: bool = True
) -> list[tuple[bytes, bytes]]:
    """The headers of the program's answer, as clients may see them. Raises when they are none."""
    given = [(name.lower(), value) for name, value in headers]
    for name, value in given:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise OpenSandboxError(Code.BACKEND_RESPONSE_FAILED, "The program's answer has a malformed header.")
    unwanted = _HOP_BY_HOP | _NOT_OUTWARD | _named_in_connection(given)
    if status in (204, 304):
        unwanted |= {b"content-length"}  # there is no body for it to measure
    passed = [(name, value) for name, value in given if name not in unwanted]
    if target.is_execd:
        return passed
    confined: list[tuple[bytes, bytes]] = []
    for name, value in passed:
        if name == b"location":
            confined.append((name, below(target.prefix, caller.host, value.decode("latin-1")).encode("latin-1")))
        elif name == b"set-cookie":
            confined += [(name, cookie) for cookie in _confined_cookie(value, target)]
        elif name not in _HOST_WIDE:
            confined.append((name, value))
    if page_sandbox:
        # A second policy only narrows the program's own.
        confined.append((b"content-security-policy", PAGE_SANDBOX))
    return confined


def below(prefix: str, host: str, location: str) -> str:
    """Put a redirect that stays on this server under the prefix; others go where they go.

    >>> below("/sandboxes/i/proxy/80", "localhost:8080", "/login?next=/")
    '/sandboxes/i/proxy/80/login?next=/'
    """
    try:
        parts = urlsplit(location)
    except ValueError:
        return location
    if parts.netloc != (host if parts.netloc else "") or (parts.scheme and not parts.netloc):
        return location
    if not parts.netloc and not parts.path.startswith("/"):
        return location  # relative to the page, which is below already
    path = _without_dots(parts.path)
    # A program that reads X-Forwarded-Prefix has put it there itself.
    if path != prefix and not path.startswith(prefix + "/"):
        path = prefix + path
    query = f"?{parts.query}" if parts.query else ""
    return path + query + (f"#{parts.fragment}" if parts.fragment else "")


def _without_dots(path: str) -> str:
    """A path that no browser can shorten to one above it."""
    kept: list[str] = []
    segments = path.replace("\\", "/").split("/")[1:] or [""]
    for number, segment in enumerate(segments):
        plain = unquote(segment)
        if plain == "..":
            kept = kept[:-1]
        if plain not in (".", ".."):
            kept.append(segment)
        elif number == len(segments) - 1:
            kept.append("")
    return "/" + "/".join(kept)


def _confined_cookie(value: bytes, target: Target) -> Iterator[bytes]:
    """The same cookie for this port alone. Cookies know no ports, so its name and path say whose it is."""
    first, *attributes = value.split(b";")
    name, equals, content = first.partition(b"=")
    if not equals or not _NAME.fullmatch(name.strip()):
        return
    path = b"/"
    kept = [target.cookie_mark + name.strip() + b"=" + content.strip()]
    for attribute in attributes:
        key, _, setting = attribute.strip().partition(b"=")
        if key.lower() == b"path":
            path = setting.strip() if setting.strip().startswith(b"/") else b"/"
        elif key.lower() in (b"expires", b"max-age", b"secure", b"httponly", b"samesite", b"partitioned"):
            kept.append(attribute.strip())
    yield b"; ".join([*kept, b"Path=" + target.prefix.encode() + path])
