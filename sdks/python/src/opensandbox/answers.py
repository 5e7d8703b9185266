# SPDX-License-Identifier: Apache-2.0
"""What became of a request, as exceptions. Pure: the same for asynchronous and synchronous programs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from opensandbox.exceptions import (
    NotFoundException,
    SandboxApiException,
    SandboxConnectionException,
    SandboxError,
    SandboxInternalException,
    SandboxTimeoutException,
    UnsupportedException,
    class_of_status,
)
from opensandbox.wire.errors import KIND, Code

logger = logging.getLogger("opensandbox")

_UNSUPPORTED = {code.value for code, kind in KIND.items() if kind == "unsupported"}


@contextmanager
def translated(method: str, base_url: str, request_id: str | None = None) -> Iterator[None]:
    """Exceptions of the HTTP client leave this block as ours."""
    import httpx2

    try:
        yield
    except httpx2.ConnectError as error:
        raise SandboxConnectionException(
            f"cannot connect to {base_url}: {error}",
            error,
            hint="Is the server running there? `opensandbox-server` starts one on localhost:8080;"
            " OPEN_SANDBOX_DOMAIN or the domain of the connection_config names another.",
            is_retryable=True,
            request_id=request_id,
        ) from error
    except httpx2.TimeoutException as error:
        raise SandboxTimeoutException(
            f"{method} to {base_url} took too long",
            error,
            hint="Raise request_timeout in the connection_config if it may take longer.",
            request_id=request_id,
        ) from error
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        raise SandboxInternalException(
            f"{base_url} is not an address this SDK can use: {error}",
            error,
            hint="Correct the domain of the connection_config.",
        ) from error
    except httpx2.TransportError as error:
        raise SandboxConnectionException(
            f"the connection to {base_url} broke: {error or type(error).__name__}", error, request_id=request_id
        ) from error


def error_of_body(
    status: int, body: bytes, *, request_id: str | None = None, retry_after: timedelta | None = None
) -> SandboxApiException:
    """The exception for an error document, whatever of the expected shape it has."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        document = {}
    message = document.get("message") or _schema_violations(document.get("detail"))
    if not message:
        message = body[:500].decode("utf-8", "replace").strip() or f"answered with status {status}"
    kind = class_of_status(status)
    code = str(document.get("code") or kind.default_code)
    if code in _UNSUPPORTED:
        # Some of these have, for published clients, the status of a bad request.
        kind = UnsupportedException
    hint = document.get("hint")
    if code == Code.MISSING_API_KEY:
        # The server names the header, as it must for every client; here there are shorter ways.
        hint = " ".join(filter(None, [hint, "Give api_key in the connection_config, or set OPEN_SANDBOX_API_KEY."]))
    details = document.get("details")
    return kind(
        str(message),
        status_code=status,
        error=SandboxError(code, str(message), str(hint) if hint else None),
        details=details if isinstance(details, dict) else {},
        request_id=document.get("requestId") or request_id,
        response_body=body,
        is_retryable=status in (429, 502, 503),
        retry_after=retry_after,
    )


def unsupported_route(error: SandboxApiException, what: str) -> SandboxApiException:
    """The same error, or, where a route is missing altogether, one that says what this server cannot do."""
    if not isinstance(error, NotFoundException) or error.code not in (Code.GENERAL_NOT_FOUND, error.default_code):
        return error
    return UnsupportedException(
        f"{what} is not supported by this sandbox",
        status_code=error.status_code,
        error=SandboxError(Code.SANDBOX_API_NOT_SUPPORTED.value, hint="A newer server is needed for it."),
        request_id=error.request_id,
        response_body=error.response_body,
    )


def _schema_violations(detail: object) -> str:
    if isinstance(detail, str):
        return detail
    if not isinstance(detail, list):
        return ""
    lines = []
    for entry in detail:
        if isinstance(entry, dict):
            place = ".".join(str(step) for step in entry.get("loc", ()))
            lines.append(f"{place}: {entry.get('msg', 'invalid')}" if place else str(entry.get("msg", "invalid")))
    return "; ".join(lines)


def log_to_stderr() -> None:
    """Show each request, for `debug` of a configuration."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
